"""Ranks forked from a worker: every kind of end is reported, and no rank begins before all have joined."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from conformance.processes.forked_ranks import Ended, WorkerError, Workers, run_ranks

# One worker for all of it: what its fixture makes takes seconds.
pytestmark = pytest.mark.xdist_group("forked-ranks")


@pytest.fixture(scope="module")
def worker() -> Iterator[Workers]:
    with Workers(1) as pool:
        yield pool


def _four_ends(_: None) -> list[list[Ended]]:
    def meet() -> list[int]:
        ranks = [0, 0]
        dist.all_gather_object(ranks, dist.get_rank())
        return ranks

    def die() -> None:
        if dist.get_rank() == 1:
            os._exit(7)

    def hang() -> None:
        if dist.get_rank() == 0:
            dist.barrier()
        time.sleep(30)

    def fail() -> None:
        raise KeyError("gone")

    return [run_ranks(one, limit_seconds=limit) for one, limit in ((meet, 20), (die, 20), (hang, 1), (fail, 20))]


def test_ranks_return_raise_die_or_hang_and_each_is_told(worker: Workers) -> None:
    ((met, died, hung, failed),) = worker.map(_four_ends, [None])
    assert [(end.how, end.value) for end in met] == [("returned", [0, 1])] * 2
    assert [end.how for end in died] == ["returned", "died"]
    assert died[1].summary == "rank 1 died with exit status 7"
    assert [end.how for end in hung] == ["hung", "hung"]
    assert [(end.error, end.message) for end in failed] == [("KeyError", "'gone'")] * 2


def _begin_beside_a_slow_rank(_: None) -> list[Ended]:
    join = dist.init_process_group
    joined = []

    def slowly(*args: Any, **more: Any) -> None:
        join(*args, **more)
        if os.environ["RANK"] == "1":
            time.sleep(0.3)
        joined.append(time.monotonic())

    dist.init_process_group = slowly
    try:
        return run_ranks(lambda: (joined[0], time.monotonic()))
    finally:
        dist.init_process_group = join


def test_no_rank_begins_before_all_have_joined(worker: Workers) -> None:
    """Otherwise a rank that dies at once breaks another's handshake; this made a test fail once in 240 runs."""
    (ends,) = worker.map(_begin_beside_a_slow_rank, [None])
    times = [end.value for end in ends]
    assert min(began for _, began in times) >= max(joined for joined, _ in times)


def _fail(job: int) -> int:
    raise ValueError(f"job {job}")


def test_a_job_that_fails_is_the_harness_trouble(worker: Workers) -> None:
    with pytest.raises(WorkerError, match="job 5"):
        worker.map(_fail, [5])

"""One decision, or one error, on all ranks."""

from __future__ import annotations

import importlib
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hyper_resume import collective
from hyper_resume.errors import CheckpointMismatchError, CheckpointSaveError

pytestmark = pytest.mark.mpi(min_size=4)
EVERY_RANK = pytest.mark.parametrize("culprit", range(4))


class ForeignError(Exception):
    """A class that the other ranks know nothing of."""


def fail_on(culprits: set[int], error: Exception) -> int:
    if dist.get_rank() in culprits:
        raise error
    return 10 + dist.get_rank()


def test_a_world_is_what_mpi_says() -> None:
    mpi_rank = importlib.import_module("mpi4py.MPI").COMM_WORLD.rank
    assert (collective.rank(), collective.world_size(), collective.is_distributed()) == (mpi_rank, 4, True)


def test_agree_gives_each_rank_its_own_result() -> None:
    assert collective.on_all_ranks(lambda: 10 + dist.get_rank()) == 10 + dist.get_rank()


@EVERY_RANK
def test_agree_raises_one_ranks_error_on_all_naming_it(culprit: int) -> None:
    with pytest.raises(CheckpointMismatchError) as caught:
        collective.on_all_ranks(lambda: fail_on({culprit}, CheckpointMismatchError("the shard is damaged")))
    assert type(caught.value) is CheckpointMismatchError
    assert str(caught.value) == f"the shard is damaged [rank {culprit}]"


def test_agree_raises_the_lowest_failing_ranks_error_and_names_all_that_failed() -> None:
    with pytest.raises(CheckpointSaveError) as caught:
        collective.on_all_ranks(lambda: fail_on({1, 3}, CheckpointSaveError(f"disk of {dist.get_rank()} is full")))
    assert str(caught.value) == "disk of 1 is full [ranks 1, 3; message of 1]"


def test_a_rarer_builtin_arrives_as_its_nearest_common_base() -> None:
    with pytest.raises(OSError, match=r"no folder \[rank 2\]") as caught:
        collective.on_all_ranks(lambda: fail_on({2}, NotADirectoryError("no folder")))
    assert type(caught.value) is OSError


def test_a_class_that_the_others_do_not_know_arrives_as_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match=r"strange \[rank 3\]"):
        collective.on_all_ranks(lambda: fail_on({3}, ForeignError("strange")))


@EVERY_RANK
def test_raise_common_raises_on_all_what_one_has(culprit: int) -> None:
    failure = PermissionError("read-only") if dist.get_rank() == culprit else None
    with pytest.raises(PermissionError) as caught:
        collective.raise_on_all_ranks(failure)
    assert str(caught.value) == f"read-only [rank {culprit}]"


def test_raise_common_returns_where_no_rank_has_a_failure() -> None:
    collective.raise_on_all_ranks(None)


def test_on_rank_zero_runs_there_only_and_all_get_the_result() -> None:
    ran: list[int] = []

    def look() -> str:
        ran.append(dist.get_rank())
        return f"seen by {dist.get_rank()}"

    assert collective.on_rank_zero(look) == "seen by 0"
    assert ran == ([0] if dist.get_rank() == 0 else [])


def test_an_error_on_rank_zero_is_raised_on_all() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        collective.on_rank_zero(lambda: fail_on({0}, FileNotFoundError("no checkpoint")))
    assert str(caught.value) == "no checkpoint [rank 0]"


def test_gather_is_in_rank_order_on_every_rank() -> None:
    mine = {"rank": dist.get_rank(), "text": "x" * dist.get_rank()}
    assert collective.all_gather(mine) == [{"rank": rank, "text": "x" * rank} for rank in range(4)]


def test_broadcast_gives_rank_zeros_value_to_all() -> None:
    assert collective.broadcast(["of rank", dist.get_rank()]) == ["of rank", 0]


@EVERY_RANK
def test_no_rank_leaves_a_barrier_before_the_last_has_come(shared_folder: Path, culprit: int) -> None:
    others = [shared_folder / str(rank) for rank in range(4) if rank != culprit]
    if dist.get_rank() == culprit:
        # The last by construction: it comes when it sees that the others are about to.
        while not all(file.exists() for file in others):
            time.sleep(0.001)
    (shared_folder / str(dist.get_rank())).touch()
    collective.barrier()
    assert (shared_folder / str(culprit)).exists()


def test_a_group_of_its_own_does_not_meet_what_is_pending_in_the_default_group() -> None:
    group = collective.new_cpu_group()
    rank = dist.get_rank()
    total = torch.tensor(float(rank + 1))
    # Two ranks enter the sum before, two after the gather: with one group for both, the calls would not match.
    pending = dist.all_reduce(total, async_op=True) if rank < 2 else None
    assert collective.all_gather(rank, group) == [0, 1, 2, 3]
    pending = pending or dist.all_reduce(total, async_op=True)
    assert pending is not None
    pending.wait()
    assert total.item() == 10.0


def test_after_a_common_failure_the_next_collective_matches_again() -> None:
    for culprit in (3, 0, 2):
        with pytest.raises(ValueError, match=rf"bad \[rank {culprit}\]"):
            collective.on_all_ranks(partial(fail_on, {culprit}, ValueError("bad")))
        assert collective.all_gather(dist.get_rank()) == [0, 1, 2, 3]

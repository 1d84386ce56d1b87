"""The rank runner itself: order, errors, deaths and hangs."""

from __future__ import annotations

import os
import resource
import signal
import time

import pytest
import torch
import torch.distributed as dist

from hyper_resume.errors import ConfigError
from tests.ranks import RankFailure, run_ranks


def _sum_of_ranks(offset: int) -> tuple[int, int, str]:
    value = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(value)
    return dist.get_rank(), int(value), os.environ["RANK"]


def _fail_on_rank_1() -> str:
    if dist.get_rank() == 1:
        raise ConfigError("wrong on purpose")
    return "fine"


def _fail_on_rank_0_while_others_wait() -> None:
    if dist.get_rank() == 0:
        raise ValueError("rank 0 leaves")
    dist.barrier()


def _die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _abort_on_rank_1() -> int:
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    if dist.get_rank() == 1:
        # A crash that is meant leaves no core.
        resource.setrlimit(resource.RLIMIT_CORE, (0, limits[1]))
        os.abort()
    return limits[0] - limits[1]


def _never_return() -> None:
    _name_to_find_in_the_stack()


def _name_to_find_in_the_stack() -> None:
    while True:
        time.sleep(0.01)


def _return_a_tensor() -> torch.Tensor:
    return torch.full((3,), float(dist.get_rank()))


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(_sum_of_ranks, 4, 10) == [(rank, 46, str(rank)) for rank in range(4)]


def test_one_rank_also_has_a_process_group() -> None:
    assert run_ranks(_sum_of_ranks, 1, 5) == [(0, 5, "0")]


def test_tensors_survive_the_end_of_their_rank() -> None:
    results = run_ranks(_return_a_tensor, 2)
    assert [result.tolist() for result in results] == [[0.0] * 3, [1.0] * 3]


def test_an_error_shows_the_rank_and_its_traceback() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1 raised.*_fail_on_rank_1.*ConfigError: wrong on purpose"):
        run_ranks(_fail_on_rank_1, 2)


def test_a_failing_rank_does_not_leave_its_peers_waiting() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure, match=r"ValueError: rank 0 leaves"):
        run_ranks(_fail_on_rank_0_while_others_wait, 2)
    assert time.monotonic() - began < 15


def test_expected_errors_come_back_as_the_exceptions_themselves() -> None:
    first, second = run_ranks(_fail_on_rank_1, 2, expect_errors=True)
    assert first == "fine"
    assert isinstance(second, ConfigError)
    assert str(second) == "wrong on purpose"


def test_a_killed_rank_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 died without a word, exit code -9"):
        run_ranks(_die_on_rank_1, 2)


def test_a_crash_leaves_its_stack_and_where_its_core_is() -> None:
    words = r"(?s)rank 1 died without a word, exit code -6; its process id was \d+, and cores go to .*_abort_on_rank_1"
    with pytest.raises(RankFailure, match=words):
        run_ranks(_abort_on_rank_1, 2)
    assert run_ranks(_abort_on_rank_1, 1) == [0], "a core may be as large as this user may have"


def test_a_hanging_rank_is_killed_at_the_limit_and_its_stack_shown() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)did not finish in 2 s.*_name_to_find_in_the_stack"):
        run_ranks(_never_return, 2, timeout_seconds=2)
    assert time.monotonic() - began < 15

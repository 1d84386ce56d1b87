"""One decision, or one error, on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_resume import collective, errors
from tests.ranks import GROUP_TIMEOUT, run_ranks

SECONDS = 5.0


class Homemade(Exception):
    """A class that no other rank can know."""


class HomemadeFileError(FileNotFoundError):
    """A class with a builtin above it."""


def fail_on(ranks: tuple[int, ...], make: Callable[[int], BaseException]) -> Callable[[], str]:
    def action() -> str:
        rank = dist.get_rank()
        if rank in ranks:
            raise make(rank)
        return f"fine on {rank}"

    return action


def attempt(action: Callable[[], Any]) -> tuple[str, str, float]:
    """The class, the message and the seconds of what comes out."""
    started = time.monotonic()
    try:
        result = action()
    except Exception as error:  # noqa: BLE001  the error is what is looked at
        return type(error).__name__, str(error), time.monotonic() - started
    return "returned", repr(result), time.monotonic() - started


FAILURES: dict[str, tuple[tuple[int, ...], Callable[[int], BaseException], str, str]] = {
    "library": (
        (1,),
        lambda r: errors.CheckpointNotFoundError("no file"),
        "CheckpointNotFoundError",
        "no file [rank 1]",
    ),
    "builtin": ((2,), lambda r: ValueError("bad"), "ValueError", "bad [rank 2]"),
    "rank zero": ((0,), lambda r: PermissionError("mine"), "PermissionError", "mine [rank 0]"),
    "rarer builtin": ((1,), lambda r: NotADirectoryError("a file"), "OSError", "a file [rank 1]"),
    "decoding": ((1,), lambda r: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd"), "ValueError", "byte 0xff"),
    "key": ((2,), lambda r: KeyError("name"), "KeyError", "'name [rank 2]'"),
    "unknown": ((1,), lambda r: Homemade("odd"), "RuntimeError", "odd [rank 1]"),
    "unknown with a base": ((1,), lambda r: HomemadeFileError("lost"), "FileNotFoundError", "lost [rank 1]"),
    "without a text": ((1,), lambda r: errors.ConfigError(), "ConfigError", " [rank 1]"),
    "several": ((1, 2), lambda r: TypeError(f"of {r}"), "TypeError", "of 1 [ranks 1, 2; message of 1]"),
    "of several kinds": (
        (0, 2),
        lambda r: ValueError("v") if r else errors.ConfigError("c"),
        "ConfigError",
        "c [ranks 0, 2; message of 0]",
    ),
}


def _many_attempts() -> dict[str, tuple[str, str, float]]:
    """Every way to fail, one after the other: the group must still work after each."""
    rank = dist.get_rank()
    results = {}
    for name, (ranks, make, _, _) in FAILURES.items():
        results[name] = attempt(partial(collective.on_all_ranks, fail_on(ranks, make)))
    results["nobody fails"] = attempt(lambda: collective.on_all_ranks(fail_on((), ValueError)))
    results["rank zero decides"] = attempt(lambda: collective.on_rank_zero(lambda: f"from {rank}"))
    results["rank zero decides on nothing"] = attempt(lambda: collective.on_rank_zero(lambda: None))
    results["rank zero cannot"] = attempt(
        lambda: collective.on_rank_zero(fail_on((0, 1), lambda r: errors.ConfigError(f"seen by {r}")))
    )
    results["a failure at hand"] = attempt(
        lambda: collective.raise_on_all_ranks(OSError("disk") if rank == 2 else None)
    )
    results["no failure at hand"] = attempt(lambda: collective.raise_on_all_ranks(None))
    results["gather"] = attempt(lambda: collective.all_gather({"rank": rank}))
    results["broadcast"] = attempt(lambda: collective.broadcast([rank]))
    results["size"] = attempt(lambda: (collective.is_distributed(), collective.world_size()))
    results["group"] = attempt(lambda: collective.all_gather(rank, dist.new_group([0, 1, 2], backend="gloo")))
    return results


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, tuple[str, str, float]]]:
    return run_ranks(_many_attempts, 3)


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_of_some_ranks_is_the_same_error_on_all_within_seconds(
    name: str, outcomes: list[dict[str, tuple[str, str, float]]]
) -> None:
    _, _, kind, message = FAILURES[name]
    for outcome in outcomes:
        assert outcome[name][0] == kind
        assert message in outcome[name][1]
        assert outcome[name][2] < SECONDS
    assert len({outcome[name][1] for outcome in outcomes}) == 1


def test_without_a_failure_every_rank_gets_its_own_result(outcomes: list[dict[str, tuple[str, str, float]]]) -> None:
    assert [outcome["nobody fails"][:2] for outcome in outcomes] == [
        ("returned", f"'fine on {rank}'") for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("rank zero decides", "returned", "'from 0'"),
        ("rank zero decides on nothing", "returned", "None"),
        ("rank zero cannot", "ConfigError", "seen by 0 [rank 0]"),
        ("a failure at hand", "OSError", "disk [rank 2]"),
        ("no failure at hand", "returned", "None"),
        ("gather", "returned", "[{'rank': 0}, {'rank': 1}, {'rank': 2}]"),
        ("broadcast", "returned", "[0]"),
        ("size", "returned", "(True, 3)"),
        ("group", "returned", "[0, 1, 2]"),
    ],
)
def test_all_ranks_get_the_common_outcome(
    name: str, kind: str, text: str, outcomes: list[dict[str, tuple[str, str, float]]]
) -> None:
    assert [outcome[name][:2] for outcome in outcomes] == [(kind, text)] * 3


def test_a_single_process_is_a_world_of_one() -> None:
    assert (collective.is_distributed(), collective.rank(), collective.world_size()) == (False, 0, 1)
    collective.barrier()
    assert collective.broadcast("x") == "x"
    assert collective.all_gather(5) == [5]
    assert collective.on_all_ranks(lambda: 7) == 7
    assert collective.on_rank_zero(lambda: 8) == 8
    collective.raise_on_all_ranks(None)


@pytest.mark.parametrize("through", [collective.on_all_ranks, collective.on_rank_zero])
def test_a_single_process_raises_the_error_itself(through: Callable[[Callable[[], Any]], Any]) -> None:
    error = Homemade("as it is")

    def action() -> None:
        raise error

    with pytest.raises(Homemade) as caught:
        through(action)
    assert caught.value is error


def _interrupt() -> str:
    try:
        collective.on_all_ranks(_raise_keyboard_interrupt)
    except KeyboardInterrupt:
        return "not swallowed"
    return "swallowed"


def _raise_keyboard_interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_is_no_failure_to_agree_on() -> None:
    assert run_ranks(_interrupt, 2) == ["not swallowed"] * 2


def _limit_of_a_new_group() -> float:
    group = collective.new_cpu_group()
    assert group is not None
    # A rank that leaves while another still connects breaks that one's group.
    collective.barrier(group)
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def test_a_new_group_has_the_time_limit_of_the_job_and_not_gloos_own() -> None:
    assert run_ranks(_limit_of_a_new_group, 2) == [GROUP_TIMEOUT.total_seconds()] * 2


def test_without_a_process_group_there_is_no_new_group() -> None:
    assert collective.new_cpu_group() is None

"""The rounds themselves, with contenders that write down when they are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.measuring import memory
from benchmarks.measuring.measure import measure, weigh
from benchmarks.protocol import BenchmarkError, Contender, Scenario

MIB = 1 << 20


def scenario(*contenders: Contender) -> Scenario:
    return Scenario(payload_bytes=1, contenders=contenders, figures=[])


def logging_contender(name: str, log: list[str]) -> Contender:
    def note(what: str) -> Callable[[], None]:
        return lambda: log.append(f"{name} {what}")

    return Contender(
        name=name,
        role="ours",
        prepare=note("prepare"),
        before=note("before"),
        call=note("call"),
        settle=note("settle"),
        check=lambda _: log.append(f"{name} check"),
    )


def calls_of(rounds: int) -> list[str]:
    log: list[str] = []
    measure(scenario(*(logging_contender(name, log) for name in "abc")), rounds=rounds, warm_up=False)
    calls = "".join(line[0] for line in log if line.endswith("call"))
    return [calls[begin : begin + 3] for begin in range(0, len(calls), 3)]


def test_contenders_take_turns_and_nobody_always_follows_the_same_one() -> None:
    orders = calls_of(30)
    assert {"".join(sorted(order)) for order in orders} == {"abc"}
    assert {order[place : place + 2] for order in orders for place in (0, 1)} == {"ab", "ac", "ba", "bc", "ca", "cb"}


def test_the_order_is_the_same_in_every_process() -> None:
    assert calls_of(8) == calls_of(8)


def test_everything_but_call_and_settle_happens_outside_of_the_timing_and_check_happens_once() -> None:
    log: list[str] = []
    measure(scenario(logging_contender("a", log)), rounds=2, warm_up=True)
    first = ["prepare", "before", "call", "settle", "check"]
    later = ["before", "call", "settle"]
    assert log == [f"a {what}" for what in [*first, *later, *later]]


def test_the_warm_up_round_is_not_recorded() -> None:
    log: list[str] = []
    found = measure(scenario(logging_contender("a", log)), rounds=2, warm_up=True)["a"]
    assert len(found.seconds) == len(found.settled_seconds) == 2
    assert log.count("a call") == 3


def test_settled_time_holds_the_time_of_the_call() -> None:
    def work() -> None:
        torch.rand(400_000).sort()

    found = measure(scenario(Contender(name="a", role="ours", call=work, settle=work)), rounds=3, warm_up=False)["a"]
    assert all(settled > seconds > 0 for seconds, settled in zip(found.seconds, found.settled_seconds, strict=True))


def test_a_contender_that_leaves_nothing_running_has_no_settled_time() -> None:
    found = measure(scenario(Contender(name="a", role="ours", call=lambda: None)), rounds=1, warm_up=False)["a"]
    assert found.settled_seconds == ()


def test_work_that_was_not_done_gives_no_time() -> None:
    def check(_: object) -> None:
        raise BenchmarkError("nothing was restored")

    with pytest.raises(BenchmarkError, match="nothing was restored"):
        measure(scenario(Contender(name="a", role="ours", call=lambda: None, check=check)), rounds=1, warm_up=False)


def test_two_contenders_of_one_name_are_refused() -> None:
    same = Contender(name="a", role="ours", call=lambda: None)
    with pytest.raises(BenchmarkError, match="same name"):
        measure(scenario(same, same), rounds=1, warm_up=False)


def test_bytes_on_disk_are_those_of_all_files_below(tmp_path: Path) -> None:
    def write() -> None:
        (tmp_path / "deep").mkdir(exist_ok=True)
        (tmp_path / "one").write_bytes(bytes(100))
        (tmp_path / "deep" / "two").write_bytes(bytes(23))

    contender = Contender(name="a", role="ours", call=write, stored=lambda: tmp_path)
    assert measure(scenario(contender), rounds=1, warm_up=False)["a"].disk_bytes == 123


@pytest.mark.parametrize("mebibytes", [32, 96])
def test_the_peak_of_a_call_is_what_it_allocates_though_it_gives_it_back(mebibytes: int) -> None:
    assert memory.why_not() == ""
    found = weigh(Contender(name="a", role="ours", call=lambda: torch.ones(mebibytes * MIB // 4).sum()))
    assert mebibytes * MIB * 0.95 <= found <= (mebibytes + 8) * MIB


def test_what_was_there_before_the_call_is_no_part_of_its_peak() -> None:
    kept: list[torch.Tensor] = []
    contender = Contender(
        name="a",
        role="ours",
        prepare=lambda: kept.append(torch.ones(96 * MIB // 4)),
        call=lambda: torch.ones(16 * MIB // 4).sum(),
    )
    assert weigh(contender) < 40 * MIB


def test_what_a_call_keeps_for_the_next_one_counts_into_the_peak() -> None:
    kept: list[torch.Tensor] = []
    found = weigh(Contender(name="a", role="ours", call=lambda: kept.append(torch.ones(24 * MIB // 4))))
    assert found >= 48 * MIB * 0.95

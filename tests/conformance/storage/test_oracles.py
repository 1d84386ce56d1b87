"""The promises at a place in a trace, and which verdicts break them."""

from __future__ import annotations

import pytest

from conformance.storage.crash_states.oracles import Progress, Promise, broken
from conformance.storage.tracing.history import Operation
from conformance.storage.workload.scenarios import Verdict


def progress(current: str, *marks: str) -> Promise:
    found = Progress(current)
    for number, mark in enumerate(marks):
        found.observe(Operation(number=number, rank=0, kind="mark", path=mark))
    return found.promise()


def test_between_the_call_and_the_durable_event_both_saves_may_be_there_and_afterwards_the_new_one_only() -> None:
    assert progress("1/0", "begin 2/0") == DURING
    assert progress("1/0", "begin 2/0", "begin 2/0", "durable 2/0") == Promise(current="2/0", past=frozenset({"1/0"}))


def test_the_second_ranks_event_changes_nothing_even_when_the_next_save_is_durable_by_then() -> None:
    found = progress("1/0", "begin 2/0", "durable 2/0", "begin 3/0", "durable 3/0", "durable 2/0")
    assert found.current == "3/0"


def test_a_run_that_goes_back_makes_the_lower_step_the_one_that_latest_means() -> None:
    assert progress("3/0", "going back 1/0").pending == {"1/0"}
    assert progress("3/0", "going back 1/0", "back 1/0") == Promise(current="1/0", past=frozenset({"3/0"}))
    assert progress("1/0", "going back 1/0", "back 1/0") == Promise(current="1/0")


DURING = Promise(current="1/0", pending=frozenset({"2/0"}), saving=frozenset({"2/0"}))
AFTER = Promise(current="2/0", past=frozenset({"1/0"}))
FIRST = Promise(current="none", pending=frozenset({"1/0"}), saving=frozenset({"1/0"}))
BACK = Promise(current="3/0", pending=frozenset({"1/0"}))


@pytest.mark.parametrize(
    ("latest", "promise", "expected"),
    [
        ("1/0", DURING, set()),
        ("2/0", DURING, set()),
        ("none", DURING, {"O2"}),
        ("3/0", DURING, {"O1"}),
        ("1/0", AFTER, {"O2"}),
        ("none", AFTER, {"O2"}),
        ("refused: nothing is complete", AFTER, {"O2"}),
        ("error: torn", AFTER, {"O3"}),
        ("other: a mix", AFTER, {"O4"}),
        ("none", FIRST, set()),
        ("1/0", FIRST, set()),
        ("refused: a pointer without a step", FIRST, {"O3"}),
    ],
)
def test_each_verdict_breaks_the_promise_that_it_breaks(latest: str, promise: Promise, expected: set[str]) -> None:
    assert broken(Verdict(latest=latest), promise) == expected


def test_a_directory_that_counts_as_complete_has_to_load_as_a_save_of_its_step() -> None:
    def oracles(what: str) -> set[str]:
        return broken(Verdict(latest="2/0", claims={"global_step_2": what}), DURING)

    assert oracles("2/0") == set()
    assert oracles("2/1") == set()
    assert oracles("error: torn") == {"O3"}
    assert oracles("other: a mix") == {"O4"}
    assert oracles("1/0") == {"O4"}


@pytest.mark.parametrize(
    ("latest", "on_disk", "promise", "expected"),
    [
        ("1/0", {"global_step_1": "1/0", "global_step_2": "2/0"}, DURING, {"O5"}),
        ("2/0", {"global_step_1": "1/0", "global_step_2": "2/0"}, DURING, set()),
        ("1/0", {"global_step_1": "1/0"}, DURING, set()),
        ("none", {"global_step_1": "1/0"}, FIRST, {"O5"}),
        # What is gone back to is there already, and no save.
        ("3/0", {"global_step_1": "1/0", "global_step_3": "3/0"}, BACK, set()),
    ],
)
def test_a_save_that_is_whole_on_disk_is_not_passed_over(
    latest: str, on_disk: dict[str, str], promise: Promise, expected: set[str]
) -> None:
    assert broken(Verdict(latest=latest, claims=on_disk), promise) == expected

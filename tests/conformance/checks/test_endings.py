"""Checks on the end of a leg: each passes on right evidence, fails on wrong evidence, and is an error on none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.evidence_made import ERROR, evidence, killed, leg, status


@pytest.mark.parametrize(
    ("ends", "reached", "signal", "expected"),
    [
        (["SIGKILL", "SIGKILL"], (0, 1), "SIGKILL", "passed"),
        (["SIGKILL", 0], (0, 1), "SIGKILL", "failed"),
        (["SIGTERM", "SIGTERM"], (0, 1), "SIGKILL", "failed"),
        (["SIGKILL", "SIGKILL"], (0,), "SIGKILL", "error"),
        ([1, 1], (0, 1), None, "passed"),
        ([1, 0], (0, 1), None, "failed"),
    ],
)
def test_fault_fired(tmp_path: Path, ends: Any, reached: Any, signal: Any, expected: str) -> None:
    found = leg(tmp_path, "interrupted", ends=ends, fault=killed(8, reached))
    assert status(evidence(found), "fault_fired", leg="interrupted", signal=signal)[0] == expected


@pytest.mark.parametrize(
    ("ends", "agents", "fault", "expected"),
    [
        pytest.param(["SIGKILL"] * 2, ["SIGKILL"], {}, "passed", id="all, and their launcher"),
        pytest.param(["SIGKILL"] * 2, [1], {}, "failed", id="a launcher that outlives its ranks"),
        pytest.param([1, "SIGKILL"], [1], {"victims": "rank-1", "struck": (1,)}, "passed", id="one; the other fails"),
        pytest.param(["SIGTERM", "SIGKILL"], [1], {"victims": "rank-1", "struck": (1,)}, "passed", id="and is ended"),
        pytest.param(
            [0, "SIGKILL"], [1], {"victims": "rank-1", "struck": (1,)}, "failed", id="one; the other ends well"
        ),
        pytest.param(
            [None, "SIGKILL"],
            [1],
            {"victims": "rank-1", "struck": (1,)},
            "failed",
            id="one; nobody knows how the other ended",
        ),
        pytest.param(
            [1, "SIGKILL"],
            [1, "SIGKILL"],
            {"victims": "node-1", "struck": (1,)},
            "passed",
            id="a node and its launcher",
        ),
        pytest.param(
            [1, "SIGKILL"], [1, 0], {"victims": "node-1", "struck": (1,)}, "failed", id="its launcher ends well"
        ),
        pytest.param([1, "SIGTERM"], [1], {"victims": "rank-1", "struck": (1,)}, "failed", id="one, of another signal"),
        pytest.param(["SIGKILL", 1], [1], {"victims": "rank-1", "struck": (1,)}, "failed", id="the wrong one"),
        pytest.param(
            ["SIGKILL"] * 2, [], {"awaited": (1,), "reached_by": (1,)}, "passed", id="only one had to be there"
        ),
        pytest.param(["SIGKILL"] * 2, [], {"awaited": (1,), "reached_by": ()}, "error", id="it was not there"),
    ],
)
def test_fault_fired_asks_of_victims_and_spared_what_the_fault_says(
    tmp_path: Path, ends: Any, agents: Any, fault: Any, expected: str
) -> None:
    found = leg(tmp_path, "interrupted", ends=ends, agents=agents, fault=killed(8, **fault))
    assert status(evidence(found), "fault_fired", leg="interrupted")[0] == expected


def test_a_launcher_that_ends_its_ranks_politely_need_not_die_of_it(tmp_path: Path) -> None:
    found = leg(tmp_path, "interrupted", ends=["SIGTERM"] * 2, agents=[1], fault=killed(8))
    assert status(evidence(found), "fault_fired", leg="interrupted", signal="SIGTERM")[0] == "passed"


def test_a_fault_that_was_never_asked_for_is_an_error(tmp_path: Path) -> None:
    assert status(evidence(leg(tmp_path)), "fault_fired", leg="resumed") == ("error", None)


@pytest.mark.parametrize(
    ("changes", "events", "expected"),
    [
        ({}, [[ERROR]], "passed"),
        ({"error": "CheckpointNotFoundError"}, [[ERROR]], "passed"),
        ({"error": "RuntimeError"}, [[ERROR]], "failed"),
        ({"contains": ["extra_state"]}, [[ERROR]], "failed"),
        ({"within_seconds": 0.05}, [[ERROR]], "failed"),
        ({}, [[ERROR], []], "failed"),
        ({}, [[]], "failed"),
    ],
)
def test_fails_with(tmp_path: Path, changes: Any, events: Any, expected: str) -> None:
    parameters = {"error": "FileNotFoundError", "contains": ["no training state"], **changes}
    found = leg(tmp_path, events=events, ends=[1] * len(events))
    assert status(evidence(found), "fails_with", leg="resumed", **parameters)[0] == expected


def test_an_error_with_exit_code_0_does_not_pass(tmp_path: Path) -> None:
    found = leg(tmp_path, events=[[ERROR]], ends=[0])
    assert status(evidence(found), "fails_with", leg="resumed", error="OSError") == ("failed", "storage")


@pytest.mark.parametrize(
    ("ends", "code", "expected"),
    [
        ([0], 0, "passed"),
        ([1], 0, "failed"),
        ([1], "nonzero", "passed"),
        ([0, 1], "nonzero", "failed"),
        (["SIGKILL"], 0, "failed"),
    ],
)
def test_exits(tmp_path: Path, ends: Any, code: Any, expected: str) -> None:
    assert status(evidence(leg(tmp_path, ends=ends)), "exits", leg="resumed", code=code)[0] == expected


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"contains": "skip"}, "passed"),
        ({"contains": "skip", "count": 2}, "passed"),
        ({"contains": "skip", "count": 1}, "failed"),
        ({"contains": "skip", "level": "WARNING", "count": 1}, "passed"),
        ({"contains": "absent"}, "failed"),
        ({"contains": "absent", "count": 0}, "passed"),
    ],
)
def test_logs(tmp_path: Path, parameters: Any, expected: str) -> None:
    lines = [{"kind": "log", "level": level, "message": "skip it"} for level in ("INFO", "WARNING")]
    assert status(evidence(leg(tmp_path, events=[lines])), "logs", leg="resumed", **parameters)[0] == expected


def test_warns_counts_warnings_only(tmp_path: Path) -> None:
    found = evidence(leg(tmp_path, events=[[{"kind": "log", "level": "INFO", "message": "skip"}]]))
    assert status(found, "warns", leg="resumed", contains="skip") == ("failed", "policy")


def test_callback_registered(tmp_path: Path) -> None:
    found = evidence(leg(tmp_path, events=[[{"kind": "callbacks", "names": ["CheckpointerCallback"]}]]))
    assert status(found, "callback_registered", leg="resumed", registered=True)[0] == "passed"
    assert status(found, "callback_registered", leg="resumed", registered=False) == ("failed", "policy")


def test_ends_at_and_value_is(tmp_path: Path) -> None:
    told = [{"kind": "value", "name": "reads", "value": 7}, {"kind": "end", "global_step": 10, "epoch": 1}]
    found = evidence(leg(tmp_path, events=[told]))
    assert status(found, "ends_at", leg="resumed", global_step=10, epoch=1)[0] == "passed"
    assert status(found, "ends_at", leg="resumed", global_step=9) == ("failed", "progress")
    assert status(found, "value_is", leg="resumed", name="reads", equals=7)[0] == "passed"
    assert status(found, "value_is", leg="resumed", name="reads", equals=8)[0] == "failed"
    assert status(found, "value_is", leg="resumed", name="writes", equals=8)[0] == "error"

"""The crash sweep: its points are the changes on disk of a real save, and a save in the wrong order fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import st.sweep
from conformance.records.results import KillRecord, Outcome, read_results
from st.attempts import InconclusiveError
from st.sweep import MODES, Point, SweepOutcome, _choose, _without_random_part
from tests.st.conftest import Done

# One worker: these runs share a warm server.
pytestmark = pytest.mark.xdist_group("st-warm")

POINTS = [Point(rank=rank, operation=number, what="write x") for rank in range(2) for number in range(1, 6)]


@pytest.fixture
def sweep(st_command: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    # Two sharded ranks: on a mesh of four each life costs four times as much, most of it what torch does once a process.
    monkeypatch.setattr(st.sweep, "_GIVEN", {**st.sweep._GIVEN, "world_size": 2, "parallel": "fsdp"})
    return lambda *words: st_command("sweep", "--results", str(tmp_path / "run"), *words)


def test_the_last_changes_of_a_save_are_the_commit_and_the_pointer_and_a_kill_before_them_keeps_the_old_step(
    tmp_path: Path, sweep: Callable[..., Done]
) -> None:
    # Only what makes the step directory visible is a change at that very path (an exchange where there is one already).
    # Both modes train the same reference.
    done = sweep("--mode", "sync", "--mode", "again", "--point", "0:* global_step_6")
    assert done.returncode == 0, done.stdout + done.stderr
    points, _ = re.findall(r"1 of (\d+) points tried, 0 red", done.stdout)
    # Each of two ranks makes, writes and syncs its file of training state and its shards.
    assert int(points) > 2 * 6, done.stdout
    kill, again = read_results(tmp_path / "run").of(KillRecord)
    assert (kill.what, kill.resumed_at, kill.lost_steps) == ("rename global_step_6", 3, 3)
    # There step 6 had been saved before; but the run went back to 3, and LATEST means 3 until it has saved.
    assert (again.mode, again.resumed_at, again.lost_steps) == ("again", 3, 3)


def test_a_rank_that_is_killed_while_it_clears_what_a_dead_save_left_has_not_told_what_it_restored(
    tmp_path: Path, sweep: Callable[..., Done]
) -> None:
    # It removes a leftover right after its load, before training begins.
    done = sweep("--mode", "leftovers", "--point", "0:remove .staging/global_step_6.*/*")
    assert done.returncode == 0, done.stdout + done.stderr
    (kill,) = read_results(tmp_path / "run").of(KillRecord)
    assert kill.what is not None
    assert kill.what.startswith("remove .staging/global_step_6.*/")
    assert (kill.last_step, kill.resumed_at, kill.lost_steps) == (3, 3, 0)


def test_a_pointer_that_moves_before_the_commit_turns_the_sweep_red(sweep: Callable[..., Done]) -> None:
    done = sweep(
        "--mode",
        "sync",
        "--point",
        "0:rename latest_checkpoint_iteration.txt",
        "--sabotage",
        "pointer-moved-before-the-commit",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the pointer holds '6'; complete checkpoints: [3]" in done.stdout


def test_a_share_is_drawn_by_the_seed_and_never_empty() -> None:
    assert _choose(POINTS, 1.0, 1, None) == POINTS
    assert len(_choose(POINTS, 0.001, 1, None)) == 1
    assert _choose(POINTS, 0.5, 1, None) == _choose(POINTS, 0.5, 1, None)
    assert _choose(POINTS, 0.5, 1, None) != _choose(POINTS, 0.5, 2, None)


def test_a_point_that_the_save_does_not_have_is_trouble_and_no_pass() -> None:
    with pytest.raises(InconclusiveError, match="no file operation 6 of rank 1"):
        _choose(POINTS, 1.0, 1, (1, 6))
    with pytest.raises(InconclusiveError, match=r"no file operation rename \* of rank 1"):
        _choose(POINTS, 1.0, 1, (1, "rename *"))


def test_a_point_is_told_by_its_number_or_is_the_first_of_its_name() -> None:
    assert _choose(POINTS, 1.0, 1, (1, 4)) == [POINTS[8]]
    assert _choose(POINTS, 1.0, 1, (1, "write ?")) == [POINTS[5]]


def test_a_sweep_of_nothing_is_no_pass() -> None:
    assert SweepOutcome(mode="sync", points=10, kills=()).outcome == "error"


@pytest.mark.parametrize(
    ("outcomes", "expected", "told"),
    [
        (("pass", "pass"), "pass", "2 of 10 points tried, 0 red; resumed"),
        (("pass", "error"), "error", "2 of 10 points tried, 1 red; resumed"),
        (("error", "fail", "pass"), "fail", "3 of 10 points tried, 2 red; resumed"),
        (
            ("fail", "false_exact", "error"),
            "false_exact",
            "3 of 10 points tried, 3 red, 1 of them under a certificate that says exact; resumed",
        ),
    ],
)
def test_a_sweep_is_as_its_worst_point(outcomes: tuple[Outcome, ...], expected: str, told: str) -> None:
    kills = tuple(
        KillRecord(
            key="sweep.sync", number=1, mode="sync", moment="file_operation", step=6, rank=0, operation=1, what="w",
            victims="all", last_step=6, resumed_at=3, lost_steps=3, outcome=outcome, reason="", divergence=None, seconds=1.0,
        )
        for outcome in outcomes
    )  # fmt: skip
    swept = SweepOutcome(mode="sync", points=10, kills=kills)
    assert (swept.outcome, swept.summary.startswith(told)) == (expected, True)


def test_a_point_is_named_without_the_random_part_of_its_path() -> None:
    assert _without_random_part(".staging/global_step_6.0123456789ab/.metadata") == ".staging/global_step_6.*/.metadata"
    assert (
        _without_random_part(".staging/latest_checkpoint_iteration.txt.0123456789ab")
        == ".staging/latest_checkpoint_iteration.txt.*"
    )
    assert _without_random_part("global_step_6") == "global_step_6"


def test_every_mode_says_what_it_is() -> None:
    assert all(mode.title for mode in MODES.values())

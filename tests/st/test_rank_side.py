"""Rank-side tests without MPI: a wrong command is an error, and nothing passes by not running.

Tests that need mpiexec are in ``st/rank_side_selftest``, which ``tox -e mpi`` runs.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from st.rank_side.agreement import Outcome, explain, shorten
from st.rank_side.harness import rank_file
from tests.warm_commands import run_module

ROOT = Path(__file__).parents[2]


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_module("pytest", "-p", "no:cacheprovider", *arguments, cwd=ROOT)


def test_without_mpi_the_tests_are_refused_with_what_to_type() -> None:
    ended = run_pytest("st/rank_side")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "mpiexec -n 4 python -m pytest --with-mpi st/rank_side " in ended.stderr
    assert "skipped" not in ended.stdout
    assert "passed" not in ended.stdout


def test_where_they_are_deselected_nothing_is_refused() -> None:
    ended = run_pytest("st/rank_side", "-m", "not mpi")
    assert ended.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "mpiexec" not in ended.stderr


def test_they_can_be_listed_without_mpi_and_the_broken_ones_are_not_among_them() -> None:
    ended = run_pytest("st/rank_side", "--collect-only", "-q")
    assert ended.returncode == 0
    tests = [line for line in ended.stdout.splitlines() if "::" in line]
    assert {test.partition("::")[0] for test in tests} == {
        str(path.relative_to(ROOT)) for path in (ROOT / "st" / "rank_side").glob("test_*.py")
    }


def test_no_folder_on_the_way_to_a_test_is_named_like_the_marker() -> None:
    # pytest takes folder names for keywords; pytest-mpi would skip all tests below it without its flag, as if they passed.
    folders = [path for room in ("st", "tests", "conformance") for path in (ROOT / room).rglob("mpi*") if path.is_dir()]
    assert folders == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [("out.xml", "out.rank2.xml"), ("a.b/j.unit.xml", "a.b/j.unit.rank2.xml"), ("a.b/plain", "a.b/plain.rank2")],
)
def test_each_rank_has_a_junit_file_of_its_own(path: str, expected: str) -> None:
    assert rank_file(Path(path), 2) == Path(expected)


def passed(*ranks: int) -> dict[int, Outcome]:
    return {rank: Outcome(at=1.0) for rank in ranks}


def test_a_test_that_passed_everywhere_needs_no_explanation() -> None:
    assert explain(passed(0, 1, 2, 3), 4, 95.0) == ""


def test_the_earliest_failure_leads_and_brings_its_traceback() -> None:
    outcomes = passed(0) | {
        1: Outcome(kind="failed", reason="RuntimeError: closed by peer", trace="trace of 1", at=7.2),
        2: Outcome(kind="failed", reason="ValueError: damaged", trace="trace of 2", at=7.1),
    }
    assert explain(outcomes, 3, 95.0) == (
        "rank 2 of 3 failed: ValueError: damaged\nand then:\n  rank 1 of 3 failed: RuntimeError: closed by peer\n"
        "traceback of rank 2:\ntrace of 2"
    )


def test_a_rank_at_its_limit_leads_before_those_that_failed_waiting_for_it() -> None:
    outcomes = {
        0: Outcome(kind="failed", reason="RuntimeError: timed out waiting", at=30.0),
        1: Outcome(kind="timed out", reason="TimeLimitReached: 90 s", at=90.0),
    }
    assert explain(outcomes, 2, 95.0).startswith(
        "rank 1 of 2 timed out: TimeLimitReached: 90 s\nand then:\n  rank 0 of 2"
    )


def test_a_rank_that_stayed_out_leads_before_all() -> None:
    outcomes = passed(0) | {2: Outcome(kind="timed out", reason="TimeLimitReached: 90 s", at=90.0)}
    assert explain(outcomes, 3, 95.0).startswith("rank 1 of 3 is still inside after 95 s\nand then:\n  rank 2 of 3")


def test_a_long_text_keeps_its_start_and_its_end() -> None:
    text = shorten("start" + "x" * 20_000 + "end")
    assert text.startswith("start")
    assert text.endswith("end")
    assert "12008 characters" in text
    assert shorten("short") == "short"

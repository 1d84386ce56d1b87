"""However one rank breaks off, the whole run fails soon, names that rank, and leaves no process.

Every case runs mpiexec with the tests of one file of ``st/rank_side/broken``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
MARK = "RANK_SIDE_SELFTEST"
RANKS = 4
# Of one broken test; its collectives wait a third of it.
LIMIT = 9.0
GRACE, HARD = 5.0, 15.0
# To start four times Python and torch on a busy machine, and to end.
STARTING = 60.0

pytestmark = pytest.mark.timeout(180)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One run of mpiexec that ended by itself."""

    code: int
    output: str
    test_seconds: float
    junit: dict[int, ElementTree.Element]
    left_behind: list[int]

    def results(self, test: str) -> dict[int, str]:
        """The failure's message of ``test`` by rank, "" where it passed; ranks that did not get to it are left out."""
        found = {}
        for rank, suite in self.junit.items():
            for case in suite.iter("testcase"):
                if case.get("name") == test:  # a rank that left leaves a nameless case
                    problems = [problem for kind in ("failure", "error", "skipped") for problem in case.iter(kind)]
                    found[rank] = "".join(problem.attrib["message"] for problem in problems)
        return found


def run(folder: Path, file: str, *options: str, ranks: int = RANKS) -> Ended:
    """Run ``file`` in ``ranks`` ranks; fails when the run does not end by itself."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    assert mpiexec.exists(), f"{mpiexec} is missing; tox -e mpi installs it, or pip install -e '.[test,mpi]'"
    mark = uuid.uuid4().hex
    command = [str(mpiexec), "-n", str(ranks), sys.executable, "-m", "pytest", "--with-mpi", f"st/rank_side/{file}"]
    command += ["-p", "no:cacheprovider", f"--junitxml={folder / 'junit.xml'}", f"--test-limit={LIMIT}", *options]
    environment = {**os.environ, MARK: mark, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(STARTING + LIMIT + HARD)
        finally:
            left_behind = marked(mark)
            for pid in [*left_behind, *([process.pid] if process.poll() is None else [])]:
                os.kill(pid, 9)
            process.wait()
    junit = {
        int(re.findall(r"rank(\d+)", path.name)[0]): ElementTree.parse(path).getroot()
        for path in folder.glob("junit*.xml")
    }
    durations = [float(case.get("time", 0)) for suite in junit.values() for case in suite.iter("testcase")]
    return Ended(
        code=code,
        output=(folder / "output").read_text(errors="replace"),
        test_seconds=max(durations, default=0.0),
        junit=junit,
        left_behind=left_behind,
    )


def marked(mark: str) -> list[int]:
    """Living processes that inherited ``mark``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            inherited = entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes()
        except OSError:
            continue
        if inherited:
            found.append(int(entry.name))
    return found


def assert_failed_on_all(ended: Ended, test: str, start: str, ranks: Set[int] = frozenset(range(RANKS))) -> None:
    """``test`` failed on ``ranks``, each of which says the same, and first ``start``."""
    results = ended.results(test)
    assert set(results) == ranks, ended.output
    for rank, message in results.items():
        assert f"RankFailure: {start}" in message, f"rank {rank}: {message}\n{ended.output}"


def assert_passed_on_all(ended: Ended, test: str) -> None:
    assert ended.results(test) == dict.fromkeys(range(RANKS), ""), ended.output


def test_a_rank_that_fails_before_a_collective_fails_the_test_on_all_at_once(tmp_path: Path) -> None:
    ended = run(tmp_path, "broken/fails_alone.py")
    assert ended.code == 1, ended.output
    assert ended.left_behind == []
    assert_failed_on_all(
        ended, "test_rank_2_fails_before_a_collective", "rank 2 of 4 failed: ValueError: the shard is damaged"
    )
    assert_passed_on_all(ended, "test_the_next_test_starts_clean")
    # The others did not wait for the limit of their collective.
    assert ended.test_seconds < LIMIT / 3


def test_a_rank_that_hangs_ends_at_the_limit_and_the_run_goes_on(tmp_path: Path) -> None:
    ended = run(tmp_path, "broken/hangs.py")
    assert ended.code == 1, ended.output
    assert ended.left_behind == []
    assert_failed_on_all(ended, "test_rank_1_hangs", "rank 1 of 4 timed out: TimeLimitReached")
    assert_passed_on_all(ended, "test_the_next_test_starts_clean")
    assert LIMIT <= ended.test_seconds < LIMIT + GRACE
    assert "hangs.py" in ended.output
    assert "threading.Event().wait()" in ended.output, "where it hung"


def test_a_rank_that_cant_be_interrupted_is_ended_by_the_others(tmp_path: Path) -> None:
    ended = run(tmp_path, "broken/hangs_for_good.py")
    assert ended.code != 0
    assert ended.left_behind == []
    assert_failed_on_all(ended, "test_rank_3_hangs_for_good", "rank 3 of 4 is still inside after 14 s", {0, 1, 2})
    assert ended.results("test_is_never_reached") == {}
    assert ended.test_seconds < LIMIT + GRACE + 2
    assert "the run is aborted: st/rank_side/broken/hangs_for_good.py::test_rank_3_hangs_for_good" in ended.output
    assert (
        "rank 3: call of st/rank_side/broken/hangs_for_good.py::test_rank_3_hangs_for_good has not ended"
        in ended.output
    )
    assert re.search(r'hangs_for_good\.py", line \d+ in test_rank_3_hangs_for_good', ended.output), "its stack"


def test_ranks_that_all_hang_end_by_themselves(tmp_path: Path) -> None:
    started = time.monotonic()
    ended = run(tmp_path, "broken/all_hang_for_good.py")
    assert ended.code != 0
    assert ended.left_behind == []
    assert ended.junit == {}
    assert time.monotonic() - started < STARTING + LIMIT + HARD
    for rank in range(RANKS):
        assert f"rank {rank}: call of st/rank_side/broken/all_hang_for_good.py" in ended.output


def test_a_killed_rank_ends_the_run_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    ended = run(tmp_path, "broken/is_killed.py")
    assert ended.code != 0
    assert ended.left_behind == []
    assert "KILLED BY SIGNAL: 9" in ended.output or "Killed" in ended.output, ended.output
    assert time.monotonic() - started < STARTING


def test_a_rank_that_goes_away_without_a_word_does_not_let_the_run_pass(tmp_path: Path) -> None:
    ended = run(tmp_path, "broken/goes_away.py")
    assert ended.code != 0
    assert ended.left_behind == []
    assert "passed" not in ended.output


def test_a_collective_too_many_fails_in_its_own_test(tmp_path: Path) -> None:
    ended = run(tmp_path, "broken/unmatched.py")
    assert ended.code == 1, ended.output
    assert ended.left_behind == []
    assert_failed_on_all(ended, "test_rank_0_sends_alone", "rank ")
    assert_passed_on_all(ended, "test_the_next_test_starts_clean")


def test_setup_teardown_skips_and_exits_of_one_rank_fail_on_all(tmp_path: Path) -> None:
    ended = run(tmp_path, "broken/odd_endings.py")
    assert ended.code == 1, ended.output
    assert ended.left_behind == []
    for test, start in {
        "test_rank_1_fails_in_setup": "rank 1 of 4 failed: OSError: no space left",
        "test_rank_3_fails_in_teardown": "rank 3 of 4 failed: OSError: cannot be removed",
        "test_rank_2_skips": "rank 2 of 4 failed: Skipped: not today",
        "test_rank_0_leaves_python": "rank 0 of 4 failed: SystemExit: 0",
    }.items():
        results = ended.results(test)
        assert set(results) == set(range(RANKS)), ended.output
        assert all(start in message for message in results.values()), results
    assert_passed_on_all(ended, "test_all_pass")


def test_a_rank_that_ends_its_session_ends_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path, "broken/ends_session.py")
    assert ended.code != 0
    assert ended.left_behind == []
    assert_failed_on_all(ended, "test_rank_2_ends_its_session", "rank 2 of 4 left: Exit: enough", {0, 1, 3})
    assert ended.results("test_is_never_reached") == {}


@pytest.mark.parametrize(("file", "rank"), [("other_tests.py", 1), ("no_import.py", 3)])
def test_ranks_with_other_tests_are_refused(tmp_path: Path, file: str, rank: int) -> None:
    ended = run(tmp_path, f"broken/{file}")
    assert ended.code != 0
    assert ended.left_behind == []
    assert f"rank {rank} collected other tests than rank 0, or failed to" in ended.output
    assert ("of rank 3 only" in ended.output) == (file == "no_import.py"), "the reason of a rank that can't speak"
    assert "passed" not in ended.output


def test_the_session_stops_at_its_limit_on_all_ranks(tmp_path: Path) -> None:
    ended = run(tmp_path, "broken/long_session.py", "--session-limit=0.5")
    assert ended.code == 1, ended.output
    assert_passed_on_all(ended, "test_takes_a_second[0]")
    assert ended.results("test_takes_a_second[1]") == {}
    assert "the session's limit of 0.5 s is reached" in ended.output


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_too_few_is_refused_with_what_to_type(tmp_path: Path, ranks: int) -> None:
    ended = run(tmp_path, "test_collectives.py", ranks=ranks)
    assert ended.code != 0
    assert ended.left_behind == []
    assert "mpiexec -n 4 python -m pytest --with-mpi st/rank_side/test_collectives.py" in ended.output
    assert "skipped" not in ended.output


def test_a_test_without_its_mark_is_refused(tmp_path: Path) -> None:
    ended = run(tmp_path, "broken/unmarked.py")
    assert ended.code != 0
    assert (
        "without @pytest.mark.mpi(min_size=...): st/rank_side/broken/unmarked.py::test_without_a_mark" in ended.output
    )


def test_a_run_that_passes_leaves_one_file_a_rank_and_no_folder(tmp_path: Path) -> None:
    ended = run(tmp_path, "test_collectives.py", "-k", "gather_is_in_rank_order")
    assert ended.code == 0, ended.output
    assert ended.left_behind == []
    assert_passed_on_all(ended, "test_gather_is_in_rank_order_on_every_rank")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"junit.rank{rank}.xml" for rank in range(4)),
        "output",
    ]
    assert ended.output.count("1 passed") == 1, "rank 0 speaks for all"

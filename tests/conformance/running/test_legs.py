"""One leg with warm and cold ranks: whatever they do is reported, and no process is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.records.results import LegRecord
from tests.conformance.stand_in import MODULE, Patient, StandInAdapter, ends, launcher_in, run_one
from tests.processes_seen import living_with

Run = Callable[..., LegRecord]


@pytest.fixture(params=["warm", "cold"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    with launcher_in(tmp_path) as hosts:

        def one(defect: str = "", **options: Any) -> LegRecord:
            adapter = StandInAdapter(defect, preload=MODULE if request.param == "warm" else None)
            launcher = Patient(hosts) if defect.startswith("hangs") else hosts
            record = run_one(tmp_path, launcher, adapter, **options)
            assert record.launcher == request.param
            return record

        yield one
    assert living_with(str(tmp_path)) == []


def test_a_leg_ends_by_itself_and_each_rank_has_a_log(run: Run, tmp_path: Path) -> None:
    record = run(ranks=2)
    assert (ends(record), record.trouble, record.timed_out, record.agents) == ([0, 0], None, False, ())
    assert (record.first_steps, record.last_steps) == ((1, 1), (4, 4))
    assert [(tmp_path / "leg" / f"log_rank_{rank}.txt").read_text() for rank in (0, 1)] == [
        "rank 0 speaks\n",
        "rank 1 speaks\n",
    ]


def test_the_exit_code_of_each_rank_is_its_own(run: Run) -> None:
    record = run("fails-together", ranks=3)
    assert (ends(record), record.trouble) == ([10, 11, 12], None)


def test_ranks_that_hang_write_where_into_their_logs_and_the_limit_is_kept(run: Run, tmp_path: Path) -> None:
    record = run("hangs", ranks=2, limit_seconds=1)
    assert record.timed_out
    assert ends(record) == ["SIGABRT", "SIGABRT"]
    assert 1 <= record.seconds < 3
    for rank in (0, 1):
        log = (tmp_path / "leg" / f"log_rank_{rank}.txt").read_text()
        assert "Fatal Python error: Aborted" in log
        assert "in hang_here\n" in log
        assert "in train\n" in log


def test_a_rank_that_does_not_even_hear_that_is_killed_three_seconds_later(run: Run) -> None:
    record = run("hangs-deaf", limit_seconds=0.5)
    assert (record.timed_out, ends(record), record.trouble) == (True, ["SIGKILL"], None)
    assert 3.5 <= record.seconds < 6


@pytest.mark.parametrize("defect", ["has-a-child", "forks-a-child"])
def test_a_process_that_outlives_its_leg_is_trouble_and_is_dead(run: Run, tmp_path: Path, defect: str) -> None:
    record = run(defect, ranks=2)
    assert record.trouble is not None
    assert "left behind; they are killed now" in record.trouble
    assert living_with(str(tmp_path / "leg")) == []


def test_a_process_that_outlives_a_kill_is_no_trouble_and_is_dead(run: Run, tmp_path: Path) -> None:
    record = run("has-a-child", ranks=2, fault={"kind": "kill", "after_step": 2})
    assert (ends(record), record.trouble) == (["SIGKILL", "SIGKILL"], None)
    assert living_with(str(tmp_path / "leg")) == []


def test_a_rank_is_killed_alone_and_the_others_go_on(run: Run) -> None:
    record = run(ranks=3, fault={"kind": "kill", "after_step": 2, "victims": "rank-1"})
    assert (ends(record), record.last_steps) == ([0, "SIGKILL", 0], (4, 2, 4))
    fault = record.fault
    assert fault is not None
    assert (fault.awaited, fault.struck, fault.reached_by) == ((0, 1, 2), (1,), (0, 1, 2))


def test_all_ranks_are_told_to_end_and_die_of_it(run: Run) -> None:
    record = run(ranks=2, fault={"kind": "terminate", "after_step": 2})
    assert (ends(record), record.last_steps) == (["SIGTERM", "SIGTERM"], (2, 2))


def test_a_launcher_that_is_no_process_can_not_be_told_to_end(run: Run) -> None:
    record = run(ranks=2, fault={"kind": "terminate", "after_step": 2, "victims": "launcher-0"})
    assert record.trouble == "LauncherError: a launcher that is a process of its own needs torchrun"


def test_a_fault_that_never_fires_is_reached_by_nobody(run: Run) -> None:
    record = run("ignores-fault", ranks=2, fault={"kind": "kill", "after_step": 2})
    assert record.fault is not None
    assert (ends(record), record.fault.awaited, record.fault.reached_by) == ([0, 0], (0, 1), ())


def test_a_file_operation_that_never_comes_is_awaited_of_its_rank_only(run: Run) -> None:
    place = {"moment": "file_operation", "rank": 1, "operation": 7}
    record = run(ranks=2, fault={"kind": "kill", "after_step": 2, **place})
    fault = record.fault
    assert fault is not None
    assert (fault.rank, fault.operation, fault.awaited, fault.struck) == (1, 7, (1,), (0, 1))
    assert (ends(record), fault.reached_by) == ([0, 0], ())


def test_a_file_operation_that_a_case_names_is_recorded_by_the_number_that_it_had(run: Run) -> None:
    place = {"moment": "file_operation", "rank": 1, "operation": "rename global_step_*"}
    record = run("renames-on-disk", ranks=2, fault={"kind": "kill", "after_step": 2, **place})
    assert record.fault is not None
    assert (record.fault.operation, record.fault.awaited, record.fault.reached_by) == (10, (1,), (1,))


def test_a_named_file_operation_that_never_comes_has_no_number(run: Run) -> None:
    place = {"moment": "file_operation", "rank": 1, "operation": "rename global_step_*"}
    record = run(ranks=2, fault={"kind": "kill", "after_step": 2, **place})
    assert record.fault is not None
    assert (record.fault.operation, record.fault.reached_by) == (None, ())


def test_what_is_not_started_is_trouble(tmp_path: Path) -> None:
    with launcher_in(tmp_path) as hosts:
        record = run_one(tmp_path / "two", hosts, StandInAdapter(), ranks=2, nodes=2)
        assert (record.launcher, record.trouble) == ("none", "LauncherError: several nodes need torchrun")
        hosts.stop()
        record = run_one(tmp_path / "late", hosts, StandInAdapter())
        assert record.trouble == "LauncherError: no leg is started any more"

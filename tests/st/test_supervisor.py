"""The supervisor against real processes under a real torchrun: it kills all, proves it, and leaves nothing behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from conformance.record import read_trajectory
from st import processes
from st.supervisor import Fault, LegError, Tail
from tests.st.legs import RANKS, fault_after_step, processes_naming, run_stand_in


def test_a_leg_without_fault_ends_with_exit_code_0_of_every_rank(tmp_path: Path) -> None:
    record = run_stand_in(tmp_path, "reference")
    assert record.agent is not None
    assert (record.agent.exit_code, record.agent.signal) == (0, None)
    assert [end.exit_code for end in record.ranks] == [0] * RANKS
    assert (record.first_steps, record.last_steps) == ((1,) * RANKS, (25,) * RANKS)
    assert record.failure is None
    assert record.fault is None


def test_a_kill_takes_the_agent_every_rank_and_their_children_by_that_very_signal(tmp_path: Path) -> None:
    # The child leads a session of its own.
    options = ("--hold-after=13", "--defect=has-a-child")
    record = run_stand_in(tmp_path, "interrupted", *options, fault=fault_after_step(13))
    assert record.agent is not None
    assert record.agent.signal == "SIGKILL"
    assert [end.signal for end in record.ranks] == ["SIGKILL"] * RANKS
    assert len({record.agent.pid, *(end.pid for end in record.ranks)}) == RANKS + 1
    assert record.fault is not None
    assert (record.fault.observed_steps, record.fault.observed_pointer) == ((13,) * RANKS, 10)
    assert processes_naming(tmp_path) == []


def test_a_kill_after_a_save_waits_for_the_pointer(tmp_path: Path) -> None:
    fault = Fault(kind="kill", moment="after_save", step=10)
    record = run_stand_in(tmp_path, "interrupted", "--hold-after=10", fault=fault)
    assert record.fault is not None
    assert (record.fault.observed_steps, record.fault.observed_pointer) == ((10,) * RANKS, 10)


def test_a_leg_that_ends_well_but_leaves_a_process_behind_fails(tmp_path: Path) -> None:
    with pytest.raises(LegError, match=r"processes \[\d+\] were left behind; they are killed now"):
        run_stand_in(tmp_path, "reference", "--defect=has-a-child")
    assert processes_naming(tmp_path) == []


def test_a_rank_that_ignores_sigterm_and_never_ends_is_killed_at_the_limit(tmp_path: Path) -> None:
    with pytest.raises(LegError, match=r"still running at its limit of 8 s, with steps \[25, 25, 25, 25\]") as caught:
        run_stand_in(tmp_path, "reference", "--defect=never-ends", limit_seconds=8.0)
    assert caught.value.record.failure is not None
    assert processes_naming(tmp_path) == []


def test_a_rank_that_dies_early_fails_the_leg_with_the_last_lines_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(LegError) as caught:
        run_stand_in(tmp_path, "interrupted", "--defect=dies-early", fault=fault_after_step(13))
    assert str(caught.value) == "leg interrupted: failed: torchrun ended with exit code 1"
    assert "rank 3 meets its end" in caught.value.log_tail
    assert "exitcode  : 7" in caught.value.log_tail
    assert "launch_agent" not in caught.value.log_tail
    assert caught.value.record.last_steps == (5, 5, 5, 4)
    assert caught.value.record.fault is None
    assert processes_naming(tmp_path) == []


def test_a_fault_that_never_fires_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(LegError, match="the fault did not fire: training finished before after_step: 26"):
        run_stand_in(tmp_path, "interrupted", fault=fault_after_step(26))


def test_a_save_that_the_supervisor_came_too_late_for_is_a_failure(tmp_path: Path) -> None:
    fault = Fault(kind="kill", moment="after_save", step=9)
    with pytest.raises(LegError, match="after_save: 9 came too late: the pointer already says 10"):
        run_stand_in(tmp_path, "interrupted", "--hold-after=10", fault=fault)
    assert processes_naming(tmp_path) == []


def test_records_are_followed_line_by_line_and_half_a_line_waits(tmp_path: Path) -> None:
    run_stand_in(tmp_path, "reference")
    whole = (tmp_path / "legs" / "reference" / "trajectory_rank_0.jsonl").read_bytes()
    copy = tmp_path / "trajectory_rank_0.jsonl"
    tail = Tail(tmp_path, 1)
    for size in (0, 50, len(whole) // 2, len(whole) - 1, len(whole)):
        copy.write_bytes(whole[:size])
        tail.poll()
        assert tail.last_steps == [whole[:size].count(b"\n")]
    assert read_trajectory(tmp_path).last_step(0) == tail.last_steps[0]


def test_a_living_process_is_no_proof_of_death() -> None:
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    with pytest.raises(processes.DeathNotProvedError, match=f"process {child} is still alive"):
        processes.reap(child, time.monotonic() + 0.05)
    found = processes.read(child)
    assert found is not None
    processes.kill(found)
    assert os.WTERMSIG(processes.reap(child, time.monotonic() + 20)) == 9
    with pytest.raises(processes.DeathNotProvedError, match="no child of this one"):
        processes.reap(child, time.monotonic() + 20)

"""Legs under a real torchrun: the end of every rank and agent is known, and no process is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.processes.torchrun import Torchrun
from conformance.records.results import LegRecord
from tests.conformance.stand_in import FOR_TORCHRUN, Patient, StandInAdapter, ends, run_one
from tests.processes_seen import living_with

Run = Callable[..., LegRecord]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    launcher = Torchrun()

    def one(defect: str = "", *, ranks: int = 4, **options: Any) -> LegRecord:
        record = run_one(tmp_path, launcher, StandInAdapter(defect, argv=FOR_TORCHRUN), ranks=ranks, **options)
        assert record.launcher == "torchrun"
        return record

    yield one
    launcher.close()
    assert living_with(str(tmp_path)) == []


def agents(record: LegRecord) -> list[int | str | None]:
    return [end.signal or end.exit_code for end in record.agents]


def test_ranks_that_fail_by_themselves_keep_their_own_exit_codes_and_logs(run: Run, tmp_path: Path) -> None:
    record = run("fails-together")
    assert (ends(record), agents(record), record.trouble) == ([10, 11, 12, 13], [1], None)
    logs = [(tmp_path / "leg" / f"log_rank_{rank}.txt").read_text() for rank in range(4)]
    assert logs == [f"rank {rank} speaks\n" for rank in range(4)]


def test_a_leg_ends_by_itself_on_two_nodes(run: Run) -> None:
    record = run(nodes=2)
    assert (ends(record), agents(record), record.trouble) == ([0] * 4, [0, 0], None)
    assert (record.first_steps, record.last_steps) == ((1,) * 4, (4,) * 4)


def test_a_polite_end_is_proved_of_every_rank_and_ends_the_agent(run: Run) -> None:
    record = run(fault={"kind": "terminate", "after_step": 2})
    assert (ends(record), record.last_steps) == (["SIGTERM"] * 4, (2,) * 4)
    assert agents(record)[0] not in (0, None)
    assert record.trouble is None


def test_an_agent_that_is_told_to_end_passes_that_on_and_the_ends_of_its_ranks_are_known(run: Run) -> None:
    record = run(fault={"kind": "terminate", "after_step": 2, "victims": "launcher-0"})
    assert (ends(record), record.last_steps) == (["SIGTERM"] * 4, (2,) * 4)
    assert agents(record)[0] not in (0, None)
    assert record.trouble is None


def test_a_kill_takes_the_agent_every_rank_and_their_children_along(run: Run) -> None:
    record = run("has-a-child", fault={"kind": "kill", "after_step": 2})
    assert (ends(record), agents(record), record.trouble) == (["SIGKILL"] * 4, ["SIGKILL"], None)
    fault = record.fault
    assert fault is not None
    assert (fault.awaited, fault.struck, fault.reached_by) == ((0, 1, 2, 3),) * 3


def test_a_node_is_killed_with_its_agent_and_the_other_is_spared(run: Run) -> None:
    # The ranks of the other node fail, as in a lost collective. An agent whose ranks end well waits for the other agents.
    record = run("fails-when-spared", nodes=2, fault={"kind": "kill", "after_step": 2, "victims": "node-1"})
    assert set(ends(record)[:2]) <= {1, "SIGTERM"}
    assert (ends(record)[2:], agents(record)) == (["SIGKILL"] * 2, [1, "SIGKILL"])


def test_a_rank_is_killed_alone_and_its_agent_ends_the_others(run: Run) -> None:
    # The others never end by themselves: the agent has to.
    record = run("hangs-when-spared", fault={"kind": "kill", "after_step": 2, "victims": "rank-1"})
    assert (ends(record), agents(record)) == (["SIGTERM", "SIGKILL", "SIGTERM", "SIGTERM"], [1])


def test_ranks_that_hang_write_where_into_their_logs_and_the_limit_is_kept(tmp_path: Path) -> None:
    launcher = Patient(Torchrun())
    record = run_one(tmp_path, launcher, StandInAdapter("hangs", argv=FOR_TORCHRUN), ranks=4, limit_seconds=1)
    launcher.close()
    assert (record.timed_out, ends(record), record.trouble) == (True, ["SIGABRT"] * 4, None)
    assert record.seconds < 10
    for rank in range(4):
        log = (tmp_path / "leg" / f"log_rank_{rank}.txt").read_text()
        assert "Fatal Python error: Aborted" in log
        assert "in hang_here\n" in log


def test_a_limit_that_comes_before_there_is_a_rank_ends_the_leg_as_hanging(tmp_path: Path) -> None:
    launcher = Torchrun()
    try:
        record = run_one(tmp_path, launcher, StandInAdapter("hangs", argv=FOR_TORCHRUN), ranks=2, limit_seconds=0.2)
    finally:
        launcher.close()
    assert record.timed_out
    assert record.agents[0].signal == "SIGKILL"


def test_a_process_that_outlives_its_leg_is_trouble_and_is_dead(run: Run, tmp_path: Path) -> None:
    record = run("has-a-child", ranks=2)
    assert record.trouble is not None
    assert "left behind; they are killed now" in record.trouble
    assert living_with(str(tmp_path / "leg")) == []

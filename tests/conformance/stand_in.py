"""Runs cases on the stand-in trainer (stand_in_trainer.py)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conformance.matrix.case import Case, parse_case
from conformance.processes.launching import Launch, Launcher, LegOrder, RunningLeg
from conformance.processes.local import LocalLauncher
from conformance.records.results import LegRecord, ResultRecord
from conformance.running.adapter import ABILITIES, Description, Job, to_job
from conformance.running.legs import LegPlan, run_leg
from conformance.running.runner import CaseRun, Runner

TRAINER = Path(__file__).with_name("stand_in_trainer.py")
MODULE = f"{__package__}.stand_in_trainer"
# What torchrun can start: it takes no options of the interpreter.
FOR_TORCHRUN = (sys.executable, str(TRAINER))


class StandInAdapter:
    """Starts the stand-in with a defect; ``lacks`` are abilities that it says it does not have, ``preload`` forks it."""

    def __init__(
        self,
        defect: str = "",
        *,
        lacks: tuple[str, ...] = (),
        argv: tuple[str, ...] | None = None,
        preload: str | None = None,
    ) -> None:
        self.defect, self.lacks, self.preload = defect, lacks, preload
        self.argv = argv or (sys.executable, "-S", str(TRAINER))

    def describe(self) -> Description:
        return Description(name="stand-in", versions={}, abilities=ABILITIES - set(self.lacks))

    def launch(self, job: Job, rank: int) -> Launch:
        return Launch(argv=self.argv, environment={"DEFECT": self.defect}, preload=self.preload)

    def collect(self, job: Job, folder: Path) -> None:
        if self.defect == "adapter-raises":
            raise ValueError("no such format")


def case_of(**changes: Any) -> Case:
    """Kill after step 8, resume at 5, compare 6..10; keyword arguments replace keys of the case."""
    limit = changes.pop("limit_seconds", 20)
    raw: dict[str, Any] = {
        "id": "Z1",
        "title": "the stand-in resumes",
        "spec": "none",
        "why": "it is a test",
        "sabotages": ["met", "unmet"],
        "script": [
            {"leg": "reference", "until_step": 10, "limit_seconds": limit},
            {
                "leg": "interrupted",
                "until_step": 10,
                "fault": {"kind": "kill", "after_step": 8},
                "limit_seconds": limit,
            },
            {"leg": "resumed", "until_step": 10, "restore_from": "LATEST", "limit_seconds": limit},
        ],
        "expect": [
            {"check": "fault_fired", "leg": "interrupted"},
            {"check": "resumed_at", "leg": "resumed", "global_step": 5},
            {"check": "trajectory_equals", "leg": "resumed", "against": "reference", "steps": [6, 10]},
        ],
    }
    raw.update(changes)
    return parse_case(raw, file="made-up")


@contextmanager
def launcher_in(folder: Path) -> Iterator[LocalLauncher]:
    folder.mkdir(parents=True, exist_ok=True)
    hosts = LocalLauncher(folder)
    try:
        yield hosts
    finally:
        hosts.close()


def run(folder: Path, adapter: Any, case: Case, **options: Any) -> CaseRun:
    with launcher_in(folder) as hosts:
        return Runner(adapter, folder, keep=True).run_case(case, hosts, **options)


def result_of(folder: Path, defect: str, case: Case | None = None, **options: Any) -> ResultRecord:
    return run(folder, StandInAdapter(defect), case or case_of(), **options).result


class Patient:
    """A launcher that hands a leg over, so that its limit begins, when all its ranks hang."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def start(self, order: LegOrder) -> RunningLeg:
        leg = self._launcher.start(order)
        while len(list(order.folder.glob("hangs_rank_*"))) < len(order.launches):
            time.sleep(0.005)
        return leg

    def wait(self) -> None:
        self._launcher.wait()

    def stop(self) -> None:
        self._launcher.stop()

    def close(self) -> None:
        self._launcher.close()


def run_one(
    folder: Path,
    launcher: Launcher,
    adapter: StandInAdapter,
    *,
    ranks: int = 1,
    fault: dict[str, Any] | None = None,
    limit_seconds: float = 60,
    **leg: Any,
) -> LegRecord:
    """One leg by itself, in ``folder / "leg"``; it trains 4 steps unless ``leg`` says otherwise."""
    words = {"leg": "interrupted" if fault else "saving", "until_step": 4, **({"fault": fault} if fault else {}), **leg}
    expect = [{"check": "exits", "leg": words["leg"]}]
    case = case_of(given={"world_size": ranks}, script=[words], expect=expect)
    job = to_job(case, case.legs[0], sabotage=None, checkpoint_dir="../disk/checkpoints")
    plan = LegPlan(
        key="Z1", job=job, folder=folder / "leg", run=folder, disk=folder / "disk", limit_seconds=limit_seconds
    )
    return run_leg(plan, adapter, launcher)


def ends(record: LegRecord) -> list[int | str | None]:
    """How its ranks ended: an exit code, or a signal's name."""
    return [end.signal or end.exit_code for end in record.ranks]

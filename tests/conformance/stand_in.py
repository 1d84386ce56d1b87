"""Running cases on the stand-in trainer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conformance.adapter import ABILITIES, Description, Job, Launch
from conformance.case import Case, parse_case
from conformance.processes import Hosts
from conformance.results import ResultRecord
from conformance.runner import CaseRun, Runner

TRAINER = Path(__file__).with_name("stand_in_trainer.py")


class StandInAdapter:
    """Starts the stand-in with a defect; ``lacks`` are abilities that it says it does not have."""

    def __init__(self, defect: str = "", *, lacks: tuple[str, ...] = (), argv: tuple[str, ...] | None = None) -> None:
        self.defect, self.lacks = defect, lacks
        self.argv = argv or (sys.executable, "-S", str(TRAINER))

    def describe(self) -> Description:
        return Description(name="stand-in", versions={}, abilities=ABILITIES - set(self.lacks))

    def launch(self, job: Job, rank: int) -> Launch:
        return Launch(argv=self.argv, environment={"DEFECT": self.defect})

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
def hosts_in(folder: Path) -> Iterator[Hosts]:
    folder.mkdir(parents=True, exist_ok=True)
    hosts = Hosts(folder)
    try:
        yield hosts
    finally:
        hosts.close()


def run(folder: Path, adapter: Any, case: Case, **options: Any) -> CaseRun:
    with hosts_in(folder) as hosts:
        return Runner(adapter, folder, keep=True).run_case(case, hosts, **options)


def result_of(folder: Path, defect: str, case: Case | None = None, **options: Any) -> ResultRecord:
    return run(folder, StandInAdapter(defect), case or case_of(), **options).result

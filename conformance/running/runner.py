"""Runs one case: its script step by step, then its judgement. It reaches the trainer through the adapter only."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conformance.checks import CHECKS
from conformance.judging.judge import Verdict, judge
from conformance.matrix.case import Case
from conformance.matrix.faults import FAULTS, Disk, FaultError, inject
from conformance.matrix.given import complete, merge
from conformance.matrix.script import FaultStep, LegStep, LookStep
from conformance.plain_data.serial import to_plain
from conformance.processes.launching import Launcher
from conformance.records.evidence import Evidence, EvidenceError, LegEvidence, read_events
from conformance.records.results import (
    CalibrationRecord,
    CaseRecord,
    FaultRecord,
    LegRecord,
    LookRecord,
    Record,
    ResultRecord,
)
from conformance.running.adapter import Adapter, Description, Job, to_job
from conformance.running.legs import LegPlan, run_leg
from conformance.running.references import References

_EDIT_SECONDS = 30.0
_LOOK_EVENT = "value"


@dataclass(frozen=True, kw_only=True)
class CaseRun:
    """A case that was run: its records in order, the result last."""

    records: tuple[Record, ...]
    result: ResultRecord


@dataclass
class _Progress:
    """The results of the steps of a script so far."""

    key: str
    folder: Path
    legs: dict[str, LegRecord] = field(default_factory=dict)
    calibrations: dict[str, CalibrationRecord] = field(default_factory=dict)
    new_calibrations: list[CalibrationRecord] = field(default_factory=list)
    faults: list[FaultRecord] = field(default_factory=list)
    looks: dict[str, LookRecord] = field(default_factory=dict)


class Runner:
    """Runs cases against one trainer into one run's folder. Threads may share it."""

    def __init__(
        self,
        adapter: Adapter,
        run: Path,
        *,
        device: str = "cpu",
        keep: bool = False,
        command: str = "python -m conformance run --case",
        extra: str = "",
    ) -> None:
        """Set up.

        Args:
            adapter: the trainer.
            run: the run's folder.
            device: given to every case.
            keep: keep the checkpoints of cases that passed, too.
            command: the command that runs a case again when the id is appended.
            extra: options that reproduction commands repeat (``--platform cuda1``).
        """
        self.adapter = adapter
        self.run = run
        self.description: Description = adapter.describe()
        self._device = device
        self._keep = keep
        self._command = command
        self._extra = extra
        self._references = References(run)

    def run_case(
        self,
        case: Case,
        launcher: Launcher,
        *,
        reference_launcher: Launcher | None = None,
        sabotage: str | None = None,
        repeat: int = 0,
    ) -> CaseRun:
        """Run and judge one case.

        Args:
            case: what to do.
            launcher: starts the legs.
            reference_launcher: starts references, and edits and looks between legs; ``launcher`` by default.
            sabotage: a defect to put into every leg but the references.
            repeat: the number of this repeat of the case; 0 for the first.
        """
        begun = time.monotonic()
        if self._device != "cpu":
            case = replace(case, given=merge(case.given, {"device": self._device}))
        key = case.id + (f"@{sabotage}" if sabotage else "") + (f"#{repeat}" if repeat else "")
        progress = _Progress(key=key, folder=self.run / key)
        lacking = self.lacking(case)
        if lacking:
            verdict = Verdict(outcome="unsupported", reason=f"the trainer lacks: {lacking}", checks=(), blamed=None)
        else:
            progress.folder.mkdir(parents=True)
            for place, step in enumerate(case.script):
                by = (
                    launcher
                    if isinstance(step, LegStep) and step.role != "reference"
                    else reference_launcher or launcher
                )
                self._do(case, place, step, progress, by, sabotage)
            verdict = judge(case, evidence_of(self.run, list(progress.legs.values()), progress))
            if verdict.outcome == "pass" and not self._keep:
                shutil.rmtree(progress.folder / "disk", ignore_errors=True)
        result = ResultRecord(
            key=key,
            case=case.id,
            title=case.title,
            level=case.level,
            outcome=verdict.outcome,
            reason=verdict.reason,
            blamed=verdict.blamed,
            checks=verdict.checks,
            sabotage=sabotage,
            repeat=repeat,
            reproduce=self._reproduce(case, sabotage),
            seconds=time.monotonic() - begun,
        )
        return CaseRun(records=(*_records(case, progress), result), result=result)

    def lacking(self, case: Case) -> str:
        """The abilities and devices that the case needs and the trainer lacks, as text; empty when there are none."""
        needs = set(needs_of(case))
        lacking = sorted(needs - self.description.abilities)
        devices = {case.leg_given(leg).device for leg in case.legs} - set(self.description.devices)
        return ", ".join([*lacking, *(f"device {device}" for device in sorted(devices))])

    def _reproduce(self, case: Case, sabotage: str | None) -> str:
        words = [case.id, "--sabotage", sabotage] if sabotage else [case.id]
        return f"{self._command} {shlex.join(words)}{self._extra} --keep"

    # ---- steps of the script --------------------------------------------------------------------------------------

    def _do(
        self,
        case: Case,
        place: int,
        step: LegStep | FaultStep | LookStep,
        progress: _Progress,
        launcher: Launcher,
        sabotage: str | None,
    ) -> None:
        if isinstance(step, LegStep):
            if step.role == "reference":
                self._reference(case, step, progress, launcher)
            else:
                self._leg(case, step, progress, launcher, sabotage)
        elif isinstance(step, FaultStep):
            progress.faults.append(self._fault(case, place, step, progress, launcher))
        else:
            progress.looks[step.name] = self._inspect(case, place, step, progress, launcher)

    def _leg(self, case: Case, step: LegStep, progress: _Progress, launcher: Launcher, sabotage: str | None) -> None:
        job = to_job(case, step, sabotage=sabotage, checkpoint_dir=_checkpoint_dir(case.leg_given(step).folder))
        plan = self._plan(progress, f"legs/{step.leg}", job, step.limit_seconds)
        progress.legs[step.leg] = run_leg(plan, self.adapter, launcher)

    def _reference(self, case: Case, step: LegStep, progress: _Progress, launcher: Launcher) -> None:
        job = to_job(case, step, sabotage=None, checkpoint_dir=_checkpoint_dir(case.leg_given(step).folder))
        job = replace(job, leg="reference")
        # Always calibrated: each certificate of the case is compared with it, whatever the case's checks do.
        reference = self._references.get(job, self.adapter, launcher, calibrate=True, limit_seconds=step.limit_seconds)
        progress.legs[step.leg] = replace(reference.record, key=progress.key, leg=step.leg)
        if reference.calibration is not None:
            progress.calibrations[step.leg] = reference.calibration
            if reference.new:
                progress.new_calibrations.append(reference.calibration)

    def _plan(self, progress: _Progress, name: str, job: Job, limit_seconds: float) -> LegPlan:
        return LegPlan(
            key=progress.key,
            job=job,
            folder=progress.folder / name,
            run=self.run,
            disk=progress.folder / "disk",
            limit_seconds=limit_seconds,
        )

    def _fault(self, case: Case, place: int, step: FaultStep, progress: _Progress, launcher: Launcher) -> FaultRecord:
        disk = self._disk(case, progress)
        asked = {"fault": step.fault, **to_plain(dict(step.parameters))}
        try:
            if FAULTS.entries[step.fault].marks.get("by_trainer"):
                done = self._edit(case, place, step, progress, launcher)
            else:
                done = inject(step.fault, step.parameters, disk)
        except FaultError as error:
            return FaultRecord(key=progress.key, place=place, asked=asked, fired=False, observed=(str(error),))
        return FaultRecord(key=progress.key, place=place, asked=asked, fired=True, observed=tuple(done))

    def _edit(self, case: Case, place: int, step: FaultStep, progress: _Progress, launcher: Launcher) -> list[str]:
        edit = {"kind": step.fault, **to_plain(dict(step.parameters))}
        job = replace(self._side_job(case), task="edit", edit=edit)
        return [str(value) for value in self._run_side_job(place, "edit", job, progress, launcher)]

    def _inspect(self, case: Case, place: int, step: LookStep, progress: _Progress, launcher: Launcher) -> LookRecord:
        job = replace(self._side_job(case), task="look", step=step.look)
        try:
            found: Any = self._run_side_job(place, "look", job, progress, launcher)[0]
        except FaultError as error:
            return LookRecord(key=progress.key, name=step.name, step=step.look, found={}, problem=str(error))
        return LookRecord(key=progress.key, name=step.name, step=step.look, found=found, problem=None)

    def _side_job(self, case: Case) -> Job:
        given = complete(case.given, case.where)
        return Job(task="look", leg="side", checkpoint_dir=_checkpoint_dir(given.folder), world_size=1, given=given)

    def _run_side_job(self, place: int, task: str, job: Job, progress: _Progress, launcher: Launcher) -> list[Any]:
        """Run an edit or a look in the trainer's own code; returns the values that it reported.

        Raises:
            FaultError: it failed.
        """
        plan = self._plan(progress, f"legs/{place}-{task}", job, _EDIT_SECONDS)
        record = run_leg(plan, self.adapter, launcher)
        try:
            events = read_events(plan.folder / "events_rank_0.jsonl", 0)
        except EvidenceError as error:
            raise FaultError(f"{task}: {error}") from error
        errors = [event.data["message"] for event in events if event.kind == "error"]
        values = [event.data["value"] for event in events if event.kind == _LOOK_EVENT]
        if record.trouble or errors or not values:
            raise FaultError(f"{task}: {record.trouble or '; '.join(errors) or 'it reported nothing'}")
        return values

    def _disk(self, case: Case, progress: _Progress) -> Disk:
        root = progress.folder / "disk"
        root.mkdir(exist_ok=True)
        return Disk(root=root, checkpoints=root / complete(case.given, case.where).folder)


def needs_of(case: Case) -> tuple[str, ...]:
    """The abilities that a trainer needs: those the case names, and those its script and checks imply."""
    needs = set(case.needs)
    for row in case.expect:
        entry = CHECKS.entries[row.check]
        needs.update(entry.marks.get("needs", ()))
        columns = {**entry.defaults, **row.parameters}.get("columns", ())
        needs.update(f"trajectory.{column}" for column in columns)
    for leg in case.legs:
        if leg.restore_from is not None:
            needs.add("resume.latest" if leg.restore_from.lower() == "latest" else "resume.path")
        if leg.fault is not None:
            needs.add("fault.file_operation" if leg.fault.moment == "file_operation" else "fault.pause")
        if case.leg_given(leg).config is not None:
            needs.add("given.config")
    for step in case.script:
        if isinstance(step, LookStep):
            needs.add("disk.look")
        if isinstance(step, FaultStep):
            needs.add("disk.edit" if FAULTS.entries[step.fault].marks.get("by_trainer") else "disk.dcp")
    if case.given or any(leg.given for leg in case.legs):
        needs.add("given.any")
    if case.world_size > 1:
        needs.add("ranks.many")
    return tuple(sorted(needs))


def evidence_of(run: Path, legs: Sequence[LegRecord], progress: _Progress) -> Evidence:
    """The evidence of a case that was just run."""
    return Evidence(
        legs={leg.leg: LegEvidence(record=leg, folder=run / leg.folder) for leg in legs},
        faults=tuple(progress.faults),
        looks=progress.looks,
        calibrations=progress.calibrations,
    )


def _records(case: Case, progress: _Progress) -> list[Record]:
    return [
        CaseRecord(key=progress.key, case=to_plain(case.raw)),
        *progress.new_calibrations,
        *progress.legs.values(),
        *progress.faults,
        *progress.looks.values(),
    ]


def _checkpoint_dir(folder: str) -> str:
    """The checkpoint directory for the job, relative to the leg's folder; a slash at the end stays."""
    return f"../../disk/{folder}"

"""Attempts of one training: each starts or resumes it on the same checkpoint directory, and is compared with the reference.

A soak is one training with many attempts, a crash sweep many trainings with two. Each attempt is judged by these rules:

1. a killed attempt was killed at the moment of its fault, and every victim is verified to have died of that signal;
2. it resumed on all ranks at the step that the disk named after the previous attempt was dead, and trained on from there;
3. it trained to the end, or to the step of its fault, and every step that all its ranks finished equals the reference's, bit
   for bit, on every rank.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.checks.certificates import certified_buckets
from conformance.checks.compare import ComparisonError, compare_trajectories
from conformance.judging.certified import false_exact
from conformance.matrix.faults import POINTER_NAME
from conformance.matrix.given import complete
from conformance.matrix.script import LegFault
from conformance.processes.launching import Launcher
from conformance.records.comparison import Divergence
from conformance.records.evidence import EvidenceError, LegEvidence, unexpected_ends
from conformance.records.results import LegRecord, Outcome
from conformance.records.trajectory import Trajectory
from conformance.running.adapter import Adapter, Job, JobFault
from conformance.running.legs import LegPlan, run_leg
from conformance.running.references import References

LATEST = "LATEST"
_FOLDER = "checkpoints"
_MARK_NAME = "latest_checkpoint_went_back.json"
# A comparison must be able to fail: this many reference steps around the compared ones are searched for constant columns.
_MARGIN_STEPS = 10
# Moments at which every rank has finished the step.
_BETWEEN_STEPS = ("after_step", "after_epoch", "before_save")
# Moments that a rank may reach before it reports its restore: clearing the rest of a dead save changes the disk.
_WHILE_RESTORING = ("during_load", "file_operation")
_SIGNALS = {"kill": "SIGKILL", "terminate": "SIGTERM"}


class InconclusiveError(RuntimeError):
    """No verdict is possible: an error of the harness or of the reference."""


class ViolationError(RuntimeError):
    """An attempt broke a rule. The message is the finding; ``divergence`` is the first difference from the reference."""

    def __init__(
        self,
        message: str,
        divergence: Divergence | None = None,
        *,
        is_about_the_kill: bool = False,
        outcome: Outcome = "fail",
    ) -> None:
        """``divergence`` is None where no step was compared; ``is_about_the_kill`` when the attempt's own fault went wrong;
        ``outcome`` is ``false_exact`` where the certificate denies the divergence.
        """
        super().__init__(message)
        self.divergence, self.is_about_the_kill, self.outcome = divergence, is_about_the_kill, outcome


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained. ``given`` is that of a case; ``save_steps`` repeats its save interval."""

    given: Mapping[str, Any]
    until_step: int
    save_steps: int
    limit_seconds: float = 60.0

    @property
    def is_async(self) -> bool:
        """True when saves are written in the background."""
        return bool(self.given.get("checkpoint", {}).get("is_async"))

    @property
    def lost_at_most(self) -> int:
        """The most steps that a kill may lose: one save interval, or two with saves in the background."""
        return self.save_steps * (2 if self.is_async else 1)

    def job(
        self,
        leg: str,
        *,
        restore_from: str | None,
        fault: LegFault | None,
        more: Mapping[str, Any] | None = None,
        sabotage: str | None = None,
    ) -> Job:
        """One attempt as a job. ``more`` is merged into ``given``."""
        given = complete({**self.given, **(more or {})}, "training")
        return Job(
            task="train",
            leg=leg,
            checkpoint_dir=f"../../disk/{_FOLDER}",
            world_size=given.world_size,
            given=dataclasses.replace(given, folder=_FOLDER),
            until_step=self.until_step,
            restore_from=restore_from,
            fault=None if fault is None else JobFault(**vars(fault)),
            sabotage=sabotage,
        )


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A finished attempt: the step it resumed at (0: from scratch), and the last step that all its ranks finished."""

    evidence: LegEvidence
    restored: int
    last_step: int

    @property
    def record(self) -> LegRecord:
        """The record of its leg."""
        return self.evidence.record


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The uninterrupted training, of which two runs were equal bit for bit."""

    trajectory: Trajectory


def reference_of(training: Training, run: Path, adapter: Adapter, launcher: Launcher, known: References) -> Reference:
    """Train without interruption, twice; a reference in ``known`` is not trained again.

    Raises:
        InconclusiveError: it fails, or its two runs differ.
    """
    job = training.job("reference", restore_from=None, fault=None)
    limit = max(training.limit_seconds, float(training.until_step))
    found = known.get(job, adapter, launcher, calibrate=True, limit_seconds=limit)
    calibration = found.calibration
    if calibration is None or not calibration.equal:
        problem = "was not compared" if calibration is None else calibration.problem or str(calibration.divergence)
        raise InconclusiveError(f"reference not reproducible: {problem}")
    return Reference(trajectory=LegEvidence(record=found.record, folder=run / found.record.folder).trajectory)


class AttemptRunner:
    """Runs the attempts of one training, one after the other, in ``folder``; they share its ``disk``."""

    def __init__(
        self,
        training: Training,
        reference: Reference,
        folder: Path,
        run: Path,
        adapter: Adapter,
        launcher: Launcher,
        *,
        sabotage: str | None = None,
    ) -> None:
        """Nothing is started yet. ``folder`` lies in ``run``, the run's folder; ``sabotage`` is installed in every attempt."""
        self._training, self._reference = training, reference
        self.folder, self._run = folder, run
        self._adapter, self._launcher = adapter, launcher
        self._sabotage = sabotage

    @property
    def checkpoints(self) -> Path:
        """The checkpoint directory."""
        return self.folder / "disk" / _FOLDER

    def run_attempt(
        self,
        leg: str,
        *,
        restore_from: str | None = LATEST,
        fault: LegFault | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> Attempt:
        """Run one attempt and judge it.

        Raises:
            InconclusiveError: its fault did not fire, or the harness failed.
            ViolationError: it broke a rule.
        """
        before = self.latest()
        record = run_leg(self._plan(leg, restore_from, fault, more), self._adapter, self._launcher)
        evidence = LegEvidence(record=record, folder=self._run / record.folder)
        _require_end(record, evidence)
        restored = self._restored(evidence, restore_from, before)
        try:
            last = self._compare(evidence, restored)
        except ComparisonError as error:
            raise ViolationError(f"its steps can't be compared with the reference: {error}") from error
        except EvidenceError as error:
            raise InconclusiveError(str(error)) from error
        self._require_steps(record, last)
        # The checkpoint for the next attempt must exist.
        self.latest()
        return Attempt(evidence=evidence, restored=restored, last_step=last)

    def _require_steps(self, record: LegRecord, last: int) -> None:
        """It trained to the end, or to the step of its fault, on every rank."""
        fault = record.fault
        expected = self._training.until_step if fault is None else fault.after_step
        if (fault is None or fault.moment in _BETWEEN_STEPS) and last != expected:
            raise ViolationError(f"the last step that all of its ranks trained is {last}; expected {expected}")

    def _plan(
        self, leg: str, restore_from: str | None, fault: LegFault | None, more: Mapping[str, Any] | None
    ) -> LegPlan:
        return LegPlan(
            key=self.folder.name,
            job=self._training.job(
                leg, restore_from=self._path(restore_from), fault=fault, more=more, sabotage=self._sabotage
            ),
            folder=self.folder / "legs" / leg,
            run=self._run,
            disk=self.folder / "disk",
            limit_seconds=self._training.limit_seconds,
            listed=False,
        )

    def _path(self, restore_from: str | None) -> str | None:
        if restore_from is None or restore_from == LATEST:
            return restore_from
        return f"../../disk/{_FOLDER}/{restore_from}"

    def latest(self) -> int:
        """The step that a resume from LATEST must find, computed from the disk.

        It is the newest save that continues the one the pointer names and was not left behind by going back, for a run may be
        killed after a commit and before its pointer; or that one itself; or, without a pointer, the highest.

        Returns:
            0 where there is no checkpoint.

        Raises:
            ViolationError: the pointer holds no number, or names an incomplete checkpoint.
        """
        whole = [
            int(path.parent.name.rpartition("_")[2])
            for path in self.checkpoints.glob("global_step_*/.metadata")
            if path.stat().st_size
        ]
        try:
            text = (self.checkpoints / POINTER_NAME).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return max(whole, default=0)
        if not text.isdigit() or int(text) not in whole:
            raise ViolationError(f"the pointer holds {text!r}; complete checkpoints: {sorted(whole)}")
        newer = _continuing(self.checkpoints, int(text), whole)
        return newer[max(newer)] if newer else int(text)

    def _restored(self, evidence: LegEvidence, restore_from: str | None, latest: int) -> int:
        """The step that all ranks restored, or were about to restore; checked against the requested one."""
        places = [event.data["global_step"] for event in evidence.events("restored", None)]
        begun = evidence.events("begin", None)
        fault = evidence.record.fault
        expected = latest if restore_from == LATEST else int((restore_from or "_0").rpartition("_")[2])
        wanted = [expected] * len(evidence.record.ranks) if expected else []
        if not begun and fault is not None and fault.moment in _WHILE_RESTORING:
            # Killed before it trained: some ranks have restored, others have not yet.
            wanted = wanted[: len(places)]
        if places != wanted or any(event.data["global_step"] != expected for event in begun):
            raise ViolationError(f"restored {places or 'nothing'} on its ranks; expected step {expected} on all")
        return expected

    def _compare(self, evidence: LegEvidence, restored: int) -> int:
        """Compare every step that all ranks finished with the reference; returns the last one, or ``restored``."""
        trajectory = _trajectory(evidence)
        last = trajectory.last_common_step() if trajectory.ranks else None
        if last is None or len(trajectory.ranks) < len(evidence.record.ranks):
            return restored
        near = _near(self._reference.trajectory, restored + 1, last)
        self._require_as_certified(evidence, near, restored)
        firsts = {trajectory.first_step(rank) for rank in trajectory.ranks}
        if firsts != {restored + 1}:
            raise ViolationError(f"restored step {restored}, and the first step trained is {firsts}")
        comparison = compare_trajectories(near, trajectory, restored + 1, last, may_be_constant=("lr",))
        if comparison.divergence is not None:
            raise ViolationError(_told(restored, comparison.divergence), comparison.divergence)
        return last

    def _require_as_certified(self, evidence: LegEvidence, reference: Trajectory, restored: int) -> None:
        verdicts = certified_buckets(evidence)
        first = false_exact(reference, evidence.trajectory, restored, verdicts)
        if first is not None:
            says = ", ".join(f"{bucket} {verdict}" for bucket, verdict in verdicts.items())
            message = f"{_told(restored, first)}, and its certificate says: {says}"
            raise ViolationError(message, first, outcome="false_exact")

    def prune(self, keep: int) -> None:
        """Delete all step directories except the newest ``keep``, as retention would, to save disk space."""
        steps = sorted(
            (path for path in self.checkpoints.glob("global_step_*") if path.is_dir()),
            key=lambda path: int(path.name.rpartition("_")[2]),
        )
        for path in steps[:-keep]:
            shutil.rmtree(path)


def _continuing(root: Path, pointed: int, whole: Sequence[int]) -> dict[int, int]:
    """Ordinal -> step of the saves that continue the pointer's, as their manifests say, and that no mark leaves behind."""
    paths = {step: root / f"global_step_{step}" / "manifest.json" for step in whole}
    manifests = {step: json.loads(path.read_text()) for step, path in paths.items() if path.exists()}
    if pointed not in manifests:
        return {}
    save = [pointed, manifests[pointed]["attempt"]]
    mark_path = root / _MARK_NAME
    mark = json.loads(mark_path.read_text()) if mark_path.exists() else {}
    left_behind = mark["ordinal"] if [mark.get("step"), mark.get("attempt")] == save else -1
    return {
        one["ordinal"]: step
        for step, one in manifests.items()
        if save in one["ancestors"] and one["ordinal"] > left_behind
    }


def _told(restored: int, first: Divergence) -> str:
    return (
        f"resumed at {restored}, differs at step {first.step}, rank {first.rank}, bucket {first.bucket} "
        f"({first.column}): {first.resumed} instead of {first.reference}"
    )


def _require_end(record: LegRecord, evidence: LegEvidence) -> None:
    if record.trouble is not None:
        raise InconclusiveError(record.trouble)
    if record.timed_out:
        raise ViolationError(f"it hung and was killed after {record.seconds:.0f} s; the stacks are in {record.folder}")
    if record.fault is None:
        bad = [f"rank {rank}: {end}" for rank, end in enumerate(record.ranks) if end.exit_code != 0]
        if bad:
            raise ViolationError(f"it did not end well: {'; '.join(bad)}; {_error_text(evidence)}")
        return
    if record.fault.reached_by != record.fault.awaited:
        error = evidence.error
        if error is not None:
            raise ViolationError(f"before its fault: {_error_text(evidence)}")
        raise InconclusiveError(f"the fault did not fire: reached by {record.fault.reached_by}, ends {record.ranks}")
    wrong = unexpected_ends(record, _SIGNALS[record.fault.kind])
    if wrong:
        raise ViolationError(f"not every victim died of {_SIGNALS[record.fault.kind]}: {wrong}", is_about_the_kill=True)


def _error_text(evidence: LegEvidence) -> str:
    error = evidence.error
    return f"{error.data['class']}: {error.data['message']}" if error else "it reported no error"


def _trajectory(evidence: LegEvidence) -> Trajectory:
    """Its records; an attempt that was killed before its first step has none."""
    try:
        return evidence.trajectory
    except EvidenceError:
        if list(evidence.folder.glob("trajectory_rank_*.jsonl")):
            known = [path.name for path in evidence.folder.glob("trajectory_rank_*.jsonl")]
            if len(known) == len(evidence.record.ranks):
                raise
        return Trajectory(records={})


def _near(reference: Trajectory, first: int, last: int) -> Trajectory:
    low, high = first - _MARGIN_STEPS, last + _MARGIN_STEPS
    # Step N is record N - 1 of a leg from scratch.
    return Trajectory(records={rank: records[max(0, low - 1) : high] for rank, records in reference.records.items()})

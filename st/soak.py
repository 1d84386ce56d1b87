"""The soak: one training is killed many times at random moments, and its end must equal that of the uninterrupted run.

All moments are drawn from a seed before anything starts: after a step, before or in a save, between its commit and the
pointer, before one of its file operations on one rank, at an epoch's end, in a load; all ranks or one; SIGKILL. They are
events of the training and not times, so seed and number identify a kill for good.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from conformance.matrix.given import complete
from conformance.matrix.script import LegFault, Moment
from conformance.processes.launching import Launcher
from conformance.records.results import KillRecord, Outcome
from conformance.records.trajectory import Trajectory, TrajectoryRecord
from conformance.running.adapter import Adapter
from conformance.running.references import References
from st.attempts import LATEST, Attempt, AttemptRunner, InconclusiveError, Training, ViolationError, reference_of

SAVE_STEPS = 3
# Two kills are 1 to this many steps apart.
_MOST_STEPS = 6
_STEPS_AFTER_LAST = 5
# More than a resume may fall back to.
_KEPT_CHECKPOINTS = 4
_TINY: Mapping[str, Any] = {
    "world_size": 4,
    "parallel": "tp2-fsdp",
    "data": {"samples": 32},
    "noise": ["loss", "dataset"],
    "scheduler": "sequential",
    "checkpoint": {"save_steps": SAVE_STEPS, "save_epochs": 0},
}
_DEMO: Mapping[str, Any] = {
    "world_size": 4,
    "config": "examples/training_demo/demo.yaml",
    "overrides": [
        "--data.seq_length=32",
        "--data.max_samples=32",
        "--training.num_train_epochs=100000",
        "--training.progress_bar=false",
    ],
    "checkpoint": {"save_steps": SAVE_STEPS, "save_epochs": 0},
}
_SAVE_MOMENTS: tuple[Moment, ...] = ("before_commit", "before_pointer", "file_operation")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained. ``steps_per_epoch`` and ``samples`` follow from ``given``; ``copies`` ranks read each sample."""

    title: str
    given: Mapping[str, Any]
    steps_per_epoch: int
    samples: int
    copies: int


WORKLOADS: Mapping[str, Workload] = {
    "tiny": Workload(
        title="a tiny model, tensor-parallel by two and sharded by two",
        given=_TINY,
        steps_per_epoch=4,
        samples=32,
        copies=2,
    ),
    "tiny-async": Workload(
        title="the same with saves in the background",
        given={**_TINY, "checkpoint": {**_TINY["checkpoint"], "is_async": True}},
        steps_per_epoch=4,
        samples=32,
        copies=2,
    ),
    "demo": Workload(
        title="the demo's Qwen3-MoE, trained by the library's program on short sequences",
        given=_DEMO,
        steps_per_epoch=8,
        samples=32,
        copies=2,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill that was drawn."""

    number: int
    fault: LegFault

    @property
    def words(self) -> str:
        """Its description in words."""
        fault = self.fault
        places = {
            "after_step": f"after step {fault.after_step}",
            "after_epoch": f"at the epoch's end, step {fault.after_step}",
            "before_save": f"before the hooks of step {fault.after_step}",
            "before_commit": f"between shards and commit of step {fault.after_step}",
            "before_pointer": f"between commit and pointer of step {fault.after_step}",
            "during_load": "in the load",
            "file_operation": (
                f"at file operation {fault.operation} of rank {fault.rank} in the save of step {fault.after_step}"
            ),
        }
        signal = {"kill": "SIGKILL", "terminate": "SIGTERM"}[fault.kind]
        victims = "all ranks" if fault.victims == "all" else fault.victims.replace("-", " ") + " alone"
        return f"{signal} to {victims} {places[fault.moment]}"


def draw(kills: int, seed: int, steps_per_epoch: int, operations: Sequence[int]) -> tuple[Kill, ...]:
    """Draw the kills of a soak, in the order of their steps.

    Args:
        kills: how many.
        seed: of the draw.
        steps_per_epoch: of the training.
        operations: how many file operations a save has, by rank.
    """
    dice = random.Random(seed)
    drawn: list[Kill] = []
    step = 0
    for number in range(1, kills + 1):
        moments: list[Moment] = ["after_step", "before_save", "after_epoch", *_SAVE_MOMENTS, "file_operation"]
        if step >= 3 * SAVE_STEPS:
            # A checkpoint certainly exists from here on.
            moments.append("during_load")
        moment = dice.choice(moments)
        fault = LegFault(kind="kill", after_step=0, moment=moment)
        if moment != "during_load":
            step = _next_step(step + dice.randint(1, _MOST_STEPS), moment, steps_per_epoch)
            fault = replace(fault, after_step=step)
        if moment == "file_operation":
            rank = dice.randrange(len(operations))
            fault = replace(fault, rank=rank, operation=dice.randint(1, operations[rank]))
        elif moment in ("after_step", "before_save") and dice.random() < 0.3:
            # Always SIGKILL: SIGTERM makes the training save (scenarios S5).
            fault = replace(fault, victims=f"rank-{dice.randrange(len(operations))}")
        drawn.append(Kill(number=number, fault=fault))
    return tuple(drawn)


def _next_step(step: int, moment: Moment, steps_per_epoch: int) -> int:
    """The first step, from ``step`` on, that has such a moment."""
    every = SAVE_STEPS if moment in _SAVE_MOMENTS else steps_per_epoch if moment == "after_epoch" else 1
    return -(-step // every) * every


@dataclass
class SurvivingSteps:
    """The steps that remain in the end; of a step that was trained several times, the last one."""

    records: dict[int, list[TrajectoryRecord]] = field(default_factory=dict)

    def add(self, attempt: Attempt, trajectory: Trajectory) -> None:
        """Add an attempt: the steps that earlier attempts trained after the one that it restored are lost."""
        for rank in range(len(attempt.record.ranks)):
            kept = [record for record in self.records.get(rank, []) if record.global_step <= attempt.restored]
            own = [record for record in trajectory.records.get(rank, ()) if record.global_step <= attempt.last_step]
            self.records[rank] = kept + own

    def problems(self, workload: Workload, until_step: int) -> list[str]:
        """Missing or duplicate steps, and epochs in which a sample is not read exactly once."""
        found = []
        for rank, records in sorted(self.records.items()):
            steps = [record.global_step for record in records]
            if steps != list(range(1, until_step + 1)):
                found.append(f"rank {rank}: the surviving steps are not 1..{until_step} each once")
        for epoch in range(until_step // workload.steps_per_epoch):
            ids = [
                number
                for records in self.records.values()
                for record in records
                if record.epoch == epoch
                for number in record.sample_ids
            ]
            if sorted(ids) != sorted(list(range(workload.samples)) * workload.copies):
                found.append(f"epoch {epoch}: not each of {workload.samples} samples once for {workload.copies} ranks")
        return found


@dataclass(frozen=True, kw_only=True)
class SoakOutcome:
    """The outcome of a soak."""

    outcome: Outcome
    reason: str
    kills: tuple[KillRecord, ...]
    until_step: int
    seconds_of_attempts: float

    @property
    def summary(self) -> str:
        """One line."""
        lost = [kill.lost_steps for kill in self.kills if kill.lost_steps is not None]
        rate = 60 * len(self.kills) / self.seconds_of_attempts if self.seconds_of_attempts else 0.0
        ends = "ends bit for bit where the uninterrupted run ends" if self.outcome == "pass" else self.reason
        return (
            f"{len(self.kills)} kills, {self.until_step} steps: {ends}; lost at most {max(lost, default=0)} steps; "
            f"{rate:.0f} kill-and-resume cycles a minute"
        )


class Soak:
    """Runs soaks into ``folder``, the run's."""

    def __init__(
        self,
        folder: Path,
        adapter: Adapter,
        launcher: Launcher,
        *,
        reference_launcher: Launcher,
        sabotage: str | None = None,
    ) -> None:
        """``reference_launcher`` starts uninterrupted legs; ``sabotage`` is installed in every attempt."""
        self._folder, self._adapter, self._launcher, self._reference_launcher = (
            folder,
            adapter,
            launcher,
            reference_launcher,
        )
        self._sabotage = sabotage
        # These are hundreds of checkpoints, and nothing resumes from them.
        self._references = References(folder, keeps_disk=False)

    def run(self, name: str, *, kills: int, seed: int, on_kill: Callable[[KillRecord, Kill], None]) -> SoakOutcome:
        """Soak one workload.

        Args:
            name: of :data:`WORKLOADS`.
            kills: how often it is killed.
            seed: of the draw.
            on_kill: called with each kill once the next attempt was judged.

        Raises:
            InconclusiveError: the reference can't be made.
        """
        workload = WORKLOADS[name]
        operations = self._operations(name, workload)
        drawn = draw(kills, seed, workload.steps_per_epoch, operations)
        until_step = max(kill.fault.after_step for kill in drawn) + _STEPS_AFTER_LAST
        training = Training(given=workload.given, until_step=until_step, save_steps=SAVE_STEPS)
        reference = reference_of(training, self._folder, self._adapter, self._reference_launcher, self._references)
        folder = self._folder / f"soak.{name}"
        runner = AttemptRunner(
            training, reference, folder, self._folder, self._adapter, self._launcher, sabotage=self._sabotage
        )
        sequence = _AttemptSequence(name, training, runner, on_kill)
        begun = time.monotonic()
        outcome, reason = sequence.run(drawn)
        if outcome == "pass":
            problems = sequence.survivors.problems(workload, until_step)
            outcome, reason = ("fail", "; ".join(problems)) if problems else (outcome, reason)
        seconds = time.monotonic() - begun
        if outcome == "pass":
            shutil.rmtree(folder)
        return SoakOutcome(
            outcome=outcome,
            reason=reason,
            kills=tuple(sequence.kills),
            until_step=until_step,
            seconds_of_attempts=seconds,
        )

    def _operations(self, name: str, workload: Workload) -> list[int]:
        """The number of file operations of a save, by rank, counted in an uninterrupted run."""
        training = Training(given=workload.given, until_step=SAVE_STEPS + 1, save_steps=SAVE_STEPS)
        reference = reference_of(training, self._folder, self._adapter, self._reference_launcher, self._references)
        folder = self._folder / f"soak.{name}.counting"
        runner = AttemptRunner(training, reference, folder, self._folder, self._adapter, self._reference_launcher)
        try:
            attempt = runner.run_attempt("saving", restore_from=None, more={"tell_operations": True})
        except ViolationError as error:
            raise InconclusiveError(f"the uninterrupted run: {error}") from error
        shutil.rmtree(folder)
        operations = [event for event in attempt.evidence.events("operation", None) if event.data["save"] == SAVE_STEPS]
        ranks = complete(workload.given, name).world_size
        return [sum(event.rank == rank for event in operations) for rank in range(ranks)]


# A kill, the attempt that it ended (None where it went wrong), and the seconds that this took.
_Before: TypeAlias = "tuple[Kill, Attempt | None, float]"


class _AttemptSequence:
    """Runs the attempts in order, and records each kill with the attempt after it."""

    def __init__(
        self, name: str, training: Training, runner: AttemptRunner, on_kill: Callable[[KillRecord, Kill], None]
    ) -> None:
        self._name, self._training, self._runner, self._on_kill = name, training, runner, on_kill
        self.kills: list[KillRecord] = []
        self.survivors = SurvivingSteps()

    def run(self, drawn: Sequence[Kill]) -> tuple[Outcome, str]:
        """Run an attempt per kill, and the last one to the end; stops at the first failure."""
        before: _Before | None = None
        for kill in [*drawn, None]:
            begun = time.monotonic()
            try:
                attempt = self._live(kill, before)
            except ViolationError as error:
                own = kill is not None and error.is_about_the_kill
                at_fault = (kill, None, time.monotonic() - begun) if kill and own else before
                self._report(at_fault, None, error.outcome, error)
                return error.outcome, self._where(kill, error)
            except InconclusiveError as error:
                self._report(before, None, "error", error)
                return "error", self._where(kill, error)
            self._report(before, attempt, "pass", None)
            if kill is not None:
                before = (kill, attempt, time.monotonic() - begun)
        return "pass", ""

    def _live(self, kill: Kill | None, before: _Before | None) -> Attempt:
        leg = "resumed-last" if kill is None else f"interrupted-{kill.number}"
        attempt = self._runner.run_attempt(leg, restore_from=LATEST, fault=kill.fault if kill else None)
        if before is not None and before[1] is not None:
            lost = before[1].last_step - attempt.restored
            if lost > self._training.lost_at_most:
                raise ViolationError(f"{lost} steps are lost, more than {self._training.lost_at_most}")
        if attempt.last_step > attempt.restored:
            self.survivors.add(attempt, attempt.evidence.trajectory)
        self._runner.prune(_KEPT_CHECKPOINTS)
        shutil.rmtree(attempt.evidence.folder)
        return attempt

    def _report(
        self,
        before: _Before | None,
        attempt: Attempt | None,
        outcome: Outcome,
        error: ViolationError | InconclusiveError | None,
    ) -> None:
        if before is None:
            return
        kill, killed, seconds = before
        operation = kill.fault.operation
        assert not isinstance(operation, str)  # it was drawn
        record = KillRecord(
            key=f"soak.{self._name}",
            number=kill.number,
            mode=self._name,
            moment=kill.fault.moment,
            step=kill.fault.after_step,
            rank=kill.fault.rank,
            operation=operation,
            what=kill.words,
            victims=kill.fault.victims,
            last_step=killed.last_step if killed else None,
            resumed_at=attempt.restored if attempt else None,
            lost_steps=killed.last_step - attempt.restored if killed and attempt else None,
            outcome=outcome,
            reason=str(error or ""),
            divergence=getattr(error, "divergence", None),
            seconds=seconds,
        )
        self.kills.append(record)
        self._on_kill(record, kill)

    def _where(self, kill: Kill | None, error: Exception) -> str:
        return (
            f"{'the last attempt' if kill is None else f'the attempt up to kill {kill.number} ({kill.words})'}: {error}"
        )

"""The crash sweep: a save is killed before each of its file operations, on every rank, and the training resumed.

For each mode a clean leg first records every change on disk that the save under test makes
(:mod:`conformance.running.file_operations`). For each of these points the disk is copied afresh, a leg is killed right before
that change, and another leg resumes from LATEST and trains to the end. The other ranks are killed wherever they are when the
one rank pauses at its point.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance.matrix.disk_changes import selects_operation
from conformance.matrix.script import LegFault
from conformance.processes.launching import Launcher
from conformance.records.results import KillRecord, Outcome
from conformance.running.adapter import Adapter
from conformance.running.references import References
from st.attempts import (
    LATEST,
    Attempt,
    AttemptRunner,
    InconclusiveError,
    Reference,
    Training,
    ViolationError,
    reference_of,
)

SAVE_STEPS = 3
# The save that is killed, and the one that it may fall back to.
STEP, BEFORE = 6, 3
_GIVEN: Mapping[str, Any] = {
    "world_size": 4,
    "parallel": "tp2-fsdp",
    "data": {"samples": 32},
    "checkpoint": {"save_steps": SAVE_STEPS, "save_epochs": 0},
}


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to save. ``checkpoint`` is merged into ``given``; ``prepare`` names what is on the disk before."""

    title: str
    checkpoint: Mapping[str, Any]
    prepare: str = "earlier"


# earlier: the checkpoint of step 3. dead save: also the rest of a killed save of step 6. same step: also a complete checkpoint
# of step 6.
MODES: Mapping[str, Mode] = {
    "sync": Mode(title="a synchronous save", checkpoint={}),
    "async": Mode(title="a save in the background", checkpoint={"is_async": True}),
    "embedded": Mode(title="training state inside the DCP payload", checkpoint={"save_extra_state_per_rank": False}),
    "leftovers": Mode(title="a save that clears the rest of a killed one", checkpoint={}, prepare="dead save"),
    "again": Mode(title="a step that is saved again after going back", checkpoint={}, prepare="same step"),
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One change on disk in the save under test."""

    rank: int
    operation: int
    what: str


# A rank and one of its changes: a number, or a pattern, which selects the first match.
PointRequest = tuple[int, int | str]


@dataclass(frozen=True, kw_only=True)
class SweepOutcome:
    """The outcome of a sweep of one mode. ``points`` is how many there are, ``kills`` those that were tried."""

    mode: str
    points: int
    kills: tuple[KillRecord, ...]

    @property
    def outcome(self) -> Outcome:
        """``pass`` when every point that was tried passed, and some were."""
        found = {kill.outcome for kill in self.kills}
        worst: Sequence[Outcome] = ("false_exact", "fail")
        return next((one for one in worst if one in found), "pass" if found == {"pass"} else "error")

    @property
    def summary(self) -> str:
        """One line."""
        lost = [kill.lost_steps for kill in self.kills if kill.lost_steps is not None]
        red = sum(kill.outcome != "pass" for kill in self.kills)
        false = sum(kill.outcome == "false_exact" for kill in self.kills)
        new = sum(kill.resumed_at == STEP for kill in self.kills)
        told = f", {false} of them under a certificate that says exact" if false else ""
        return (
            f"{len(self.kills)} of {self.points} points tried, {red} red{told}; resumed at step {STEP} {new} times, "
            f"otherwise at {BEFORE}; lost at most {max(lost, default=0)} steps"
        )


class Sweep:
    """Sweeps modes into ``folder``, the run's. ``sabotage`` puts a defect of the matrix into each leg under test."""

    def __init__(
        self, folder: Path, adapter: Adapter, launcher: Launcher, *, sabotage: str | None = None, keep: bool = False
    ) -> None:
        """Nothing is started yet. ``keep`` keeps the files of points that pass, too."""
        self._folder, self._adapter, self._launcher = folder, adapter, launcher
        self._sabotage, self._keep = sabotage, keep
        # Several modes train the same reference.
        self._references = References(folder, keeps_disk=False)

    def run(
        self,
        name: str,
        *,
        share: float,
        seed: int,
        jobs: int,
        only: PointRequest | None,
        on_point: Callable[[KillRecord], None],
    ) -> SweepOutcome:
        """Sweep one mode.

        Args:
            name: of :data:`MODES`.
            share: of the points to try, drawn by ``seed``; 1 is all of them.
            seed: of the draw.
            jobs: points at a time.
            only: the only point to try.
            on_point: called with each point, in order.

        Raises:
            InconclusiveError: the reference, or the disk before the save, can't be made.
        """
        mode = MODES[name]
        given = {**_GIVEN, "checkpoint": {**_GIVEN["checkpoint"], **mode.checkpoint}}
        training = Training(given=given, until_step=STEP + 2, save_steps=SAVE_STEPS)
        reference = reference_of(training, self._folder, self._adapter, self._launcher, self._references)
        # The disk before is made by synchronous saves, so that they are complete when their leg is killed.
        checkpoint = {**given["checkpoint"], "is_async": False}
        base = self._prepare(name, mode, replace(training, given={**given, "checkpoint": checkpoint}), reference)
        points = list(self._points(name, base, training, reference))
        chosen = _choose(points, share, seed, only)
        kills = []
        with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="sweep") as pool:
            numbered = enumerate(chosen, start=1)
            futures = [
                pool.submit(self._try, name, number, point, base, training, reference) for number, point in numbered
            ]
            try:
                for future in futures:
                    kills.append(future.result())
                    on_point(kills[-1])
            except BaseException:
                # On Ctrl-C: without this all waiting points would be tried first.
                pool.shutdown(wait=False, cancel_futures=True)
                self._launcher.stop()
                raise
        if not self._keep:
            shutil.rmtree(base)
        return SweepOutcome(mode=name, points=len(points), kills=tuple(kills))

    def _runner(
        self, folder: Path, training: Training, reference: Reference, *, sabotaged: bool = False
    ) -> AttemptRunner:
        sabotage = self._sabotage if sabotaged else None
        return AttemptRunner(
            training, reference, folder, self._folder, self._adapter, self._launcher, sabotage=sabotage
        )

    def _prepare(self, name: str, mode: Mode, training: Training, reference: Reference) -> Path:
        """Make the disk that every point starts from."""
        folder = self._folder / f"sweep.{name}" / "base"
        runner = self._runner(folder, training, reference)
        try:
            runner.run_attempt("saving", restore_from=None, fault=LegFault(kind="kill", after_step=STEP - 1))
            if mode.prepare == "dead save":
                fault = LegFault(kind="kill", after_step=STEP, moment="before_commit")
                runner.run_attempt("interrupted", fault=fault)
            elif mode.prepare == "same step":
                runner.run_attempt("interrupted", fault=LegFault(kind="kill", after_step=STEP))
        except ViolationError as error:
            raise InconclusiveError(f"the disk before the save can't be made: {error}") from error
        return folder

    def _points(self, name: str, base: Path, training: Training, reference: Reference) -> Iterator[Point]:
        """Every change on disk of the save under test, recorded by an uninterrupted leg."""
        folder = self._folder / f"sweep.{name}" / "counting"
        shutil.copytree(base / "disk", folder / "disk", symlinks=True)
        runner = self._runner(folder, training, reference)
        try:
            attempt = runner.run_attempt("saving", restore_from=f"global_step_{BEFORE}", more={"tell_operations": True})
        except ViolationError as error:
            raise InconclusiveError(f"the uninterrupted save: {error}") from error
        for event in attempt.evidence.events("operation", None):
            if event.data["save"] == STEP:
                what = f"{event.data['what']} {_without_random_part(event.data['where'])}"
                yield Point(rank=event.rank, operation=event.data["number"], what=what)
        shutil.rmtree(folder)

    def _try(
        self, name: str, number: int, point: Point, base: Path, training: Training, reference: Reference
    ) -> KillRecord:
        begun = time.monotonic()
        folder = self._folder / f"sweep.{name}" / f"rank-{point.rank}-operation-{point.operation}"
        shutil.copytree(base / "disk", folder / "disk", symlinks=True)
        outcome: Outcome
        killed, resumed, outcome, reason, divergence = None, None, "pass", "", None
        try:
            runner = self._runner(folder, training, reference, sabotaged=True)
            earlier = _save_id(runner)
            killed = runner.run_attempt("interrupted", restore_from=f"global_step_{BEFORE}", fault=_fault(point))
            is_committed = _save_id(runner) not in (None, earlier)
            resumed = runner.run_attempt("resumed", restore_from=LATEST)
            _require_little_lost(training, killed, resumed)
            _require_committed_used(resumed, is_committed=is_committed)
            _require_clean(runner)
        except ViolationError as error:
            outcome, reason, divergence = error.outcome, str(error), error.divergence
        except InconclusiveError as error:
            outcome, reason = "error", str(error)
        if outcome == "pass" and not self._keep:
            shutil.rmtree(folder)
        return KillRecord(
            key=f"sweep.{name}",
            number=number,
            mode=name,
            moment="file_operation",
            step=STEP,
            rank=point.rank,
            operation=point.operation,
            what=point.what,
            victims="all",
            last_step=killed.last_step if killed else None,
            resumed_at=resumed.restored if resumed else None,
            lost_steps=killed.last_step - resumed.restored if killed and resumed else None,
            outcome=outcome,
            reason=reason,
            divergence=divergence,
            seconds=time.monotonic() - begun,
        )


def _fault(point: Point) -> LegFault:
    return LegFault(kind="kill", after_step=STEP, moment="file_operation", rank=point.rank, operation=point.operation)


def _choose(points: Sequence[Point], share: float, seed: int, only: PointRequest | None) -> list[Point]:
    if only is not None:
        rank, operation = only
        chosen = [
            item for item in points if item.rank == rank and selects_operation(operation, item.operation, item.what)
        ]
        if not chosen:
            raise InconclusiveError(f"the save has no file operation {operation} of rank {rank}")
        return chosen[:1]
    count = max(1, round(share * len(points)))
    drawn = sorted(random.Random(seed).sample(range(len(points)), count))
    return [points[place] for place in drawn]


def _require_little_lost(training: Training, killed: Attempt, resumed: Attempt) -> None:
    lost = killed.last_step - resumed.restored
    if lost > training.lost_at_most:
        raise ViolationError(f"{lost} steps are lost, more than {training.lost_at_most}")


def _save_id(runner: AttemptRunner) -> str | None:
    """The id of the save that has the name of the step under test; None if there is none."""
    manifest = runner.checkpoints / f"global_step_{STEP}" / "manifest.json"
    found: str | None = json.loads(manifest.read_text())["attempt"] if manifest.exists() else None
    return found


def _require_committed_used(resumed: Attempt, *, is_committed: bool) -> None:
    """A save that was committed before the kill is resumed from, wherever the pointer was."""
    if is_committed and resumed.restored != STEP:
        raise ViolationError(f"step {STEP} was committed before the kill, and is passed over for {resumed.restored}")


def _require_clean(runner: AttemptRunner) -> None:
    """The resumed training saved again, and cleared what the killed save had left."""
    left = [path.name for path in (runner.checkpoints / ".staging").glob("*")]
    if left:
        raise ViolationError(f"left behind in .staging: {left}")


def _without_random_part(where: str) -> str:
    """A path without the random part of a staging directory's or a temporary's name, so that runs can be compared."""
    head, *rest = where.split("/")
    if head != ".staging" or not rest:
        return where
    stem, _, mark = rest[0].partition(".")
    name = rest[0] if not mark else stem + (".txt" if mark.startswith("txt") else "") + ".*"
    return "/".join([head, name, *rest[1:]])


__all__ = ["MODES", "Mode", "Point", "PointRequest", "Sweep", "SweepOutcome"]

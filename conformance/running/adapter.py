"""The interface to a trainer under test. An adapter describes its abilities and how a leg is started; it starts nothing itself.

A trainer gets a :class:`Job` and nothing more. A job has no field for an expectation, so none can reach the trainer.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from conformance.matrix.case import Case
from conformance.matrix.disk_changes import selects_operation
from conformance.matrix.given import Given
from conformance.matrix.script import LegStep, Moment
from conformance.plain_data import serial
from conformance.processes.launching import Launch
from conformance.records.evidence import JOB_NAME

# The abilities of a trainer. A case that needs one that its adapter lacks is `unsupported`.
ABILITIES = frozenset(
    {
        "trajectory.loss",
        "trajectory.lr",
        "trajectory.grad_norm",
        "trajectory.samples",
        "trajectory.rng",
        "trajectory.model",
        "trajectory.optimizer",
        "trajectory.extras",
        "events.begin",
        "events.restored",
        "events.saved",
        "events.log",
        "events.error",
        "events.callbacks",
        "events.end",
        "events.value",
        "fault.pause",  # it pauses at the moment of a fault, see probe.Probe.moment
        "fault.file_operation",  # it can pause before any change that it makes on disk
        "resume.latest",
        "resume.path",
        "disk.dcp",  # global_step_N directories with .metadata, and the pointer
        "disk.look",
        "disk.edit",
        "given.any",  # every key of conformance.matrix.given; without it only cases with an empty `given` run
        "given.config",  # it trains from a configuration file of its own
        "ranks.many",
    }
)


# Moments of the publication, which rank 0 does for all ranks.
_OF_RANK_ZERO = ("before_commit", "before_pointer", "before_retention")


@dataclass(frozen=True, kw_only=True)
class JobFault:
    """The moment at which the leg pauses to be killed, or raises an error."""

    kind: Literal["kill", "terminate", "raise"]
    after_step: int
    moment: Moment
    rank: int | None
    operation: int | str | None
    victims: str

    def is_awaited_by(self, world_size: int) -> tuple[int, ...]:
        """The ranks that must pause at its moment, in a leg of ``world_size`` ranks."""
        if self.moment in _OF_RANK_ZERO:
            return (0,)
        return tuple(range(world_size)) if self.rank is None else (self.rank,)

    def is_operation(self, number: int, what: str, where: str) -> bool:
        """True when its ``operation`` is this number, or a pattern that this change on disk matches."""
        return self.operation is not None and selects_operation(self.operation, number, f"{what} {where}")

    def struck_ranks(self, world_size: int, nodes: int) -> tuple[int, ...]:
        """The ranks that it ends, directly or by their launcher, in a leg of ``world_size`` ranks on ``nodes`` equal nodes."""
        kind, _, number = self.victims.partition("-")
        if kind == "all":
            return tuple(range(world_size))
        if kind == "rank":
            return (int(number),)
        size = world_size // nodes
        return tuple(range(int(number) * size, (int(number) + 1) * size))


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process has to do: ``job.json`` in the leg's folder, which is also its working directory.

    ``task``: ``train`` a leg; ``edit`` a step directory (``edit`` has the fault's ``kind`` and parameters); ``look``: read
    the step directory of ``step``. ``checkpoint_dir`` is relative to the working directory; ``restore_from`` is ``LATEST``,
    a path, or None.
    """

    task: Literal["train", "edit", "look"]
    leg: str
    checkpoint_dir: str
    world_size: int
    given: Given
    until_step: int | None = None
    restore_from: str | None = None
    fault: JobFault | None = None
    sabotage: str | None = None
    nodes: int = 1
    edit: Mapping[str, Any] | None = None
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Description:
    """A trainer's name, versions (of itself and of what it runs on), abilities, and the devices that are there."""

    name: str
    versions: Mapping[str, str]
    abilities: frozenset[str]
    devices: tuple[str, ...] = ("cpu",)


class Adapter(Protocol):
    """A trainer. The runner calls: 1. ``describe`` once; then for each leg 2. ``launch`` for every rank, 3. ``collect`` once
    all of them are dead.
    """

    def describe(self) -> Description:
        """Return name, versions, abilities and devices. Cheap; starts nothing."""
        ...

    def launch(self, job: Job, rank: int) -> Launch:
        """Return how a rank of a leg is started. ``job.json`` is in its working directory."""
        ...

    def collect(self, job: Job, folder: Path) -> None:
        """Turn native output in the leg's folder into ``trajectory_rank_R.jsonl`` and ``events_rank_R.jsonl``, if need be."""
        ...


# The name on the command line -> the adapter's module and class. Imported by name only: nothing here knows a trainer.
ADAPTERS = {"hyper_resume": "conformance.adapters.hyper_resume.adapter:HyperResumeAdapter"}


def build_adapter(name: str) -> Adapter:
    """Return the adapter called ``name``.

    Raises:
        KeyError: there is no such adapter.
    """
    module, _, attribute = ADAPTERS[name].partition(":")
    adapter: Adapter = getattr(importlib.import_module(module), attribute)()
    return adapter


def to_job(case: Case, leg: LegStep, *, sabotage: str | None, checkpoint_dir: str) -> Job:
    """Turn one leg of a case into a job, without title, reason and expectations.

    Args:
        case: the case that the leg belongs to.
        leg: the leg.
        sabotage: the defect to install; a reference never gets one.
        checkpoint_dir: the trainer's checkpoint directory, relative to the leg's folder.
    """
    made_from = case.leg_given(leg)
    return Job(
        task="train",
        leg=leg.leg,
        checkpoint_dir=checkpoint_dir,
        world_size=made_from.world_size,
        given=made_from,
        until_step=leg.until_step,
        restore_from=_resolve(leg.restore_from, checkpoint_dir),
        fault=None if leg.fault is None else JobFault(**vars(leg.fault)),
        nodes=leg.nodes,
        sabotage=None if leg.role == "reference" else sabotage,
    )


def _resolve(restore_from: str | None, checkpoint_dir: str) -> str | None:
    """``step:10`` and ``dir:NAME`` as paths; any other value unchanged."""
    if restore_from is None:
        return None
    kind, _, rest = restore_from.partition(":")
    if kind == "step" and rest.isdigit():
        return os.path.join(checkpoint_dir, f"global_step_{rest}")  # noqa: PTH118  a Path would drop a slash at the end
    if kind == "dir":
        return os.path.join(checkpoint_dir, rest)  # noqa: PTH118
    return restore_from


def write_job(job: Job, folder: Path) -> None:
    """Write ``job.json``."""
    text = json.dumps(serial.to_plain(job), indent=1, ensure_ascii=False)
    (folder / JOB_NAME).write_text(text + "\n", encoding="utf-8")


def read_job(path: Path) -> Job:
    """Read a job.

    Raises:
        SerialError: it is not one.
    """
    return serial.build(Job, json.loads(path.read_text(encoding="utf-8")), path.name)

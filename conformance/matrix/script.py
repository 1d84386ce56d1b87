"""The script of a case: legs and their faults, damage and looks between legs, and the expectations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Moment = Literal[
    "after_step",
    "after_epoch",
    "before_save",
    "before_commit",
    "before_pointer",
    "before_retention",
    "during_load",
    "file_operation",
]


@dataclass(frozen=True, kw_only=True)
class LegFault:
    """How a leg is ended at step ``after_step``.

    kind: ``kill`` sends SIGKILL while the ranks pause; ``terminate`` sends SIGTERM, after which ranks that handle it go on;
        ``raise`` makes every rank's training raise an error.
    moment: ``after_step`` when the step and its ``on_step_end`` (with its save) are done; ``after_epoch`` when that step ended
        an epoch and ``on_epoch_end`` (with its save) is done too; ``before_save`` before the step's ``on_step_end`` saves;
        ``before_commit`` when all files of its save are written but not yet visible; ``before_pointer`` when the step
        directory is visible and the pointer is still the old one; ``before_retention`` when the pointer names it and nothing
        outdated is deleted yet (at these three only rank 0 pauses); ``during_load`` while the
        checkpoint of that step (0: of whichever step) is loaded, before the first tensor is read; ``file_operation`` right
        before a change on disk that ``rank`` makes in the save of that step (:mod:`conformance.running.file_operations`): the
        ``operation``-th, from 1, or the first that ``operation`` names (``fsync *.distcp``: what, and a pattern for where);
        cases use a name, because the number of changes depends on the trainer. Only that rank pauses; the others are
        anywhere. All but the first three need a save (or a checkpoint) of that step.
    victims: ``all`` ranks and their launchers; ``rank-2`` that rank alone; ``node-1`` a node's launcher with
        its ranks; ``launcher-0`` a node's launcher alone, which passes a SIGTERM on to its ranks (torchrun only). Other
        ranks go on, and must end by themselves with an error.
    """

    kind: Literal["kill", "terminate", "raise"]
    after_step: int
    moment: Moment = "after_step"
    rank: int | None = None
    operation: int | str | None = None
    victims: str = "all"


@dataclass(frozen=True, kw_only=True)
class LegStep:
    """One leg of the script: one process group, from its start to its end.

    leg: ``reference``, ``saving``, ``interrupted`` or ``resumed``, with ``-anything`` appended where several are needed.
    until_step: the planned last step; None trains all of ``given.epochs``.
    restore_from: None, ``LATEST``, ``step:N``, ``dir:NAME`` (relative to the checkpoint directory, slash at the end kept), or a
        path taken as it is.
    given: differences from the case's ``given``.
    nodes: number of nodes, each with its own launcher (torchrun only).
    limit_seconds: after this time the leg is killed as hanging, and the case fails.
    """

    leg: str
    until_step: int | None = None
    restore_from: str | None = None
    given: Mapping[str, Any] | None = None
    fault: LegFault | None = None
    nodes: int = 1
    limit_seconds: float = 30.0

    @property
    def role(self) -> str:
        """``reference``, ``saving``, ``interrupted`` or ``resumed``."""
        return self.leg.partition("-")[0]


@dataclass(frozen=True, kw_only=True)
class FaultStep:
    """Damage to the checkpoint directory between two legs: a fault of :mod:`conformance.matrix.faults` and its parameters."""

    fault: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LookStep:
    """Read a step directory between two legs: its entries by bucket. Checks refer to it by ``name``, by default its step."""

    look: int
    name: str


Step: TypeAlias = "LegStep | FaultStep | LookStep"


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """One check and its parameters. ``blames`` overrides the bucket that the check blames."""

    check: str
    parameters: Mapping[str, Any]
    blames: str | None

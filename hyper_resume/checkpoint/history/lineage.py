"""Which saves a run descends from, and in which order a resume tries them.

A run that goes back to a lower step and trains on leaves the higher steps behind as an abandoned future. Steps can't tell the
two apart, so every manifest names the saves that it descends from, and an ordinal that grows with every save into one root.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.format.manifest import (
    MANIFEST_NAME,
    MAX_ANCESTORS,
    METADATA_NAME,
    Manifest,
    read_manifest,
)
from hyper_resume.checkpoint.parsing import safe_load
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError, describe

logger = logging.getLogger(__name__)

Ancestors = tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A step directory that a resume may take; ``complaint`` says why it can't, where that is known already."""

    step: int
    path: Path
    manifest: Manifest | None
    complaint: str

    @property
    def was_committed(self) -> bool:
        """True when a save of this library was committed here, whatever became of it: the manifest came with the name."""
        return (self.path / MANIFEST_NAME).exists()

    @property
    def order(self) -> tuple[int, int]:
        """Later saves are greater; those without a manifest come before all others, by their step."""
        return (-1 if self.manifest is None else self.manifest.ordinal, self.step)


def list_candidates(checkpoint_dir: Path) -> list[Candidate]:
    """Return all step directories, in no order; also those that stepped aside for a save that never came."""
    found = layout.step_directories(checkpoint_dir) + layout.replaced_directories(checkpoint_dir)
    return [_candidate(step, path) for step, path in found]


def _candidate(step: int, path: Path) -> Candidate:
    try:
        manifest = read_manifest(path)
    except CheckpointMismatchError as error:
        return Candidate(step=step, path=path, manifest=None, complaint=f"can't be trusted: {error}")
    if manifest is not None and manifest.step != step:
        # Another step's: nothing that it says holds here, its ancestors neither.
        return Candidate(
            step=step, path=path, manifest=None, complaint=f"has a {MANIFEST_NAME} of global_step {manifest.step}"
        )
    return Candidate(
        step=step, path=path, manifest=manifest, complaint=layout.why_incomplete_by_manifest(path, manifest)
    )


@dataclass(frozen=True, kw_only=True)
class ResumeOrder:
    """What a resume tries, best first; and why other step directories are out, one sentence each."""

    directories: tuple[Path, ...]
    complaints: tuple[str, ...]
    was_published: bool


def resume_order(checkpoint_dir: Path) -> ResumeOrder:
    """Find out what LATEST may mean: what the pointer names, then what that descends from, newest first.

    Where the pointer is of no use the newest save by ordinal takes its place. A directory without a manifest (stock DCP)
    carries no lineage, so it is tried in the order of its step. Whatever is passed over is warned of.

    Raises:
        CheckpointNotFoundError: ``checkpoint_dir`` is a file.
    """
    _refuse_file(checkpoint_dir)
    pointed, complaint = layout.read_pointer(checkpoint_dir)
    found = list_candidates(checkpoint_dir)
    head = next((one for one in found if one.step == pointed), None)
    if head is not None and not _manifest_is_of_metadata(head):
        # What another save descends from says nothing of this one.
        found.remove(head)
        head = replace(
            head, manifest=None, complaint=f"has a {METADATA_NAME} and a {MANIFEST_NAME} that are not of one save"
        )
        found.append(head)
    if pointed is not None and (head is None or head.complaint):
        pointer, name = checkpoint_dir / layout.POINTER_NAME, layout.step_directory_name(pointed)
        complaint = f"pointer {pointer} names {name}, which {head.complaint if head else 'does not exist'}"
    if complaint:
        logger.warning("%s; scanning %s for the newest complete checkpoint instead", complaint, checkpoint_dir)
    rest = sorted((one for one in found if one is not head), key=lambda one: one.order, reverse=True)
    lineage: set[tuple[int, str]] | None = None
    directories: list[Path] = []
    complaints = [complaint] if complaint else []
    for one in rest if head is None else [head, *rest]:
        against = one.complaint or _why_not_in_lineage(one, lineage, pointed, head)
        if lineage is None and one.manifest is not None and not _is_beyond(one, pointed, head):
            lineage = set(one.manifest.ancestors)
        if not against:
            directories.append(one.path)
        elif one is not head:
            logger.warning("skipping %s: %s", one.path, against)
            complaints.append(f"{one.path.name}: {against}")
    return ResumeOrder(
        directories=tuple(directories),
        complaints=tuple(complaints),
        was_published=pointed is not None or bool(complaint) or any(one.was_committed for one in found),
    )


def _manifest_is_of_metadata(one: Candidate) -> bool:
    """False for a manifest that came from another attempt at the step: ``.metadata`` tells which save it is of."""
    if one.manifest is None:
        return True
    try:
        content = operations.read_bytes(one.path / METADATA_NAME, safe_load.MAX_METADATA_BYTES)
    except OSError:
        return True
    return one.manifest.attempt.encode() in content


def _refuse_file(checkpoint_dir: Path) -> None:
    if checkpoint_dir.exists() and not checkpoint_dir.is_dir():
        raise CheckpointNotFoundError(
            describe(
                "checkpoint.checkpoint_dir is no directory",
                where=str(checkpoint_dir),
                expected="a directory, or nothing yet",
                found="a file",
                do="correct the path",
            )
        )


def _why_not_in_lineage(
    one: Candidate, lineage: set[tuple[int, str]] | None, pointed: int | None, head: Candidate | None
) -> str:
    if one.manifest is None or one is head:
        return ""
    if lineage is not None and (one.manifest.step, one.manifest.attempt) not in lineage:
        return "the run that LATEST follows does not descend from it"
    if _is_beyond(one, pointed, head):
        return "it is beyond the pointer and may be of an abandoned future"
    return ""


def refuse_if_published(checkpoint_dir: Path, order: ResumeOrder, complaints: list[str]) -> None:
    """Raise when something was published and none of it can be resumed from: a start from scratch would be a silent loss.

    Args:
        checkpoint_dir: the root.
        order: what :func:`resume_order` found.
        complaints: why each of ``order.directories`` was refused.

    Raises:
        CheckpointNotFoundError: names all reasons.
    """
    if order.was_published or complaints:
        raise CheckpointNotFoundError(
            describe(
                "a checkpoint was published here, but none can be resumed from",
                where=str(checkpoint_dir),
                expected="at least one global_step_N directory that is complete and as it was written",
                found="; ".join((*order.complaints, *complaints)),
                do=f"restore the missing directory, or delete {layout.POINTER_NAME} and the step directories to start from "
                "scratch on purpose",
            )
        )


def _is_beyond(one: Candidate, pointed: int | None, head: Candidate | None) -> bool:
    """True for a step above the pointer's that does not descend from the very save that the pointer means."""
    if one.manifest is None or one is head or pointed is None or one.step <= pointed:
        return False
    attempt = head.manifest.attempt if head is not None and head.manifest is not None else None
    return attempt is None or (pointed, attempt) not in one.manifest.ancestors


def next_ordinal(checkpoint_dir: Path) -> int:
    """Return an ordinal above all that this root has."""
    ordinals = [one.manifest.ordinal for one in list_candidates(checkpoint_dir) if one.manifest is not None]
    return max(ordinals, default=0) + 1


def ancestors_of_next_save(manifest: Manifest) -> Ancestors:
    """Return the ancestors of a save that comes next after the one of ``manifest``."""
    return extend_ancestors(manifest.ancestors, manifest.step, manifest.attempt)


def extend_ancestors(ancestors: Ancestors, step: int, attempt: str) -> Ancestors:
    """Return ``ancestors`` and one more, at most :data:`MAX_ANCESTORS`; a step that is passed again takes its new attempt."""
    return (*(one for one in ancestors if one[0] < step), (step, attempt))[-MAX_ANCESTORS:]


def current_lineage(checkpoint_dir: Path) -> Ancestors:
    """Return what a save descends from that goes on from wherever the pointer is; () in an empty root."""
    pointed, _ = layout.read_pointer(checkpoint_dir)
    manifest = (
        None if pointed is None else layout.manifest_or_none(checkpoint_dir / layout.step_directory_name(pointed))
    )
    return () if manifest is None else ancestors_of_next_save(manifest)

"""The lineage of saves, and the order in which LATEST tries the step directories of a root.

A run may go back to an earlier step and train on from there; the later steps of the abandoned run stay in the root. Step
numbers can't tell the two runs apart. So every manifest lists the saves that its run continued (its ancestors), and an ordinal
that grows with every save to the same root.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.format.lost_entries import refuse_lost
from hyper_resume.checkpoint.format.manifest import (
    MANIFEST_NAME,
    MAX_ANCESTORS,
    METADATA_NAME,
    Manifest,
    read_manifest,
)
from hyper_resume.checkpoint.parsing import safe_load
from hyper_resume.checkpoint.parsing.strict_json import MAX_INTEGER
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError, CheckpointSaveError, describe

logger = logging.getLogger(__name__)

Ancestors = tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A step directory from which a run might resume; ``complaint`` is the reason why it can't, or "" if none is known."""

    step: int
    path: Path
    manifest: Manifest | None
    complaint: str

    @property
    def was_committed(self) -> bool:
        """True if a save of this library was committed here: the manifest exists, even if it is damaged."""
        return (self.path / MANIFEST_NAME).exists()

    @property
    def order(self) -> tuple[int, int]:
        """The sort key: later saves are greater. Directories without a manifest come before all others, by their step."""
        return (-1 if self.manifest is None else self.manifest.ordinal, self.step)


def list_candidates(checkpoint_dir: Path) -> list[Candidate]:
    """Return all step directories, in no order, and those that a save moved to ``.staging`` and never replaced."""
    found = layout.step_directories(checkpoint_dir) + layout.replaced_directories(checkpoint_dir)
    return [_candidate(step, path) for step, path in found]


def _candidate(step: int, path: Path) -> Candidate:
    try:
        manifest = read_manifest(path)
    except CheckpointMismatchError as error:
        return Candidate(step=step, path=path, manifest=None, complaint=f"can't be trusted: {error}")
    if manifest is not None and manifest.step != step:
        # The manifest of another step: nothing in it is valid here, its ancestors included.
        return Candidate(
            step=step, path=path, manifest=None, complaint=f"has a {MANIFEST_NAME} of global_step {manifest.step}"
        )
    return Candidate(
        step=step, path=path, manifest=manifest, complaint=layout.why_incomplete_by_manifest(path, manifest)
    )


@dataclass(frozen=True, kw_only=True)
class ResumeOrder:
    """The step directories that a resume tries, best first.

    ``complaints`` says why each other directory is skipped. ``was_published`` is true if a save was ever committed here.
    ``newest`` is the first one, whether it can be used or not.
    """

    directories: tuple[Path, ...]
    complaints: tuple[str, ...]
    was_published: bool
    newest: Path | None = None


def resume_order(checkpoint_dir: Path) -> ResumeOrder:
    """Return the step directories that LATEST may mean: the one that the pointer names, then its ancestors, newest first.

    If the pointer is missing or not usable, the newest save by ordinal takes its place. A directory without a manifest (stock
    DCP) has no lineage and is tried in the order of its step. Each directory that is skipped is logged as a warning.

    Raises:
        CheckpointNotFoundError: ``checkpoint_dir`` is a file.
    """
    _refuse_file(checkpoint_dir)
    pointed, complaint = layout.read_pointer(checkpoint_dir)
    found = list_candidates(checkpoint_dir)
    head = next((candidate for candidate in found if candidate.step == pointed), None)
    if head is not None and not _manifest_is_of_metadata(head):
        # The manifest of another save says nothing about the ancestors of this one.
        found.remove(head)
        head = replace(head, manifest=None, complaint=f"has a {METADATA_NAME} and a {MANIFEST_NAME} of different saves")
        found.append(head)
    if pointed is not None and (head is None or head.complaint):
        pointer, name = checkpoint_dir / layout.POINTER_NAME, layout.step_directory_name(pointed)
        complaint = f"pointer {pointer} names {name}, which {head.complaint if head else 'does not exist'}"
    if complaint:
        logger.warning("%s; scanning %s for the newest complete checkpoint instead", complaint, checkpoint_dir)
    rest = sorted(
        (candidate for candidate in found if candidate is not head), key=lambda candidate: candidate.order, reverse=True
    )
    lineage: set[tuple[int, str]] | None = None
    directories: list[Path] = []
    complaints = [complaint] if complaint else []
    candidates = rest if head is None else [head, *rest]
    for candidate in candidates:
        reason = candidate.complaint or _why_not_in_lineage(candidate, lineage, pointed, head)
        if lineage is None and candidate.manifest is not None and not _is_beyond_pointer(candidate, pointed, head):
            lineage = set(candidate.manifest.ancestors)
        if not reason:
            directories.append(candidate.path)
        elif candidate is not head:
            logger.warning("skipping %s: %s", candidate.path, reason)
            complaints.append(f"{candidate.path.name}: {reason}")
    return ResumeOrder(
        directories=tuple(directories),
        complaints=tuple(complaints),
        was_published=pointed is not None or bool(complaint) or any(candidate.was_committed for candidate in found),
        newest=candidates[0].path if candidates else None,
    )


def _manifest_is_of_metadata(candidate: Candidate) -> bool:
    """False if the manifest belongs to another save of the same step than ``.metadata``, which contains its save id."""
    if candidate.manifest is None:
        return True
    try:
        content = operations.read_bytes(candidate.path / METADATA_NAME, safe_load.MAX_METADATA_BYTES)
    except OSError:
        return True
    return candidate.manifest.attempt.encode() in content


def _refuse_file(checkpoint_dir: Path) -> None:
    if checkpoint_dir.exists() and not checkpoint_dir.is_dir():
        raise CheckpointNotFoundError(
            describe(
                "checkpoint.checkpoint_dir is not a directory",
                where=str(checkpoint_dir),
                expected="a directory, or a path that does not exist yet",
                found="a file",
                do="correct the path",
            )
        )


def _why_not_in_lineage(
    candidate: Candidate, lineage: set[tuple[int, str]] | None, pointed: int | None, head: Candidate | None
) -> str:
    if candidate.manifest is None or candidate is head:
        return ""
    if lineage is not None and (candidate.manifest.step, candidate.manifest.attempt) not in lineage:
        return "the run that LATEST means does not continue it"
    if _is_beyond_pointer(candidate, pointed, head):
        return "it is a later step than the pointer names and may belong to an abandoned run"
    return ""


def refuse_if_published(checkpoint_dir: Path, order: ResumeOrder, complaints: list[str]) -> None:
    """Raise if something was published and nothing can be resumed from: a start from scratch would lose it silently.

    Args:
        checkpoint_dir: the root.
        order: what :func:`resume_order` found.
        complaints: why each of ``order.directories`` was refused.

    Raises:
        CheckpointNotFoundError: lists all reasons; or, of the newest directory, that its training state was taken out.
        CheckpointMismatchError: a model key was taken out of the newest directory.
    """
    if order.newest is not None:
        refuse_lost(order.newest, layout.manifest_or_none(order.newest))
    if order.was_published or complaints:
        raise CheckpointNotFoundError(
            describe(
                "a checkpoint was published here, but none can be resumed from",
                where=str(checkpoint_dir),
                expected="at least one global_step_N directory that is complete and as it was written",
                found="; ".join((*order.complaints, *complaints)),
                do=f"restore the missing directory; or, to start from scratch, delete {layout.POINTER_NAME} and the step "
                "directories",
            )
        )


def _is_beyond_pointer(candidate: Candidate, pointed: int | None, head: Candidate | None) -> bool:
    """True for a later step than the pointer's that does not have the pointer's save among its ancestors."""
    if candidate.manifest is None or candidate is head or pointed is None or candidate.step <= pointed:
        return False
    attempt = head.manifest.attempt if head is not None and head.manifest is not None else None
    return attempt is None or (pointed, attempt) not in candidate.manifest.ancestors


def next_ordinal(checkpoint_dir: Path) -> int:
    """Return an ordinal above all ordinals in this root.

    Raises:
        CheckpointSaveError: there is none that a manifest can hold. No run saves that often: somebody has made the manifest.
    """
    saves = [candidate for candidate in list_candidates(checkpoint_dir) if candidate.manifest is not None]
    newest = max(saves, key=lambda candidate: candidate.order, default=None)
    if newest is None or newest.manifest is None:
        return 1
    if newest.manifest.ordinal >= MAX_INTEGER:
        raise CheckpointSaveError(
            describe(
                "no save can come after one in this checkpoint_dir",
                where=str(newest.path / MANIFEST_NAME),
                expected=f"an ordinal below {MAX_INTEGER}",
                found=str(newest.manifest.ordinal),
                do="move that directory away, and find out who made it",
            )
        )
    return newest.manifest.ordinal + 1


def ancestors_of_next_save(manifest: Manifest) -> Ancestors:
    """Return the ancestors of the next save after the one of ``manifest``."""
    return extend_ancestors(manifest.ancestors, manifest.step, manifest.attempt)


def extend_ancestors(ancestors: Ancestors, step: int, attempt: str) -> Ancestors:
    """Return ``ancestors`` and one more, at most :data:`MAX_ANCESTORS`. A step that is saved again replaces its old entry."""
    return (*(candidate for candidate in ancestors if candidate[0] < step), (step, attempt))[-MAX_ANCESTORS:]


def current_lineage(checkpoint_dir: Path) -> Ancestors:
    """Return the ancestors of a save that continues the pointer's save; () in an empty root."""
    pointed, _ = layout.read_pointer(checkpoint_dir)
    manifest = (
        None if pointed is None else layout.manifest_or_none(checkpoint_dir / layout.step_directory_name(pointed))
    )
    return () if manifest is None else ancestors_of_next_save(manifest)

"""The lineage of saves, and the order in which LATEST tries the step directories of a root.

A run may go back to an earlier step and train on from there; the later steps of the abandoned run stay in the root. Step
numbers can't tell the two runs apart. So every manifest lists the saves that its run continued (its ancestors), and an ordinal
that grows with every save to the same root.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hyper_resume.checkpoint.disk import observing, operations, reading
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.format.lost_entries import refuse_lost
from hyper_resume.checkpoint.format.manifest import (
    MANIFEST_NAME,
    MAX_ANCESTORS,
    METADATA_NAME,
    Manifest,
    read_manifest,
)
from hyper_resume.checkpoint.history import going_back
from hyper_resume.checkpoint.parsing import safe_load
from hyper_resume.checkpoint.parsing.strict_json import MAX_INTEGER
from hyper_resume.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CheckpointUnreadableError,
    describe,
    explained,
)

logger = logging.getLogger(__name__)

Ancestors = tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A step directory from which a run might resume; ``complaint`` is the reason why it can't, or "" if none is known.

    ``is_readable`` is False if it can't be read now; then nothing is known of it but its name.
    """

    step: int
    path: Path
    manifest: Manifest | None
    complaint: str
    is_readable: bool = True

    @property
    def was_committed(self) -> bool:
        """True if a save of this library was committed here: the manifest exists, even if it is damaged."""
        return not self.is_readable or (self.path / MANIFEST_NAME).exists()

    @property
    def order(self) -> tuple[int, int]:
        """The sort key: later saves are greater. Directories without a manifest come before all others, by their step."""
        return (-1 if self.manifest is None else self.manifest.ordinal, self.step)


def identity(candidate: Candidate) -> tuple[int, str]:
    """Return (step, save id) of a candidate with a manifest."""
    assert candidate.manifest is not None
    return candidate.manifest.step, candidate.manifest.attempt


def with_ancestors(saves: Ancestors, candidates: Iterable[Candidate]) -> set[tuple[int, str]]:
    """Return ``saves`` and all that they descend from.

    A manifest lists at most :data:`MAX_ANCESTORS`; those before them are in the lists of the ancestors that stand.
    """
    known = {identity(one): one.manifest.ancestors for one in candidates if one.manifest is not None}
    found: set[tuple[int, str]] = set()
    left = list(saves)
    while left:
        save = left.pop()
        if save not in found:
            found.add(save)
            left.extend(known.get(save, ()))
    return found


def list_candidates(checkpoint_dir: Path) -> list[Candidate]:
    """Return all step directories, in no order, and those that a save moved to ``.staging`` and never replaced.

    Raises:
        CheckpointUnreadableError: the root can't be listed now. A step directory that can't be read is among the candidates.
    """
    found = reading.again(
        lambda: layout.step_directories(checkpoint_dir) + layout.replaced_directories(checkpoint_dir), checkpoint_dir
    )
    return [_candidate(step, path) for step, path in found]


def _candidate(step: int, path: Path) -> Candidate:
    try:
        return reading.again(lambda: _look_at(step, path), path)
    except CheckpointUnreadableError as error:
        return Candidate(step=step, path=path, manifest=None, complaint=str(error), is_readable=False)


def _look_at(step: int, path: Path) -> Candidate:
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
    ``newest`` is the first one, whether it can be used or not. ``unreadable`` has, for those of ``directories`` that can't be
    read now, the reason: a resume that comes to one of them stops, because nothing shows that it is damaged.
    """

    directories: tuple[Path, ...]
    complaints: tuple[str, ...]
    was_published: bool
    newest: Path | None = None
    unreadable: Mapping[Path, str] = field(default_factory=dict)

    @property
    def readable(self) -> tuple[Path, ...]:
        """The directories before the first that can't be read."""
        return tuple(itertools.takewhile(lambda path: path not in self.unreadable, self.directories))


@dataclass(frozen=True, kw_only=True)
class _Start:
    """Where a resume begins to look.

    ``head`` is the pointer's directory, ``save`` the (step, save id) that the pointer names, as far as it is known. ``newer``
    are the saves that continue that save and were committed after it, and not left behind by going back.
    """

    pointed: int | None
    head: Candidate | None
    save: tuple[int, str] | None
    newer: tuple[Candidate, ...]

    @property
    def first(self) -> Candidate | None:
        """The newest save that continues the pointer's, or the pointer's own."""
        return max(self.newer, key=lambda one: one.order, default=self.head)

    def is_beyond(self, candidate: Candidate) -> bool:
        """True for a save of a later step than the pointer's that does not continue it, or was left behind."""
        if candidate.manifest is None or candidate is self.head or self.pointed is None:
            return False
        return candidate.step > self.pointed and candidate not in self.newer


def resume_order(checkpoint_dir: Path) -> ResumeOrder:
    """Return the step directories that LATEST may mean, newest first.

    The first is the newest save that continues the one that the pointer names: a run may have been killed after a commit and
    before the pointer moved. Saves that a run left behind when it went back (:mod:`.going_back`) do not count. If there is
    none, it is the pointer's save; then come the ancestors. If the pointer is missing or not usable, the newest save by
    ordinal takes its place. A directory without a manifest (stock DCP) has no lineage: if the pointer names it, the pointer
    decides; otherwise it is tried in the order of its step. Each directory that is skipped is logged as a warning.

    A run may save to the root and delete there meanwhile: what then looks wrong is looked at again.

    Raises:
        CheckpointNotFoundError: ``checkpoint_dir`` is a file, or is no directory that can be read.
        CheckpointUnreadableError: the root, its pointer, or the mark of going back can't be read now.
    """
    with explained("checkpoint.checkpoint_dir can't be read", checkpoint_dir):
        _refuse_file(checkpoint_dir)
        for _ in range(observing.MAX_LOOKS):
            before = _root_identity(checkpoint_dir)
            order, messages = _look(checkpoint_dir)
            is_clear = bool(order.directories) and not order.complaints
            if is_clear or _root_identity(checkpoint_dir) == before:
                break
    for level, message in messages:
        logger.log(level, "%s", message)
    return order


def _root_identity(checkpoint_dir: Path) -> tuple[object, ...]:
    return reading.again(lambda: layout.root_identity(checkpoint_dir), checkpoint_dir)


def _look(checkpoint_dir: Path) -> tuple[ResumeOrder, list[tuple[int, str]]]:
    """Return the order as it is now, and what to log: levels and texts."""
    pointed, complaint = layout.read_pointer(checkpoint_dir)
    found = [_without_foreign_manifest(one) if one.step == pointed else one for one in list_candidates(checkpoint_dir)]
    mark, damage = going_back.read(checkpoint_dir)
    start = _find_start(found, pointed, mark, is_damaged=bool(damage))
    head, first = start.head, start.first
    if pointed is not None and (head is None or head.complaint):
        pointer, name = checkpoint_dir / layout.POINTER_NAME, layout.step_directory_name(pointed)
        complaint = f"pointer {pointer} names {name}, which {head.complaint if head else 'does not exist'}"
    messages: list[tuple[int, str]] = []
    if damage:
        messages.append((logging.WARNING, f"{damage}: LATEST means what the pointer names, and nothing newer"))
    if complaint:
        messages.append(
            (logging.WARNING, f"{complaint}; scanning {checkpoint_dir} for the newest complete checkpoint instead")
        )
    elif first is not head and first is not None:
        name = layout.step_directory_name(pointed or 0)
        messages.append((logging.INFO, f"{first.path} continues {name}, which the pointer names"))
    rest = sorted((one for one in found if one is not first), key=lambda one: one.order, reverse=True)
    lineage: set[tuple[int, str]] | None = None
    tried: list[Candidate] = []
    complaints = [complaint] if complaint else []
    candidates = rest if first is None else [first, *rest]
    for candidate in candidates:
        reason = candidate.complaint or _why_not_in_lineage(candidate, lineage, start)
        if lineage is None and candidate.manifest is not None and not start.is_beyond(candidate):
            lineage = with_ancestors(candidate.manifest.ancestors, found)
        if not reason:
            tried.append(candidate)
        elif candidate is not head and candidate.is_readable:
            messages.append((logging.WARNING, f"skipping {candidate.path}: {reason}"))
            complaints.append(f"{candidate.path.name}: {reason}")
    unreadable = [one for one in found if not one.is_readable and _may_be_meant(one, lineage, start)]
    order = ResumeOrder(
        directories=tuple(one.path for one in _with_unreadable(tried, unreadable, pointed)),
        complaints=tuple(complaints),
        was_published=pointed is not None or bool(complaint) or any(candidate.was_committed for candidate in found),
        newest=candidates[0].path if candidates else None,
        unreadable={one.path: one.complaint for one in unreadable},
    )
    return order, messages


def _find_start(
    found: Sequence[Candidate], pointed: int | None, mark: going_back.Mark | None, *, is_damaged: bool
) -> _Start:
    """Return where to begin; with a damaged mark, no save counts as newer than the pointer's."""
    head = next((one for one in found if one.step == pointed), None)
    save = None
    if head is not None and head.manifest is not None:
        save = identity(head)
    elif mark is not None and mark.step == pointed:
        save = mark.step, mark.attempt
    left_behind = mark.ordinal if mark is not None and (mark.step, mark.attempt) == save else -1
    newer = tuple(
        one
        for one in found
        if not is_damaged and one.manifest and save in one.manifest.ancestors and one.manifest.ordinal > left_behind
    )
    return _Start(pointed=pointed, head=head, save=save, newer=newer)


def _may_be_meant(candidate: Candidate, lineage: set[tuple[int, str]] | None, start: _Start) -> bool:
    """Whether LATEST may mean a directory that can't be read: it is no earlier step, or it is one of the lineage."""
    is_earlier = start.pointed is not None and candidate.step < start.pointed
    return not is_earlier or lineage is None or candidate.step in {step for step, _ in lineage}


def _with_unreadable(
    tried: Sequence[Candidate], unreadable: Sequence[Candidate], pointed: int | None
) -> list[Candidate]:
    """Put each directory that can't be read where it may belong: before all others, or before those of earlier steps."""
    order = list(tried)
    for one in sorted(unreadable, key=lambda one: one.step):
        is_first = pointed is None or one.step >= pointed
        at = 0 if is_first else next((i for i, other in enumerate(order) if other.step < one.step), len(order))
        order.insert(at, one)
    return order


def _without_foreign_manifest(candidate: Candidate) -> Candidate:
    """Take a manifest away that belongs to another save of the same step than ``.metadata``, which contains its save id.

    The manifest of another save says nothing about the ancestors of this one.
    """
    if candidate.manifest is None:
        return candidate
    path = candidate.path / METADATA_NAME
    try:
        content = reading.again(lambda: operations.read_bytes(path, safe_load.MAX_METADATA_BYTES), path)
    except CheckpointUnreadableError as error:
        return replace(candidate, manifest=None, complaint=str(error), is_readable=False)
    except OSError:
        return candidate
    if candidate.manifest.attempt.encode() in content:
        return candidate
    return replace(
        candidate, manifest=None, complaint=f"has a {METADATA_NAME} and a {MANIFEST_NAME} of different saves"
    )


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


def _why_not_in_lineage(candidate: Candidate, lineage: set[tuple[int, str]] | None, start: _Start) -> str:
    if candidate.manifest is None or candidate is start.first:
        return ""
    if lineage is not None and identity(candidate) not in lineage:
        return "the run that LATEST means does not continue it"
    if start.is_beyond(candidate):
        return "it is a later step than the pointer names and may belong to an abandoned run"
    return ""


def is_step_of(directory: Path, checkpoint_dir: Path) -> bool:
    """Whether ``directory`` is a step directory of this root, by whatever way its path leads there."""
    return layout.parse_step(directory.name) is not None and directory.resolve().parent == checkpoint_dir.resolve()


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


def next_ordinal(checkpoint_dir: Path) -> int:
    """Return an ordinal above all ordinals in this root, and above that of the mark of going back.

    Raises:
        CheckpointUnreadableError: a manifest can't be read now, so its ordinal is not known.
        CheckpointSaveError: there is none that a manifest can hold. No run saves that often: somebody has made the file.
    """
    ordinals = [(0, checkpoint_dir)]
    for candidate in list_candidates(checkpoint_dir):
        if not candidate.is_readable:
            raise CheckpointUnreadableError(candidate.complaint)
        if candidate.manifest is not None:
            ordinals.append((candidate.manifest.ordinal, candidate.path / MANIFEST_NAME))
    mark, _ = going_back.read(checkpoint_dir)
    if mark is not None:
        ordinals.append((mark.ordinal, checkpoint_dir / layout.WENT_BACK_NAME))
    highest, where = max(ordinals)
    if highest >= MAX_INTEGER:
        raise CheckpointSaveError(
            describe(
                "no save can come after one in this checkpoint_dir",
                where=str(where),
                expected=f"an ordinal below {MAX_INTEGER}",
                found=str(highest),
                do="move it away, and find out who made it",
            )
        )
    return highest + 1


def go_back(checkpoint_dir: Path, source: Manifest, ordinal: int) -> None:
    """Leave the mark that a run goes back to ``source``, if there is anything that it leaves behind.

    Args:
        checkpoint_dir: the root.
        source: the manifest of the save that the run continues.
        ordinal: the highest ordinal in this root.
    """
    save = source.step, source.attempt
    if any(one.manifest and save in one.manifest.ancestors for one in list_candidates(checkpoint_dir)):
        going_back.write(checkpoint_dir, going_back.Mark(step=source.step, attempt=source.attempt, ordinal=ordinal))


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

"""The directory tree of a root: its names, the pointer, staging directories, the commit, and whether a directory is complete.

``checkpoint_dir/`` holds ``latest_checkpoint_iteration.txt``, step directories ``global_step_N/``, ``.staging/`` for saves in
progress and ``.trash/`` for directories that are being deleted. A step directory appears by one rename, so an interrupted save
leaves nothing under a final name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import uuid
from pathlib import Path

from hyper_resume.checkpoint.disk import lock, observing, operations, reading
from hyper_resume.checkpoint.format.lost_entries import find_lost
from hyper_resume.checkpoint.format.manifest import METADATA_NAME, Manifest, read_manifest, verify_files
from hyper_resume.checkpoint.format.ownership import why_not_ours
from hyper_resume.errors import CheckpointMismatchError, CheckpointSaveError, CheckpointUnreadableError, describe

logger = logging.getLogger(__name__)

POINTER_NAME = "latest_checkpoint_iteration.txt"
WENT_BACK_NAME = "latest_checkpoint_went_back.json"
STAGING_NAME = ".staging"
TRASH_NAME = ".trash"
_REPLACED_SUFFIX = ".replaced"
_STEP_DIRECTORY = re.compile(r"global_step_(0|[1-9][0-9]*)")
# No training run needs more than 18 digits. The limit keeps a damaged pointer from giving a file name that is too long.
_POINTER = re.compile(rb"[0-9]{1,18}")
_MAX_POINTER_BYTES = 64
MAX_STEP = 10**18 - 1
"""The largest step that the pointer can name."""
RESERVED_NAMES = frozenset({POINTER_NAME, WENT_BACK_NAME, STAGING_NAME, TRASH_NAME, lock.LOCK_NAME, "..", ""})
"""Names that no step directory can have."""

# The name of a staging directory, of an earlier copy that was moved aside, of a pointer that is being written, and of a
# directory that is being deleted. Nothing else below ``.staging`` and ``.trash`` is this library's.
_OWN_LEFTOVER = re.compile(rf".+\.[0-9a-f]{{12}}(?:{re.escape(_REPLACED_SUFFIX)})?", re.DOTALL)
# The save id begins with the name of the step directory. These characters of it are written as % and two digits, so that the
# id is a text that every file of a save can hold and that no log or terminal takes for a command.
_QUOTED = re.compile(r"[%\x00-\x1f\x7f\ud800-\udfff]")
_QUOTES = re.compile(rb"%([0-9A-F]{2})")

# Staging directories of running saves of this process, which are not leftovers.
_in_progress: set[Path] = set()


def step_directory_name(global_step: int) -> str:
    """Return ``global_step_N``."""
    return f"global_step_{global_step}"


def parse_step(name: str) -> int | None:
    """Return N for exactly ``global_step_N``, None for anything else (``global_step_10_old``, ``my_global_step_10``)."""
    match = _STEP_DIRECTORY.fullmatch(name)
    return int(match.group(1)) if match else None


def step_directories(checkpoint_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of all ``global_step_N`` directories, and of links to directories, lowest step first.

    Raises:
        OSError: ``checkpoint_dir`` can't be read.
    """
    # A directory entry knows its kind from the listing, so that a step which a run deletes meanwhile does not count as a file.
    found = ((parse_step(entry.name), entry) for entry in observing.entries_of(checkpoint_dir))
    return sorted((step, checkpoint_dir / entry.name) for step, entry in found if step is not None and entry.is_dir())


def root_identity(checkpoint_dir: Path) -> tuple[object, ...]:
    """Return what changes when a run saves to the root or deletes there: the pointer, and every step directory.

    Raises:
        OSError: the root can't be read.
    """
    paths = [checkpoint_dir / POINTER_NAME, *(path for _, path in step_directories(checkpoint_dir))]
    return tuple((path.name, observing.identity(path)) for path in paths)


def replaced_directories(checkpoint_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of earlier copies that a save moved to ``.staging`` and never replaced (see :func:`commit`).

    :func:`clear_leftovers` moves them back. Until then, each is the only copy of its step.
    """
    found = []
    for entry in _entries(checkpoint_dir / STAGING_NAME):
        step = parse_step(final_path_of(entry).name)
        if entry.name.endswith(_REPLACED_SUFFIX) and step is not None and not final_path_of(entry).exists():
            found.append((step, entry))
    return found


def final_path_of(directory: Path) -> Path:
    """Return the final path of a directory below ``.staging``; any other path unchanged."""
    if directory.parent.name != STAGING_NAME:
        return directory
    quoted = os.fsencode(directory.name.removesuffix(_REPLACED_SUFFIX).rpartition(".")[0])
    return directory.parent.parent / os.fsdecode(_QUOTES.sub(lambda found: bytes.fromhex(found[1].decode()), quoted))


def _quote(name: str) -> str:
    return _QUOTED.sub(lambda found: "".join(f"%{byte:02X}" for byte in os.fsencode(found[0])), name)


def why_incomplete(directory: Path) -> str:
    """Return why the directory is incomplete; "" for a complete one. Digests are not compared.

    With a manifest, it is complete if every listed file exists with its size. Without one (written by another tool), it is
    complete if ``.metadata``, which is written last, exists and is not empty (a power cut can leave it with 0 bytes).

    Raises:
        CheckpointUnreadableError: it can't be read now, so it is not known.
    """
    return reading.again(lambda: _why_incomplete(directory), directory)


def _why_incomplete(directory: Path) -> str:
    if not directory.is_dir():
        return "does not exist"
    try:
        found = read_manifest(directory)
    except CheckpointMismatchError as error:
        return f"can't be trusted: {error}"
    return why_incomplete_by_manifest(directory, found)


def why_incomplete_by_manifest(directory: Path, manifest: Manifest | None) -> str:
    """Do the same as :func:`why_incomplete` for a directory whose manifest was read already (None: it has none)."""
    if manifest is not None:
        missing = verify_files(directory, manifest, sorted(manifest.files), digests=False)
        lost = str(find_lost(directory, manifest, missing)) if missing else ""
        return f"is incomplete: {'; '.join([*([lost] if lost else []), *missing[:3]])}" if missing else ""
    try:
        status = (directory / METADATA_NAME).stat()
    except (FileNotFoundError, NotADirectoryError):
        return "is incomplete (no usable .metadata)"
    return "" if stat.S_ISREG(status.st_mode) and status.st_size else "is incomplete (no usable .metadata)"


def read_pointer(checkpoint_dir: Path) -> tuple[int | None, str]:
    """Return the step that the pointer names, and what is wrong with the pointer ("" if nothing is, or if there is none).

    Raises:
        CheckpointUnreadableError: it can't be read now.
    """
    pointer = checkpoint_dir / POINTER_NAME
    try:
        content = reading.again(lambda: operations.read_bytes(pointer, _MAX_POINTER_BYTES), pointer).strip()
    except CheckpointUnreadableError:
        raise
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"pointer {pointer} can't be read ({error})"
    if not _POINTER.fullmatch(content):
        return None, f"pointer {pointer} holds {content[:40].decode(errors='replace')!r}, which is not a step number"
    return int(content), ""


def new_staging_directory(target: Path) -> Path:
    """Create and return an empty staging directory for one save to ``target``."""
    staging = target.parent / STAGING_NAME / f"{_quote(target.name)}.{uuid.uuid4().hex[:12]}"
    operations.make_directories(staging.parent)
    _in_progress.add(staging.absolute())
    try:
        operations.current().make_directory(staging)
    except BaseException:
        _in_progress.discard(staging.absolute())
        raise
    return staging


def clear_leftovers(checkpoint_dir: Path) -> None:
    """Delete the leftovers of interrupted saves and deletions. Call it before a run's first save, with the root locked.

    A complete step directory that a save moved to ``.staging`` and never replaced is moved back. Every other name below
    ``.staging`` and ``.trash`` that this library gives is deleted; what has another name is somebody else's.
    """
    for leftover in own_leftovers(checkpoint_dir / STAGING_NAME):
        if leftover.absolute() in _in_progress:
            continue
        target = final_path_of(leftover)
        if not leftover.name.endswith(_REPLACED_SUFFIX) or target.exists():
            logger.warning("removing %s, left by a save that did not finish", leftover)
            remove(leftover)
        elif reason := _why_kept_aside(leftover):
            # The only copy of its step, so it is not deleted, whatever is wrong with it.
            logger.warning("keeping %s, which can't be moved back because it %s", leftover, reason)
        else:
            logger.warning("moving %s back: the save that was to replace it did not finish", target)
            operations.current().rename(leftover, target)
            operations.current().sync_directory(checkpoint_dir)
    for leftover in own_leftovers(checkpoint_dir / TRASH_NAME):
        remove(leftover)


def _why_kept_aside(leftover: Path) -> str:
    try:
        return why_incomplete(leftover)
    except CheckpointUnreadableError as error:
        return f"can't be read now: {error}"


def own_leftovers(directory: Path) -> list[Path]:
    """Return what saves and deletions have left in ``.staging`` or ``.trash``, or are still working on."""
    return [entry for entry in _entries(directory) if _OWN_LEFTOVER.fullmatch(entry.name)]


def _entries(directory: Path) -> list[Path]:
    """Return the entries of ``.staging`` or ``.trash``; none if it is a link, because it would lead out of the root."""
    if directory.is_symlink():
        logger.warning("%s is a link: its target is not changed", directory)
        return []
    return sorted(directory.iterdir()) if directory.is_dir() else []


def discard_staging(staging: Path) -> None:
    """Delete the staging directory of a failed save. If the failed commit left the earlier copy in it, it is kept."""
    try:
        found = manifest_or_none(staging)
    except CheckpointUnreadableError:
        logger.warning("%s is left to the next run: it can't be read now", staging)
    else:
        if found is None or found.attempt == staging.name:
            remove(staging)
    _in_progress.discard(staging.absolute())


def remove(path: Path) -> None:
    """Delete a file, a link or a directory tree. Errors are ignored: the next run deletes what is left."""
    with contextlib.suppress(OSError):
        operations.remove_tree(path)


def commit(staging: Path, target: Path) -> Path | None:
    """Make the finished ``staging`` directory visible as ``target`` by one rename, durably.

    If ``target`` exists already (an earlier save of the same step), the two names are exchanged, so there is a whole copy
    under the name at any moment. If the file system can't exchange names, the earlier copy is moved to ``.staging`` first. A
    crash between the two renames leaves both copies there, and :func:`clear_leftovers` moves the earlier one back.

    A ``target`` that this library did not write is left alone: see :mod:`~hyper_resume.checkpoint.format.ownership`.

    If the last sync fails, the renames are undone: a save that reports a failure has published nothing, and the earlier copy,
    which is known to be durable, has its name back.

    Returns:
        the earlier copy, which the caller deletes; None if there was none.

    Raises:
        OSError: the save was not committed.
        CheckpointSaveError: somebody else has taken the name, and the save was not committed; or it was committed, perhaps not
            durably, and the commit could not be undone.
    """
    refuse_taken_name(target)
    disk = operations.current()
    for directory in (*sorted(entry for entry in staging.rglob("*") if entry.is_dir()), staging):
        disk.sync_directory(directory)
    replaced: Path | None = None
    if not (target.exists() or target.is_symlink()):
        disk.rename(staging, target)
    elif disk.exchange(staging, target):
        replaced = staging
    else:
        replaced = staging.with_name(f"{staging.name}{_REPLACED_SUFFIX}")
        try:
            disk.rename(target, replaced)
            disk.rename(staging, target)
        except BaseException:
            # An interrupt may come between the two, too.
            if replaced.exists() and not target.exists():
                disk.rename(replaced, target)
            raise
    try:
        disk.sync_directory(target.parent)
    except OSError as error:
        try:
            _undo_commit(staging, target, replaced)
        except OSError:
            raise _unknown_durability_error(target, error) from error
        raise
    _in_progress.discard(staging.absolute())
    return replaced


def refuse_taken_name(target: Path) -> None:
    """Refuse to save under a name that is taken by what this library did not write.

    Raises:
        CheckpointSaveError: says what is there.
    """
    reason = why_not_ours(target)
    if reason:
        raise CheckpointSaveError(
            describe(
                "a save would replace what this library did not write",
                where=str(target),
                expected="nothing of this name, or an earlier save with its own files only",
                found=reason,
                do="move it away, or set another checkpoint.checkpoint_dir",
            )
        )


def _unknown_durability_error(target: Path, error: OSError) -> CheckpointSaveError:
    return CheckpointSaveError(
        describe(
            "the checkpoint is committed, but it may not survive a power cut, and the commit could not be undone",
            where=str(target),
            found=f"{type(error).__name__}: {error}",
            do="fix the file system; the pointer was not moved to it",
        )
    )


def _undo_commit(staging: Path, target: Path, replaced: Path | None) -> None:
    disk = operations.current()
    if replaced == staging:
        disk.exchange(staging, target)
        return
    disk.rename(target, staging)
    if replaced is not None:
        disk.rename(replaced, target)


def write_pointer(checkpoint_dir: Path, global_step: int) -> None:
    """Replace the pointer, atomically and durably (:func:`replace_file`)."""
    replace_file(checkpoint_dir, POINTER_NAME, f"{global_step}\n".encode())


def replace_file(checkpoint_dir: Path, name: str, content: bytes) -> None:
    """Replace a small file of the root atomically: write a temporary file, sync it, rename it over the old one, sync the root.

    The temporary file is below ``.staging``, where the next run deletes it if this process is killed.
    """
    staging = checkpoint_dir / STAGING_NAME
    operations.make_directories(staging)
    temporary = staging / f"{name}.{uuid.uuid4().hex[:12]}"
    _in_progress.add(temporary.absolute())
    try:
        operations.write_file(temporary, content)
        operations.current().rename(temporary, checkpoint_dir / name)
    except BaseException:
        remove(temporary)
        raise
    finally:
        _in_progress.discard(temporary.absolute())
    operations.current().sync_directory(checkpoint_dir)


def manifest_or_none(directory: Path) -> Manifest | None:
    """Return the manifest; None if there is none, or if it can't be trusted.

    Raises:
        CheckpointUnreadableError: it can't be read now.
    """
    try:
        return read_manifest(directory)
    except CheckpointMismatchError:
        return None

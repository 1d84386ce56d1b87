"""Names on disk, completeness, the pointer, and the way from staging to commit.

``checkpoint_dir/`` holds ``latest_checkpoint_iteration.txt``, step directories ``global_step_N/``, ``.staging/`` for saves in
progress and ``.trash/`` for what is being deleted. A step directory appears by one rename, so a save that dies leaves nothing
under a final name.
"""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from pathlib import Path

from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.format.manifest import METADATA_NAME, Manifest, read_manifest, verify_files
from hyper_resume.errors import CheckpointMismatchError, CheckpointSaveError, describe

logger = logging.getLogger(__name__)

POINTER_NAME = "latest_checkpoint_iteration.txt"
STAGING_NAME = ".staging"
TRASH_NAME = ".trash"
_REPLACED_SUFFIX = ".replaced"
_STEP_DIRECTORY = re.compile(r"global_step_(0|[1-9][0-9]*)")
# 18 digits outlast any training run, and keep a damaged pointer from making a number or a file name that is too long.
_POINTER = re.compile(rb"[0-9]{1,18}")
_MAX_POINTER_BYTES = 64

# Staging directories of saves that this process has begun and not ended: a sweep must not take them for leftovers.
_in_progress: set[Path] = set()


def step_directory_name(global_step: int) -> str:
    """Return ``global_step_N``."""
    return f"global_step_{global_step}"


def parse_step(name: str) -> int | None:
    """Return N for exactly ``global_step_N``, None for anything else (``global_step_10_old``, ``my_global_step_10``)."""
    match = _STEP_DIRECTORY.fullmatch(name)
    return int(match.group(1)) if match else None


def step_directories(checkpoint_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of all ``global_step_N`` directories and links to directories, lowest step first."""
    if not checkpoint_dir.is_dir():
        return []
    found = ((parse_step(entry.name), entry) for entry in checkpoint_dir.iterdir())
    return sorted((step, entry) for step, entry in found if step is not None and entry.is_dir())


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
    """Return where a directory under ``.staging`` belongs; any other one as it is."""
    if directory.parent.name != STAGING_NAME:
        return directory
    return directory.parent.parent / directory.name.removesuffix(_REPLACED_SUFFIX).rpartition(".")[0]


def why_incomplete(directory: Path) -> str:
    """Say what keeps the directory from being complete; "" for a complete one, whatever is in its files.

    One with a manifest is complete when every file of it is there with its size; one without (another tool wrote it) when
    ``.metadata``, which is written last, is there and not empty (a power cut can leave it with 0 bytes).
    """
    if not directory.is_dir():
        return "does not exist"
    try:
        found = read_manifest(directory)
    except CheckpointMismatchError as error:
        return f"can't be trusted: {error}"
    return why_incomplete_by_manifest(directory, found)


def why_incomplete_by_manifest(directory: Path, manifest: Manifest | None) -> str:
    """As :func:`why_incomplete`, for a directory whose manifest was read already (None: it has none)."""
    if manifest is not None:
        missing = verify_files(directory, manifest, sorted(manifest.files), digests=False)
        return f"is incomplete: {'; '.join(missing[:3])}" if missing else ""
    marker = directory / METADATA_NAME
    return "" if marker.is_file() and marker.stat().st_size > 0 else "is incomplete (no usable .metadata)"


def read_pointer(checkpoint_dir: Path) -> tuple[int | None, str]:
    """Return the step that the pointer names, and what is wrong with it ("" where nothing is, and where there is none)."""
    pointer = checkpoint_dir / POINTER_NAME
    try:
        content = operations.read_bytes(pointer, _MAX_POINTER_BYTES).strip()
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"pointer {pointer} can't be read ({error})"
    if not _POINTER.fullmatch(content):
        return None, f"pointer {pointer} holds {content[:40].decode(errors='replace')!r}, which is no step number"
    return int(content), ""


def new_staging_directory(target: Path) -> Path:
    """Create and return an empty directory for one attempt at saving ``target``."""
    staging = target.parent / STAGING_NAME / f"{target.name}.{uuid.uuid4().hex[:12]}"
    operations.make_directories(staging.parent)
    _in_progress.add(staging.absolute())
    try:
        operations.current().make_directory(staging)
    except BaseException:
        _in_progress.discard(staging.absolute())
        raise
    return staging


def clear_leftovers(checkpoint_dir: Path) -> None:
    """Clear what dead saves and deletions left behind. Called before a run's first save, when no other run saves here.

    A complete step directory that had stepped aside for a save which never took its place is put back; all else under
    ``.staging`` and ``.trash`` is deleted.
    """
    for leftover in _entries(checkpoint_dir / STAGING_NAME):
        if leftover.absolute() in _in_progress:
            continue
        target = final_path_of(leftover)
        if not leftover.name.endswith(_REPLACED_SUFFIX) or target.exists():
            logger.warning("removing %s, left by a save that did not finish", leftover)
            remove(leftover)
        elif reason := why_incomplete(leftover):
            # All that there is of that step: not ours to delete, and a read that failed once may work the next time.
            logger.warning("leaving %s, which should be put back but %s", leftover, reason)
        else:
            logger.warning("putting %s back: the save that was to replace it did not finish", target)
            operations.current().rename(leftover, target)
            operations.current().sync_directory(checkpoint_dir)
    for leftover in _entries(checkpoint_dir / TRASH_NAME):
        remove(leftover)


def _entries(directory: Path) -> list[Path]:
    """What stands in one of the root's own directories; nothing where it is a link, which leads out of the root."""
    if directory.is_symlink():
        logger.warning("%s is a link: what is behind it is left alone", directory)
        return []
    return sorted(directory.iterdir()) if directory.is_dir() else []


def discard_staging(staging: Path) -> None:
    """Delete what a save that has failed left under ``.staging``; an earlier copy that stands in its place is left there."""
    found = manifest_or_none(staging)
    if found is None or found.attempt == staging.name:
        remove(staging)
    _in_progress.discard(staging.absolute())


def remove(path: Path) -> None:
    """Delete a file, a link or a tree; what can't be deleted now stays for the next sweep."""
    with contextlib.suppress(OSError):
        operations.remove_tree(path)


def commit(staging: Path, target: Path) -> Path | None:
    """Make the finished ``staging`` directory visible as ``target`` by one rename, durably.

    A directory of an earlier attempt at the same step changes places with it, so that there is one whole copy under the name
    at any moment. Where the file system can't exchange two names, the earlier one steps aside first: stopping between the two
    renames then leaves both copies under ``.staging``, from where :func:`clear_leftovers` puts the earlier one back.

    Where the last sync fails all of it is taken back: a save that reports a failure has published nothing, and the earlier
    copy, which alone is known to be on the device, is under its name again.

    Returns:
        the earlier copy, which the caller deletes; None where there was none.

    Raises:
        OSError: it was not committed.
        CheckpointSaveError: it was, not durably, and that could not be undone.
    """
    disk = operations.current()
    for directory in (*sorted(entry for entry in staging.rglob("*") if entry.is_dir()), staging):
        disk.sync_directory(directory)
    aside: Path | None = None
    if not (target.exists() or target.is_symlink()):
        disk.rename(staging, target)
    elif disk.exchange(staging, target):
        aside = staging
    else:
        aside = staging.with_name(f"{staging.name}{_REPLACED_SUFFIX}")
        disk.rename(target, aside)
        try:
            disk.rename(staging, target)
        except OSError:
            disk.rename(aside, target)
            raise
    try:
        disk.sync_directory(target.parent)
    except OSError as error:
        try:
            _undo_commit(staging, target, aside)
        except OSError:
            raise _unknown_durability_error(target, error) from error
        raise
    _in_progress.discard(staging.absolute())
    return aside


def _unknown_durability_error(target: Path, error: OSError) -> CheckpointSaveError:
    return CheckpointSaveError(
        describe(
            "the checkpoint is complete, but whether it survives a power cut is not known, and it could not be taken back",
            where=str(target),
            found=f"{type(error).__name__}: {error}",
            do="mend the file system; the pointer was not moved to it",
        )
    )


def _undo_commit(staging: Path, target: Path, aside: Path | None) -> None:
    disk = operations.current()
    if aside == staging:
        disk.exchange(staging, target)
        return
    disk.rename(target, staging)
    if aside is not None:
        disk.rename(aside, target)


def write_pointer(checkpoint_dir: Path, global_step: int) -> None:
    """Replace the pointer atomically: write a temporary, sync it, rename it over the old one, sync the directory.

    The temporary stands under ``.staging``, where the next run's sweep finds it if this process is killed.
    """
    staging = checkpoint_dir / STAGING_NAME
    operations.make_directories(staging)
    temporary = staging / f"{POINTER_NAME}.{uuid.uuid4().hex[:12]}"
    _in_progress.add(temporary.absolute())
    try:
        operations.write_file(temporary, f"{global_step}\n".encode())
        operations.current().rename(temporary, checkpoint_dir / POINTER_NAME)
    except BaseException:
        remove(temporary)
        raise
    finally:
        _in_progress.discard(temporary.absolute())
    operations.current().sync_directory(checkpoint_dir)


def manifest_or_none(directory: Path) -> Manifest | None:
    """Return the manifest; None where there is none, or none that can be trusted."""
    try:
        return read_manifest(directory)
    except CheckpointMismatchError:
        return None

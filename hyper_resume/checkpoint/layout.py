"""Names on disk, completeness, the pointer, and the way from staging to commit.

``checkpoint_dir/`` holds ``latest_checkpoint_iteration.txt``, step directories ``global_step_N/`` and ``.staging/`` for
saves in progress. A step directory appears by one rename, so a save that dies leaves nothing under a final name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import shutil
import uuid
from pathlib import Path

from hyper_resume.errors import CheckpointNotFoundError, describe

logger = logging.getLogger(__name__)

POINTER_NAME = "latest_checkpoint_iteration.txt"
STAGING_NAME = ".staging"
METADATA_NAME = ".metadata"
_REPLACED_SUFFIX = ".replaced"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_STEP_DIRECTORY = re.compile(r"global_step_(0|[1-9][0-9]*)")
# 18 digits outlast any training run, and keep a damaged pointer from making a number or a file name that is too long.
_POINTER = re.compile(r"[0-9]{1,18}")

# Staging directories of saves that this process has begun and not ended: a sweep must not take them for leftovers.
_in_progress: set[Path] = set()


def step_directory_name(global_step: int) -> str:
    """Return ``global_step_N``."""
    return f"global_step_{global_step}"


def parse_step(name: str) -> int | None:
    """Return N for exactly ``global_step_N``, None for anything else (``global_step_10_old``, ``my_global_step_10``)."""
    match = _STEP_DIRECTORY.fullmatch(name)
    return int(match.group(1)) if match else None


def is_complete(directory: Path) -> bool:
    """True when ``.metadata``, which is written last, is there and not empty (a power cut can leave it with 0 bytes)."""
    marker = directory / METADATA_NAME
    return marker.is_file() and marker.stat().st_size > 0


def find_latest(checkpoint_dir: Path) -> Path | None:
    """Return the newest complete step directory: by the pointer, else by a scan for the highest step.

    Returns:
        None where nothing was ever published (no pointer, no complete step directory).

    Raises:
        CheckpointNotFoundError: a pointer is there, so something was published, yet no complete step directory is; or
            ``checkpoint_dir`` is a file.
    """
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
    pointer = checkpoint_dir / POINTER_NAME
    pointed, complaint = _follow_pointer(pointer)
    if pointed is not None:
        return pointed
    if complaint:
        logger.warning("%s; scanning %s for the newest complete checkpoint instead", complaint, checkpoint_dir)
    found = _scan(checkpoint_dir)
    if found is None and complaint:
        raise CheckpointNotFoundError(
            describe(
                "the pointer shows that a checkpoint was published, but none is complete",
                where=str(checkpoint_dir),
                expected="at least one global_step_N directory with its .metadata",
                found=complaint,
                do=f"restore the missing directory, or delete {POINTER_NAME} to start from scratch on purpose",
            )
        )
    return found


def _follow_pointer(pointer: Path) -> tuple[Path | None, str]:
    """Return the complete directory that the pointer names, or None and what is wrong with it ("" for no pointer)."""
    try:
        text = pointer.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None, ""
    except (OSError, UnicodeDecodeError) as error:
        return None, f"pointer {pointer} can't be read ({error})"
    if not _POINTER.fullmatch(text):
        return None, f"pointer {pointer} holds {text[:40]!r}, which is no step number"
    target = pointer.parent / step_directory_name(int(text))
    if not is_complete(target):
        state = "is incomplete (no usable .metadata)" if target.is_dir() else "does not exist"
        return None, f"pointer {pointer} names {target.name}, which {state}"
    return target, ""


def _scan(checkpoint_dir: Path) -> Path | None:
    if not checkpoint_dir.is_dir():
        return None
    newest: tuple[int, Path] | None = None
    for entry in checkpoint_dir.iterdir():
        step = parse_step(entry.name)
        if step is None or not entry.is_dir():
            continue
        if not is_complete(entry):
            logger.warning("skipping %s: incomplete (no usable .metadata)", entry)
        elif newest is None or step > newest[0]:
            newest = (step, entry)
    return newest[1] if newest else None


def new_staging_directory(target: Path) -> Path:
    """Create and return an empty directory for one attempt at saving ``target``."""
    staging = target.parent / STAGING_NAME / f"{target.name}.{uuid.uuid4().hex[:12]}"
    staging.mkdir(parents=True)
    _in_progress.add(staging.absolute())
    return staging


def sweep_staging(checkpoint_dir: Path) -> None:
    """Clear what dead saves left under ``.staging``. Called before a run's first save, when no other run saves here.

    A complete step directory that had stepped aside for a save which never took its place is put back; all else is
    deleted.
    """
    staging = checkpoint_dir / STAGING_NAME
    if not staging.is_dir():
        return
    for leftover in sorted(staging.iterdir()):
        if leftover.absolute() in _in_progress:
            continue
        target = checkpoint_dir / leftover.name.split(".", 1)[0]
        if leftover.name.endswith(_REPLACED_SUFFIX) and is_complete(leftover) and not target.exists():
            logger.warning("putting %s back: the save that was to replace it did not finish", target)
            leftover.rename(target)
        else:
            logger.warning("removing %s, left by a save that did not finish", leftover)
            _remove(leftover)


def discard(staging: Path) -> None:
    """Delete what a save that has ended left under ``.staging``."""
    _remove(staging)
    _in_progress.discard(staging.absolute())


def _remove(path: Path) -> None:
    """Delete a file, a link or a tree; what can't be deleted now stays for the next sweep."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def commit(staging: Path, target: Path) -> None:
    """Make the finished ``staging`` directory visible as ``target`` by one rename.

    A directory of an earlier attempt at the same step changes places with it and is deleted last, so that there is one whole
    copy under the name at any moment. Where the file system can't exchange two names, the earlier one steps aside first:
    stopping between the two renames then leaves both copies under ``.staging``, from where :func:`sweep_staging` puts the
    earlier one back.
    """
    for directory in (staging, *(entry for entry in staging.rglob("*") if entry.is_dir())):
        _fsync_directory(directory)
    aside: Path | None = None
    if not (target.exists() or target.is_symlink()):
        staging.rename(target)
    elif _exchange(staging, target):
        aside = staging
    else:
        aside = staging.with_name(f"{staging.name}{_REPLACED_SUFFIX}")
        target.rename(aside)
        staging.rename(target)
    _in_progress.discard(staging.absolute())
    _fsync_directory(target.parent)
    if aside is not None:
        _remove(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths change places in one step (Linux, ``renameat2``); False where kernel or file system can't."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def write_pointer(checkpoint_dir: Path, global_step: int) -> None:
    """Replace the pointer atomically: write a temporary, fsync it, rename it over the old one, fsync the directory.

    The temporary stands under ``.staging``, where the next run's sweep finds it if this process is killed.
    """
    staging = checkpoint_dir / STAGING_NAME
    staging.mkdir(parents=True, exist_ok=True)
    temporary = staging / f"{POINTER_NAME}.{uuid.uuid4().hex[:12]}"
    _in_progress.add(temporary.absolute())
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(f"{global_step}\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(checkpoint_dir / POINTER_NAME)
    finally:
        discard(temporary)
    _fsync_directory(checkpoint_dir)


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

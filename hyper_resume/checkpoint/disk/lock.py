"""One writer a root: two runs that save into one directory would sweep, point and delete over each other.

The lock is the kernel's (``flock``), so it ends with the process that holds it, however that dies; what stands in the file only
tells a human who it is. (``lockf`` would be lost as soon as anything in this process reads the file and closes it, as a copy of
the root does.) Where a file system has no locks, a warning says that nothing guards the root.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from hyper_resume.errors import CheckpointLockedError, describe

logger = logging.getLogger(__name__)

LOCK_NAME = ".writer.lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
# Kept open for the process's life.
_held: dict[tuple[int, int], int] = {}


def acquire(checkpoint_dir: Path) -> None:
    """Take the root for this process, until it ends; again and again is fine.

    Raises:
        CheckpointLockedError: another process has it; says which, as far as the file tells.
    """
    path = checkpoint_dir / LOCK_NAME
    if _is_held(path):
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            logger.warning("%s has no file locks: nothing keeps a second run from saving there", checkpoint_dir)
        elif error.errno in (errno.EACCES, errno.EAGAIN):
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise _locked(path, holder) from error
        else:
            os.close(descriptor)
            raise
    status = os.fstat(descriptor)
    _held[status.st_dev, status.st_ino] = descriptor
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(_owner()).encode() + b"\n", 0)


def _is_held(path: Path) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return (status.st_dev, status.st_ino) in _held


def _owner() -> dict[str, str | int]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _locked(path: Path, holder: str) -> CheckpointLockedError:
    return CheckpointLockedError(
        describe(
            "another run saves into this checkpoint_dir",
            where=str(path),
            expected="one run at a time",
            found=holder or "a process that does not say who it is",
            do="end that run (a rank may have outlived its launcher), or set another checkpoint.checkpoint_dir",
        )
    )


def release_after_fork() -> None:
    """A forked child holds none of its parent's locks: with its copy left open the lock would outlive the parent."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=release_after_fork)


def describe_holder(checkpoint_dir: Path) -> str:
    """Return what the lock file says of the process that holds the root now; "" where none does.

    Raises:
        OSError: the file can't be opened.
    """
    path = checkpoint_dir / LOCK_NAME
    if _is_held(path):
        return json.dumps(_owner())
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return ""
        return os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "a process that does not say who it is"
    finally:
        os.close(descriptor)
    return ""


def supports_locks(directory: Path) -> bool:
    """Try whether files of this directory can be locked; leaves a file there."""
    descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    finally:
        os.close(descriptor)
    return True

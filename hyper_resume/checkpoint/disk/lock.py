"""A file lock that lets only one run at a time save to a root. Two runs would delete each other's files and pointer.

It is a kernel lock (``flock``), so it ends with the process that holds it, however the process ends. The content of the file
only tells a human who holds it. (``lockf`` would be released as soon as this process opens and closes the file elsewhere, for
example to copy the root.) If the file system has no locks, a warning says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from hyper_resume.checkpoint.disk import operations
from hyper_resume.errors import CheckpointLockedError, CheckpointSaveError, describe, explained

logger = logging.getLogger(__name__)

LOCK_NAME = ".writer.lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_TRIES, _PAUSE_SECONDS = 3, 0.01
# (device, inode) -> descriptor of a locked file; kept open until the process ends.
_held: dict[tuple[int, int], int] = {}


def acquire(checkpoint_dir: Path) -> None:
    """Lock the root for this process until it ends. Repeated calls do nothing.

    Raises:
        CheckpointLockedError: another process holds the lock; the message has what the file says about it.
        NotADirectoryError: ``checkpoint_dir`` is something else.
        CheckpointSaveError: the lock file can't be opened or written, or is not a regular file.
    """
    path = checkpoint_dir / LOCK_NAME
    if checkpoint_dir.exists() and not checkpoint_dir.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    do = "fix the cause (permissions, a read-only mount, something else of this name), or set another checkpoint.checkpoint_dir"
    with explained("the lock of checkpoint_dir can't be taken", path, do, kind=CheckpointSaveError):
        if not _is_held(path):
            _acquire(checkpoint_dir, path)


def _acquire(checkpoint_dir: Path, path: Path) -> None:
    descriptor = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        _lock_exclusively(descriptor)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            logger.warning("%s has no file locks: a second run that saves there is not refused", checkpoint_dir)
        elif error.errno in (errno.EACCES, errno.EAGAIN):
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise _locked(path, holder) from error
        else:
            os.close(descriptor)
            raise
    status = os.fstat(descriptor)
    if not _has_name(path, status):
        os.close(descriptor)
        acquire(checkpoint_dir)
        return
    _held[status.st_dev, status.st_ino] = descriptor
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(_owner()).encode() + b"\n", 0)


def _open(path: Path, flags: int) -> int:
    """Open the lock file, without waiting for the other end of a FIFO.

    Raises:
        OSError: it can't be opened, or is not a regular file (``EINVAL``).
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def _lock_exclusively(descriptor: int) -> None:
    """Take the lock. :func:`describe_holder` of another process has it for a moment, and is no run that saves.

    Raises:
        OSError: another process has it, or there are no locks.
    """
    for _ in range(_TRIES - 1):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_PAUSE_SECONDS)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def held(checkpoint_dir: Path) -> Iterator[None]:
    """Hold the lock while the context lasts, and leave no lock file where there was none. For a command, not for a run.

    Raises:
        CheckpointLockedError: another process holds the lock.
    """
    path = checkpoint_dir / LOCK_NAME
    is_new, was_held = not path.exists(), _is_held(path)
    acquire(checkpoint_dir)
    try:
        yield
    finally:
        if not was_held:
            status = os.lstat(path)
            descriptor = _held.pop((status.st_dev, status.st_ino))
            if is_new:
                # Still locked: whoever has opened it meanwhile finds that it has lost its name, and makes a new one.
                operations.current().remove(path)
            os.close(descriptor)


def _is_held(path: Path) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return (status.st_dev, status.st_ino) in _held


def _has_name(path: Path, opened: os.stat_result) -> bool:
    """Whether the file that was opened still has its name: a command that held its lock may have deleted it."""
    try:
        return os.path.samestat(os.lstat(path), opened)
    except FileNotFoundError:
        return False


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
            found=holder or "an unknown process",
            do="end that run (a rank may have outlived its launcher), or set another checkpoint.checkpoint_dir",
        )
    )


def release_after_fork() -> None:
    """Close the lock files in a forked child, which does not own the locks: an open copy would keep them after the parent."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=release_after_fork)


def describe_holder(checkpoint_dir: Path) -> str:
    """Return what the lock file says about the process that holds the lock now; "" if none does.

    Raises:
        OSError: the file can't be opened, or is not a regular file.
    """
    path = checkpoint_dir / LOCK_NAME
    if _is_held(path):
        return json.dumps(_owner())
    try:
        # For reading, so that it works where this user may only read.
        descriptor = _open(path, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return ""
        return os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "an unknown process"
    finally:
        os.close(descriptor)
    return ""


def supports_locks(directory: Path) -> bool:
    """Test whether files of this directory can be locked; leaves the lock file there."""
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

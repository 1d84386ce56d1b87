"""Looking at directories that a run beside this process may rename, replace or delete at any moment.

A save commits a step directory by one rename, and retention moves one away before it deletes its files. So whatever looks
strange while a directory is looked at is compared with what happened to the directory: only of one that stayed the same can it
be said that it is damaged.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from hyper_resume.errors import CheckpointNotFoundError, HyperResumeError, describe

T = TypeVar("T")

MAX_LOOKS = 20
"""How often something is looked at that changes each time; the last look counts, whatever it shows."""

Identity = tuple[int, ...]


class DirectoryVanishedError(CheckpointNotFoundError):
    """A step directory was deleted, or moved away to be deleted, while it was read."""


def identity(path: Path) -> Identity | None:
    """Return device, inode and times of what ``path`` leads to; None if there is nothing.

    They change if it is replaced, and a directory's also if it is renamed or an entry of it is.

    Raises:
        OSError: it can't be accessed.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def unchanged(directory: Path, look: Callable[[], T]) -> T:
    """Return the result of ``look``, which reads one step directory, and read it again if it was replaced meanwhile.

    Raises:
        DirectoryVanishedError: there is no such directory, or none any more.
        Exception: what ``look`` raises of a directory that stayed the same.
    """
    for left in reversed(range(MAX_LOOKS)):
        before = identity(directory)
        if before is None:
            break
        failure: Exception | None = None
        try:
            found = look()
        except (HyperResumeError, OSError) as error:
            failure = error
        if identity(directory) == before or not left:
            if failure is not None:
                raise failure
            return found
    raise vanished_error(directory)


def vanished_error(directory: Path) -> DirectoryVanishedError:
    """Return the error for a step directory that is not there any more."""
    return DirectoryVanishedError(
        describe(
            "the step directory was deleted while it was read",
            where=str(directory),
            expected="a directory that stays where it is",
            found="no such directory",
            do="nothing, if a run saves there and keeps only its newest checkpoints; name another step",
        )
    )


def files_below(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path below ``directory``, its ``lstat``) of everything in it but directories; what vanishes is left out.

    Raises:
        OSError: a directory can't be read.
    """
    pending = [directory]
    while pending:
        folder = pending.pop()
        for entry in entries_of(folder):
            if entry.is_dir(follow_symlinks=False):
                pending.append(folder / entry.name)
                continue
            try:
                yield (folder / entry.name).relative_to(directory).as_posix(), entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue


def file_sizes(directory: Path) -> list[int]:
    """Return the sizes in bytes of all regular files below ``directory``; what vanishes is left out.

    Raises:
        OSError: a directory can't be read.
    """
    return [status.st_size for _, status in files_below(directory) if stat.S_ISREG(status.st_mode)]


def entries_of(directory: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a directory, sorted by name; none if there is no such directory.

    Raises:
        OSError: it can't be read.
    """
    try:
        with os.scandir(directory) as found:
            return sorted(found, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []

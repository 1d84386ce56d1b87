"""Errors of the library: what happened, where, expected against found, what to do.

Every class derives from the builtin that the specification names for its situation (chapter 9.3), so callers may catch
either. All of them are built from one finished message, because an error must survive a trip from one rank to another
(see :mod:`hyper_resume.collective`) as a class name and a text.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The kernel has looked, and this is what it found: no such file, another kind of file, a link, or a name that can't exist.
# EFBIG is this library's own, for a file that is larger than any it writes.
_FOUND_OUT = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EFBIG, errno.EINVAL)
)
_MOST_PRINTED = 10_000
DO_READABLE = "fix the cause (permissions, a mount, the length of a name), or correct the path"
"""What to do about a path that can't be read."""


class HyperResumeError(Exception):
    """Base of every error that this library raises itself."""


class ConfigError(HyperResumeError, ValueError):
    """The configuration is wrong (unknown field, wrong type, impossible combination), or a trainer lacks attributes."""


class CheckpointNotFoundError(HyperResumeError, FileNotFoundError):
    """A checkpoint, or a required part of one, is not on disk."""


class CheckpointUnreadableError(HyperResumeError, OSError):
    """A checkpoint could not be read, although it was tried again; nothing says that it is damaged."""


class CheckpointMismatchError(HyperResumeError, RuntimeError):
    """The checkpoint and the running job do not fit together."""


class InsufficientMemoryError(HyperResumeError, MemoryError):
    """There is not enough memory; nothing is known to be wrong with a checkpoint."""


class CheckpointSaveError(HyperResumeError, RuntimeError):
    """A save failed; the message says whether it was committed before that. Earlier checkpoints are untouched."""


class CheckpointLockedError(CheckpointSaveError):
    """Another run writes to the same checkpoint_dir."""


class CheckpointExistsError(CheckpointSaveError):
    """A run was to start anew in a checkpoint_dir that holds another run's checkpoints."""


class PreemptedError(HyperResumeError, RuntimeError):
    """A signal stopped training after a save; start it again to resume."""


class StateNotPlainError(HyperResumeError, TypeError):
    """A bucket holds an object that could only be read back by running code, so it is not saved."""


class ReplicaMismatchError(HyperResumeError, RuntimeError):
    """Copies that must be equal on several ranks differ."""


class TrainingIncompleteError(HyperResumeError, RuntimeError):
    """Training ended before its planned number of steps."""


class UnsupportedError(HyperResumeError, RuntimeError):
    """A combination that is not supported; the message says which part of it, and what works instead."""


def may_pass(error: BaseException) -> bool:
    """Whether a later try of a read may succeed that failed so: the error says nothing about what is on the disk."""
    if not isinstance(error, OSError) or isinstance(error, HyperResumeError):
        return False
    return error.errno is not None and error.errno not in _FOUND_OUT


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is Python's, torch's or the system's word that there is not enough memory."""
    is_torch = type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
    return is_torch or isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def insufficient_memory_error(where: str, error: BaseException) -> InsufficientMemoryError:
    """Return the error of an action that did not get the memory it needs; ``error`` is its cause."""
    if isinstance(error, InsufficientMemoryError):
        return error
    return InsufficientMemoryError(
        describe(
            "there is not enough memory",
            where=where,
            found=" ".join(f"{type(error).__name__}: {error}".split())[:300],
            do="free memory, or raise the limit of this process or container; nothing is known to be wrong with the checkpoint",
        )
    )


_REMEDIES = {
    errno.ENOSPC: "free space on that file system",
    errno.EDQUOT: "free space, or ask for a larger quota",
    errno.EACCES: "fix the permissions",
    errno.EPERM: "fix the permissions",
    errno.EROFS: "mount it writable, or use another directory",
    errno.ENOTDIR: "correct the path: a part of it is a file",
    errno.EISDIR: "move the directory away that has the name of a file",
    errno.EEXIST: "move away what has this name",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.ELOOP: "correct the path: a link in it leads to itself, or is not followed",
    errno.EXDEV: "let .staging be a plain directory of the same file system",
    errno.ESTALE: "mount the file system again",
    errno.EIO: "look at the device and the kernel's log, or use another file system",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "free memory",
}


def remedy(error: OSError, otherwise: str) -> str:
    """Return what to do about an error of the system; ``otherwise`` for one that is not known."""
    return _REMEDIES.get(error.errno or 0, otherwise)


def describe(what: str, *, where: str = "", expected: str = "", found: str = "", do: str = "") -> str:
    """Compose one message in the order a reader needs it.

    Args:
        what: the failure in one clause.
        where: path, step, rank or field that it concerns.
        expected: what should have been there.
        found: what was there instead.
        do: what the reader can do about it.
    """
    parts = [what]
    if where:
        parts.append(f"where: {where}")
    if expected:
        parts.append(f"expected: {expected}")
    if found:
        parts.append(f"found: {found}")
    if do:
        parts.append(f"what to do: {do}")
    return "; ".join(parts)


@contextmanager
def explained(
    what: str,
    where: Path | str,
    do: str = DO_READABLE,
    *,
    kind: type[HyperResumeError] = CheckpointNotFoundError,
) -> Iterator[None]:
    """Raise an ``OSError`` of the block as ``kind``, with :func:`describe`; errors of this library pass unchanged."""
    try:
        yield
    except HyperResumeError:
        raise
    except OSError as error:
        text = f"{type(error).__name__}: {error.strerror or error}"
        at = f" ({error.filename})" if error.filename is not None and str(error.filename) != str(where) else ""
        raise kind(describe(what, where=str(where), found=text + at, do=do)) from error


def printable(text: str, most: int = _MOST_PRINTED) -> str:
    """Return ``text`` on one line for a terminal, with at most ``most`` of its characters.

    What a checkpoint holds may be forged: a control character is shown as an escape, so that it can't change what the terminal
    shows, and so is a character that can't be encoded.
    """
    more = f"... and {len(text) - most:,} more characters" if len(text) > most else ""
    shown = text[:most]
    if not shown.isprintable():
        shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in shown)
    return shown + more

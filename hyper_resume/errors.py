"""Errors of the library: what happened, where, expected against found, what to do.

Every class derives from the builtin that the specification names for its situation (chapter 9.3), so callers may catch
either. All of them are built from one finished message, because an error must survive a trip from one rank to another
(see :mod:`hyper_resume.collective`) as a class name and a text.
"""

from __future__ import annotations

import errno


class HyperResumeError(Exception):
    """Base of every error that this library raises itself."""


class ConfigError(HyperResumeError, ValueError):
    """The configuration is wrong (unknown field, wrong type, impossible combination), or a trainer lacks attributes."""


class CheckpointNotFoundError(HyperResumeError, FileNotFoundError):
    """A checkpoint, or a required part of one, is not on disk."""


class CheckpointMismatchError(HyperResumeError, RuntimeError):
    """The checkpoint and the running job do not fit together."""


class InsufficientMemoryError(HyperResumeError, MemoryError):
    """There is not enough memory; nothing is known to be wrong with a checkpoint."""


class CheckpointSaveError(HyperResumeError, RuntimeError):
    """A save failed; the message says whether it was committed before that. Earlier checkpoints are untouched."""


class CheckpointLockedError(CheckpointSaveError):
    """Another run writes to the same checkpoint_dir."""


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

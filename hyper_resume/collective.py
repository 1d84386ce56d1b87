"""Collectives that share decisions and errors among all ranks.

If one rank fails alone, the others wait in the next collective until the process group's timeout. So every action that may
fail on one rank only (reading its file, checking its tensors) runs inside :func:`on_all_ranks`: either all ranks return, or all
ranks raise the same error.

All functions work without a process group too, as in a world of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from hyper_resume import errors

T = TypeVar("T")

# The classes that an error keeps on other ranks. An error of any other class is raised there as a RuntimeError.
_KNOWN_ERRORS: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (
        *[value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)],
        FileNotFoundError,
        PermissionError,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        RuntimeError,
    )
}


def is_distributed() -> bool:
    """True if a default process group exists."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's global rank; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait for every rank of ``group`` (None: all ranks)."""
    if is_distributed():
        dist.barrier(group=group)


def broadcast(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's ``value`` on every rank."""
    if not is_distributed():
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    result: T = box[0]
    return result


def all_gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the ``value`` of every rank, in rank order, on every rank."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_all_ranks(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on every rank. If it fails on any rank, raise the error of the lowest failing rank on all ranks.

    ``action`` must not call a collective: a rank that failed before it would be missing there.

    1. every rank: runs ``action`` and stores its result or its error;
    2. every rank: gathers (error class, message) from all ranks;
    3. every rank: returns its own result, or raises the error of the lowest failing rank.

    Raises:
        Exception: the lowest failing rank's error. It keeps its class if that is one of this library's or a common builtin;
            otherwise it is a ``RuntimeError``. With several ranks, the message names the rank.
    """
    result: T | None = None
    failure: BaseException | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001  any error must be raised on the other ranks too
        failure = _named(error)
    raise_on_all_ranks(failure, group)
    return result  # type: ignore[return-value]  # no failure on any rank, so action returned a T


def raise_on_all_ranks(failure: BaseException | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise the lowest failing rank's ``failure`` on every rank; return if no rank has one.

    Every rank calls it once, with its own error or None.
    """
    if not is_distributed():
        if failure is not None:
            raise failure
        return
    _raise_lowest_rank_error(all_gather(None if failure is None else _describe_error(failure), group), failure)


def _raise_lowest_rank_error(reports: Sequence[tuple[list[str], str] | None], failure: BaseException | None) -> None:
    """Raise the error of the lowest rank that reported one, if any; ``failure`` is this rank's own error, its cause."""
    for failing_rank, found in enumerate(reports):
        if found is None:
            continue
        names, message = found
        failing = [str(index) for index, other in enumerate(reports) if other is not None]
        where = (
            f" [rank {failing_rank}]"
            if len(failing) == 1
            else f" [ranks {', '.join(failing)}; message of {failing_rank}]"
        )
        known = next((_KNOWN_ERRORS[name] for name in names if name in _KNOWN_ERRORS), RuntimeError)
        raise known(message + where) from failure


def _named(error: Exception) -> Exception:
    """Return ``error``; a lack of memory, for which Python, torch and the system each have a class, as this library's error."""
    if not errors.is_lack_of_memory(error) or isinstance(error, errors.HyperResumeError):
        return error
    found = errors.insufficient_memory_error("", error)
    found.__cause__ = error
    return found


def _describe_error(failure: BaseException) -> tuple[list[str], str]:
    """Return what is sent of an error: the names of its class and base classes, nearest first, and its message.

    With the base classes, an error of a rare class (``NotADirectoryError``) is raised as its nearest known base (``OSError``).
    """
    # str() of a KeyError is the repr of its key, which would be quoted a second time on the other ranks.
    message = str(failure.args[0]) if isinstance(failure, KeyError) and len(failure.args) == 1 else str(failure)
    return [cls.__name__ for cls in type(failure).__mro__], message


def on_rank_zero(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on rank 0 only, and return its result, or raise its error, on every rank.

    Used to read the disk on one rank only: on a network file system, two ranks may see different states.
    """
    result: T | None = None
    failure: Exception | None = None
    if rank() == 0:
        try:
            result = action()
        except Exception as error:  # noqa: BLE001  any error must be raised on the other ranks too
            failure = _named(error)
    if not is_distributed() and failure is not None:
        raise failure
    # One broadcast for both: the error or the result.
    report, result = broadcast((None if failure is None else _describe_error(failure), result), group)
    _raise_lowest_rank_error([report], failure)
    return result  # type: ignore[return-value]  # rank 0 had no failure, so its result is a T


def new_cpu_group() -> dist.ProcessGroup | None:
    """Create a gloo group of all ranks with the default group's timeout; None without a process group.

    By default, ``new_group`` would use gloo's own timeout of 30 minutes instead of the job's.
    """
    if not is_distributed():
        return None
    world = dist.group.WORLD
    assert world is not None  # is_distributed
    backend = world._get_backend(next(iter(world._device_types)))
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=backend.options._timeout)
    return group

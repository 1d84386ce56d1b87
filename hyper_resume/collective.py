"""Agreement between ranks: one decision, or one error, on all of them.

A rank that fails alone leaves the others waiting in the next collective until the process group's timeout. Every step
that may fail on one rank only (reading its own file, checking its own tensors) therefore runs inside :func:`on_all_ranks`,
which makes the outcome common: all ranks return, or all ranks raise the same error.

All functions work without a process group; a single process is then a world of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from hyper_resume import errors

T = TypeVar("T")

# What `agree` can raise again on another rank under its own class. Anything else becomes a RuntimeError.
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
    """True when a default process group exists."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's global rank; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait for every rank of ``group`` (default: all)."""
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
    """Run ``action`` on every rank; if it fails on any, raise the first failing rank's error on all.

    ``action`` itself must not enter a collective: a rank that failed before it would be missing there.

    1. every rank: runs ``action`` and keeps its result or its error;
    2. every rank: gathers (error class, message) from all ranks;
    3. every rank: returns its own result, or raises the error of the lowest failing rank.

    Raises:
        Exception: the lowest failing rank's error, under its own class when that class is the library's or a common
            builtin, else as ``RuntimeError``. The message names the rank in a world of several.
    """
    result: T | None = None
    failure: BaseException | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must hear of it
        failure = error
    raise_on_all_ranks(failure, group)
    return result  # type: ignore[return-value]  # no failure on any rank, so action returned a T


def raise_on_all_ranks(failure: BaseException | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise the lowest failing rank's ``failure`` on every rank; return when no rank has one.

    Every rank calls it once, with its own failure or None.
    """
    if not is_distributed():
        if failure is not None:
            raise failure
        return
    _raise_lowest_rank_error(all_gather(None if failure is None else _describe_error(failure), group), failure)


def _raise_lowest_rank_error(reports: Sequence[tuple[list[str], str] | None], failure: BaseException | None) -> None:
    """Raise what the lowest rank reported, if any did; ``failure`` is this rank's own."""
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


def _describe_error(failure: BaseException) -> tuple[list[str], str]:
    """Return what travels: the names of the error's class and its bases, nearest first, and its message.

    The bases let a rarer subclass (``NotADirectoryError``) arrive as the nearest class that is known (``OSError``).
    """
    # str() of a KeyError is the repr of its key; as a message it would be quoted again on arrival.
    message = str(failure.args[0]) if isinstance(failure, KeyError) and len(failure.args) == 1 else str(failure)
    return [cls.__name__ for cls in type(failure).__mro__], message


def on_rank_zero(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on rank 0 only and return its result, or raise its error, on every rank.

    One rank looks at the disk, all ranks act on what it saw: two ranks that ask a network file system may get two answers.
    """
    result: T | None = None
    failure: Exception | None = None
    if rank() == 0:
        try:
            result = action()
        except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must hear of it
            failure = error
    if not is_distributed() and failure is not None:
        raise failure
    # One round for both: what went wrong travels in place of the result.
    report, result = broadcast((None if failure is None else _describe_error(failure), result), group)
    _raise_lowest_rank_error([report], failure)
    return result  # type: ignore[return-value]  # rank 0 had no failure, so its result is a T


def new_cpu_group() -> dist.ProcessGroup | None:
    """Make a gloo group of all ranks with the default group's time limit; None without a process group.

    Left to itself ``new_group`` takes gloo's own 30 minutes, however short the limit that the job was started with.
    """
    if not is_distributed():
        return None
    world = dist.group.WORLD
    assert world is not None  # is_distributed
    backend = world._get_backend(next(iter(world._device_types)))
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=backend.options._timeout)
    return group

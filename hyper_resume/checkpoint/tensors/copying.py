"""Work on many tensors at memory speed: in several threads, and small ones many at a time."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hyper_resume import digest

T = TypeVar("T")
R = TypeVar("R")

MOST_THREADS = 4
# Smaller ones cost more to hand to a thread than to copy.
_SMALL_BYTES = 256 << 10
# What stays in a processor's own memory between two looks at it.
_AT_HAND_BYTES = 2 << 20


def in_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return ``function`` of each item, in order, computed by a few threads, of which this is one.

    Raises:
        Exception: whatever ``function`` raised, of the first item that it failed for; items behind it may be left undone.
    """
    others = min(MOST_THREADS, os.cpu_count() or 1, len(items)) - 1
    if others < 1:
        return [function(item) for item in items]
    found: dict[int, R] = {}
    failed: dict[int, BaseException] = {}
    waiting = deque(enumerate(items))

    def work(_: int) -> None:
        # Each takes the next item by itself: a task an item costs more than most items do.
        while not failed:
            try:
                place, item = waiting.popleft()
            except IndexError:
                return
            try:
                found[place] = function(item)
            except BaseException as error:  # noqa: BLE001  raised again below
                failed[place] = error

    with ThreadPoolExecutor(others, thread_name_prefix="hyper_resume-io") as pool:
        helping = [start(pool, work, number) for number in range(others)]
        work(others)
        for future in helping:
            future.result()
    if failed:
        raise failed[min(failed)]
    return [found[place] for place in range(len(items))]


def start(pool: ThreadPoolExecutor, function: Callable[[T], R], item: T) -> Future[R]:
    """Have it computed in ``pool``, or here and now where no thread can be started (any more); once in any case.

    A pool takes a task before it starts a thread for it, so one that was refused may run all the same, later.
    """
    done: Future[R] = Future()
    left = [item]

    def run() -> None:
        try:
            mine = left.pop()
        except IndexError:
            return
        try:
            done.set_result(function(mine))
        except BaseException as error:  # noqa: BLE001  raised again by whoever asks for the result
            done.set_exception(error)

    try:
        pool.submit(run)
    except RuntimeError:
        run()
    return done


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the collector of cycles off while many objects are made that all stay: it would go through them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair into the first; of sharded ones this rank's part.

    Tensors that share memory are written in the order of ``pairs``, by one thread.
    """
    with torch.no_grad():
        whole = [(_local(target), _local(source)) for target, source in pairs]
    small: list[tuple[torch.Tensor, torch.Tensor]] = []
    large: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for group, size in _by_memory(whole):
        small.extend(group) if size < _SMALL_BYTES else large.append(group)
    in_threads(_copy_in_order, large)
    _copy_many(small)


def copy_and_digest(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bytes]:
    """Copy the second of each pair into the first, none of them sharded; return the digest of each one's bytes.

    Of those on the CPU it is taken of what was copied, not of the copy, and while the processor has it at hand. Of others it is
    the copy's: to look at them means to copy them.

    Args:
        pairs: of equal shapes and types; no two of the first share memory, and those are contiguous.
    """
    found: dict[int, bytes] = {}
    large: dict[int, tuple[Any, Any]] = {}
    other: list[int] = []
    small: list[int] = []
    for place, (target, source) in enumerate(pairs):
        if target.nbytes < _SMALL_BYTES:
            small.append(place)
        elif source.is_cpu and source.layout is torch.strided and source.is_contiguous():
            # Made here: each thread would hold up the other with it.
            large[place] = digest.bytes_of(target), digest.bytes_of(source)
        else:
            other.append(place)
    found.update(zip(large, in_threads(_copy_array, list(large.values())), strict=True))
    found.update(zip(other, in_threads(lambda place: _copy_other(*pairs[place]), other), strict=True))
    _copy_many([pairs[place] for place in small])
    for place in small:
        target, source = pairs[place]
        found[place] = digest.data_digest(digest.bytes_of(source if source.is_cpu else target))
    return [found[place] for place in range(len(pairs))]


def _copy_other(target: torch.Tensor, source: torch.Tensor) -> bytes:
    # Whether gradients are recorded is each thread's own setting.
    with torch.no_grad():
        target.copy_(source)
    return digest.data_digest(digest.bytes_of(source if source.is_cpu else target))


def _copy_array(arrays: tuple[Any, Any]) -> bytes:
    # One may be flat already, and the other in its shape.
    there, here = (memoryview(array).cast("B") for array in arrays)
    hasher = digest.FileHasher()
    for begin in range(0, len(here), _AT_HAND_BYTES):
        part = np.frombuffer(here[begin : begin + _AT_HAND_BYTES], np.uint8)
        hasher.update(part)
        np.copyto(np.frombuffer(there[begin : begin + _AT_HAND_BYTES], np.uint8), part)
    return hasher.digest()


def in_form_of(live: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return ``local``, this rank's part, as a tensor sharded as ``live`` is; itself where ``live`` is not sharded.

    ``DTensor.from_local`` would move it to the mesh's device.
    """
    if not isinstance(live, DTensor):
        return local
    return DTensor(local, live._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _by_memory(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> list[tuple[list[tuple[torch.Tensor, torch.Tensor]], int]]:
    """Put together what shares memory, also where several storages lie over the same bytes, as NumPy makes them.

    Returns:
        groups of pairs, each with the bytes of its largest storage.
    """
    storages = [target.untyped_storage() for target, _ in pairs]
    spans = sorted((storage.data_ptr(), storage.nbytes(), index) for index, storage in enumerate(storages))
    groups: list[list[int]] = []
    sizes: list[int] = []
    end = 0
    for begin, size, index in spans:
        if not groups or begin >= end:
            groups.append([index])
            sizes.append(size)
        else:
            groups[-1].append(index)
            sizes[-1] = max(sizes[-1], size)
        end = max(end, begin + size)
    return [([pairs[index] for index in sorted(group)], size) for group, size in zip(groups, sizes, strict=True)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copy_in_order(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    # Whether gradients are recorded is each thread's own setting.
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


def _copy_many(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])

"""Copies many tensors, and digests them, at the speed of memory: large ones in threads, small ones in one call."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hyper_resume import digest
from hyper_resume.checkpoint.tensors.threads import map_in_threads

# For smaller tensors, passing the work to a thread costs more than the copy.
_SMALL_BYTES = 256 << 10
# A piece of this size stays in the processor's cache between digesting and copying it.
_CACHED_BYTES = 2 << 20


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's garbage collector while many long-lived objects are created, which it would traverse again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def copy_tensors(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first; of sharded tensors, this rank's part.

    Targets that share memory are written in the order of ``pairs``, by one thread.
    """
    with torch.no_grad():
        whole = [(_local(target), _local(source)) for target, source in pairs]
    small: list[tuple[torch.Tensor, torch.Tensor]] = []
    large: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for group, size in _by_memory(whole):
        small.extend(group) if size < _SMALL_BYTES else large.append(group)
    map_in_threads(_copy_in_order, large)
    _copy_many(small)


def copy_and_digest(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bytes]:
    """Copy the second tensor of each pair into the first, none of them sharded; return the digest of each one's bytes.

    The digest is that of the source if it is on the CPU, computed while its bytes are in the cache. Otherwise it is that of
    the copy, because the source can only be read by copying it.

    Args:
        pairs: (target, source) of equal shape and dtype; targets are contiguous and share no memory.
    """
    found: dict[int, bytes] = {}
    large: dict[int, tuple[Any, Any]] = {}
    other: list[int] = []
    small: list[int] = []
    for place, (target, source) in enumerate(pairs):
        if target.nbytes < _SMALL_BYTES:
            small.append(place)
        elif source.is_cpu and source.layout is torch.strided and source.is_contiguous():
            # Converted here, because this holds the interpreter lock and would block the other threads.
            large[place] = digest.tensor_bytes(target), digest.tensor_bytes(source)
        else:
            other.append(place)
    found.update(zip(large, map_in_threads(_copy_array, list(large.values())), strict=True))
    found.update(zip(other, map_in_threads(lambda place: _copy_other(*pairs[place]), other), strict=True))
    _copy_many([pairs[place] for place in small])
    for place in small:
        target, source = pairs[place]
        found[place] = digest.data_digest(digest.tensor_bytes(source if source.is_cpu else target))
    return [found[place] for place in range(len(pairs))]


def _copy_other(target: torch.Tensor, source: torch.Tensor) -> bytes:
    # no_grad is a setting of each thread.
    with torch.no_grad():
        target.copy_(source)
    return digest.data_digest(digest.tensor_bytes(source if source.is_cpu else target))


def _copy_array(arrays: tuple[Any, Any]) -> bytes:
    # As flat bytes, because the two arrays may have different shapes.
    there, here = (memoryview(array).cast("B") for array in arrays)
    hasher = digest.FileHasher()
    for begin in range(0, len(here), _CACHED_BYTES):
        part = np.frombuffer(here[begin : begin + _CACHED_BYTES], np.uint8)
        hasher.update(part)
        np.copyto(np.frombuffer(there[begin : begin + _CACHED_BYTES], np.uint8), part)
    return hasher.digest()


def sharded_like(live: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return ``local``, this rank's part, as a DTensor that is sharded as ``live`` is; unchanged if ``live`` is not sharded.

    ``DTensor.from_local`` is not used, because it would move the tensor to the mesh's device.
    """
    if not isinstance(live, DTensor):
        return local
    return DTensor(local, live._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _by_memory(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> list[tuple[list[tuple[torch.Tensor, torch.Tensor]], int]]:
    """Group the pairs whose targets share memory; several storages may overlap, as with tensors made from NumPy views.

    Returns:
        (pairs, size in bytes of the largest storage) for each group.
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
    # no_grad is a setting of each thread.
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


def _copy_many(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])

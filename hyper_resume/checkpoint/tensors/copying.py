"""Work on many tensors at memory speed: in several threads, and small ones many at a time."""

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

# Smaller ones cost more to hand to a thread than to copy.
_SMALL_BYTES = 256 << 10
# What stays in a processor's own memory between two looks at it.
_AT_HAND_BYTES = 2 << 20


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the collector of cycles off while many objects are made that all stay: it would go through them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def copy_tensors(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair into the first; of sharded ones this rank's part.

    Tensors that share memory are written in the order of ``pairs``, by one thread.
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
    # Whether gradients are recorded is each thread's own setting.
    with torch.no_grad():
        target.copy_(source)
    return digest.data_digest(digest.tensor_bytes(source if source.is_cpu else target))


def _copy_array(arrays: tuple[Any, Any]) -> bytes:
    # One may be flat already, and the other in its shape.
    there, here = (memoryview(array).cast("B") for array in arrays)
    hasher = digest.FileHasher()
    for begin in range(0, len(here), _AT_HAND_BYTES):
        part = np.frombuffer(here[begin : begin + _AT_HAND_BYTES], np.uint8)
        hasher.update(part)
        np.copyto(np.frombuffer(there[begin : begin + _AT_HAND_BYTES], np.uint8), part)
    return hasher.digest()


def sharded_like(live: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
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

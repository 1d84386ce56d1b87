"""States to save: reproducible random tensors, and their comparison bit by bit.

Every tensor can be generated again from its index, so a load is verified without a second copy in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.protocol import BenchmarkError

State = dict[str, torch.Tensor]

_COLUMNS = 1024
_MOST_TENSORS = 144
_FEWEST_TENSORS = 4
_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Layout:
    """``count`` float32 tensors of shape ``shape``; the index of a tensor is its seed."""

    count: int
    shape: tuple[int, ...]

    @property
    def bytes_in_all(self) -> int:
        """Total bytes of all tensors."""
        return self.count * _FLOAT_BYTES * torch.Size(self.shape).numel()

    def names(self) -> list[str]:
        """Names like those of a model with layers."""
        return [f"layers.{index // 6}.part_{index % 6}.weight" for index in range(self.count)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor, generated one at a time."""
        for index, name in enumerate(self.names()):
            yield name, torch.rand(self.shape, generator=torch.Generator().manual_seed(index + 1))

    def state(self) -> State:
        """All tensors."""
        return dict(self.tensors())

    def zeros(self) -> State:
        """Return zeros of the same layout. They are written to once, so that their pages are mapped."""
        return {name: torch.zeros(self.shape).fill_(0) for name in self.names()}


def large(total_bytes: float) -> Layout:
    """Return up to 144 matrices of 1,024 columns, about ``total_bytes`` together, like those of a transformer."""
    count = max(_FEWEST_TENSORS, min(_MOST_TENSORS, int(total_bytes) // (1 << 20)))
    rows = max(1, round(total_bytes / (count * _COLUMNS * _FLOAT_BYTES)))
    return Layout(count=count, shape=(rows, _COLUMNS))


def small(count: int) -> Layout:
    """Return ``count`` vectors of 64 numbers."""
    return Layout(count=count, shape=(64,))


def sharded(layout: Layout, mesh: DeviceMesh) -> State:
    """Return the layout's tensors, each sharded along its rows over ``mesh``. Every rank must call this."""
    world = mesh.size()
    rows = -(-layout.shape[0] // world)
    start = mesh.get_local_rank() * rows
    return {
        name: DTensor.from_local(
            tensor[start : start + rows].clone(),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        for name, tensor in layout.tensors()
    }


def poison(state: Mapping[str, torch.Tensor]) -> None:
    """Overwrite every tensor, so that a load which restores nothing is noticed."""
    for tensor in state.values():
        _local(tensor).fill_(-1.0)


def check_equal(found: Mapping[str, torch.Tensor], layout: Layout, *, part: DeviceMesh | None = None) -> None:
    """Compare ``found``, or this rank's shard of it, bit by bit with the tensors of ``layout``.

    Raises:
        BenchmarkError: names differ, or a tensor differs in shape, dtype or a bit.
    """
    names = layout.names()
    if sorted(found) != sorted(names):
        raise BenchmarkError(f"restored {len(found)} tensors, saved {len(names)}, or under other names")
    for name, made in layout.tensors():
        expected = made
        if part is not None:
            rows = -(-layout.shape[0] // part.size())
            expected = made[part.get_local_rank() * rows :][:rows]
        if not _same_bits(_local(found[name]), expected):
            raise BenchmarkError(f"{name} was not restored as it was saved")


def memory_of(state: Mapping[str, torch.Tensor]) -> list[memoryview]:
    """Return the bytes of each tensor of this rank, in order, without a copy."""
    arrays: list[Any] = [_local(tensor).reshape(-1).view(torch.uint8).numpy() for tensor in state.values()]
    return [memoryview(array) for array in arrays]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))

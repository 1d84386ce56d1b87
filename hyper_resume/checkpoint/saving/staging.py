"""The copy of the state that an asynchronous save writes, in CPU memory that is reused from save to save.

Between saves the memory is kept, so a rank holds its state twice. Allocating it anew would cost more time than the copy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.tensor import DTensor

from hyper_resume.checkpoint.tensors.copying import copy_and_digest, sharded_like
from hyper_resume.checkpoint.tensors.flattening import Keys


def deep_copy(value: Any) -> Any:
    """Return a deep copy of plain values and tensors. ``copy.deepcopy`` refuses tensors that are part of an autograd graph."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple, set):
        return type(value)(deep_copy(item) for item in value)
    if isinstance(value, dict):
        return type(value)({key: deep_copy(item) for key, item in value.items()})
    return copy.deepcopy(value)


@dataclass(frozen=True)
class StagedState:
    """A copy of a state, and entry name -> digest of the tensor's bytes at the time of the copy."""

    state: dict[str, Any]
    data_digests: dict[str, bytes]


class Stager:
    """Copies states to the CPU. Only one save may use it at a time: each copy overwrites the previous one."""

    def __init__(self) -> None:
        """Allocate nothing yet."""
        self._kept: dict[str, torch.Tensor] = {}

    def stage(self, flat: Mapping[str, Any], places: dict[str, Keys]) -> StagedState:
        """Return a copy of a state. Memory of the previous copy is reused where name, dtype and shape are the same.

        Args:
            flat: entry name -> value.
            places: entry name -> its keys in the nested state.
        """
        kept: dict[str, torch.Tensor] = {}
        staged: dict[str, Any] = {}
        pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, value in flat.items():
            if not isinstance(value, torch.Tensor):
                staged[name] = deep_copy(value)
                continue
            local = value.to_local() if isinstance(value, DTensor) else value
            room = self._kept.get(name)
            if room is None or room.dtype != local.dtype or room.shape != local.shape:
                room = torch.empty(local.shape, dtype=local.dtype, device="cpu")
            kept[name] = room
            pairs[name] = room, local
            staged[name] = sharded_like(value, room)
        digests = copy_and_digest(list(pairs.values()))
        # Frees the memory of entries that the state no longer has.
        self._kept = kept
        whole: dict[str, Any] = unflatten_state_dict(staged, places)
        return StagedState(whole, dict(zip(pairs, digests, strict=True)))

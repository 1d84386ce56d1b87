"""A copy of the state as it is at the call of an asynchronous save, in memory that is kept from save to save.

There are two copies of a rank's state then: the live one and this. Memory that is new costs more to touch than to copy into.
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
    """A deep copy of plain values; a tensor among them may be part of a graph, which ``copy.deepcopy`` refuses."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple, set):
        return type(value)(deep_copy(item) for item in value)
    if isinstance(value, dict):
        return type(value)({key: deep_copy(item) for key, item in value.items()})
    return copy.deepcopy(value)


@dataclass(frozen=True)
class StagedState:
    """A copy of a state, and name -> digest of a tensor's bytes, as they were when they were copied."""

    state: dict[str, Any]
    data_digests: dict[str, bytes]


class Stager:
    """Copies to the CPU. One save at a time: the next one writes over what this one has staged."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._kept: dict[str, torch.Tensor] = {}

    def stage(self, flat: Mapping[str, Any], places: dict[str, Keys]) -> StagedState:
        """Return a copy; tensors of the names, types and shapes of the last time are written to where those are.

        Args:
            flat: the state's entries by name.
            places: where each stands in the state.
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
        # What is not of this state any more is let go.
        self._kept = kept
        whole: dict[str, Any] = unflatten_state_dict(staged, places)
        return StagedState(whole, dict(zip(pairs, digests, strict=True)))

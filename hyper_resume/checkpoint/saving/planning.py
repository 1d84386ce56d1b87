"""The plan of a save, as ``torch.distributed.checkpoint`` makes it, without what whole tensors and a single rank do not need.

What is equal is one object here (properties, shapes), which a pickle writes once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

# What is one of these and nothing more is written whole.
_WHOLE = (torch.Tensor, torch.nn.Parameter)


def local_write_items(flat: Mapping[str, Any], *, is_coordinator: bool) -> list[WriteItem]:
    """Return what this rank offers to write of a flat state."""
    kinds: dict[Any, TensorWriteData] = {}
    properties: dict[Any, TensorProperties] = {}
    items: list[WriteItem] = []
    for name, value in flat.items():
        if type(value) not in _WHOLE:
            items += create_default_local_save_plan({name: value}, is_coordinator).items
            continue
        kind = value.dtype, value.layout, value.requires_grad, value.is_pinned()
        data = kinds.get((kind, value.shape))
        if data is None:
            # Those that differ in shape alone have the same.
            own = properties.setdefault(kind, TensorProperties.create_from_tensor(value))
            data = kinds[kind, value.shape] = _whole(value.size(), own)
        # The place in the list of chunks is a hint that does not count when indices are compared.
        index = MetadataIndex(name, data.chunk.offsets, 0)
        items.append(WriteItem(index=index, type=WriteItemType.TENSOR, tensor_data=data))
    return items


def _whole(size: torch.Size, properties: TensorProperties) -> TensorWriteData:
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorWriteData(chunk=chunk, properties=properties, size=size)


def single_rank_metadata(plans: Sequence[SavePlan]) -> Metadata | None:
    """Return the description of a save by one rank alone that shards nothing; None for any other.

    Any other DCP has to put together; here is no second copy to be left out of the plan, no hole and no overlap.
    """
    if len(plans) != 1 or any(item.type == WriteItemType.SHARD for item in plans[0].items):
        return None
    described: dict[str, Any] = {}
    for item in plans[0].items:
        data = item.tensor_data
        described[item.index.fqn] = (
            BytesStorageMetadata()
            if data is None
            else TensorStorageMetadata(properties=data.properties, size=data.size, chunks=[data.chunk])
        )
    return Metadata(described, planner_data=plans[0].planner_data)

"""Save plans that equal those of ``torch.distributed.checkpoint``, with short cuts for whole tensors and for a single rank.

Equal properties and shapes share one object, which a pickle then writes only once.
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

# Exactly these types (no subclass) are written whole.
_WHOLE = (torch.Tensor, torch.nn.Parameter)


def local_write_items(flat: Mapping[str, Any], *, is_coordinator: bool) -> list[WriteItem]:
    """Return the items that this rank offers to write from a flattened state."""
    write_data: dict[Any, TensorWriteData] = {}
    properties: dict[Any, TensorProperties] = {}
    items: list[WriteItem] = []
    for name, value in flat.items():
        if type(value) not in _WHOLE:
            items += create_default_local_save_plan({name: value}, is_coordinator).items
            continue
        properties_key = value.dtype, value.layout, value.requires_grad, value.is_pinned()
        data = write_data.get((properties_key, value.shape))
        if data is None:
            # Tensors that differ only in shape share their properties.
            own = properties.setdefault(properties_key, TensorProperties.create_from_tensor(value))
            data = write_data[properties_key, value.shape] = _whole(value.size(), own)
        # The index in the list of chunks is only a hint: it is ignored when indices are compared.
        index = MetadataIndex(name, data.chunk.offsets, 0)
        items.append(WriteItem(index=index, type=WriteItemType.TENSOR, tensor_data=data))
    return items


def _whole(size: torch.Size, properties: TensorProperties) -> TensorWriteData:
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorWriteData(chunk=chunk, properties=properties, size=size)


def single_rank_metadata(plans: Sequence[SavePlan]) -> Metadata | None:
    """Return the metadata of a save by a single rank without sharded tensors; None for any other save.

    Such a save has no duplicates to remove and no chunks to combine, so DCP's general method is not needed.
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

"""The work of stock DCP on rank 0 in a save of many ranks, with generated plans instead of gathered ones.

Measured is the work on the plans: the global plan, the merge of all results into the metadata, and writing the metadata. The
gather and the scatter (pickling and network) are not measured, which favours stock DCP.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

_ROWS, _COLUMNS = 4, 256


def local_plans(world_size: int, tensors: int) -> list[SavePlan]:
    """Return the plans of ``world_size`` ranks; each of ``tensors`` matrices is sharded along its rows."""
    names = [f"model.layers.{index}.weight" for index in range(tensors)]
    mapping = {name: ("model", name.removeprefix("model.")) for name in names}
    properties = TensorProperties(dtype=torch.float32)
    whole = torch.Size((_ROWS * world_size, _COLUMNS))
    part = torch.Size((_ROWS, _COLUMNS))
    plans = []
    for rank in range(world_size):
        offsets = torch.Size((_ROWS * rank, 0))
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=part), properties=properties, size=whole
        )
        items = [
            WriteItem(index=MetadataIndex(name, offsets), type=WriteItemType.SHARD, tensor_data=data) for name in names
        ]
        plans.append(SavePlan(items, planner_data=mapping))
    return plans


def local_results(plans: Sequence[SavePlan]) -> list[list[WriteResult]]:
    """Return the write results of the ranks: one file per rank."""
    size = _ROWS * _COLUMNS * 4
    return [
        [
            WriteResult(
                index=item.index,
                size_in_bytes=size,
                storage_data=_StorageInfo(f"__{rank}_0.distcp", number * size, size),
            )
            for number, item in enumerate(plan.items)
        ]
        for rank, plan in enumerate(plans)
    ]


def plan_and_close(plans: Sequence[SavePlan], results: Sequence[list[WriteResult]], folder: Path) -> int:
    """Plan globally, merge the results, write ``.metadata`` into ``folder``, and return the number of planned entries."""
    planner = DefaultSavePlanner()
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    planned, metadata = planner.create_global_plan(list(plans))
    planned = writer.prepare_global_plan(planned)
    writer.finish(metadata, list(results))
    return sum(len(plan.items) for plan in planned)

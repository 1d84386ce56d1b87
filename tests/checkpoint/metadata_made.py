"""Descriptions made by hand, and a payload, for the tests of what reads them."""

from __future__ import annotations

import os
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)


class MakesDirectory:
    """Pickles as a call of ``os.mkdir``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def small_metadata() -> Metadata:
    """A good description, made by hand: one tensor in two chunks, one value."""
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 3])) for row in (0, 2)]
    return Metadata(
        state_dict_metadata={
            "tensor": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4, 3]), chunks),
            "value": BytesStorageMetadata(),
        },
        planner_data={"tensor": ("tensor",), "value": ("value",)},
        storage_data={
            MetadataIndex("tensor", (0, 0), 0): _StorageInfo("__0_0.distcp", 0, 100),
            MetadataIndex("tensor", (2, 0), 1): _StorageInfo("__1_0.distcp", 0, 100),
            MetadataIndex("value"): _StorageInfo("__0_0.distcp", 100, 50),
        },
        storage_meta=StorageMeta(PosixPath("/somewhere"), "id"),
        version="1.0.0",
    )

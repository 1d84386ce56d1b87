"""The DCP storage writer of this library.

The writer gives each rank one file, hashed as it is written, and closes a save with ``.metadata`` and the manifest. Stock
``torch.distributed.checkpoint.load`` reads what it writes: a tensor is a ``torch.save`` archive, as DCP's own writer makes it.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from hyper_resume import digest
from hyper_resume.checkpoint import archive, index, manifest, operations
from hyper_resume.checkpoint.manifest import FileEntry, Manifest
from hyper_resume.checkpoint.stream import Stream


@dataclasses.dataclass(frozen=True)
class ShardWriteResult(WriteResult):
    """Carries, in the gather that DCP makes anyway, what the manifest says of the file that the entry is in."""

    file_name: str = ""
    file: FileEntry | None = None


class ShardWriter(StorageWriter):
    """Writes one save into its staging directory. Can be pickled, for a save in another process."""

    def __init__(self, staging: Path, draft: Manifest) -> None:
        """Take the manifest as far as it is known; files and ``.metadata`` are added by :meth:`finish`, on rank 0 only."""
        super().__init__()
        self._path = staging
        self._draft = draft

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: one writer makes one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to open before the plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is; the directory exists."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank its number."""
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's entries, bring them to the device, and report where each stands."""
        results: Future[list[WriteResult]] = Future()
        results.set_result(self._write_shard(plan, planner) if plan.items else [])
        return results

    def _write_shard(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        rank: int = plan.storage_data
        name = f"__{rank}_0{dcp_filesystem.DEFAULT_SUFFIX}"
        places: list[tuple[WriteItem, int, int]] = []
        # Tensors first: their sizes follow from the layout, so that they stand at the same places in every save.
        items = sorted(plan.items, key=lambda item: item.type == WriteItemType.BYTE_IO)
        with operations.current().create(self._path / name) as file:
            stream = Stream(file)
            for item in items:
                begin = stream.align(archive.ALIGNMENT)
                for content in _serialise(planner.resolve_data(item)):
                    stream.write(content)
                places.append((item, begin, stream.size_bytes - begin))
            found = stream.finish()
            file.sync()
            entry = FileEntry(size_bytes=stream.size_bytes, digest=found, rank=rank)
        return [
            ShardWriteResult(
                index=item.index,
                size_in_bytes=length,
                storage_data=dcp_filesystem._StorageInfo(name, offset, length),
                file_name=name,
                file=entry,
            )
            for item, offset, length in places
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata`` and then the manifest. Called on rank 0 once every rank has written."""
        found = [result for of_rank in results for result in of_rank]
        metadata.storage_data = {result.index: result.storage_data for result in found}
        metadata.storage_meta = self.storage_meta()
        version = getattr(dcp_filesystem, "CURRENT_DCP_VERSION", None)
        if version is not None:
            metadata.version = version
        files: dict[str, FileEntry] = {
            result.file_name: result.file
            for result in found
            if isinstance(result, ShardWriteResult) and result.file is not None
        }
        contents = {manifest.METADATA_NAME: pickle.dumps(metadata), index.INDEX_NAME: index.encode(metadata)}
        for name, content in contents.items():
            operations.write_file(self._path / name, content)
            files[name] = FileEntry(size_bytes=len(content), digest=digest.digest_bytes([content]), rank=0)
        whole = dataclasses.replace(self._draft, files={**self._draft.files, **files})
        operations.write_file(self._path / manifest.MANIFEST_NAME, manifest.encode(whole))

    def storage_meta(self) -> StorageMeta:
        """Return what ``.metadata`` says of the save: the staging directory's name tells the attempt."""
        return StorageMeta(checkpoint_id=self._path, save_id=self._draft.attempt)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path."""
        return True


def _serialise(data: torch.Tensor | io.BytesIO) -> Iterator[bytes | memoryview]:
    """Give the archive of one entry, piece by piece."""
    if isinstance(data, io.BytesIO):
        yield data.getbuffer()
        return
    tensor = data.detach().cpu()
    around = archive.template(tensor.dtype, tuple(tensor.shape)) if tensor.layout is torch.strided else None
    if around is not None and not (tensor.is_conj() or tensor.is_neg()):
        yield around.prefix
        if around.data_bytes:
            yield memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # it is one
        yield around.suffix
        return
    if tensor.untyped_storage().size() != tensor.nbytes:
        # A view: torch.save would write all of the storage behind it.
        tensor = tensor.clone()
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    yield buffer.getbuffer()

"""The DCP storage writer and reader of this library.

The writer gives each rank one file, hashed as it is written, and closes a save with ``.metadata`` and the manifest. Stock
``torch.distributed.checkpoint.load`` reads what it writes: a tensor is a ``torch.save`` archive, as DCP's own writer makes it.
The reader opens nothing outside the step directory and runs no code from it.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from hyper_resume import digest
from hyper_resume.checkpoint import manifest, operations, safe_load
from hyper_resume.checkpoint.manifest import FileEntry, Manifest
from hyper_resume.errors import CheckpointMismatchError, describe


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
        hasher = digest.file_hasher()
        places: list[tuple[WriteItem, int, int]] = []
        # Entries that are no tensors first, as DCP does.
        items = sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO)
        with operations.current().create(self._path / name) as file:
            for item in items:
                content = _serialise(planner.resolve_data(item))
                places.append((item, file.tell(), len(content)))
                file.write(content)
                hasher.update(content)
            file.sync()
            entry = FileEntry(size_bytes=file.tell(), digest=digest.as_text(hasher), rank=rank)
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
        content = pickle.dumps(metadata)
        operations.write_file(self._path / manifest.METADATA_NAME, content)
        files: dict[str, FileEntry] = {
            result.file_name: result.file
            for result in found
            if isinstance(result, ShardWriteResult) and result.file is not None
        }
        files[manifest.METADATA_NAME] = FileEntry(
            size_bytes=len(content), digest=digest.digest_bytes([content]), rank=0
        )
        whole = dataclasses.replace(self._draft, files={**self._draft.files, **files})
        operations.write_file(self._path / manifest.MANIFEST_NAME, manifest.encode(whole))

    def storage_meta(self) -> StorageMeta:
        """Return what ``.metadata`` says of the save: the staging directory's name tells the attempt."""
        return StorageMeta(checkpoint_id=self._path, save_id=self._draft.attempt)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path."""
        return True


def _serialise(data: torch.Tensor | io.BytesIO) -> memoryview:
    if isinstance(data, io.BytesIO):
        return data.getbuffer()
    tensor = data.detach().cpu()
    if tensor.untyped_storage().size() != tensor.nbytes:
        # A view: torch.save would write all of the storage behind it.
        tensor = tensor.clone()
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getbuffer()


class SafeReader(dcp_filesystem.FileSystemReader):
    """Reads a step directory, of this library's or of stock DCP's."""

    def __init__(self, directory: Path, metadata: Metadata | None = None) -> None:
        """Read from ``directory``; with ``metadata``, which was read and checked before, ``.metadata`` is not read again."""
        super().__init__(directory)
        self._directory = directory
        self._metadata = metadata
        self._chunks: dict[str, dict[Any, Any]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata`` through the allow-list.

        Raises:
            CheckpointMismatchError: it holds anything else than a description of tensors and values, or does not add up.
        """
        metadata = self._metadata = self._metadata or read_metadata_file(self._directory)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for, file by file and from front to back."""
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            per_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in sorted(per_file.items()):
            path = safe_load.check_contained(self._directory, name)
            items.sort(key=lambda item: int(self.storage_data[item.storage_index].offset))
            with operations.current().open_read(path) as file:
                for item in items:
                    self._read_item(file, item, planner, name)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, file: Any, item: ReadItem, planner: LoadPlanner, name: str) -> None:
        place = self.storage_data[item.storage_index]
        where = f"{self._directory / name}, entry {item.storage_index.fqn}"
        content = _read_exactly(file, place.offset, place.length, where)
        if place.transform_descriptors:
            # Nothing of ours writes them, and one that decompresses has no bound.
            raise _not_as_described(
                where, "bytes as they were saved", f"transformed by {place.transform_descriptors[0]}"
            )
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(content))
            return
        tensor = safe_load.load_plain(content, where)
        if not isinstance(tensor, torch.Tensor):
            raise _not_as_described(where, "a tensor", type(tensor).__name__)
        described = self._described(item)
        if (tensor.dtype, tuple(tensor.shape)) != described:
            raise _not_as_described(
                where, f"{described[0]}, shape {described[1]}", f"{tensor.dtype}, {tuple(tensor.shape)}"
            )
        part = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
        target = planner.resolve_tensor(item).detach()
        target.copy_(part)
        planner.commit_tensor(item, target)

    def _described(self, item: ReadItem) -> tuple[torch.dtype, tuple[int, ...]]:
        """What ``.metadata`` says of the stored chunk; a tensor of another kind in its place is another checkpoint's."""
        assert self._metadata is not None
        name, offset = item.storage_index.fqn, item.storage_index.offset
        entry: Any = self._metadata.state_dict_metadata[name]
        if name not in self._chunks:
            self._chunks[name] = {chunk.offsets: chunk for chunk in entry.chunks}
        chunk = entry.chunks[0] if offset is None else self._chunks[name][offset]
        return entry.properties.dtype, tuple(chunk.sizes)


def read_metadata_file(directory: Path) -> Metadata:
    """Read a step directory's ``.metadata`` through the allow-list.

    Raises:
        CheckpointMismatchError: it can't be read, or can't be trusted.
    """
    path = directory / manifest.METADATA_NAME
    try:
        content = operations.read_bytes(path, safe_load.MOST_METADATA_BYTES)
    except OSError as error:
        raise CheckpointMismatchError(
            describe(
                "the checkpoint's metadata can't be read", where=str(path), found=f"{type(error).__name__}: {error}"
            )
        ) from error
    return safe_load.load_metadata(content, str(path))


def _read_exactly(file: Any, offset: int, length: int, where: str) -> bytes:
    file.seek(offset)
    chunks: list[bytes] = []
    missing = length
    while missing and (chunk := file.read(missing)):
        chunks.append(chunk)
        missing -= len(chunk)
    if missing:
        raise _not_as_described(where, f"{length} bytes at {offset}", f"{length - missing} bytes")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _not_as_described(where: str, expected: str, found: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        describe(
            "an entry of the checkpoint is not what its metadata says",
            where=where,
            expected=expected,
            found=found,
            do="restore the file from a copy, or resume from another checkpoint",
        )
    )

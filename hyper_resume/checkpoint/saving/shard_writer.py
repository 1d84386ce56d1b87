"""The DCP storage writer: one shard file per rank, digested while it is written; then ``.metadata``, index and manifest.

Stock ``torch.distributed.checkpoint.load`` can read the files: every tensor is a ``torch.save`` archive, as in DCP's own files.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

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
from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.format import archive, index, manifest
from hyper_resume.checkpoint.format.manifest import FileEntry, Manifest
from hyper_resume.checkpoint.saving.plan_cache import MetadataTemplate, PlanCache
from hyper_resume.checkpoint.saving.stream import SMALL_BYTES, HashingStream
from hyper_resume.checkpoint.tensors.threads import submit_or_run


@dataclasses.dataclass(frozen=True)
class ShardWriteResult(WriteResult):
    """DCP's result for one entry, with the manifest entry of its file. It reaches rank 0 in the gather that DCP makes anyway.

    A result with ``is_summary`` is the only one of its rank: all entries have the same locations as in the last save. The
    first result of a rank carries the bucket digests, if they were computed during the write.
    """

    file_name: str = ""
    file: FileEntry | None = None
    is_summary: bool = False
    buckets: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _is_summary(results: list[WriteResult]) -> bool:
    return not results or (isinstance(results[0], ShardWriteResult) and results[0].is_summary)


class WrittenTensor(NamedTuple):
    """A tensor that was written to a shard, and the digest of its bytes."""

    tensor: torch.Tensor
    data_digest: bytes


class ShardWriter(StorageWriter):
    """Writes one save to its staging directory."""

    def __init__(
        self,
        staging: Path,
        draft: Manifest,
        cache: PlanCache | None = None,
        digest_buckets: Callable[[Mapping[str, WrittenTensor]], Mapping[str, str]] | None = None,
    ) -> None:
        """Write nothing yet.

        Args:
            staging: the staging directory.
            draft: the manifest without the shard files and the metadata files, which :meth:`finish` adds on rank 0.
            cache: plan and locations of the last save; updated by this one.
            digest_buckets: computes the digests of this rank's buckets from those of the tensors in its shard; called while
                the shard is synced. None if the draft has them already.
        """
        super().__init__()
        self._path = staging
        self._draft = draft
        self._cache = cache
        self._digest_buckets = digest_buckets

    def without_cache(self) -> ShardWriter:
        """Return a writer that can be pickled, for a save in another process."""
        return ShardWriter(self._path, self._draft)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a writer is used for one save only."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no file is opened before the plan is made."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Store each rank's number in its plan."""
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync this rank's shard, and return the location of each entry."""
        # Every rank writes at least its save id, and the bucket digests travel with that result.
        assert plan.items or self._digest_buckets is None
        results: Future[list[WriteResult]] = Future()
        results.set_result(self._write_shard(plan, planner) if plan.items else [])
        return results

    def _write_shard(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        rank: int = plan.storage_data
        name = f"__{rank}_0{dcp_filesystem.DEFAULT_SUFFIX}"
        places: list[tuple[WriteItem, int, int]] = []
        tensors: list[tuple[str, torch.Tensor, int, int]] = []
        # Tensors first: their sizes follow from the layout, so their locations are the same in every save.
        items = sorted(plan.items, key=lambda item: item.type == WriteItemType.BYTE_IO)
        with (
            operations.current().create(self._path / name) as file,
            HashingStream(file, with_table=True) as stream,
            ThreadPoolExecutor(1, thread_name_prefix="hyper_resume-digest") as thread,
        ):
            file.reserve(sum(_min_bytes(item) for item in items))
            for item in items:
                begin = stream.align(archive.ALIGNMENT)
                data = planner.resolve_data(item)
                pieces = _serialise(data)
                for content in pieces:
                    stream.write(content)
                if isinstance(data, torch.Tensor) and isinstance(pieces, _TensorArchive):
                    tensors.append((item.index.fqn, data, begin + len(pieces.prefix), len(pieces.data)))
                places.append((item, begin, stream.size_bytes - begin))
            found = stream.finish()
            take = self._digest_buckets
            digested = None if take is None else submit_or_run(thread, take, _digested_tensors(stream, tensors))
            file.sync()
            buckets = {} if digested is None else digested.result()
            entry = FileEntry(size_bytes=stream.size_bytes, digest=found, rank=rank)
        is_known = self._cache is not None and self._cache.update_locations(places)
        results: list[WriteResult] = [
            ShardWriteResult(
                index=item.index,
                size_in_bytes=length,
                storage_data=dcp_filesystem._StorageInfo(name, offset, length),
                file_name=name,
                file=entry,
                is_summary=is_known,
                buckets={} if number else buckets,
            )
            for number, (item, offset, length) in enumerate(places[:1] if is_known else places)
        ]
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``, the index, and then the manifest. Called on rank 0 after every rank has written its shard."""
        files: dict[str, FileEntry] = {
            result.file_name: result.file
            for of_rank in results
            for result in of_rank[:1]
            if isinstance(result, ShardWriteResult) and result.file is not None
        }
        described, listed = self._described(metadata, results)
        pickled = described.for_save(str(self._path), self._draft.attempt)
        for name, pieces in ((manifest.METADATA_NAME, pickled), (index.INDEX_NAME, (listed,))):
            files[name] = _write_pieces(self._path / name, pieces)
        buckets = {
            str(rank): {**self._draft.buckets.get(str(rank), {}), **of_rank[0].buckets}
            for rank, of_rank in enumerate(results)
            if of_rank and isinstance(of_rank[0], ShardWriteResult)
        }
        whole = dataclasses.replace(
            self._draft, files={**self._draft.files, **files}, buckets={**self._draft.buckets, **buckets}
        )
        operations.write_file(self._path / manifest.MANIFEST_NAME, manifest.encode(whole))

    def _described(self, metadata: Metadata, results: list[list[WriteResult]]) -> tuple[MetadataTemplate, bytes]:
        cache = self._cache
        if cache is not None and cache.contents is not None and all(_is_summary(found) for found in results):
            return cache.contents
        known = [
            cache.expand_results(found) if cache is not None and _is_summary(found) else found for found in results
        ]
        whole = Metadata(
            state_dict_metadata=metadata.state_dict_metadata,
            planner_data=metadata.planner_data,
            storage_data={result.index: result.storage_data for found in known for result in found},
        )
        version = getattr(dcp_filesystem, "CURRENT_DCP_VERSION", None)
        if version is not None:
            whole.version = version
        contents = MetadataTemplate(whole), index.encode(whole)
        if cache is not None:
            cache.store_results(known, contents)
        return contents

    def storage_meta(self) -> StorageMeta:
        """Return the staging directory and the save id, for ``.metadata``."""
        return StorageMeta(checkpoint_id=self._path, save_id=self._draft.attempt)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Accept any path."""
        return True


def _write_pieces(path: Path, pieces: Iterable[bytes]) -> FileEntry:
    """Write and sync a file on rank 0; return its manifest entry."""
    with operations.current().create(path) as file, HashingStream(file) as stream:
        for piece in pieces:
            stream.write(piece)
        found = stream.finish()
        file.sync()
        return FileEntry(size_bytes=stream.size_bytes, digest=found, rank=0)


def _digested_tensors(
    stream: HashingStream, tensors: Sequence[tuple[str, torch.Tensor, int, int]]
) -> Mapping[str, WrittenTensor]:
    """Return name -> tensor and digest; ``tensors`` are (name, tensor, offset, length) in the file."""
    found = {}
    for name, tensor, begin, length in tensors:
        of_data = stream.data_digest(begin, length)
        if of_data is not None:
            found[name] = WrittenTensor(tensor, of_data)
    return found


class _TensorArchive(NamedTuple):
    """The archive of a large tensor in three pieces; ``data`` are the tensor's bytes, not copied."""

    prefix: bytes
    data: memoryview
    suffix: bytes


def _min_bytes(item: WriteItem) -> int:
    """Return the size of an entry's tensor data in bytes; its archive is a little larger."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _serialise(data: torch.Tensor | io.BytesIO) -> Sequence[bytes | memoryview]:
    """Return the archive of one entry: in one piece if it is small, otherwise as a :class:`_TensorArchive`."""
    if isinstance(data, io.BytesIO):
        return (data.getbuffer(),)
    tensor = data.detach() if data.requires_grad else data
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    around = archive.template(tensor.dtype, tensor.shape) if tensor.layout is torch.strided else None
    if around is not None:
        prefix, suffix, data_bytes = around
        content = digest.tensor_bytes(tensor)
        if data_bytes < SMALL_BYTES:
            return (b"".join((prefix, content.data, suffix)) if data_bytes else prefix + suffix,)
        return _TensorArchive(prefix, memoryview(content).cast("B"), suffix)
    if tensor.untyped_storage().size() != tensor.nbytes:
        # For a view, torch.save would write the whole storage behind it.
        tensor = tensor.clone()
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return (buffer.getbuffer(),)

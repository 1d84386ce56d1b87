"""Reads entries of a step directory through memory-mapped files; data is copied only where chunks must be combined.

It reads directories of this library and of stock DCP. No file outside the directory is opened, and no code from it is run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.format import archive, segments
from hyper_resume.checkpoint.format.segments import VerifiedFile
from hyper_resume.checkpoint.parsing import safe_load
from hyper_resume.checkpoint.tensors.copying import sharded_like
from hyper_resume.checkpoint.tensors.threads import MAX_THREADS, map_in_threads
from hyper_resume.errors import CheckpointMismatchError, describe

# Files are preloaded by ranges. Ranges with a gap of at most this size between them are joined.
_SMALL_GAP_BYTES = 1 << 20
_MAX_AT_ONCE_BYTES = 256 << 20


@dataclass
class ReadResult:
    """Entry name -> value; and entry name -> digest of the tensor's bytes, if the verification of the file computed it."""

    values: dict[str, Any] = field(default_factory=dict)
    data_digests: dict[str, bytes] = field(default_factory=dict)


class EntryReader:
    """Reads entries of one step directory. A context manager; the tensors that it returned stay valid afterwards.

    Attributes:
        data_digests: entry name -> digest of the bytes of a tensor that was read, if a verified file has it.
    """

    def __init__(
        self, directory: Path, metadata: Metadata, verified_files: Mapping[str, VerifiedFile] = MappingProxyType({})
    ) -> None:
        """Read from ``directory``.

        Args:
            directory: the step directory.
            metadata: its DCP metadata.
            verified_files: file name -> the result of its verification, whose bytes are used. A file that has changed since
                is verified again.
        """
        self._directory = directory
        self._verified_files: dict[str, VerifiedFile] = {}
        self._offered = dict(verified_files)
        self.data_digests: dict[str, bytes] = {}
        self._described = metadata.state_dict_metadata
        self._places: dict[MetadataIndex, _StorageInfo] = metadata.storage_data or {}
        self._files: dict[str, operations.InputFile] = {}
        self._found: dict[str, list[_StorageInfo]] = {}

    def __enter__(self) -> EntryReader:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def preload(self, names: Collection[str]) -> None:
        """Read the bytes of these entries into memory, so that a read error is raised here. Reads all chunks, of all ranks.

        Raises:
            OSError: they can't be read.
            CheckpointMismatchError: a file is missing, or is not a file of the checkpoint.
        """
        if len(names) >= len(self._places) // 2:
            self._find_all()
        ranges: dict[str, list[tuple[int, int]]] = {}
        spans: dict[str, tuple[int, int]] = {}
        for name in names:
            for place in self._places_of(name):
                begin, end = place.offset, place.offset + place.length
                if place.relative_path in self._verified_files or self._is_verified(place.relative_path):
                    first, last = spans.get(place.relative_path, (begin, end))
                    spans[place.relative_path] = min(first, begin), max(last, end)
                else:
                    ranges.setdefault(place.relative_path, []).append((begin, end))
        for file_name, (begin, end) in spans.items():
            # The verification has read these bytes, so usually they are still in memory and this costs little.
            operations.preload_mapped(self._verified_files[file_name].content, begin, end - begin)
        for file_name, found in sorted(ranges.items()):
            file = self._file(file_name)
            pieces = [piece for begin, end in _merged(found) for piece in _pieces(begin, min(end, file.size_bytes))]
            map_in_threads(lambda piece, file=file: file.preload(*piece), pieces)  # type: ignore[misc]  # bound now

    def _is_verified(self, file_name: str) -> bool:
        offered = self._offered.pop(file_name, None)
        # The name comes from the manifest, so it is a path inside the directory.
        if offered is not None and not offered.is_unchanged(self._directory / file_name):
            complaint, offered = segments.verify(self._file(file_name), offered.expected)
            if complaint:
                raise CheckpointMismatchError(
                    describe(
                        "a file of the checkpoint was changed after it was verified",
                        where=str(self._directory / file_name),
                        found=complaint,
                        do="find out who else writes there; restore the file from a copy, or resume from another checkpoint",
                    )
                )
        if offered is not None:
            self._verified_files[file_name] = offered
        return file_name in self._verified_files

    def _find_all(self) -> None:
        """Find the locations of all entries with one chunk in one pass; looking up each takes five times as long."""
        found: dict[str, list[_StorageInfo]] = {}
        for index, place in self._places.items():
            found.setdefault(index.fqn, []).append(place)
        self._found = {name: places for name, places in found.items() if len(places) == 1}

    def _places_of(self, name: str) -> list[_StorageInfo]:
        """Return the locations of a tensor's chunks, in order, or the one location of any other entry."""
        found = self._found.get(name)
        if found is None:
            entry = self._described[name]
            offsets = [chunk.offsets for chunk in entry.chunks] if isinstance(entry, TensorStorageMetadata) else [None]
            found = self._found[name] = [self._places[MetadataIndex(name, offset)] for offset in offsets]
        return found

    def _file(self, name: str) -> operations.InputFile:
        file = self._files.get(name)
        if file is None:
            path = safe_load.check_contained(self._directory, name)
            file = self._files[name] = operations.current().open_read(path)
        return file

    def value(self, name: str) -> Any:
        """Return an entry that is not a tensor: plain values, which may contain tensors; these are on the CPU.

        Raises:
            CheckpointMismatchError: it is damaged, or holds anything else.
        """
        # Any rank may read an entry that one rank wrote, so a device that is stored in it has no meaning here.
        (place,) = self._places_of(name)
        return safe_load.load_plain(self._content(name, place), self._where(name, place))

    def tensor(self, name: str, live: torch.Tensor | None) -> torch.Tensor:
        """Return this rank's part of a tensor entry, sharded as ``live`` is.

        Args:
            name: the entry; its dtype and shape are those of ``live``.
            live: a plain or sharded tensor; None for the whole entry.

        Returns:
            a view of the mapped file if one stored chunk holds the part, otherwise a new tensor; on the CPU. Do not write
            to it.

        Raises:
            CheckpointMismatchError: the bytes do not match the metadata.
        """
        entry = self._described[name]
        assert isinstance(entry, TensorStorageMetadata)  # the caller has compared it with ``live``
        if not isinstance(live, DTensor):
            # A short cut for the most frequent case; the general method would take a tenth of the time of a load.
            if len(entry.chunks) == 1 and entry.chunks[0].sizes == entry.size:
                return self._chunk(name, entry, entry.chunks[0], self._places_of(name)[0], is_all=True)
            return self._box(name, entry, (0,) * len(entry.size), tuple(entry.size))
        local = live.to_local()
        chunks: list[ChunkStorageMetadata] = live.__create_chunk_list__()  # type: ignore[no-untyped-call]
        part = torch.empty(local.shape, dtype=local.dtype)
        if local.numel():
            (chunk,) = chunks
            part = self._box(name, entry, tuple(chunk.offsets), tuple(chunk.sizes))
        return sharded_like(live, part)

    def _box(
        self, name: str, entry: TensorStorageMetadata, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """Return the part of an entry that begins at ``offsets`` and has the shape ``sizes``."""
        places = self._places_of(name)
        for chunk, place in zip(entry.chunks, places, strict=True):
            if chunk.sizes == sizes and chunk.offsets == offsets:
                return self._chunk(name, entry, chunk, place, is_all=True)
        found: list[tuple[torch.Tensor, tuple[slice, ...]]] = []
        for chunk, place in zip(entry.chunks, places, strict=True):
            common = _overlap(offsets, sizes, chunk.offsets, chunk.sizes)
            if common is not None:
                there, here = common
                found.append((self._chunk(name, entry, chunk, place)[there], here))
        if len(found) == 1 and found[0][0].shape == sizes:
            return found[0][0]
        whole = torch.empty(sizes, dtype=entry.properties.dtype)
        for part, here in found:
            whole[here].copy_(part)
        return whole

    def _chunk(
        self,
        name: str,
        entry: TensorStorageMetadata,
        chunk: ChunkStorageMetadata,
        place: _StorageInfo,
        *,
        is_all: bool = False,
    ) -> torch.Tensor:
        """Return a stored chunk; ``is_all`` says that the whole chunk is the requested part."""
        dtype, shape = entry.properties.dtype, chunk.sizes
        content = self._content(name, place)
        begin = archive.data_offset(content, dtype, shape)
        count = math.prod(shape)
        if begin is not None:
            if not count:
                return torch.empty(shape, dtype=dtype)
            verified = self._verified_files.get(place.relative_path) if is_all else None
            known = verified and verified.data_digest(place.offset + begin, count * dtype.itemsize)
            if known:
                self.data_digests[name] = known
            found = torch.frombuffer(content, dtype=dtype, count=count, offset=begin)
            return found if len(shape) == 1 else found.view(shape)
        where = self._where(name, place)
        found = safe_load.load_plain(content, where)
        if not isinstance(found, torch.Tensor):
            raise _not_as_described(where, "a tensor", type(found).__name__)
        if (found.dtype, found.shape) != (dtype, shape):
            raise _not_as_described(where, f"{dtype}, shape {tuple(shape)}", f"{found.dtype}, {tuple(found.shape)}")
        return found.detach()

    def _content(self, name: str, place: _StorageInfo) -> memoryview:
        if place.transform_descriptors:
            # This library never writes transformed data, and decompression could produce any number of bytes.
            found = f"transformed by {place.transform_descriptors[0]}"
            raise _not_as_described(self._where(name, place), "bytes as they were saved", found)
        verified = self._verified_files.get(place.relative_path)
        if verified is not None:
            content = verified.content[place.offset : place.offset + place.length]
        else:
            content = self._file(place.relative_path).view(place.offset, place.length)
        if len(content) != place.length:
            expected = f"{place.length} bytes at {place.offset}"
            raise _not_as_described(self._where(name, place), expected, f"{len(content)} bytes")
        return content

    def _where(self, name: str, place: _StorageInfo) -> str:
        return f"{self._directory / place.relative_path}, entry {name}"


def _merged(ranges: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and begin - merged[-1][1] <= _SMALL_GAP_BYTES:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _pieces(begin: int, end: int) -> list[tuple[int, int]]:
    """Return (offset, length) of pieces that several threads can preload at the same time."""
    step = min(_MAX_AT_ONCE_BYTES, max(_SMALL_GAP_BYTES, (end - begin) // MAX_THREADS + 1))
    return [(place, min(step, end - place)) for place in range(begin, end, step)]


def _overlap(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the intersection of two boxes, as slices of the second one and slices of the first one; None if it is empty."""
    there, here = [], []
    for offset, size, other, other_size in zip(offsets, sizes, other_offsets, other_sizes, strict=True):
        begin, end = max(offset, other), min(offset + size, other + other_size)
        if begin >= end:
            return None
        there.append(slice(begin - other, end - other))
        here.append(slice(begin - offset, end - offset))
    return tuple(there), tuple(here)


def _not_as_described(where: str, expected: str, found: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        describe(
            "an entry of the checkpoint does not match its metadata",
            where=where,
            expected=expected,
            found=found,
            do="restore the file from a copy, or resume from another checkpoint",
        )
    )

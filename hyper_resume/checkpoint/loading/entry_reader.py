"""The entries of a step directory: looked at where they lie in its files, and copied only where they have to be put together.

Of this library's directories and of stock DCP's. Nothing outside the directory is opened, and no code from it is run.
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

# Files are brought in by ranges; what is not wanted is not, unless it is little.
_SMALL_GAP_BYTES = 1 << 20
_MAX_AT_ONCE_BYTES = 256 << 20


@dataclass
class ReadResult:
    """What was read: name -> value; and name -> digest of a tensor's bytes, where the verification has found it."""

    values: dict[str, Any] = field(default_factory=dict)
    data_digests: dict[str, bytes] = field(default_factory=dict)


class EntryReader:
    """Reads entries of one step directory. Use as a context; tensors that it gave stay valid afterwards.

    Attributes:
        data_digests: name -> digest of the bytes of a tensor that it gave, where a verified file has it.
    """

    def __init__(
        self, directory: Path, metadata: Metadata, verified_files: Mapping[str, VerifiedFile] = MappingProxyType({})
    ) -> None:
        """Read from ``directory``.

        Args:
            directory: the step directory.
            metadata: its own description.
            verified_files: files that were verified, by name: their bytes are read where they were verified; a file
                that was changed since is verified again.
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
        """Have the bytes of these entries read, so that an error is told here. What another rank alone needs is read too.

        Raises:
            OSError: they can't be read.
            CheckpointMismatchError: a file is missing or is none of the checkpoint.
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
            # They were in memory a moment ago; where they still are it costs next to nothing.
            operations.preload_mapped(self._verified_files[file_name].content, begin, end - begin)
        for file_name, found in sorted(ranges.items()):
            file = self._file(file_name)
            pieces = [piece for begin, end in _merged(found) for piece in _pieces(begin, min(end, file.size_bytes))]
            map_in_threads(lambda piece, file=file: file.preload(*piece), pieces)  # type: ignore[misc]  # bound now

    def _is_verified(self, file_name: str) -> bool:
        offered = self._offered.pop(file_name, None)
        # The name is one of the manifest's, so it leads nowhere else.
        if offered is not None and not offered.is_unchanged(self._directory / file_name):
            complaint, offered = segments.verify(self._file(file_name), offered.expected)
            if complaint:
                raise CheckpointMismatchError(
                    describe(
                        "a file of the checkpoint was changed after it was verified",
                        where=str(self._directory / file_name),
                        found=complaint,
                        do="see who else writes there; restore the file from a copy, or resume from another checkpoint",
                    )
                )
        if offered is not None:
            self._verified_files[file_name] = offered
        return file_name in self._verified_files

    def _find_all(self) -> None:
        """Find the places of all entries of one chunk in one walk: to look each up takes five times as long."""
        found: dict[str, list[_StorageInfo]] = {}
        for index, place in self._places.items():
            found.setdefault(index.fqn, []).append(place)
        self._found = {name: places for name, places in found.items() if len(places) == 1}

    def _places_of(self, name: str) -> list[_StorageInfo]:
        """Where the chunks of a tensor stand, in their order, or the one place of anything else."""
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
        """Return an entry that is no tensor: plain values, and tensors on the CPU.

        Raises:
            CheckpointMismatchError: it is damaged, or holds anything else.
        """
        # One rank wrote the entry and any rank may read it, so a device in it says nothing about where it belongs.
        (place,) = self._places_of(name)
        return safe_load.load_plain(self._content(name, place), self._where(name, place))

    def tensor(self, name: str, live: torch.Tensor | None) -> torch.Tensor:
        """Return this rank's part of an entry, in the form of ``live``.

        Args:
            name: the entry; its type and shape are those of ``live``.
            live: a tensor, or a sharded one; None for all of the entry.

        Returns:
            a view of the file where one stored chunk has all of it, else a new tensor; on the CPU. Not to be written to.

        Raises:
            CheckpointMismatchError: the bytes are not what the description says.
        """
        entry = self._described[name]
        assert isinstance(entry, TensorStorageMetadata)  # it is of the kind of ``live``
        if not isinstance(live, DTensor):
            # Nearly all are, and there are many: the way through the boxes would take a tenth of a load's time.
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
        """Return the elements from ``offsets`` on, ``sizes`` of them."""
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
        """Return a stored chunk; ``is_all`` when it is all that is wanted of the entry."""
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
            # Nothing of ours writes them, and one that decompresses has no bound.
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
    """Offset and length of pieces that several threads can bring at a time."""
    step = min(_MAX_AT_ONCE_BYTES, max(_SMALL_GAP_BYTES, (end - begin) // MAX_THREADS + 1))
    return [(place, min(step, end - place)) for place in range(begin, end, step)]


def _overlap(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return what two boxes have in common, as slices of the other one and of the first; None for nothing."""
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
            "an entry of the checkpoint is not what its metadata says",
            where=where,
            expected=expected,
            found=found,
            do="restore the file from a copy, or resume from another checkpoint",
        )
    )

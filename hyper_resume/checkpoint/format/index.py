"""``index.json``: the same content as DCP's ``.metadata``, in JSON, which is faster and safer to read.

``.metadata`` is a pickle. Reading it safely takes about 100 microseconds per entry. If the manifest lists an index, a load
reads the index. The pickle is written for stock DCP, and read in directories of other tools.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hyper_resume.checkpoint.parsing.metadata_structure import (
    box_complaint,
    cover_complaint,
    is_valid_size,
    path_complaint,
)
from hyper_resume.checkpoint.parsing.pickle_subset import shorten
from hyper_resume.checkpoint.parsing.strict_json import JsonFormatError, JsonObject, parse_json
from hyper_resume.checkpoint.tensors.copying import gc_paused
from hyper_resume.errors import CheckpointMismatchError, describe

INDEX_NAME = "index.json"
FORMAT = "hyper_resume.index"
FORMAT_VERSION = 1
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_MAX_FILES = 1 << 20
_MAX_DIMENSIONS = 64
_MAX_SIZE = 1 << 62


def encode(metadata: Metadata) -> bytes:
    """Return the file's bytes. Equal metadata gives equal bytes."""
    places = metadata.storage_data
    files = sorted({place.relative_path for place in places.values()})
    numbers = {name: number for number, name in enumerate(files)}
    tensors: list[str] = []
    values: list[str] = []
    # Built as text, because building nested lists for json.dumps takes twice the time.
    quoted = json.encoder.encode_basestring_ascii
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks = [
                f"[{_numbers(chunk.offsets)},{_numbers(chunk.sizes)},"
                f"{_place(places[MetadataIndex(name, chunk.offsets)], numbers)}]"
                for chunk in entry.chunks
            ]
            dtype = str(entry.properties.dtype)[len("torch.") :]
            tensors.append(f'{quoted(name)}:["{dtype}",{_numbers(entry.size)},[{",".join(chunks)}]]')
        else:
            values.append(f"{quoted(name)}:[{_place(places[MetadataIndex(name)], numbers)}]")
    head = json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, "files": files}, separators=(",", ":"))
    whole = f'{head[:-1]},"tensors":{{{",".join(tensors)}}},"values":{{{",".join(values)}}}}}\n'
    return whole.encode()


def _place(place: _StorageInfo, numbers: Mapping[str, int]) -> str:
    return f"{numbers[place.relative_path]},{place.offset},{place.length}"


@lru_cache(maxsize=65536)
def _numbers(size: torch.Size) -> str:
    return f"[{','.join(map(str, size))}]"


def decode(content: bytes, where: str) -> Metadata:
    """Read the file's bytes.

    Args:
        content: the whole file.
        where: the path, for messages.

    Raises:
        CheckpointMismatchError: not a valid index; chunks overlap or leave a hole; a path leads out of the checkpoint.
    """
    try:
        with gc_paused():
            return _decode(content)
    except (JsonFormatError, TypeError, ValueError, KeyError, IndexError, OverflowError, RuntimeError) as error:
        raise CheckpointMismatchError(
            describe(
                "the checkpoint's index can't be read",
                where=where,
                expected=f"{FORMAT}, format_version {FORMAT_VERSION}",
                found=str(error)[:300] or type(error).__name__,
                do="restore the file from a copy, or resume from another checkpoint",
            )
        ) from error


def _decode(content: bytes) -> Metadata:
    form = JsonObject(parse_json(content))
    form.refuse_unknown_keys("format", "format_version", "files", "tensors", "values")
    if form.text("format") != FORMAT or form.integer("format_version") != FORMAT_VERSION:
        raise JsonFormatError("another format, or another version of it")
    files = [JsonObject({"file": name}).text("file") for name in form.items("files", most=_MAX_FILES)]
    for name in files:
        complaint = path_complaint(name)
        if complaint:
            raise JsonFormatError(f"{complaint}: {shorten(name)}")
    if len(set(files)) != len(files):
        # The check for shared bytes identifies files by their number.
        raise JsonFormatError("files: a name is listed twice")
    reader = _Reader(files)
    for name, item in form.child("tensors").value.items():
        reader.add_tensor(name, item)
    for name, item in form.child("values").value.items():
        reader.add_value(name, item)
    reader.refuse_shared_bytes()
    return Metadata(state_dict_metadata=reader.entries, storage_data=reader.places)


class _Reader:
    """Builds the metadata, entry by entry."""

    def __init__(self, files: list[str]) -> None:
        self._files = files
        self._spans: list[tuple[int, int, int]] = []
        self._properties: dict[str, TensorProperties] = {}
        self._least: dict[tuple[str, torch.Size], int] = {}
        self.entries: dict[str, Any] = {}
        self.places: dict[MetadataIndex, _StorageInfo] = {}

    def add_tensor(self, name: str, item: Any) -> None:
        """Add a tensor entry; ``item`` is [dtype, shape, chunks]."""
        if type(item) is not list or len(item) != 3 or type(item[2]) is not list:
            raise JsonFormatError(f"entry {shorten(name)}: no type, shape and chunks")
        dtype, shape, chunks = item
        properties = self._properties.get(dtype)
        if properties is None:
            properties = self._properties[dtype] = TensorProperties(dtype=_DTYPES[dtype])
        size = _size(shape)
        least = self._least.get((dtype, size))
        if least is None:
            if not is_valid_size(size, properties.dtype):
                raise JsonFormatError(f"entry {shorten(name)}: too many elements for a tensor")
            least = self._least[dtype, size] = math.prod(size) * properties.dtype.itemsize
        parts: list[ChunkStorageMetadata] = []
        for offsets, sizes, *place in chunks:
            part = ChunkStorageMetadata(offsets=_size(offsets), sizes=_size(sizes))
            parts.append(part)
            # A short cut for a single chunk, which nearly all tensors have.
            is_whole = part.sizes == size and len(part.offsets) == len(size) and not any(part.offsets)
            complaint = "" if is_whole else box_complaint(size, part)
            if complaint:
                raise JsonFormatError(f"entry {shorten(name)}: {complaint}")
            index = MetadataIndex(name, part.offsets)
            if index in self.places:
                raise JsonFormatError(f"entry {shorten(name)}: two chunks at the same offsets")
            self._add_place(index, place, least if is_whole else math.prod(part.sizes) * properties.dtype.itemsize)
        complaint = "" if len(parts) == 1 and is_whole else cover_complaint(size, parts)
        if complaint:
            raise JsonFormatError(f"entry {shorten(name)}: {complaint}")
        self.entries[name] = TensorStorageMetadata(properties=properties, size=size, chunks=parts)

    def add_value(self, name: str, item: Any) -> None:
        """Add an entry that is not a tensor; ``item`` is [file number, offset, length]."""
        if name in self.entries:
            raise JsonFormatError(f"entry {shorten(name)} is listed twice")
        self._add_place(MetadataIndex(name), item, 0)
        self.entries[name] = BytesStorageMetadata()

    def _add_place(self, index: MetadataIndex, item: Any, least: int) -> None:
        number, offset, length = item
        if type(number) is not int or type(offset) is not int or type(length) is not int:
            raise JsonFormatError(f"entry {shorten(index.fqn)}: its location is not three integers")
        if number < 0 or not 0 <= offset <= _MAX_SIZE or not least <= length <= _MAX_SIZE:
            raise JsonFormatError(f"entry {shorten(index.fqn)}: invalid location, offset {offset} with {length} bytes")
        self._spans.append((number, offset, offset + length))
        self.places[index] = _StorageInfo(self._files[number], offset, length)

    def refuse_shared_bytes(self) -> None:
        """Refuse two entries that share a byte of a file."""
        self._spans.sort()
        last, end = -1, 0
        for number, begin, until in self._spans:
            if number == last and begin < end:
                raise JsonFormatError(f"entries share bytes of {shorten(self._files[number])}")
            last, end = number, until


def _size(numbers: Any) -> torch.Size:
    if type(numbers) is not list or len(numbers) > _MAX_DIMENSIONS:
        raise JsonFormatError(f"not a shape: {shorten(numbers)}")
    for number in numbers:
        if type(number) is not int or not 0 <= number <= _MAX_SIZE:
            raise JsonFormatError(f"not a shape: {shorten(numbers)}")
    return torch.Size(numbers)

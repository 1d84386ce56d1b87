"""An independent reader of an index and a table of digests, with json, struct, xxhash and plain counting."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import xxhash


class UnreadableError(ValueError):
    """The content can't be loaded; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The place of one box of a tensor: a file, and bytes of it. A value is one part without offsets and sizes."""

    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...] | None
    file: str
    begin: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry. ``dtype`` and ``shape`` are None of a value."""

    dtype: torch.dtype | None
    shape: tuple[int, ...] | None
    parts: tuple[Part, ...]


# ---- index.json ---------------------------------------------------------------------------------------------------------


def index_meaning(content: bytes, files: Mapping[str, bytes]) -> dict[str, Entry]:
    """Every entry by its name.

    Args:
        content: the index.
        files: the files next to it.

    Raises:
        UnreadableError: it is no valid index.
    """
    index = _json(content)
    if not isinstance(index, dict) or set(index) != {"format", "format_version", "files", "tensors", "values"}:
        raise UnreadableError("other keys than an index has")
    if (
        index["format"] != "hyper_resume.index"
        or type(index["format_version"]) is not int
        or index["format_version"] != 1
    ):
        raise UnreadableError("another format")
    names = _list(index["files"])
    for name in names:
        if not isinstance(name, str) or not _is_inside(name):
            raise UnreadableError(f"a file elsewhere: {name!r:.100}")
    entries = {name: _tensor(item, names) for name, item in _dict(index["tensors"]).items()}
    for name, item in _dict(index["values"]).items():
        if name in entries:
            raise UnreadableError("a tensor and a value of one name")
        entries[name] = Entry(dtype=None, shape=None, parts=(_part(None, None, item, names),))
    _refuse_shared(entries.values(), files)
    return entries


def _json(content: bytes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise UnreadableError("a key twice")
        return dict(pairs)

    def refuse(name: str) -> Any:
        raise UnreadableError(name)

    try:
        return json.loads(content.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"no JSON: {error}") from error


def _is_inside(name: str) -> bool:
    """True for a plain relative path to a file below the directory."""
    whole = os.path.normpath(f"/base/{name}") if not name.startswith("/") else name
    return whole == f"/base/{name}" and name not in ("", ".") and "\0" not in name


def _list(found: Any) -> list[Any]:
    if not isinstance(found, list):
        raise UnreadableError("no list where one must be")
    return found


def _dict(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise UnreadableError("no object where one must be")
    return found


def _whole_number(found: Any) -> int:
    if type(found) is not int or not 0 <= found < 1 << 63:
        raise UnreadableError(f"no number of bytes or elements: {found!r:.100}")
    return found


def _numbers(found: Any) -> tuple[int, ...]:
    return tuple(_whole_number(number) for number in _list(found))


def _tensor(item: Any, names: Sequence[str]) -> Entry:
    if len(_list(item)) != 3:
        raise UnreadableError("no type, shape and boxes")
    dtype = getattr(torch, item[0], None) if isinstance(item[0], str) else None
    if not isinstance(dtype, torch.dtype):
        raise UnreadableError(f"no type: {item[0]!r:.100}")
    shape = _numbers(item[1])
    parts = []
    for box in _list(item[2]):
        if len(_list(box)) != 5:
            raise UnreadableError("a box of other parts")
        part = _part(_numbers(box[0]), _numbers(box[1]), box[2:], names)
        if math.prod(part.sizes or ()) * dtype.itemsize > part.length:
            raise UnreadableError("more elements than bytes")
        parts.append(part)
    if not covers_once(shape, [(part.offsets or (), part.sizes or ()) for part in parts]):
        raise UnreadableError("the boxes do not cover it once")
    return Entry(dtype=dtype, shape=shape, parts=tuple(parts))


def _part(offsets: tuple[int, ...] | None, sizes: tuple[int, ...] | None, place: Any, names: Sequence[str]) -> Part:
    if len(_list(place)) != 3:
        raise UnreadableError("no place")
    number, begin, length = map(_whole_number, place)
    if number >= len(names):
        raise UnreadableError("a file that is not listed")
    return Part(offsets=offsets, sizes=sizes, file=names[number], begin=begin, length=length)


def covers_once(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """True if the boxes, (offsets, sizes) each, lie inside the shape and cover each element once."""
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return False
        if any(at + size > most for at, size, most in zip(offsets, sizes, shape, strict=True)):
            return False
    boxes = sorted((tuple(offsets), tuple(sizes)) for offsets, sizes in boxes if math.prod(sizes))
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    # Their total volume is right, so they cover the shape if no two overlap.
    for number, (offsets, sizes) in enumerate(boxes):
        for other_offsets, other_sizes in boxes[number + 1 :]:
            if shape and other_offsets[0] >= offsets[0] + sizes[0]:
                break
            if _meet(offsets, sizes, other_offsets, other_sizes):
                return False
    return True


def _meet(offsets: Sequence[int], sizes: Sequence[int], others: Sequence[int], other_sizes: Sequence[int]) -> bool:
    return all(
        at < other + other_size and other < at + size
        for at, size, other, other_size in zip(offsets, sizes, others, other_sizes, strict=True)
    )


def _refuse_shared(entries: Any, files: Mapping[str, bytes]) -> None:
    """Refuse shared bytes, by the names of files, however often one is listed."""
    spans = [
        (part.file, part.begin, part.begin + part.length) for entry in entries for part in entry.parts if part.length
    ]
    last, end = "", 0
    for file, begin, until in sorted(spans):
        if file == last and begin < end:
            raise UnreadableError(f"bytes of {file[:100]} that two entries share")
        if file not in files or until > len(files[file]):
            raise UnreadableError(f"bytes that no file has: {file[:100]} up to {until}")
        last, end = file, until


def doubt_description(metadata: Any, meaning: Mapping[str, Entry]) -> str:
    """What is wrong with a description that the library read; "" if nothing is."""
    if set(metadata.state_dict_metadata) != set(meaning):
        return "other entries than the index has"
    places = {(index.fqn, index.offset): place for index, place in metadata.storage_data.items()}
    for name, entry in meaning.items():
        found = metadata.state_dict_metadata[name]
        if (entry.dtype is None) != (not hasattr(found, "chunks")):
            return f"{name[:100]}: a tensor is read as a value, or a value as a tensor"
        if entry.dtype is not None:
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks]
            expected = (entry.dtype, entry.shape, [(part.offsets, part.sizes) for part in entry.parts])
            if (found.properties.dtype, tuple(found.size), boxes) != expected:
                return f"{name[:100]}: another type, shape or boxes"
        for part in entry.parts:
            offsets = None if part.offsets is None else torch.Size(part.offsets)
            place = places.get((name, offsets))
            if place is None or (place.relative_path, place.offset, place.length) != (
                part.file,
                part.begin,
                part.length,
            ):
                return f"{name[:100]}: another place"
    return ""


def value(entry: Entry, files: Mapping[str, bytes]) -> Any:
    """The value of an entry, read by torch's restricted reader; a tensor without elements is an empty text.

    If torch refuses an archive because of records that do not concern the tensor, it is read record by record.
    """
    pieces = [_piece(entry, part, files) for part in entry.parts]
    if entry.dtype is None or entry.shape is None:
        return pieces[0]
    if not math.prod(entry.shape):
        return ""
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for part, piece in zip(entry.parts, pieces, strict=True):
        if not isinstance(piece, torch.Tensor) or (piece.dtype, tuple(piece.shape)) != (entry.dtype, part.sizes):
            raise UnreadableError("a part is of another type or shape")
        boxed = zip(part.offsets or (), part.sizes or (), strict=True)
        whole[tuple(slice(at, at + size) for at, size in boxed)] = piece
    return whole


def _piece(entry: Entry, part: Part, files: Mapping[str, bytes]) -> Any:
    content = files[part.file][part.begin : part.begin + part.length]
    try:
        return _unpacked(content)
    except RuntimeError:
        if entry.dtype is None or part.sizes is None:
            raise
        return _by_records(content, entry.dtype, part.sizes)


# Most parts are good ones, repeated in many cases.
@lru_cache(maxsize=256)
def _unpacked(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _by_records(content: bytes, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose pickle equals the one that torch writes for this type and shape."""
    like = io.BytesIO()
    torch.save(torch.zeros(sizes, dtype=dtype), like)
    if _record(content, "data.pkl") != _record(like.getvalue(), "data.pkl"):
        raise UnreadableError("a pickle of something else")
    return torch.frombuffer(bytearray(_record(content, "data/0")), dtype=dtype).view(sizes)


def _record(content: bytes, name: str) -> bytes:
    """The bytes of one record, if their checksum is right or absent."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        (found,) = [one for one in archive.infolist() if one.filename == f"archive/{name}"]
    name_bytes, extra_bytes = struct.unpack_from("<2H", content, found.header_offset + 26)
    begin = found.header_offset + 30 + name_bytes + extra_bytes
    return content[begin : begin + found.file_size]


# ---- the table of digests -----------------------------------------------------------------------------------------------


def table_meaning(content: bytes) -> list[tuple[int, int, bytes]]:
    """The segments in a shard's table: beginning, length and digest.

    Raises:
        UnreadableError: there is no table, it does not cover the file, or a digest is not that of the bytes.
    """
    if len(content) < 16 or content[-8:] != b"hrsegm01":
        raise UnreadableError("no table")
    (count,) = struct.unpack("<Q", content[-16:-8])
    body_bytes = len(content) - 16 - 24 * count
    if body_bytes < 0:
        raise UnreadableError("more segments than the file has room for")
    found = list(_segments(content, body_bytes, count))
    if sum(length for _, length, _ in found) != body_bytes:
        raise UnreadableError("segments that are not all that is before the table")
    for begin, length, digest in found:
        if xxhash.xxh3_128_digest(content[begin : begin + length]) != digest:
            raise UnreadableError(f"other bytes at {begin}")
    return found


def _segments(content: bytes, table: int, count: int) -> Iterator[tuple[int, int, bytes]]:
    begin = 0
    for number in range(count):
        length, digest = struct.unpack_from("<Q16s", content, table + 24 * number)
        yield begin, length, digest
        begin += length

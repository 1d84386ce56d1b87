"""Checks of decoded DCP metadata: chunks cover each tensor exactly once, and each entry has its own bytes of a file.

If chunks left a hole, the tensor would silently keep old values there. If they overlapped, the result would depend on the
order of reading. DCP writes neither.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from hyper_resume.checkpoint.parsing.metadata_pickle import MAX_INTEGER, has_required_fields
from hyper_resume.checkpoint.parsing.pickle_subset import PickleRefused, shorten
from hyper_resume.checkpoint.parsing.strict_json import MAX_TEXT

# This makes 2**6 corners per chunk. Parallelism splits along three dimensions at most.
_MAX_SPLIT_DIMENSIONS = 6
_MAX_NAME_BYTES = 255
# Many entries can share one object, so the size of each object is limited. torch allows 64 dimensions.
_MAX_DIMENSIONS = 64
_MAX_PATH_PARTS = 64
_MAX_TRANSFORMATIONS = 8


def check_structure(metadata: Any) -> None:
    """Check that the parts of the metadata are consistent.

    Raises:
        PickleRefused: they are not; the message names the entry.
    """
    if type(metadata) is not Metadata or not has_required_fields(metadata) or metadata.storage_data is None:
        raise PickleRefused("not a Metadata with its entries and their locations")
    _check_side_parts(metadata)
    places: dict[Any, Any] = metadata.storage_data
    _check_places(places)
    described: set[MetadataIndex] = set()
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str:
            raise PickleRefused("an entry whose name is not text")
        if len(name) > MAX_TEXT:
            raise PickleRefused(f"an entry whose name has {len(name)} characters; at most {MAX_TEXT} are read")
        if type(entry) is TensorStorageMetadata:
            indexes = _check_tensor(name, entry, places)
        elif type(entry) is BytesStorageMetadata:
            indexes = [MetadataIndex(name)]
        else:
            raise PickleRefused(f"entry {shorten(name)} that is {shorten(entry)}")
        if any(index not in places for index in indexes):
            raise PickleRefused(f"entry {shorten(name)}: it has no location")
        described.update(indexes)
    if len(described) != len(places):
        raise PickleRefused(f"{len(places)} locations for {len(described)} chunks and values")


def _check_side_parts(metadata: Metadata) -> None:
    for name, path in (metadata.planner_data or {}).items():
        is_path = (
            type(path) is tuple and len(path) <= _MAX_PATH_PARTS and all(type(part) in (str, int) for part in path)
        )
        if type(name) is not str or not is_path:
            raise PickleRefused(f"planner_data[{shorten(name)}]: not a path into the state")
    about = metadata.storage_meta
    if about is not None and not (
        type(about) is StorageMeta and has_required_fields(about) and "modules" in vars(about)
    ):
        raise PickleRefused("a StorageMeta without its fields")
    if about is not None and not all(type(module) is str for module in about.modules):
        raise PickleRefused("StorageMeta.modules: not a list of names")


def _check_places(places: dict[Any, Any]) -> None:
    """Check that each location is in a file of the directory, and that no two share a byte."""
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for index, place in places.items():
        if type(index) is not MetadataIndex:
            raise PickleRefused("a location of something that is not a MetadataIndex")
        name = shorten(index.fqn)
        if type(place) is not _StorageInfo or not has_required_fields(place):
            raise PickleRefused(f"entry {name}: its location is {shorten(place)}")
        if not (0 <= place.offset <= MAX_INTEGER and 0 <= place.length <= MAX_INTEGER):
            raise PickleRefused(f"entry {name}: invalid location, offset {place.offset} with {place.length} bytes")
        transformations = place.transform_descriptors or ()
        if len(transformations) > _MAX_TRANSFORMATIONS or not all(type(text) is str for text in transformations):
            raise PickleRefused(f"entry {name}: a stream transformation that is not text")
        if place.relative_path not in spans:
            complaint = path_complaint(place.relative_path)
            if complaint:
                raise PickleRefused(f"entry {name}: {complaint}: {shorten(place.relative_path)}")
        spans.setdefault(place.relative_path, []).append((place.offset, place.offset + place.length, name))
    for file, parts in spans.items():
        parts.sort()
        for (_, end, one), (begin, _, other) in itertools.pairwise(parts):
            if begin < end:
                raise PickleRefused(f"entries {one} and {other} share bytes of {shorten(file)}")


def path_complaint(name: str) -> str:
    """Return why ``name`` is not a path to a file in the step directory or in a direct subdirectory; "" if it is one."""
    parts = name.split("/")
    if name.startswith("/"):
        return "an absolute path"
    if ".." in parts:
        return "a path that leads out of the checkpoint"
    if len(parts) > 2 or "" in parts or "." in parts or "\\" in name:
        return "not a plain path of a file"
    if not name.isprintable() or any(len(part.encode("utf-8", "replace")) > _MAX_NAME_BYTES for part in parts):
        return "a name that no file can have"
    return ""


def _check_tensor(name: str, entry: TensorStorageMetadata, places: dict[Any, Any]) -> list[MetadataIndex]:
    """Check a tensor entry and return the keys of its chunks in ``places``."""
    if not has_required_fields(entry) or not vars(entry.properties) or len(entry.size) > _MAX_DIMENSIONS:
        raise PickleRefused(f"entry {shorten(name)}: a tensor without its properties, or of too many dimensions")
    if not is_valid_size(entry.size, entry.properties.dtype):
        raise PickleRefused(f"entry {shorten(name)}: too many elements for a tensor")
    indexes, complaint = [], ""
    # Entries may share one list of chunks, but the loop is bounded: it ends at the first chunk without a location.
    for chunk in entry.chunks:
        if type(chunk) is not ChunkStorageMetadata or not has_required_fields(chunk):
            complaint = f"a chunk that is {shorten(chunk)}"
            break
        index = MetadataIndex(name, chunk.offsets)
        complaint = _chunk_complaint(entry, chunk, places.get(index))
        if complaint:
            break
        indexes.append(index)
    complaint = complaint or cover_complaint(entry.size, entry.chunks)
    if complaint:
        raise PickleRefused(f"entry {shorten(name)}: {complaint}")
    if len(set(indexes)) != len(indexes):
        raise PickleRefused(f"entry {shorten(name)}: two chunks at the same offsets")
    return indexes


def is_valid_size(size: torch.Size, dtype: torch.dtype) -> bool:
    """True if torch can represent this shape; it computes strides and sizes even if a dimension is 0."""
    return math.prod(max(1, number) for number in size) * dtype.itemsize <= MAX_INTEGER


def _chunk_complaint(entry: TensorStorageMetadata, chunk: ChunkStorageMetadata, place: Any) -> str:
    complaint = box_complaint(entry.size, chunk)
    if complaint:
        return complaint
    if place is None:
        return "a chunk without a location"
    smallest = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
    if smallest > place.length and not place.transform_descriptors:
        return f"{smallest} bytes of values in {place.length} bytes of a file"
    return ""


def box_complaint(size: torch.Size, chunk: ChunkStorageMetadata) -> str:
    """Return why ``chunk`` is not a part of a tensor of shape ``size``; "" if it is one."""
    if not len(chunk.offsets) == len(chunk.sizes) == len(size):
        return "a chunk of another number of dimensions"
    if any(begin + most > whole for begin, most, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)):
        return "a chunk that reaches out of the tensor"
    return ""


def cover_complaint(size: torch.Size, chunks: list[ChunkStorageMetadata]) -> str:
    """Return why ``chunks`` do not cover a tensor of shape ``size`` exactly once; "" if they do.

    Method: each box contributes its corners with a sign, which is negative if the corner has an odd number of upper bounds
    among its coordinates. The sum over all boxes is the mixed difference of the function "number of boxes that contain this
    element" and determines that function. So the sum equals the corners of the whole tensor if and only if every element is
    in exactly one chunk. This takes one pass, while comparing all pairs of chunks would take quadratic time.
    """
    if 0 in size:
        return ""
    boxes = [chunk for chunk in chunks if 0 not in chunk.sizes]
    split = [axis for axis, whole in enumerate(size) if any(box.sizes[axis] != whole for box in boxes)]
    if len(split) > _MAX_SPLIT_DIMENSIONS:
        return f"split along {len(split)} dimensions"
    corners: Counter[tuple[int, ...]] = Counter()
    for box in boxes:
        _add_corners(corners, [(box.offsets[axis], box.offsets[axis] + box.sizes[axis]) for axis in split], 1)
    _add_corners(corners, [(0, size[axis]) for axis in split], -1)
    if not any(corners.values()):
        return ""
    volume, whole = sum(math.prod(box.sizes) for box in boxes), math.prod(size)
    kind = "leave a hole" if volume < whole else "overlap"
    return f"its {len(chunks)} chunks {kind}: {volume} elements of {whole}"


def _add_corners(corners: Counter[tuple[int, ...]], bounds: list[tuple[int, int]], weight: int) -> None:
    for choice in itertools.product((0, 1), repeat=len(bounds)):
        sign = -weight if sum(choice) % 2 else weight
        corners[tuple(pair[side] for pair, side in zip(bounds, choice, strict=True))] += sign

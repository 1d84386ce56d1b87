"""``hyper-resume diff``: compare two step directories bit by bit, and report bucket, entry, rank and the first difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hyper_resume.checkpoint.disk import observing
from hyper_resume.checkpoint.format import extra_state as extra
from hyper_resume.checkpoint.format.manifest import Manifest
from hyper_resume.checkpoint.format.metadata import require_complete
from hyper_resume.checkpoint.format.save_id import SAVE_ID
from hyper_resume.checkpoint.loading import file_verification
from hyper_resume.checkpoint.loading.reading import load_entries, read_training_state
from hyper_resume.errors import CheckpointNotFoundError, HyperResumeError, explained, printable
from hyper_resume.local_path import local_path

_BATCH_BYTES = 256 << 20
_BATCH_ENTRIES = 500
_SHOWN = 120


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One entry that differs between the two directories.

    ``where`` is the position of the first difference inside the entry; ``first`` and ``second`` are the two values there. For
    a tensor, ``differing`` of its ``elements`` are not equal.
    """

    bucket: str
    entry: str
    rank: int | None
    where: str
    first: str
    second: str
    differing: int | None = None
    elements: int | None = None

    def as_plain(self) -> dict[str, Any]:
        """Return a dict that can be written as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Side:
    directory: Path
    metadata: Metadata
    manifest: Manifest | None


def compare(first: str | Path, second: str | Path) -> Iterator[Difference]:
    """Yield every entry that differs, sorted by name. Tensors are read in batches, so memory stays bounded.

    Raises:
        ConfigError: a path is an address with a scheme.
        CheckpointNotFoundError: one of the directories is missing or incomplete, can't be read, or was deleted meanwhile.
        CheckpointMismatchError: one of the directories is damaged.
    """
    sides = [_open(local_path(path)) for path in (first, second)]
    try:
        yield from _compare_entries(*sides)
        yield from _compare_training_states(*sides)
    except HyperResumeError as error:
        gone = next((side.directory for side in sides if not side.directory.is_dir()), None)
        if gone is None:
            raise
        raise observing.vanished_error(gone) from error


def _open(directory: Path) -> _Side:
    with explained("this can't be compared", directory):
        if not directory.is_dir():
            require_complete(directory)
        return observing.unchanged(directory, partial(_verified, directory))


def _verified(directory: Path) -> _Side:
    manifest = file_verification.verify(directory, "digest", None)
    return _Side(directory, file_verification.check_metadata(directory, manifest), manifest)


def _compare_entries(one: _Side, other: _Side) -> Iterator[Difference]:
    ours, theirs = (_payload_entries(side) for side in (one, other))
    same: list[str] = []
    for name in sorted(set(ours) | set(theirs)):
        found = _entry_type(ours.get(name)), _entry_type(theirs.get(name))
        if found[0] != found[1]:
            yield _difference(name, None, "", *found)
        else:
            same.append(name)
    for batch in _batches(same, ours):
        pairs = [_read(side, batch) for side in (one, other)]
        for name in batch:
            yield from _compare_values(name, None, pairs[0][name], pairs[1][name])


def _payload_entries(side: _Side) -> dict[str, Any]:
    left_out = (f"{extra.PAYLOAD_KEY}.", f"{SAVE_ID}.")
    return {name: entry for name, entry in side.metadata.state_dict_metadata.items() if not name.startswith(left_out)}


def _entry_type(entry: Any) -> str:
    if entry is None:
        return "absent"
    if isinstance(entry, TensorStorageMetadata):
        return f"{str(entry.properties.dtype).removeprefix('torch.')}{list(entry.size)}"
    return "a value"


def _batches(names: Sequence[str], entries: Mapping[str, Any]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name in names:
        batch.append(name)
        size += _size_bytes(entries[name])
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_ENTRIES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size_bytes(entry: Any) -> int:
    return entry.size.numel() * entry.properties.dtype.itemsize if isinstance(entry, TensorStorageMetadata) else 0


def _read(side: _Side, names: Sequence[str]) -> dict[str, Any]:
    return load_entries(dict.fromkeys(names), side.directory, side.metadata).values


def _compare_training_states(one: _Side, other: _Side) -> Iterator[Difference]:
    ours, theirs = (_training_states(side) for side in (one, other))
    for rank in sorted(set(ours) | set(theirs)):
        if rank not in ours or rank not in theirs:
            first, second = ("present" if rank in side else "absent" for side in (ours, theirs))
            yield _difference(extra.PAYLOAD_KEY, rank, "", first, second)
            continue
        for key in sorted((set(ours[rank]) | set(theirs[rank])) - extra.IDENTITY_KEYS):
            yield from _compare_values(key, rank, ours[rank].get(key, "absent"), theirs[rank].get(key, "absent"))


def _training_states(side: _Side) -> dict[int, dict[str, Any]]:
    try:
        layout = extra.detect_layout(side.directory, side.metadata, side.manifest)
    except CheckpointNotFoundError:
        return {}
    return {rank: read_training_state(side.directory, side.metadata, layout, rank) for rank in layout.ranks}


def _compare_values(entry: str, rank: int | None, one: Any, other: Any) -> Iterator[Difference]:
    found = _first_difference(one, other, "")
    if found is not None:
        yield _difference(entry, rank, *found)


def _first_difference(one: Any, other: Any, where: str) -> tuple[Any, ...] | None:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _first_element(one, other, where)
    if type(one) is not type(other):
        return where, f"{type(one).__name__} {_show(one)}", f"{type(other).__name__} {_show(other)}"
    if isinstance(one, Mapping):
        for key in sorted(set(one) | set(other), key=repr):
            name = printable(str(key), _SHOWN)
            inside = f"{where}.{name}" if where else name
            if key not in one or key not in other:
                return (
                    inside,
                    _show(one[key]) if key in one else "absent",
                    _show(other[key]) if key in other else "absent",
                )
            found = _first_difference(one[key], other[key], inside)
            if found is not None:
                return found
        return None
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return where, f"{len(one)} items", f"{len(other)} items"
        inner = (_first_difference(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True)))
        return next((found for found in inner if found is not None), None)
    return None if repr(one) == repr(other) else (where, _show(one), _show(other))


def _first_element(one: torch.Tensor, other: torch.Tensor, where: str) -> tuple[Any, ...] | None:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return where, f"{one.dtype}{list(one.shape)}", f"{other.dtype}{list(other.shape)}"
    ours, theirs = (tensor.contiguous().reshape(-1) for tensor in (one, other))
    if not ours.numel():
        return None
    # Bytes are compared: two NaNs with the same bits are equal, and 0.0 differs from -0.0.
    width = ours.element_size()
    unequal = (ours.view(torch.uint8) != theirs.view(torch.uint8)).reshape(-1, width).any(dim=1)
    count = int(unequal.sum())
    if not count:
        return None
    flat = int(unequal.nonzero()[0])
    place = f"{where}[{', '.join(str(int(i)) for i in torch.unravel_index(torch.tensor(flat), one.shape))}]"
    return place, _element(ours, flat), _element(theirs, flat), count, ours.numel()


def _element(flat: torch.Tensor, index: int) -> str:
    bits = bytes(flat[index : index + 1].view(torch.uint8).tolist())
    return f"{flat[index].item()!r} (0x{bits[::-1].hex()})"


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _difference(
    entry: str,
    rank: int | None,
    where: str,
    first: str,
    second: str,
    differing: int | None = None,
    elements: int | None = None,
) -> Difference:
    bucket = entry.split(".", 1)[0] if rank is None else extra.bucket_of(entry)
    return Difference(
        bucket=bucket,
        entry=entry,
        rank=rank,
        where=where,
        first=first,
        second=second,
        differing=differing,
        elements=elements,
    )

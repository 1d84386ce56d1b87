"""A rank's parts of the sharded tensors in a training state, put together from those that ranks of another mesh saved.

Each rank saves its local parts, with the place of each in its whole tensor (``extra_state.SHARDED``). Only a restore on another
mesh reads the training state of every saved rank, one after the other: a rank never holds more than one of them and its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hyper_resume import digest
from hyper_resume.checkpoint.format import extra_state as extra
from hyper_resume.checkpoint.format.bucket_digests import compare_digests
from hyper_resume.checkpoint.format.manifest import Manifest
from hyper_resume.errors import CheckpointMismatchError, describe

STATEFUL = "stateful"


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a whole tensor of ``shape`` that begins at ``offsets`` and has ``sizes``; a scalar has none of them."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def to_plain(self) -> list[list[int]]:
        """Return lists that a training state can hold."""
        return [list(self.shape), list(self.offsets), list(self.sizes)]

    def slices_of(self, other: Part) -> tuple[slice, ...] | None:
        """Return where ``other`` lies in this part, cut to it; None where they have nothing in common."""
        found = []
        for begin, size, start, count in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low, high = max(begin, start), min(begin + size, start + count)
            if low >= high:
                return None
            found.append(slice(low - begin, high - begin))
        return tuple(found)


def parts_from_plain(found: Any) -> dict[str, Part]:
    """Return path -> part; nothing of a training state without places, which version 0.2.0 and before wrote.

    Raises:
        CheckpointMismatchError: a part does not lie in its whole tensor.
    """
    parts = {}
    for path, lists in found.items() if isinstance(found, Mapping) else ():
        numbers = [tuple(one) for one in lists] if isinstance(lists, list) else []
        is_valid = len(numbers) == 3 and len(set(map(len, numbers))) == 1
        is_valid = is_valid and all(type(value) is int and value >= 0 for one in numbers for value in one)
        if not is_valid or any(begin + size > whole for whole, begin, size in zip(*numbers, strict=True)):
            raise _unreadable(f"stateful.{path}", "a part within its tensor: shape, offsets, sizes", str(lists)[:200])
        parts[path] = Part(shape=numbers[0], offsets=numbers[1], sizes=numbers[2])
    return parts


def reshard(
    first: Mapping[str, Any],
    ranks: Iterable[int],
    read: Callable[[int], Mapping[str, Any]],
    wanted: Mapping[str, Part],
    manifest: Manifest | None,
) -> dict[str, Any]:
    """Return ``first`` with this rank's parts of the sharded tensors of its other stateful objects; without collectives.

    Args:
        first: the training state that all ranks get.
        ranks: those that saved one.
        read: returns the training state of a saved rank.
        wanted: path -> the part that this rank has of the live tensor.
        manifest: of the checkpoint; its digests decide whether what is read is what was saved.

    Returns:
        the training state. ``extra_state.RESHARDED`` names the objects of which the rest was not the same on all ranks.

    Raises:
        CheckpointMismatchError: the parts do not make up a tensor, copies of a part differ, or one is not as it was saved.
    """
    saved = parts_from_plain(first.get(extra.SHARDED))
    pieces = {
        path: _Pieces(path, part) for path, part in wanted.items() if path in saved and part.shape == saved[path].shape
    }
    rests: dict[str, set[str]] = {}
    for rank in ranks:
        state = read(rank)
        where = f"the extra_state of rank {rank}"
        if _save_of(state) != _save_of(first):
            raise _unreadable(where, f"step {first['global_step']} of the same save", f"step {state['global_step']}")
        if manifest is not None:
            compare_digests(extra.saved_digests(manifest, state), extra.bucket_digests(state), where)
        parts = parts_from_plain(state.get(extra.SHARDED))
        for name, value in (state.get(STATEFUL) or {}).items():

            def take(path: str, tensor: torch.Tensor, parts: Mapping[str, Part] = parts) -> Any:
                if path in pieces and path in parts:
                    pieces[path].add(parts[path], tensor)
                return tensor if path not in parts else None

            rest = _with_tensors(value, name, take)
            rests.setdefault(name, set()).add(digest.state_digest_text(rest))
    whole = {path: piece.whole() for path, piece in pieces.items()}
    stateful = {
        name: _with_tensors(value, name, lambda path, tensor: whole.get(path, tensor))
        for name, value in (first.get(STATEFUL) or {}).items()
    }
    differing = sorted(name for name, found in rests.items() if len(found) > 1)
    kept = {path: part.to_plain() for path, part in saved.items()}
    now = {path: wanted[path].to_plain() for path in whole}
    return {**first, STATEFUL: stateful, extra.SHARDED: {**kept, **now}, extra.RESHARDED: [differing, sorted(whole)]}


def _save_of(state: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(state.get(key) for key in ("global_step", "world_size", "save_id"))


class _Pieces:
    """One tensor's part on this rank, which is filled piece by piece."""

    def __init__(self, path: str, part: Part) -> None:
        self._path, self._part = path, part
        self._values: torch.Tensor | None = None
        self._is_filled = torch.zeros(part.sizes, dtype=torch.bool)

    def add(self, part: Part, tensor: torch.Tensor) -> None:
        """Take what a saved part has of this one."""
        if tuple(tensor.shape) != part.sizes or part.shape != self._part.shape:
            raise _unreadable(
                f"stateful.{self._path}", f"a part of {part.sizes} of {self._part.shape}", str(tuple(tensor.shape))
            )
        if self._values is None:
            self._values = torch.empty(self._part.sizes, dtype=tensor.dtype)
        target, source = self._part.slices_of(part), part.slices_of(self._part)
        if target is None or source is None:
            return
        known, values = self._is_filled[target], tensor[source]
        if values.dtype != self._values.dtype or not torch.equal(
            self._values[target][known].contiguous().view(torch.uint8), values[known].contiguous().view(torch.uint8)
        ):
            raise _unreadable(
                f"stateful.{self._path}", "the same values on all ranks that have copies of a part", "others"
            )
        self._values[target] = values
        self._is_filled[target] = True

    def whole(self) -> torch.Tensor:
        """Return the part, once every element has come."""
        if self._values is None or not bool(self._is_filled.all()):
            raise _unreadable(
                f"stateful.{self._path}", f"parts for all of its {self._is_filled.numel()} elements here", "fewer"
            )
        return self._values


def _with_tensors(value: Any, path: str, function: Callable[[str, torch.Tensor], Any]) -> Any:
    """Return the nested state with ``function(path, tensor)`` in place of each tensor; paths as those of the save."""
    if isinstance(value, torch.Tensor):
        return function(path, value)
    if isinstance(value, Mapping):
        return {key: _with_tensors(item, f"{path}.{key}", function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_with_tensors(item, f"{path}.{place}", function) for place, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _unreadable(where: str, expected: str, found: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        describe(
            "the saved parts of a sharded tensor do not fit together",
            where=where,
            expected=expected,
            found=found,
            do="resume with the number of ranks and the parallel sizes that were saved, or from another checkpoint",
        )
    )

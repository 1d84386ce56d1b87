"""The index side of a torch loader: notes what the sampler gives, and passes over what was consumed before a resume."""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import xxhash

from hyper_resume.errors import CheckpointMismatchError, describe


class IndexOwner(Protocol):
    """The pass that an index side belongs to."""

    def before_iteration(self, made: int) -> None:
        """The sampler's iterator is about to be made; ``made`` of them were made before."""
        ...

    def before_draw(self, number: int) -> None:
        """Index batch ``number`` (from 0) is about to be drawn."""
        ...


class DrawnIndices:
    """Stands in for a loader's ``batch_sampler`` (or ``sampler``, where nothing is batched) in one pass.

    Every index batch goes through a running digest. ``consumed`` follows training; what is drawn ahead of it waits here.

    Args:
        sampler: the loader's own; asked exactly when, and as often as, torch would ask it.
        owner: asked before the sampler's iterator is made, and before each draw; held weakly, because torch's iterator holds
            this object, and an iterator of workers in a cycle might be collected in a process that was forked from this one.
    """

    def __init__(self, sampler: Any, owner: IndexOwner) -> None:
        """Draw nothing yet."""
        self.sampler = sampler
        self.is_held = False
        self.exhausted = False
        self.drawn = 0
        self.consumed = 0
        self.sample_ids: list[int] = []
        self.consumed_digest = _EMPTY
        self.drawn_digest = _EMPTY
        self._waiting: deque[tuple[Any, bytes]] = deque()
        self._owner = weakref.ref(owner)
        self._made = 0
        self._expected: tuple[int, bytes] | None = None
        self._hasher = xxhash.xxh3_128()
        self._iterator: Iterator[Any] = iter(())

    def __getattr__(self, name: str) -> Any:
        """What others read from a sampler (``batch_size``, ``set_epoch``) is the sampler's."""
        if name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __len__(self) -> int:
        """Index batches of a whole epoch."""
        return len(self.sampler)

    def __iter__(self) -> _Draws:
        """Make the sampler's iterator, as torch does once or twice for a pass."""
        owner = self._owner()
        if owner is not None:
            owner.before_iteration(self._made)
        self._made += 1
        self._iterator = iter(self.sampler)
        return _Draws(self)

    def draw(self) -> Any:
        """Draw the next index batch.

        Raises:
            StopIteration: the sampler has given all, or is held back.
            CheckpointMismatchError: another index batch was drawn here in the run that was saved.
        """
        if self.is_held:
            raise StopIteration
        owner = self._owner()
        if owner is not None:
            owner.before_draw(self.drawn)
        try:
            index = next(self._iterator)
        except StopIteration:
            self.exhausted = True
            raise
        self.drawn += 1
        self._hasher.update(_bytes_of(index))
        self.drawn_digest = self._hasher.digest()
        self._waiting.append((index, self.drawn_digest))
        if self._expected is not None and self.drawn == self._expected[0]:
            self._compare(self.drawn_digest, self._expected[1], self.drawn)
        return index

    def consume(self) -> None:
        """Training has got the next batch."""
        index, self.consumed_digest = self._waiting.popleft()
        self.consumed += 1
        self.sample_ids = _sample_ids(index)

    def skip(self, saved: Mapping[str, Any], batches: int) -> None:
        """Draw what was consumed before the save, and compare; nothing is read from the dataset.

        Raises:
            CheckpointMismatchError: the sampler does not give again what it gave.
        """
        if saved["drawn"] > batches:
            self._expected = (saved["drawn"], saved["drawn_digest"])
        for number in range(batches):
            try:
                self.draw()
            except StopIteration:
                raise self._mismatch(f"{batches} index batches or more", f"{number} in the epoch") from None
            self.consume()
        self._compare(self.consumed_digest, saved["consumed_digest"], batches)

    def _compare(self, found: bytes, expected: bytes, count: int) -> None:
        if found != expected:
            raise self._mismatch(f"digest {expected.hex()} of the first {count} index batches", f"digest {found.hex()}")

    def _mismatch(self, expected: str, found: str) -> CheckpointMismatchError:
        return CheckpointMismatchError(
            describe(
                "the sampler does not give the index batches that it gave in the run that was saved",
                where=f"sampler {sampler_name(self.sampler)}",
                expected=expected,
                found=found,
                do="build the loader as in the saved run; a sampler that draws while training draws from the same stream needs "
                "a generator of its own, kept as an attribute",
            )
        )


class _Draws(Iterator[Any]):
    """What torch holds as the sampler's iterator."""

    def __init__(self, indices: DrawnIndices) -> None:
        self._indices = indices

    def __next__(self) -> Any:
        return self._indices.draw()


def sampler_name(sampler: Any) -> str:
    """The class of a sampler, and of the one that it batches."""
    inner = getattr(sampler, "sampler", None)
    name = type(sampler).__name__
    return name if inner is None else f"{name} of {type(inner).__name__}"


_EMPTY = xxhash.xxh3_128_digest(b"")


def _bytes_of(index: Any) -> bytes:
    """The same bytes for the same indices, however they are kept."""
    if isinstance(index, torch.Tensor):
        index = index.tolist()
    try:
        return b"q" + array("q", index if isinstance(index, (list, tuple)) else (index,)).tobytes()
    except (TypeError, OverflowError):
        return repr(index).encode()


def _sample_ids(index: Any) -> list[int]:
    if isinstance(index, torch.Tensor):
        index = index.tolist()
    items = list(index) if isinstance(index, (list, tuple)) else [index]
    return [int(item) for item in items] if all(hasattr(item, "__index__") for item in items) else []

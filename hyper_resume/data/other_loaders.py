"""Positions in our own loader, and in iterables without any: those are read again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from hyper_resume.data.held_state import HeldState
from hyper_resume.data.loader import DataLoader, EpochIterator
from hyper_resume.data.passes import Pass, length_of, set_epoch_everywhere
from hyper_resume.data.streams import moved_streams, pack_streams, put_streams, read_streams
from hyper_resume.errors import CheckpointMismatchError, describe

logger = logging.getLogger(__name__)


class OwnSource:
    """:class:`hyper_resume.data.DataLoader`, which has an exact position of its own."""

    kind = "hyper_resume"

    def __init__(self, loader: DataLoader) -> None:
        """Leave the loader where it is."""
        self._loader = loader

    def open(self, epoch: int, restored: Mapping[str, Any] | None, *, goes_on: bool) -> Pass:
        """Begin ``epoch``, or go on in it."""
        if not goes_on and epoch == self._loader.epoch:
            # A pass that was left early, or is over, is read again from its start, as by a plain loop.
            self._loader.load_state_dict({**self._loader.state_dict(), "batches_consumed": 0})
        self._loader.set_epoch(epoch)
        return _OwnPass(iter(self._loader))

    def between(self) -> dict[str, Any]:
        """The loader's own state."""
        return self._loader.state_dict()

    def describe(self) -> dict[str, Any]:
        """Nothing: the loader's own state has it."""
        return {}

    def changes_since(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """What has changed since ``state``, as ``name: saved -> now``."""
        return tuple(self._loader.order.changes_since(state))

    def load(self, state: Mapping[str, Any]) -> None:
        """Set the loader's position; it warns of data that has changed."""
        self._loader.load_state_dict(state)

    def position(self) -> tuple[int, int]:
        """The epoch and the batches consumed in it."""
        return self._loader.epoch, self._loader.batches_consumed


class _OwnPass(Pass):
    def __init__(self, iterator: EpochIterator) -> None:
        self._iterator = iterator
        self.is_open = True

    @property
    def sample_ids(self) -> list[int]:
        return self._iterator.sample_ids

    def __next__(self) -> Any:
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        return self._iterator.state_dict()

    def close(self) -> None:
        self.is_open = False
        self._iterator.close()


class ReplaySource:
    """A loader without a position: what was consumed is read again and dropped.

    Args:
        loader: any iterable that gives the same batches from the same streams, generators and counters.
        device_type: the kind of device whose stream is put back with the host's.
        in_workers: whether other processes read, with streams of their own.
    """

    kind = "replayed"

    def __init__(self, loader: Any, device_type: str, *, in_workers: bool) -> None:
        """Note the counters that the loader holds."""
        self.loader = loader
        self.device_type = device_type
        self.in_workers = in_workers
        self.held = HeldState({"loader": loader})

    def open(self, epoch: int, restored: Mapping[str, Any] | None, *, goes_on: bool) -> Pass:
        """Begin ``epoch``, or read it again as far as it was consumed."""
        if restored is not None and not goes_on:
            self.held.put(restored["held"])
        return _ReplayPass(self, epoch, restored if goes_on else None)

    def between(self) -> dict[str, Any]:
        """Generators and counters."""
        return {"held": self.held.collect()}

    def describe(self) -> dict[str, Any]:
        """The length, where there is one."""
        return {"batches": length_of(self.loader), "num_workers": getattr(self.loader, "num_workers", None)}


class _ReplayPass(Pass):
    def __init__(self, source: ReplaySource, epoch: int, saved: Mapping[str, Any] | None) -> None:
        self._source = source
        self.is_open = True
        # A thread that reads ahead can't tell the loader's draws from those of training.
        self._thread = None if source.in_workers else threading.get_ident()
        self._before: bytes | None = None
        self._moved_by_loader: set[str] = set()
        self._moved_by_training: set[str] = set()
        now = read_streams(source.device_type)
        if saved is None:
            self._start: Mapping[str, Any] = {"streams": now, "held": source.held.collect()}
            self._iterator = self._make(epoch)
            return
        self._start = saved["start"]
        self._moved_by_loader, self._moved_by_training = set(saved["drawn_between"]), set(saved["drawn_between"])
        try:
            source.held.put(self._start["held"])
            put_streams(self._start["streams"], source.device_type)
            self._iterator = self._make(epoch)
            self._drop(saved["batches_consumed"])
            source.held.put(saved["held"])
        finally:
            put_streams(now, source.device_type)

    def _make(self, epoch: int) -> Iterator[Any]:
        set_epoch_everywhere(self._source.loader, epoch)
        return iter(self._source.loader)

    def _drop(self, batches: int) -> None:
        logger.info(
            "%s has no position: %d batches are read again and dropped", type(self._source.loader).__name__, batches
        )
        for number in range(batches):
            try:
                next(self._iterator)
            except StopIteration:
                message = describe(
                    "the data ends before the saved position",
                    where=type(self._source.loader).__name__,
                    expected=f"{batches} batches or more",
                    found=str(number),
                    do="give the data of the run that was saved",
                )
                raise CheckpointMismatchError(message) from None

    def __next__(self) -> Any:
        if self._thread != threading.get_ident():
            return next(self._iterator)
        begin = pack_streams()
        if self._before is not None:
            self._moved_by_training |= moved_streams(self._before, begin)
        batch = next(self._iterator)
        self._before = pack_streams()
        self._moved_by_loader |= moved_streams(begin, self._before)
        return batch

    def is_over(self, consumed: int, length: int | None) -> bool:
        # torch's length of iterable data is an estimate.
        return not hasattr(self._source.loader, "dataset") and super().is_over(consumed, length)

    def state(self) -> dict[str, Any]:
        shared = sorted(self._moved_by_loader & self._moved_by_training)
        return {"start": self._start, "held": self._source.held.collect(), "drawn_between": shared}

    def close(self) -> None:
        self.is_open = False
        iterator, self._iterator = self._iterator, iter(())
        if hasattr(iterator, "_shutdown_workers") and not getattr(self._source.loader, "persistent_workers", False):
            iterator._shutdown_workers()

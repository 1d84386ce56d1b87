"""Positions in loaders with ``state_dict`` and ``load_state_dict``, such as torchdata's: their own state, at the right time."""

from __future__ import annotations

import copy
import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from hyper_resume.data.passes import Pass, length_of, set_epoch_everywhere
from hyper_resume.data.streams import moved_streams, pack_streams, put_streams, read_streams
from hyper_resume.digest import state_digest_text
from hyper_resume.errors import UnsupportedError, describe

logger = logging.getLogger(__name__)


class StatefulSource:
    """A loader with ``state_dict`` and ``load_state_dict``, such as torchdata's.

    ``state_dict`` is called only when an iterator was made: torchdata's nodes begin anew when it was called earlier.
    """

    kind = "stateful"

    def __init__(self, loader: Any, device_type: str) -> None:
        """Leave the loader alone."""
        self.loader = loader
        self.device_type = device_type
        self._has_iterator = False
        # The thread that opens the passes, and whether the loader's state_dict was seen to draw there.
        self._thread = threading.get_ident()
        self._draws = False
        self._restored: Mapping[str, Any] | None = None

    def open(self, epoch: int, restored: Mapping[str, Any] | None, *, goes_on: bool) -> Pass:
        """Begin ``epoch``, or go on in it."""
        self._thread = threading.get_ident()
        now = read_streams(self.device_type)
        iterator: Iterator[Any] | None = None
        may_be_empty = False
        start = now
        if restored is not None and restored["inner"] is not None:
            start = restored["start"] if goes_on else now
            iterator = self._load(epoch, restored, start, now)
            if not goes_on and (self._discards_first(restored)):
                # That was the earlier epoch's iterator; the next one is this epoch's, as in the run that was saved.
                iterator = None
            may_be_empty = not goes_on and iterator is not None
        if iterator is None:
            set_epoch_everywhere(self.loader, epoch)
            iterator = iter(self.loader)
        self._has_iterator = True
        return _StatefulPass(self, start, iterator, now if may_be_empty else None)

    def _load(self, epoch: int, restored: Mapping[str, Any], start: Any, now: Any) -> Iterator[Any]:
        """Give the loader its state and make the iterator, from the streams that the epoch began with."""
        goes_on = start is not now
        put_streams(start, self.device_type)
        try:
            set_epoch_everywhere(self.loader, epoch)
            self.loader.load_state_dict(copy.deepcopy(restored["inner"]))
            return _iterator_of_saved(self.loader)
        finally:
            if goes_on or self._discards_first(restored):
                put_streams(now, self.device_type)

    def _discards_first(self, restored: Mapping[str, Any]) -> bool:
        return not restored["finished"] or _is_stateful_dataloader(self.loader)

    def between(self) -> dict[str, Any]:
        """The loader's state."""
        return {"inner": self.inner() if self._has_iterator else None}

    def inner(self) -> Any:
        """The loader's state now, copied; a stream that its ``state_dict`` moves is put back.

        A thread that reads ahead of training leaves the streams alone: training draws from them at the same time.

        Raises:
            UnsupportedError: the loader has the method and no state; or its ``state_dict`` draws and a thread calls it.
        """
        if threading.get_ident() != self._thread:
            return self._inner_in_thread()
        before = read_streams(self.device_type)
        try:
            return self._copied()
        finally:
            self._draws = bool(moved_streams(before["host"], pack_streams())) or self._draws
            if self._draws or before["device"] is not None:
                put_streams(before, self.device_type)

    def _inner_in_thread(self) -> Any:
        if self._draws:
            message = describe(
                "the data loader's state_dict draws random numbers; with a prefetching thread they can't be put back",
                where=type(self.loader).__name__,
                do="set use_background_prefetcher to false",
            )
            raise UnsupportedError(message)
        return self._copied()

    def _copied(self) -> Any:
        try:
            return copy.deepcopy(self.loader.state_dict())
        except (AttributeError, NotImplementedError) as error:
            message = describe(
                "the data loader's state_dict fails",
                where=type(self.loader).__name__,
                found=f"{type(error).__name__}: {error}",
                do="give a loader whose state_dict works, or one without it",
            )
            raise UnsupportedError(message) from error

    def describe(self) -> dict[str, Any]:
        """The length, where there is one."""
        return {"batches": length_of(self.loader), "num_workers": getattr(self.loader, "num_workers", None)}


class _StatefulPass(Pass):
    def __init__(self, source: StatefulSource, start: Any, iterator: Iterator[Any], again_from: Any) -> None:
        self._source = source
        self._start = start
        self._iterator = iterator
        # The streams to begin again from, where the first pass may be the empty rest of the epoch that was saved.
        self._again_from = again_from
        self._taken = 0
        # Batches taken, and the digest of the loader's state, when it was last asked for.
        self._last: tuple[int, str] | None = None
        self.is_open = True

    def __next__(self) -> Any:
        batch = self._next()
        self._taken += 1
        return batch

    def _next(self) -> Any:
        again_from, self._again_from = self._again_from, None
        if again_from is None:
            return next(self._iterator)
        try:
            return next(self._iterator)
        except StopIteration:
            put_streams(again_from, self._source.device_type)
            self._iterator = iter(self._source.loader)
            return next(self._iterator)

    def is_over(self, consumed: int, length: int | None) -> bool:
        # torch's length of iterable data is an estimate.
        return not hasattr(self._source.loader, "dataset") and super().is_over(consumed, length)

    def state(self) -> dict[str, Any]:
        inner = self._source.inner()
        self._warn_of_standstill(inner)
        return {"start": self._start, "inner": inner}

    def _warn_of_standstill(self, inner: Any) -> None:
        now, last = (self._taken, state_digest_text(inner)), self._last
        self._last = now
        if last is not None and now[0] > last[0] and now[1] == last[1]:
            logger.warning(
                "the state of %s is the same before and after %d more batches: a resume would read them twice",
                type(self._source.loader).__name__,
                now[0] - last[0],
            )

    def close(self) -> None:
        self.is_open = False
        iterator, self._iterator = self._iterator, iter(())
        if hasattr(iterator, "_shutdown_workers") and not getattr(self._source.loader, "persistent_workers", False):
            iterator._shutdown_workers()


def _iterator_of_saved(loader: Any) -> Iterator[Any]:
    """``iter(loader)`` behind a ``load_state_dict``, without torchdata's nodes going over to the next epoch by themselves.

    To find out whether they must, they would read the next batch, before the random streams are back.
    """
    if getattr(loader, "restart_on_stop_iteration", None) is not True:
        return iter(loader)
    loader.restart_on_stop_iteration = False
    try:
        return iter(loader)
    finally:
        loader.restart_on_stop_iteration = True


def _is_stateful_dataloader(loader: Any) -> bool:
    """torchdata's ``StatefulDataLoader``: at an epoch's end ``iter`` makes two iterators, and so draws twice."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(loader, module.StatefulDataLoader)

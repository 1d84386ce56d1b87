"""Prefetching in a background thread, with the position of the batch that training has received.

A thread that reads ahead moves the loader's position with every batch that it reads. A checkpoint needs the position after the
last batch that was returned to training. :class:`HyperIter` stores that position with each batch.
"""

from __future__ import annotations

import copy
import logging
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from hyper_resume.data.loader import EpochIterator
from hyper_resume.errors import ConfigError, UnsupportedError, describe

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BackgroundPrefetcher(Iterator[T]):
    """Reads items from an iterator in a thread, at most ``capacity`` items ahead of the consumer.

    An error of ``source`` is raised after the items before it, and again at each later ``__next__``. The thread ends when the
    source ends or fails, on :meth:`close`, when this object is deleted, and at the interpreter's exit.

    Args:
        source: the iterator; from now on only the thread reads it.
        capacity: items in the queue, 1 or more; the thread holds one more.
        close_timeout_seconds: how long :meth:`close` waits for ``source`` to finish its current item.

    Raises:
        ConfigError: ``capacity`` is below 1.
    """

    def __init__(self, source: Iterator[T], *, capacity: int = 2, close_timeout_seconds: float = 10.0) -> None:
        """Start the thread at once."""
        if capacity < 1:
            raise ConfigError(
                describe("the capacity of the prefetcher is too small", expected="1 or more", found=str(capacity))
            )
        self._channel: _Channel[T] = _Channel(capacity)
        # The thread must not refer to this object, or the object could not be deleted while the thread runs.
        self._thread = threading.Thread(
            target=_fill, args=(self._channel, source), name="hyper-resume-prefetch", daemon=True
        )
        self._shut_down = weakref.finalize(self, _end_thread, self._channel, self._thread, close_timeout_seconds)
        self._thread.start()

    def __iter__(self) -> BackgroundPrefetcher[T]:
        """Itself."""
        return self

    def __next__(self) -> T:
        """The next item; waits for it.

        Raises:
            StopIteration: the source is exhausted.
            RuntimeError: the prefetcher was closed.
        """
        return self._channel.take()

    def close(self) -> None:
        """Drop the queued items and end the thread. It may be called more than once.

        It waits for the thread to end. If the current item takes longer than the timeout, it logs a warning and returns; the
        thread ends after that item.
        """
        self._shut_down()


class _Channel(Generic[T]):
    """A bounded queue between a producer and a consumer, which can also end, fail or be closed without a deadlock."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._closed = False
        self._error: BaseException | None = None

    def put(self, item: T) -> bool:
        """Producer: wait for room and add ``item``; False if the queue was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def end(self, error: BaseException | None) -> None:
        """Producer: mark the end of the items, with the ``error`` that ended them, if any."""
        with self._changed:
            self._ended = True
            self._error = error
            self._changed.notify_all()

    def take(self) -> T:
        """Consumer: wait for an item, the end or the error."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._ended or bool(self._items))
            if self._closed:
                raise RuntimeError("the prefetcher was closed")
            if self._items:
                self._changed.notify_all()
                return self._items.popleft()
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Consumer: drop all items and accept no more."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


def _fill(channel: _Channel[T], source: Iterator[T]) -> None:
    error: BaseException | None = None
    try:
        for item in source:
            if not channel.put(item):
                break
    except BaseException as caught:  # noqa: BLE001 - the waiting consumer must receive any error of this thread
        error = caught
    finally:
        channel.end(error)


def _end_thread(channel: _Channel[Any], thread: threading.Thread, timeout_seconds: float) -> None:
    channel.close()
    # The garbage collector may call this in the prefetching thread itself, which can't join itself.
    if thread is threading.current_thread() or thread.ident is None:
        return
    thread.join(timeout_seconds)
    if thread.is_alive():
        logger.warning(
            "the prefetching thread is still reading a batch after %.1f s; it ends after that batch", timeout_seconds
        )


class HyperIter(Iterator[Any]):
    """Iterates over one epoch of a loader and knows the position after the last batch that training has received.

    It works with this package's :class:`~hyper_resume.data.loader.DataLoader`, with another loader that has a ``state_dict``
    (which is copied with every batch), and with any iterable (then there is no state).

    With the background prefetcher, a thread reads batches in this process while training runs. If the dataset draws random
    numbers in this process, the order of its draws and those of training is random, and a resume can't be exact. This is
    refused at the first batch. Loader workers (``num_workers`` > 0) have their own streams and are allowed.

    Args:
        loader: the loader; ``iter(loader)`` is called at once, and the first batch is read at the first ``__next__``.
        use_background_prefetcher: read ahead in a thread.
        prefetch_batches: how many batches the thread reads ahead.
    """

    def __init__(
        self, loader: Iterable[Any], *, use_background_prefetcher: bool = False, prefetch_batches: int = 2
    ) -> None:
        """Start before the next batch of ``loader``; no thread and no worker is started yet."""
        if use_background_prefetcher and prefetch_batches < 1:
            message = describe("prefetch_batches is out of range", expected="1 or more", found=str(prefetch_batches))
            raise ConfigError(message)
        self.loader = loader
        self._background = use_background_prefetcher
        self._capacity = prefetch_batches
        self._iterator = iter(loader)
        self._snapshot = _snapshot_function(loader, self._iterator)
        self._state = self._snapshot()
        self._sample_ids: list[int] = []
        self._handed_out = 0
        self._taken = _Count()
        self._readings = _read(self._iterator, self._snapshot, self._taken)
        self._prefetcher: BackgroundPrefetcher[_BatchRead] | None = None
        self._closed = False

    @property
    def has_state(self) -> bool:
        """Whether :meth:`state_dict` can return a position; False for a loader without a ``state_dict``."""
        return self._state is not None

    @property
    def sample_ids(self) -> list[int]:
        """Dataset indices of the last returned batch; empty if the loader does not report them."""
        return list(self._sample_ids)

    def __iter__(self) -> HyperIter:
        """Itself."""
        return self

    def __next__(self) -> Any:
        """The next batch of this epoch.

        Raises:
            StopIteration: the epoch is finished.
            RuntimeError: the iterator was closed.
            UnsupportedError: the dataset draws random numbers in this process, and a thread is to read it.
            Exception: the error of the loader; the iterator is closed then.
        """
        if self._closed:
            raise RuntimeError("this iterator over the epoch was closed; make a new one from the loader")
        try:
            reading = self._take()
        except StopIteration:
            raise
        except BaseException:
            # A generator that has failed raises StopIteration at the next call, so a failed epoch would look finished.
            self.close()
            raise
        self._state = reading.state
        if reading.is_end:
            raise StopIteration
        self._handed_out += 1
        self._sample_ids = reading.sample_ids
        return reading.batch

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the last returned batch, for the loader's ``load_state_dict``.

        Before the first batch it is the state at creation; after the last batch, that of the finished epoch. It can be read
        after :meth:`close` too.

        Raises:
            UnsupportedError: the loader has no ``state_dict`` (see :attr:`has_state`).
        """
        if self._state is None:
            found = type(self.loader).__name__
            raise UnsupportedError(describe("the loader has no state_dict", found=found, do="check has_state first"))
        return copy.deepcopy(self._state)

    def close(self) -> None:
        """End the thread and the loader's workers, and set the loader to the position after the last returned batch.

        So training may stop within an epoch and continue with the same loader, without losing prefetched batches.
        """
        if self._closed:
            return
        self._closed = True
        if self._prefetcher is not None:
            self._prefetcher.close()
        if isinstance(self._iterator, EpochIterator):
            # Always, because a thread that did not end within the timeout may still move the position.
            self._iterator.rewind(self.state_dict()["batches_consumed"])
        elif self.has_state and self._taken.value > self._handed_out and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(self.state_dict())

    def __enter__(self) -> HyperIter:
        """Itself; closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the iterator, also after an error."""
        self.close()

    def _take(self) -> _BatchRead:
        if not self._background:
            return next(self._readings)
        if self._prefetcher is None:
            # The first batch is read here: workers are then forked by this thread, the random streams are those that were
            # restored after the construction, and a dataset that moves them is noticed.
            reading = self._take_first()
            self._prefetcher = BackgroundPrefetcher(self._readings, capacity=self._capacity)
            return reading
        return next(self._prefetcher)

    def _take_first(self) -> _BatchRead:
        # Another loader may draw its order from the global streams, once, at its first batch.
        watched = isinstance(self._iterator, EpochIterator)
        if isinstance(self._iterator, EpochIterator):
            # It may put the streams back.
            self._iterator.announce()
        before = _random_states() if watched else None
        reading = next(self._readings)
        if watched and _random_states() != before:
            message = describe(
                "the dataset draws random numbers in this process; with a prefetching thread they can't be reproduced",
                where=f"sample ids {reading.sample_ids}",
                do="set num_workers to 1 or more, or use_background_prefetcher to false",
            )
            raise UnsupportedError(message)
        return reading


@dataclass(frozen=True, kw_only=True)
class _BatchRead:
    """A batch and the position after it; at the end of the epoch no batch, and the position of the finished epoch."""

    batch: Any
    sample_ids: list[int]
    state: dict[str, Any] | None
    is_end: bool = False


@dataclass
class _Count:
    value: int = 0


def _read(
    iterator: Iterator[Any], snapshot: Callable[[], dict[str, Any] | None], taken: _Count
) -> Iterator[_BatchRead]:
    for batch in iterator:
        taken.value += 1
        yield _BatchRead(batch=batch, sample_ids=list(getattr(iterator, "sample_ids", ())), state=snapshot())
    yield _BatchRead(batch=None, sample_ids=[], state=snapshot(), is_end=True)


def _snapshot_function(loader: Iterable[Any], iterator: Iterator[Any]) -> Callable[[], dict[str, Any] | None]:
    if isinstance(iterator, EpochIterator):
        return iterator.state_dict
    read_state: Callable[[], dict[str, Any]] | None = getattr(loader, "state_dict", None)
    if read_state is None:
        return lambda: None
    # Copied, because another loader may return a live object that changes later.
    return lambda: copy.deepcopy(read_state())


def _random_states() -> tuple[object, ...]:
    """The states of this process's torch (CPU), Python and NumPy streams, for comparison."""
    numpy_state: Any = np.random.get_state(legacy=False)
    words, place = numpy_state["state"]["key"].tobytes(), numpy_state["state"]["pos"]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), words, place, numpy_state["has_gauss"]

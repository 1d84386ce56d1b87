"""Iterates over an epoch without recording a position for every batch: the loader is asked for it when it is needed."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from hyper_resume.data.loader import EpochIterator
from hyper_resume.data.resumable import ResumableLoader
from hyper_resume.errors import UnsupportedError, describe


class DirectIter(Iterator[Any]):
    """Replaces :class:`~hyper_resume.data.prefetch.HyperIter` where no thread reads ahead, or reads for one.

    A batch goes from the loader to training unchanged. As only training takes batches, the loader's own position is the one
    after the last batch, and a callback that asks for the position gets it from the loader.
    """

    def __init__(self, loader: Iterable[Any] | ResumableLoader, epoch: int) -> None:
        """Start before the next batch of ``epoch``; an iterator other than that of a ``ResumableLoader`` is made at once."""
        if isinstance(loader, ResumableLoader):
            self._iterator: Iterator[Any] = loader.batches(epoch)
            self._source: Any = loader
        else:
            self._iterator = iter(loader)
            self._source = self._iterator if isinstance(self._iterator, EpochIterator) else loader

    @property
    def has_state(self) -> bool:
        """Whether :meth:`state_dict` has a position to give; False for a loader without one."""
        return hasattr(self._source, "state_dict")

    @property
    def sample_ids(self) -> list[int]:
        """Dataset indices of the last batch, not to be changed; empty when the loader does not report them."""
        found: list[int] = getattr(self._source, "sample_ids", [])
        return found

    def __iter__(self) -> DirectIter:
        """Itself."""
        return self

    def __next__(self) -> Any:
        """The next batch of this epoch.

        Raises:
            StopIteration: the epoch is finished.
            Exception: what reading raised.
        """
        return next(self._iterator)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the last batch, for the loader's ``load_state_dict``.

        Raises:
            UnsupportedError: the loader has no ``state_dict`` (see :attr:`has_state`).
        """
        if not self.has_state:
            found = type(self._source).__name__
            raise UnsupportedError(describe("the loader has no state_dict", found=found, do="check has_state first"))
        # A foreign loader may return its live state, which would change in the caller's hands.
        state: dict[str, Any] = copy.deepcopy(self._source.state_dict())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the loader's position; this iterator is over then."""
        self._source.load_state_dict(state)

    def close(self) -> None:
        """End the loader's workers; the loader's position stays after the last batch."""
        if isinstance(self._iterator, EpochIterator | Generator):
            self._iterator.close()

"""A data loader whose position is saved and restored exactly, by (epoch, batches consumed).

The order of an epoch is a function of (seed, epoch, rank, world size), see :mod:`hyper_resume.data.sampler`. So a resume
computes the order again and starts after the consumed batches, without reading them from the dataset.

Random numbers that a dataset draws while it reads a sample:

* ``num_workers`` 0: from the main process's streams, which the checkpoint's rng_state bucket restores.
* ``num_workers`` > 0: the worker's streams (torch, Python, NumPy) are seeded before every batch from
  (seed, epoch, rank, batch). So they depend neither on the worker that reads the batch nor on where the run was resumed. If
  the dataset has its own generator, this is not possible, and its resume is not exact.

Creating a loader or an iterator does not move the random streams of the main process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset

from hyper_resume.data.indices import Indices
from hyper_resume.data.reading import MapDataset, start_reading, stop_reading
from hyper_resume.data.sampler import SHUFFLE_METHODS, EpochOrder, batch_indices
from hyper_resume.data.saved_state import check_saved_state, is_non_negative_int
from hyper_resume.errors import CheckpointMismatchError, ConfigError, describe

logger = logging.getLogger(__name__)


class DataLoader:
    """Batches of a map-style dataset for one data-parallel rank, with an exact position.

    Args:
        dataset: an object with ``__len__`` and ``__getitem__(int)``; its length must not change. If it has a text attribute
            ``fingerprint``, this is saved, so that another dataset of the same length is noticed.
        batch_size: samples per batch on this rank; 1 where it is left out, as in torch.
        shuffle: a new order each epoch; otherwise ascending.
        shuffle_method: ``randperm`` is torch's order from ``seed + epoch``. It is computed at the start of every epoch, and
            takes about 30 ns and 4 bytes per sample on every rank. ``feistel`` is another order from seed and epoch, computed
            batch by batch, without this cost for any length. A position that was saved with one can't be used with the other.
        seed: seed of the order and of the workers' random streams.
        drop_last: drop samples that do not divide evenly among the ranks, and then those that do not fill a batch.
        dp_rank: this process's number among the data-parallel ranks, from 0.
        dp_world_size: number of data-parallel ranks.
        num_workers: number of reading processes, which are started for each epoch. It may change at a resume; but with 0 a
            dataset draws its random numbers from other streams than with workers.
        collate_fn: makes a batch from a list of samples; None means torch's ``default_collate``.
        prefetch_factor: batches that each worker reads ahead; needs ``num_workers`` > 0, where None means torch's default, 2.
        ignored_signals: names of signals that workers ignore, because training saves and ends when it receives them.

    Raises:
        ConfigError: (a ``ValueError``) an argument is out of range, the dataset is not map-style, or an epoch would have no
            batch.
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch_factor: int | None = None,
        ignored_signals: Sequence[str] = (),
        shuffle_method: str = "randperm",
    ) -> None:
        """Start before the first batch of epoch 0. Only the dataset's length is read."""
        _check_counts(batch_size=batch_size, dp_world_size=dp_world_size, num_workers=num_workers)
        _check_rank(dp_rank, dp_world_size)
        _check_shuffle_method(shuffle_method, shuffle=bool(shuffle))
        if prefetch_factor is not None and num_workers == 0:
            message = describe("prefetch_factor needs num_workers above 0", found=f"prefetch_factor={prefetch_factor}")
            raise ConfigError(message)
        self.dataset = dataset
        self.dp_rank = dp_rank
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self.prefetch_factor = prefetch_factor
        self.ignored_signals = tuple(ignored_signals)
        self.order = EpochOrder(
            dp_world_size=dp_world_size,
            batch_size=batch_size,
            num_samples=_length_of(dataset),
            shuffle=bool(shuffle),
            seed=seed,
            drop_last=bool(drop_last),
            fingerprint=_fingerprint_of(dataset),
            shuffle_method=shuffle_method,
        )
        self._cursor = _Cursor(epoch=0, batches_consumed=0)
        self._before_next_batch: Callable[[bool], None] | None = None
        self._num_batches = self.order.count_batches()
        if self._num_batches == 0:
            raise ConfigError(describe("the data gives no batch", found=str(self.order), do="give more samples"))

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, independent of the position."""
        return self._num_batches

    @property
    def epoch(self) -> int:
        """The epoch of the current position, from 0."""
        return self._cursor.epoch

    @property
    def batches_consumed(self) -> int:
        """Batches of this epoch returned so far; ``len(self)`` when the epoch is finished."""
        return self._cursor.batches_consumed

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to read next: the current epoch keeps its position, any other starts at its first batch.

        If a finished epoch is chosen again, it stays finished: the next pass has no batches, and a warning is logged.

        Raises:
            ConfigError: ``epoch`` is not an integer of 0 or more.
        """
        if not is_non_negative_int(epoch):
            raise ConfigError(describe("set_epoch needs a whole number from 0 up", found=repr(epoch)))
        if epoch != self.epoch:
            self._cursor = _Cursor(epoch=epoch, batches_consumed=0)
        self._cursor.chosen = True

    def __iter__(self) -> EpochIterator:
        """Read from the current position to the epoch's end; after a finished epoch, read the next one.

        The position moves before a batch is returned: a state that is saved in the loop's body counts that batch as consumed.
        From now on, the loader's position follows the new iterator; an older iterator no longer moves it.
        """
        cursor = _Cursor(epoch=self.epoch, batches_consumed=self.batches_consumed)
        if cursor.batches_consumed >= len(self):
            if self._cursor.chosen:
                logger.warning("epoch %d has already been read to its end: this pass has no batch", self.epoch)
            else:
                cursor = _Cursor(epoch=self.epoch + 1, batches_consumed=0)
        self._cursor = cursor
        return EpochIterator(self, cursor)

    def before_next_batch(self, action: Callable[[bool], None]) -> None:
        """Call ``action(within)`` once, right before the next batch is read, before the dataset draws.

        ``within`` is True where that batch continues an epoch, False where it is an epoch's first.
        """
        self._before_next_batch = action

    def state_dict(self) -> dict[str, Any]:
        """The position, and the parameters of the order; plain numbers and texts. Without side effects."""
        return self._state_at(self._cursor.epoch, self._cursor.batches_consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position with the next iterator; existing iterators are not changed.

        If the data or its division has changed, the saved position is not valid here. It has changed if ``dp_world_size``,
        ``batch_size``, ``shuffle_method`` (``randperm`` if ``state`` has none) or another field that ``state`` has differs.
        Then a warning names each change, and the saved epoch is read again from its first sample. Unknown keys are ignored.

        Raises:
            CheckpointMismatchError: (a ``RuntimeError``) a key is missing or has the wrong type, or the position lies
                past the epoch's end. The loader is unchanged then.
        """
        check_saved_state(state)
        changes = self.order.changes_since(state)
        epoch: int = state["epoch"]
        consumed: int = state["batches_consumed"]
        if changes:
            logger.warning(
                "the data has changed since the checkpoint (%s): the position in epoch %d (%d batches consumed) "
                "is dropped, the epoch is read again from its first sample",
                "; ".join(changes),
                epoch,
                consumed,
            )
            consumed = 0
        elif consumed > len(self):
            expected = f"at most {len(self)} batches in an epoch"
            found = f"batches_consumed={consumed}"
            raise CheckpointMismatchError(
                describe("the saved data position lies past the epoch's end", expected=expected, found=found)
            )
        self._cursor = _Cursor(epoch=epoch, batches_consumed=consumed)

    def _state_at(self, epoch: int, batches_consumed: int) -> dict[str, Any]:
        return {"epoch": epoch, "batches_consumed": batches_consumed, **self.order.to_state()}

    def _seek(self, old: _Cursor, batches_consumed: int) -> None:
        """Set the position within the epoch, if ``old`` is still the loader's cursor."""
        if self._cursor is old:
            self._cursor = replace(old, batches_consumed=batches_consumed)


class EpochIterator(Iterator[Any]):
    """One pass from a loader's position to its epoch's end.

    ``sample_ids`` are the dataset indices of the last returned batch. The first ``__next__`` starts the workers and reads the
    dataset. If reading fails, the pass has ended; a new iterator starts with the batch that failed.
    """

    def __init__(self, loader: DataLoader, cursor: _Cursor) -> None:
        """Call ``iter(loader)`` instead; ``cursor`` is the position that this iterator moves."""
        self.sample_ids: list[int] = []
        self._loader = loader
        self._cursor = cursor
        self._indices: Indices | None = None
        self._batches: Iterator[Any] | None = None
        self._closed = False
        self._is_reading = False

    def __iter__(self) -> EpochIterator:
        """Itself."""
        return self

    def __next__(self) -> Any:
        """The next batch, exactly as ``collate_fn`` made it.

        Raises:
            StopIteration: the epoch is finished.
            RuntimeError: the iterator was closed, or the dataset raised ``StopIteration`` (which would otherwise end the
                epoch early without an error). Other errors of the dataset are raised unchanged.
        """
        number = self._cursor.batches_consumed
        if number >= len(self._loader):
            self.close()
            raise StopIteration
        if self._closed:
            raise RuntimeError("this pass over the data was closed or has failed; make a new iterator from the loader")
        self.announce()
        try:
            batch, sample_ids = self._read(number)
        except BaseException as error:
            self.close()
            if isinstance(error, StopIteration):
                where = f"epoch {self._cursor.epoch}, batch {number} of {len(self._loader)}"
                raise RuntimeError(describe("reading the dataset raised StopIteration", where=where)) from error
            raise
        self.sample_ids = sample_ids
        self._cursor.batches_consumed = number + 1
        self._cursor.chosen = False
        return batch

    def announce(self) -> None:
        """Do what :meth:`DataLoader.before_next_batch` asked for; ``__next__`` does it, too."""
        action, self._loader._before_next_batch = self._loader._before_next_batch, None
        if action is not None:
            action(self._cursor.batches_consumed > 0)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the last batch that this iterator returned, even if the loader has moved on."""
        return self._loader._state_at(self._cursor.epoch, self._cursor.batches_consumed)

    def rewind(self, batches_consumed: int) -> None:
        """Set the loader back to an earlier batch of this pass, if it still follows this iterator; closes the iterator.

        For a reader that reads ahead of training and drops the batches that were not trained.
        """
        self._loader._seek(self._cursor, batches_consumed)
        self.close()

    def close(self) -> None:
        """Stop the workers and end the pass. The loader keeps its position."""
        self._closed = True
        batches, self._batches, self._indices = self._batches, None, None
        # Another thread that is still inside torch's iterator would wait forever for a stopped worker. In that case the
        # workers end when that thread releases the iterator.
        if batches is not None and not self._is_reading:
            stop_reading(batches)

    def _read(self, number: int) -> tuple[Any, list[int]]:
        if self._batches is None or self._indices is None:
            self._indices = self._loader.order.indices(self._cursor.epoch, self._loader.dp_rank)
            self._batches = start_reading(
                self._loader.dataset,
                order=self._loader.order,
                epoch=self._cursor.epoch,
                dp_rank=self._loader.dp_rank,
                first_batch=number,
                indices=self._indices,
                num_workers=self._loader.num_workers,
                collate_fn=self._loader.collate_fn,
                prefetch_factor=self._loader.prefetch_factor,
                ignored_signals=self._loader.ignored_signals,
            )
        sample_ids = batch_indices(self._indices, self._loader.order.batch_size, number)
        self._is_reading = True
        try:
            return next(self._batches), sample_ids
        finally:
            self._is_reading = False


@dataclass(kw_only=True)
class _Cursor:
    """A position that exactly one iterator moves.

    The loader refers to the cursor of its newest iterator. To change its position, it creates a new cursor. So an older
    iterator, perhaps in another thread, can't move a loader whose position was set.
    """

    epoch: int
    batches_consumed: int
    # True after set_epoch, until a batch is read: then a finished epoch is not followed by the next one automatically.
    chosen: bool = False


def _check_counts(*, batch_size: int, dp_world_size: int, num_workers: int) -> None:
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("dp_world_size", dp_world_size, 1),
        ("num_workers", num_workers, 0),
    ):
        if not is_non_negative_int(value) or value < least:
            message = describe(f"{name} is out of range", expected=f"a whole number from {least} up", found=repr(value))
            raise ConfigError(message)


def _check_rank(dp_rank: int, dp_world_size: int) -> None:
    if not is_non_negative_int(dp_rank) or dp_rank >= dp_world_size:
        expected = f"0 to {dp_world_size - 1} (dp_world_size={dp_world_size})"
        raise ConfigError(describe("dp_rank is out of range", expected=expected, found=repr(dp_rank)))


def _check_shuffle_method(shuffle_method: str, *, shuffle: bool) -> None:
    if shuffle_method not in SHUFFLE_METHODS:
        expected = f"one of {', '.join(SHUFFLE_METHODS)}"
        raise ConfigError(describe("shuffle_method is unknown", expected=expected, found=repr(shuffle_method)))
    if not shuffle and shuffle_method != "randperm":
        found = f"shuffle_method={shuffle_method!r}"
        raise ConfigError(describe("shuffle_method needs shuffle=True", found=found, do="leave it out, or shuffle"))


def _length_of(dataset: MapDataset) -> int:
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_map_style or isinstance(dataset, IterableDataset):
        message = describe(
            "the dataset isn't map-style",
            expected="__len__ and __getitem__",
            found=type(dataset).__name__,
            do="use another loader for iterable data; its position is only as exact as its own state_dict",
        )
        raise ConfigError(message)
    return len(dataset)


def _fingerprint_of(dataset: MapDataset) -> str | None:
    fingerprint = getattr(dataset, "fingerprint", None)
    if fingerprint is not None and not isinstance(fingerprint, str):
        found = f"{type(fingerprint).__name__} on {type(dataset).__name__}"
        raise ConfigError(describe("the dataset's fingerprint isn't a text", expected="a text or None", found=found))
    return fingerprint

"""Reads the batches of an epoch through torch's loader, in this process or in workers, with seeded worker streams."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from hyper_resume.data.indices import Indices
from hyper_resume.data.sampler import EpochOrder, batch_indices
from hyper_resume.data.worker_signals import ignore_signals


class MapDataset(Protocol):
    """A map-style dataset: it has a length, and returns samples by index. The optional attribute ``fingerprint`` is a text."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """The sample ``index``, from 0."""
        ...


class _PlannedBatch(NamedTuple):
    """Number and dataset indices of one batch, as sent to the process that reads it."""

    number: int
    sample_ids: list[int]


class _RemainingBatches:
    """The batch sampler for torch's loader: the batches from ``first_batch`` to the end of the epoch."""

    def __init__(self, indices: Indices, order: EpochOrder, first_batch: int) -> None:
        self._indices = indices
        self._batch_size = order.batch_size
        self._numbers = range(first_batch, order.count_batches())

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[_PlannedBatch]:
        for number in self._numbers:
            yield _PlannedBatch(number, batch_indices(self._indices, self._batch_size, number))


class PlannedDataset(Dataset[Any]):
    """Reads whole batches, so that a worker can seed its random streams before each batch."""

    def __init__(self, dataset: MapDataset, worker_entropy: tuple[int, ...] | None) -> None:
        """Wrap ``dataset``; ``worker_entropy`` (seed, epoch, rank) is given if workers read, otherwise None."""
        self._dataset = dataset
        self._worker_entropy = worker_entropy

    def __getitems__(self, planned: _PlannedBatch) -> list[Any]:
        """The samples of one batch; torch calls it with the items of the batch sampler."""
        if self._worker_entropy is not None:
            _seed_streams(*self._worker_entropy, planned.number)
        read_many = getattr(self._dataset, "__getitems__", None)
        if read_many is not None:
            samples: list[Any] = read_many(planned.sample_ids)
            return samples
        return [self._dataset[index] for index in planned.sample_ids]


def start_reading(
    dataset: MapDataset,
    *,
    order: EpochOrder,
    epoch: int,
    dp_rank: int,
    first_batch: int,
    indices: Indices,
    num_workers: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    prefetch_factor: int | None,
    ignored_signals: Sequence[str] = (),
) -> Iterator[Any]:
    """Return an iterator over the batches from ``first_batch`` to the end of the epoch, as ``collate_fn`` makes them.

    ``indices`` are the rank's dataset indices of the whole epoch; ``ignored_signals`` are the names of signals that workers
    ignore (see :mod:`hyper_resume.data.worker_signals`).
    """
    batches: TorchDataLoader[Any] = TorchDataLoader(
        PlannedDataset(dataset, (order.seed, epoch, dp_rank) if num_workers > 0 else None),
        batch_sampler=_RemainingBatches(indices, order, first_batch),  # type: ignore[arg-type]
        num_workers=num_workers,
        collate_fn=collate_fn,
        prefetch_factor=prefetch_factor,
        worker_init_fn=functools.partial(ignore_signals, tuple(ignored_signals)) if num_workers > 0 else None,
        # torch draws a base seed for its workers. Without a separate generator, that would move the global stream.
        generator=torch.Generator().manual_seed(order.seed),
    )
    return iter(batches)


def stop_reading(batches: Iterator[Any]) -> None:
    """Stop the workers of an iterator from :func:`start_reading` now.

    torch stops them when its iterator is deleted. But an error that was raised in it keeps it alive as long as that error
    exists.
    """
    stop_workers = getattr(batches, "_shutdown_workers", None)
    if stop_workers is not None:
        stop_workers()


def _seed_streams(*entropy: int) -> None:
    """Seed this process's torch (CPU), Python and NumPy streams; equal numbers give equal streams."""
    # SeedSequence refuses negative numbers, but a negative seed is valid.
    words = np.random.SeedSequence([number % 2**64 for number in entropy]).generate_state(8)
    torch.default_generator.manual_seed(int(words[0]) << 32 | int(words[1]))
    random.seed(int(words[2]) << 32 | int(words[3]))
    np.random.seed(words[4:])

"""Loaders of torch and torchdata, which have no exact position of their own; ``ResumableLoader`` gives them one."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from conformance.matrix.given import Given
from hyper_resume.data import ResumableLoader

FOREIGN = ("torch", "torchdata", "nodes", "iterable", "accelerate", "bare-torch")


class Carrying(IterableDataset[Any]):
    """The samples of a dataset as iterable data, split over the workers; what is drawn for one is a part of the next."""

    def __init__(self, samples: Dataset[Any], length: int) -> None:
        """All of ``samples``, whose second value is a number."""
        self._samples, self._length = samples, length

    def __iter__(self) -> Iterator[Any]:
        """This worker's samples, in order."""
        info = get_worker_info()
        first, workers = (0, 1) if info is None else (info.id, info.num_workers)
        carried = 0.0
        for index in range(first, self._length, workers):
            number, drawn = self._samples[index]
            carried += drawn
            yield number, carried


def seed_by_number(worker: int) -> None:
    """A ``worker_init_fn``."""
    random.seed(worker)


class OwnSampler(Sampler[int]):
    """A user's sampler: it shuffles with a generator of its own, which goes on from epoch to epoch."""

    def __init__(self, length: int, seed: int) -> None:
        """Orders of ``length`` indices."""
        self._length = length
        self._random = random.Random(seed)

    def __len__(self) -> int:
        """Indices per epoch."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        """One order."""
        order = list(range(self._length))
        self._random.shuffle(order)
        return iter(order)


def build_foreign_loader(given: Given, dataset: Any) -> Any:
    """The loader that ``given.data`` names, with its sampler, in a ``ResumableLoader`` unless it is bare."""
    data = given.data
    sampler = _sampler(given, dataset)
    if data.loader == "nodes":
        return ResumableLoader(_nodes(dataset, sampler or RandomSampler(dataset), data.batch_size))
    kind = _stateful_dataloader() if data.loader == "torchdata" else DataLoader
    order: dict[str, Any] = {"sampler": sampler, "shuffle": data.shuffle if sampler is None else None}
    if data.loader == "iterable":
        dataset, order = Carrying(dataset, data.samples), {}
    loader = kind(
        dataset,
        batch_size=data.batch_size,
        num_workers=data.workers,
        persistent_workers=data.persistent,
        worker_init_fn=seed_by_number if data.worker_init else None,
        drop_last=data.drop_last,
        **order,
    )
    if data.loader == "accelerate":
        loader = _prepared(loader)
    return loader if data.loader == "bare-torch" else ResumableLoader(loader)


def _sampler(given: Given, dataset: Dataset[Any]) -> Sampler[int] | None:
    length = given.data.samples
    if given.data.sampler == "generator":
        return RandomSampler(range(length), generator=torch.Generator().manual_seed(given.seed))
    if given.data.sampler == "weighted":
        return WeightedRandomSampler([1.0 + index for index in range(length)], length)
    if given.data.sampler == "distributed":
        return DistributedSampler(dataset, num_replicas=2, rank=1, seed=given.seed)
    if given.data.sampler == "own":
        return OwnSampler(length, given.seed)
    return None


def _prepared(loader: DataLoader[Any]) -> Any:
    from accelerate import Accelerator  # here, because few cases need it

    # It takes a process with a rank for one of a group, and a leg of one rank has none.
    ranks = {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ}
    try:
        return Accelerator(cpu=True).prepare(loader)
    finally:
        os.environ.update(ranks)


def _stateful_dataloader() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader  # here, because few cases need it

    return StatefulDataLoader


def _nodes(dataset: Any, sampler: Sampler[int], batch_size: int) -> Any:
    from torchdata import nodes  # here, because few cases need it

    indices = nodes.SamplerWrapper(sampler)
    batches = nodes.Batcher(nodes.Mapper(indices, dataset.__getitem__), batch_size=batch_size)
    return nodes.Loader(nodes.Mapper(batches, torch.utils.data.default_collate))

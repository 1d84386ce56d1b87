"""Loaders of torch and torchdata, which have no exact position of their own; ``ResumableLoader`` gives them one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler, WeightedRandomSampler

from conformance.matrix.given import Given
from hyper_resume.data import ResumableLoader

FOREIGN = ("torch", "torchdata", "nodes", "bare-torch")


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
    loader = kind(
        dataset,
        batch_size=data.batch_size,
        sampler=sampler,
        shuffle=data.shuffle if sampler is None else None,
        num_workers=data.workers,
        drop_last=data.drop_last,
    )
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


def _stateful_dataloader() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader  # here, because few cases need it

    return StatefulDataLoader


def _nodes(dataset: Any, sampler: Sampler[int], batch_size: int) -> Any:
    from torchdata import nodes  # here, because few cases need it

    indices = nodes.SamplerWrapper(sampler)
    batches = nodes.Batcher(nodes.Mapper(indices, dataset.__getitem__), batch_size=batch_size)
    return nodes.Loader(nodes.Mapper(batches, torch.utils.data.default_collate))

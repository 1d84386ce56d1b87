from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from tests.data.datasets_for_tests import Noisy, Numbers, as_is
from tests.data.resumed_loops import assert_exact

LENGTH = 9


class NoisyInWorker(Noisy):
    """Says who read it, too."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return super().__getitem__(index), None if info is None else (info.id, info.seed)


class OwnGenerators(Numbers):
    """Draws from generators of its own, one of them made when it is first used, and counts."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.torch_generator = torch.Generator().manual_seed(1)
        self.python = random.Random(2)
        self.numpy: np.random.Generator | None = None
        self.reads = 0

    def __getitem__(self, index: int) -> Any:
        if self.numpy is None:
            self.numpy = np.random.default_rng(3)
        self.reads += 1
        drawn = torch.rand((), generator=self.torch_generator).item(), self.python.gauss(0, 1), self.numpy.random()
        return index, drawn, self.reads


class Counting(Sampler[int]):
    """Another order in each pass, by its own count of the passes."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from ((index * 2 + self.passes) % LENGTH for index in range(LENGTH))


class Eager(Sampler[int]):
    """Draws when its iterator is made, from NumPy's stream."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(LENGTH).tolist())


class PythonRandom(Sampler[int]):
    """Draws index by index from a generator of its own."""

    def __init__(self) -> None:
        self.random = random.Random(4)

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return (self.random.randrange(LENGTH) for _ in range(LENGTH))


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    dataset = dataset if dataset is not None else NoisyInWorker(LENGTH)
    return DataLoader(dataset, **({"batch_size": 2, "collate_fn": as_is} | options))


def distributed() -> DataLoader[Any]:
    data = NoisyInWorker(2 * LENGTH)
    return loader(data, sampler=DistributedSampler(data, num_replicas=2, rank=1, seed=3))


MAKERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: loader(shuffle=True),
    "shuffled by a generator": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(5)),
    "in order": lambda: loader(),
    "with replacement": lambda: loader(
        sampler=RandomSampler(range(LENGTH), replacement=True, num_samples=70), batch_size=15
    ),
    "with replacement by a generator": lambda: loader(
        sampler=RandomSampler(
            range(LENGTH), replacement=True, num_samples=70, generator=torch.Generator().manual_seed(6)
        ),
        batch_size=15,
    ),
    "weighted": lambda: loader(sampler=WeightedRandomSampler([1.0, 2.0, 3.0], LENGTH)),
    "subset": lambda: loader(sampler=SubsetRandomSampler([1, 2, 4, 8, 6])),
    "counting sampler": lambda: loader(sampler=Counting()),
    "eager sampler": lambda: loader(sampler=Eager()),
    "sampler with its own generator": lambda: loader(sampler=PythonRandom()),
    "own batch sampler": lambda: loader(
        batch_size=1, batch_sampler=BatchSampler(RandomSampler(range(LENGTH)), 4, drop_last=False)
    ),
    "no batches": lambda: loader(batch_size=None, sampler=RandomSampler(range(4)), collate_fn=None),
    "last batch dropped": lambda: loader(shuffle=True, drop_last=True),
    "dataset with generators": lambda: loader(OwnGenerators(LENGTH), shuffle=True),
    "subset of a dataset with generators": lambda: loader(Subset(OwnGenerators(LENGTH), [3, 1, 5, 2]), shuffle=True),
}


@pytest.mark.parametrize("draws", [True, False], ids=["dropout", "no dropout"])
@pytest.mark.parametrize("name", MAKERS)
def test_torch_loader_without_workers_resumes_exactly_at_every_position(name: str, draws: bool) -> None:
    whole = assert_exact(MAKERS[name], draws=draws)
    assert len({step.batch for step in whole}) > len(whole) // 2


def test_distributed_sampler_gets_its_epoch() -> None:
    def set_epoch(loader: Any, epoch: int) -> None:
        loader.sampler.set_epoch(epoch)

    whole = assert_exact(distributed, epochs=3, set_epoch=set_epoch)
    assert len({step.batch for step in whole}) == len(whole)


def init_draws(worker_id: int) -> None:
    random.seed(worker_id)
    torch.rand(3)


WITH_WORKERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: loader(shuffle=True, num_workers=2, prefetch_factor=1),
    "replaced, by a generator": lambda: loader(
        num_workers=2,
        sampler=RandomSampler(range(LENGTH), replacement=True, generator=torch.Generator().manual_seed(6)),
    ),
    "worker_init_fn": lambda: loader(
        shuffle=True, num_workers=2, worker_init_fn=init_draws, generator=torch.Generator()
    ),
    "dataset with generators": lambda: loader(OwnGenerators(LENGTH), shuffle=True, num_workers=2),
    "persistent": lambda: loader(shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=1),
    "persistent, eager sampler": lambda: loader(
        OwnGenerators(LENGTH), sampler=Eager(), num_workers=2, persistent_workers=True
    ),
    "three workers, few batches": lambda: loader(num_workers=3, shuffle=True, batch_size=4),
}


@pytest.mark.parametrize("name", WITH_WORKERS)
def test_torch_loader_with_workers_resumes_exactly(name: str) -> None:
    # Each resume starts its workers once an epoch. Every position for one loader; every third, so behind each of two workers
    # and in each epoch, for those that differ from it in who draws what.
    assert_exact(WITH_WORKERS[name], every=1 if name == "shuffled" else 3)


def test_a_worker_keeps_its_number_behind_a_resume() -> None:
    whole = assert_exact(lambda: loader(num_workers=2), every=4)
    assert [f"({number % 2}, " in step.batch for number, step in enumerate(whole[:5])] == [True] * 5


def test_sequential_sampler_over_another_source() -> None:
    assert_exact(lambda: loader(sampler=SequentialSampler(range(5))))

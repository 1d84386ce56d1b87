from __future__ import annotations

import json
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from hyper_resume.data import DataLoader
from tests.data.datasets_for_tests import Counting, Noisy, Numbers, Only, as_is
from tests.data.loaders_for_tests import flat, numbers_loader
from tests.data.position_replay import assert_resumes_exactly_at_every_position


def _global_streams() -> tuple[Any, ...]:
    return (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("world", "rank"), [(1, 0), (3, 0), (3, 2)])
def test_resume_at_every_position_of_three_epochs_equals_the_uninterrupted_run(
    world: int, rank: int, drop_last: bool
) -> None:
    def make_loader() -> DataLoader:
        return numbers_loader(dp_world_size=world, dp_rank=rank, drop_last=drop_last)

    whole = assert_resumes_exactly_at_every_position(make_loader, epochs=3)

    expected = []
    for epoch in range(3):
        order = DistributedSampler(Numbers(23), num_replicas=world, rank=rank, seed=5, drop_last=drop_last)
        order.set_epoch(epoch)
        expected += list(BatchSampler(order, 4, drop_last))
    assert [handed.batch for handed in whole] == expected
    assert [handed.sample_ids for handed in whole] == expected
    per_epoch = len(expected) // 3
    assert [(json.loads(handed.state)["epoch"], json.loads(handed.state)["batches_consumed"]) for handed in whole] == [
        (epoch, consumed) for epoch in range(3) for consumed in range(1, per_epoch + 1)
    ]


def test_resume_with_workers_gives_the_same_batches_and_the_same_augmentations() -> None:
    def make_loader() -> DataLoader:
        return DataLoader(Noisy(5), batch_size=2, seed=5, num_workers=2, collate_fn=as_is)

    whole = assert_resumes_exactly_at_every_position(make_loader, epochs=3)
    noise = [repr(sample[1:]) for handed in whole for sample in handed.batch]
    assert len(set(noise)) == len(noise) == 15  # varies from sample to sample and from epoch to epoch


def test_augmentations_in_workers_do_not_depend_on_the_number_of_workers() -> None:
    def batches(num_workers: int) -> list[Any]:
        return list(DataLoader(Noisy(9), batch_size=2, num_workers=num_workers, collate_fn=as_is))

    assert batches(1) == batches(2)


@pytest.mark.parametrize(("option", "value"), [("seed", 6), ("dp_rank", 1)])
def test_augmentations_in_workers_depend_on_seed_and_rank(option: str, value: int) -> None:
    def noise(**changed: int) -> list[Any]:
        options = {"seed": 5, "dp_rank": 0} | changed
        loader = DataLoader(
            Noisy(4), batch_size=2, shuffle=False, dp_world_size=2, num_workers=1, collate_fn=as_is, **options
        )
        return [sample[1:] for batch in loader for sample in batch]

    assert noise() == noise()
    assert not set(map(repr, noise())) & set(map(repr, noise(**{option: value})))


def test_without_workers_the_dataset_draws_from_the_restored_streams_and_skipping_draws_nothing() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    straight = DataLoader(Noisy(20), batch_size=2, collate_fn=as_is)
    reading = iter(straight)
    for _ in range(4):
        next(reading)
    position = straight.state_dict()
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()
    expected = list(reading)

    torch.rand(5)
    resumed = DataLoader(Noisy(20), batch_size=2, collate_fn=as_is)
    torch.set_rng_state(streams[0])
    random.setstate(streams[1])
    np.random.set_state(streams[2])
    resumed.load_state_dict(position)
    assert list(resumed) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_nothing_in_the_loader_moves_a_global_stream_of_the_main_process(num_workers: int) -> None:
    before = _global_streams()
    loader = numbers_loader(num_workers=num_workers)
    loader.load_state_dict(loader.state_dict())
    loader.set_epoch(1)
    reading = iter(loader)
    next(reading)
    loader.state_dict()
    list(reading)
    list(loader)
    assert _global_streams() == before


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipped_batches_are_not_read_from_the_dataset(num_workers: int) -> None:
    dataset = Counting(23)
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=as_is)
    loader.load_state_dict(loader.state_dict() | {"epoch": 1, "batches_consumed": 4})
    rest = flat(loader)
    assert len(rest) == 7
    assert [index for index, reads in enumerate(dataset.reads) if reads] == sorted(rest)
    assert max(dataset.reads) == 1


def test_making_an_iterator_reads_nothing() -> None:
    dataset = Counting(8)
    iter(DataLoader(dataset, batch_size=2))
    assert sum(dataset.reads) == 0


def test_resume_deep_in_an_epoch_of_ten_million_samples_reads_one_batch_and_is_quick() -> None:
    length, batch_size, consumed = 10_000_000, 8, 1_200_000
    order = torch.randperm(length, generator=torch.Generator().manual_seed(3 + 2))
    wanted = order[consumed * batch_size :][:batch_size].tolist()
    loader = DataLoader(Only(length, set(wanted)), batch_size=batch_size, seed=3, collate_fn=as_is)
    loader.load_state_dict(loader.state_dict() | {"epoch": 2, "batches_consumed": consumed})
    start = time.perf_counter()
    assert next(iter(loader)) == wanted
    assert time.perf_counter() - start < 10

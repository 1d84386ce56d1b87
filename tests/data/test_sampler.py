from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from hyper_resume.data.sampler import batch_of, batches_per_epoch, epoch_indices, samples_per_rank

LENGTHS = (1, 2, 5, 12, 23, 24)


def _torch_order(length: int, world: int, rank: int, *, shuffle: bool, drop_last: bool, epoch: int) -> list[int]:
    reference = DistributedSampler(
        range(length), num_replicas=world, rank=rank, shuffle=shuffle, seed=7, drop_last=drop_last
    )
    reference.set_epoch(epoch)
    return list(reference)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_order_is_that_of_torchs_distributed_sampler(world: int, shuffle: bool, drop_last: bool) -> None:
    for length in LENGTHS:
        for epoch in range(3):
            for rank in range(world):
                got = epoch_indices(
                    length,
                    epoch=epoch,
                    seed=7,
                    shuffle=shuffle,
                    drop_last=drop_last,
                    dp_rank=rank,
                    dp_world_size=world,
                )
                expected = _torch_order(length, world, rank, shuffle=shuffle, drop_last=drop_last, epoch=epoch)
                assert got.tolist() == expected
                assert got.dtype == torch.int64
                assert len(got) == samples_per_rank(length, dp_world_size=world, drop_last=drop_last)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 30])
def test_batches_are_those_of_torchs_batch_sampler(batch_size: int, world: int, drop_last: bool) -> None:
    for length in LENGTHS:
        order = _torch_order(length, world, 0, shuffle=True, drop_last=drop_last, epoch=2)
        expected = list(BatchSampler(order, batch_size, drop_last))
        count = batches_per_epoch(length, batch_size=batch_size, dp_world_size=world, drop_last=drop_last)
        assert [batch_of(torch.tensor(order), batch_size, index) for index in range(count)] == expected


def test_one_rank_shuffles_with_a_private_generator_of_seed_plus_epoch() -> None:
    got = epoch_indices(23, epoch=2, seed=40, shuffle=True, drop_last=False, dp_rank=0, dp_world_size=1)
    assert got.tolist() == torch.randperm(23, generator=torch.Generator().manual_seed(42)).tolist()


@pytest.mark.parametrize("length", [23, 24])
def test_ranks_together_cover_the_dataset_and_nothing_else(length: int) -> None:
    seen: list[int] = []
    for rank in range(3):
        indices = epoch_indices(length, epoch=1, seed=0, shuffle=True, drop_last=False, dp_rank=rank, dp_world_size=3)
        seen += indices.tolist()
    assert len(seen) == 24
    assert set(seen) == set(range(length))


def test_computing_an_order_moves_no_global_stream() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    epoch_indices(1000, epoch=1, seed=0, shuffle=True, drop_last=False, dp_rank=1, dp_world_size=2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import BatchSampler, DistributedSampler

from hyper_resume.data.sampler import batch_indices, batches_per_epoch, epoch_indices, samples_per_rank

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
                assert got[:].tolist() == expected
                assert got[:].dtype in (torch.int32, torch.int64)
                assert len(got) == samples_per_rank(length, dp_world_size=world, drop_last=drop_last)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 30])
def test_batches_are_those_of_torchs_batch_sampler(batch_size: int, world: int, drop_last: bool) -> None:
    for length in LENGTHS:
        order = _torch_order(length, world, 0, shuffle=True, drop_last=drop_last, epoch=2)
        expected = list(BatchSampler(order, batch_size, drop_last))
        count = batches_per_epoch(length, batch_size=batch_size, dp_world_size=world, drop_last=drop_last)
        assert [batch_indices(torch.tensor(order), batch_size, index) for index in range(count)] == expected


@pytest.mark.parametrize(
    ("world", "rank", "expected"),
    [(1, 0, [7, 5, 3, 0, 2, 6, 9, 4, 1, 8]), (3, 0, [7, 0, 9, 8]), (3, 1, [5, 2, 4, 7]), (3, 2, [3, 6, 1, 5])],
)
def test_order_of_ten_samples_is_the_one_that_old_checkpoints_were_saved_in(
    world: int, rank: int, expected: list[int]
) -> None:
    got = epoch_indices(
        10,
        epoch=2,
        seed=1234,
        shuffle=True,
        drop_last=False,
        dp_rank=rank,
        dp_world_size=world,
        shuffle_method="randperm",
    )
    assert got[:].tolist() == expected


def _shuffled_by_hand(length: int, seed: int) -> list[int]:
    """Fisher and Yates, forwards, with the Mersenne Twister's 32-bit words as NumPy gives them: what randperm does."""
    words = np.random.RandomState(seed).randint(0, 2**32, size=length - 1, dtype=np.uint32).tolist()
    order = list(range(length))
    for place, word in enumerate(words):
        other = place + word % (length - place)
        order[place], order[other] = order[other], order[place]
    return order


@pytest.mark.parametrize("length", [2, 23, 1000, 65_537])
def test_order_is_a_fisher_yates_shuffle_by_the_mersenne_twister(length: int) -> None:
    got = epoch_indices(length, epoch=3, seed=39, shuffle=True, drop_last=False, dp_rank=0, dp_world_size=1)
    assert got[:].tolist() == _shuffled_by_hand(length, seed=42)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [2, 3, 64, 999, 5000, 5001, 12_000])
def test_shares_of_a_long_order_are_every_so_manyth_index_of_it(world: int, drop_last: bool) -> None:
    order = _shuffled_by_hand(5000, seed=42)
    whole = order[: 5000 // world * world] if drop_last else (order * 3)[: -(-5000 // world) * world]
    for rank in {0, 1, world // 2, world - 1}:
        got = epoch_indices(
            5000, epoch=3, seed=39, shuffle=True, drop_last=drop_last, dp_rank=rank, dp_world_size=world
        )
        assert got[:].tolist() == whole[rank::world]


class _Memory:
    """What is allocated inside a ``with``: by NumPy and Python (peak, and what is kept), and by torch's own allocator."""

    def __enter__(self) -> _Memory:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        tracemalloc.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.kept_bytes, self.peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        self._profile.__exit__(*error)
        self.torch_bytes = sum(max(0, event.self_cpu_memory_usage) for event in self._profile.events())


@pytest.mark.parametrize(("world", "share"), [(1, 1_000_003), (2, 500_002), (4, 250_001), (1000, 1001)])
def test_a_shuffled_order_takes_four_bytes_a_sample_and_then_a_ranks_own_share(world: int, share: int) -> None:
    with _Memory() as memory:
        indices = epoch_indices(
            1_000_003, epoch=0, seed=0, shuffle=True, drop_last=False, dp_rank=world - 1, dp_world_size=world
        )
    assert len(indices) == share
    assert 4_000_012 <= memory.peak_bytes < 4_000_012 + 100_000
    assert 4 * share <= memory.kept_bytes < 4 * share + 100_000
    assert memory.torch_bytes < 100_000


def test_memory_that_torch_allocates_is_seen() -> None:
    with _Memory() as memory:
        torch.randperm(1_000_000)
    assert memory.torch_bytes >= 8_000_000


@pytest.mark.parametrize(("shuffle", "method"), [(False, "randperm"), (True, "feistel")])
def test_an_order_that_is_computed_makes_no_array_of_the_size_of_the_data(shuffle: bool, method: str) -> None:
    with _Memory() as memory:
        indices = epoch_indices(
            10**12,
            epoch=0,
            seed=0,
            shuffle=shuffle,
            drop_last=False,
            dp_rank=2,
            dp_world_size=3,
            shuffle_method=method,
        )
        batch = batch_indices(indices, 8, 40_000_000_000)
    assert len(indices) == 333_333_333_334
    assert len(set(batch)) == 8
    assert memory.peak_bytes < 1_000_000
    assert memory.torch_bytes < 100_000


def test_ascending_indices_are_those_of_the_positions_at_any_length() -> None:
    indices = epoch_indices(10**12, epoch=5, seed=1, shuffle=False, drop_last=False, dp_rank=2, dp_world_size=3)
    assert batch_indices(indices, 4, 250_000) == [3_000_002, 3_000_005, 3_000_008, 3_000_011]
    assert indices[len(indices) - 2 :].tolist() == [999_999_999_998, 1]  # filled up from the start


@pytest.mark.parametrize(
    "places", [slice(0, 0), slice(5, 2), slice(0, 1024), slice(1000, 3000), slice(2900, 9999), slice(-3, None)]
)
def test_computed_indices_are_sliced_as_a_list_is(places: slice) -> None:
    indices = epoch_indices(3000, epoch=0, seed=1, shuffle=False, drop_last=False, dp_rank=0, dp_world_size=1)
    assert indices[places].tolist() == list(range(3000))[places]


def test_computed_indices_have_no_stride() -> None:
    indices = epoch_indices(30, epoch=0, seed=1, shuffle=False, drop_last=False, dp_rank=0, dp_world_size=1)
    with pytest.raises(IndexError, match="a step of 2"):
        indices[::2]


def test_one_rank_shuffles_with_a_private_generator_of_seed_plus_epoch() -> None:
    got = epoch_indices(23, epoch=2, seed=40, shuffle=True, drop_last=False, dp_rank=0, dp_world_size=1)
    assert got[:].tolist() == torch.randperm(23, generator=torch.Generator().manual_seed(42)).tolist()


@pytest.mark.parametrize("length", [23, 24])
def test_ranks_together_cover_the_dataset_and_nothing_else(length: int) -> None:
    seen: list[int] = []
    for rank in range(3):
        indices = epoch_indices(length, epoch=1, seed=0, shuffle=True, drop_last=False, dp_rank=rank, dp_world_size=3)
        seen += indices[:].tolist()
    assert len(seen) == 24
    assert set(seen) == set(range(length))


def test_computing_an_order_moves_no_global_stream() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    epoch_indices(1000, epoch=1, seed=0, shuffle=True, drop_last=False, dp_rank=1, dp_world_size=2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]

from __future__ import annotations

import collections
import itertools
import math
import random

import numpy as np
import pytest

from hyper_resume.data.permutation import KeyedPermutation
from tests.data.feistel_model import index_at, position_of

TRILLION = 10**12
PRIMES = (503, 1009, 2003, 4999, 7919)
AROUND_POWERS = tuple(2**power + step for power in range(9, 14) for step in (-1, 0, 1))
AROUND_SQUARES = tuple(side * side + step for side in (30, 64, 89) for step in (-1, 0, 1, side - 1, side, side + 1))
LENGTHS = (*range(1, 400), *PRIMES, *AROUND_POWERS, *AROUND_SQUARES)


def _places(*places: int) -> np.ndarray:
    return np.array(places, dtype=np.uint64)


def _order(length: int, seed: int = 7, epoch: int = 1) -> list[int]:
    return KeyedPermutation(length, seed=seed, epoch=epoch)(np.arange(length, dtype=np.uint64)).tolist()


def _sample(length: int, count: int) -> list[int]:
    return [0, length - 1, *random.Random(3).sample(range(length), count)]


def _excess(counts: list[int]) -> float:
    """Chi-square of equal shares, in standard deviations above its mean (both from the degrees of freedom alone)."""
    share = sum(counts) / len(counts)
    freedom = len(counts) - 1
    return (sum((count - share) ** 2 / share for count in counts) - freedom) / math.sqrt(2 * freedom)


# ---- a permutation


def test_every_index_stands_at_exactly_one_position_at_every_length() -> None:
    for length in LENGTHS:
        for epoch in range(3):
            assert sorted(_order(length, epoch=epoch)) == list(range(length)), length


@pytest.mark.parametrize(
    "length", [TRILLION, TRILLION - 1, 999_999_999_989, 2**40, 2**40 + 1, 10**6 * (10**6 + 1), 2**63 - 1]
)
def test_the_inverse_finds_each_position_again_at_great_lengths(length: int) -> None:
    positions = _sample(length, 300)
    indices = KeyedPermutation(length, seed=-5, epoch=2)(_places(*positions)).tolist()
    assert [position_of(index, length, -5, 2) for index in indices] == positions
    assert max(indices) < length


def test_a_hundred_thousand_positions_of_a_trillion_hold_different_indices() -> None:
    positions = np.arange(TRILLION - 100_000, TRILLION, dtype=np.uint64)
    indices = KeyedPermutation(TRILLION, seed=1, epoch=0)(positions)
    assert len(np.unique(indices)) == 100_000
    assert int(indices.max()) < TRILLION
    assert positions[0] == TRILLION - 100_000  # what was passed in stays as it was


# ---- always the same one


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 17, 100, 1000, 65_537, 10**8, TRILLION, 2**63 - 1])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (1234, 3), (-1, 0), (2**70, 10**9)])
def test_indices_are_those_of_the_construction_in_whole_numbers(length: int, seed: int, epoch: int) -> None:
    positions = _sample(length, min(length, 50))
    got = KeyedPermutation(length, seed=seed, epoch=epoch)(_places(*positions)).tolist()
    assert got == [index_at(position, length, seed, epoch) for position in positions]


def test_the_order_is_the_one_that_checkpoints_were_saved_in() -> None:
    assert _order(10, seed=1234, epoch=2) == [1, 6, 7, 2, 8, 9, 0, 5, 3, 4]
    got = KeyedPermutation(TRILLION, seed=1234, epoch=2)(_places(0, 1, 2, 500_000_000_000, TRILLION - 1))
    assert got.tolist() == [998482912503, 543497905609, 449237370090, 335447840798, 529277132793]


def test_positions_can_be_asked_for_in_any_portions() -> None:
    permutation = KeyedPermutation(5000, seed=7, epoch=1)
    portions = [permutation(np.arange(first, first + 8, dtype=np.uint64)).tolist() for first in range(0, 5000, 8)]
    assert list(itertools.chain.from_iterable(portions)) == _order(5000)
    assert permutation(_places()).tolist() == []


# ---- a shuffle: fixed seeds, so a bound holds or does not; 4 standard deviations are passed by one honest shuffle in 10,000


def test_another_seed_and_another_epoch_are_other_orders_and_their_sum_is_not_what_counts() -> None:
    orders = [tuple(_order(100, seed, epoch)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_every_order_of_a_few_samples_is_as_frequent_as_any_other(length: int) -> None:
    seen = collections.Counter(tuple(_order(length, seed=9, epoch=epoch)) for epoch in range(6000))
    assert _excess([seen[order] for order in itertools.permutations(range(length))]) < 4


@pytest.mark.parametrize("length", [17, 50])
def test_each_sample_is_as_often_at_each_position_and_follows_each_other_one(length: int) -> None:
    at, steps = np.zeros((length, length), dtype=int), np.zeros(length, dtype=int)
    for epoch in range(3000):
        order = np.array(_order(length, seed=3, epoch=epoch))
        at[np.arange(length), order] += 1
        np.add.at(steps, np.diff(order) % length, 1)
    # Rows and columns both add up to the epochs: (length - 1) ** 2 of the counts are free.
    free = (length - 1) ** 2
    share = 3000 / length
    assert (float(((at - share) ** 2).sum()) / share - free) / math.sqrt(2 * free) < 4
    assert _excess(steps[1:].tolist()) < 4


def test_indices_at_the_first_million_positions_of_a_trillion_are_spread_evenly() -> None:
    order = KeyedPermutation(TRILLION, seed=3, epoch=0)(np.arange(10**6, dtype=np.uint64)).astype(np.int64)
    following = KeyedPermutation(TRILLION, seed=3, epoch=1)(np.arange(10**6, dtype=np.uint64)).astype(np.int64)
    thousandth = TRILLION // 1000
    pairs = order[:-1] * 32 // TRILLION * 32 + order[1:] * 32 // TRILLION
    for what, bins in {
        "high digits": order // thousandth,
        "low digits": order % 1000,
        "steps": np.diff(order) % TRILLION // thousandth,
        "neighbours": pairs,
        "against the next epoch": (following - order) % TRILLION // thousandth,
    }.items():
        assert _excess(np.bincount(bins, minlength=1000).tolist()) < 4, what

"""Rank 2 fails before a collective that the others enter."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpi(min_size=4)


def test_rank_2_fails_before_a_collective() -> None:
    if dist.get_rank() == 2:
        raise ValueError("the shard is damaged")
    dist.all_reduce(torch.ones(1))


def test_the_next_test_starts_clean() -> None:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    assert total.item() == 6.0

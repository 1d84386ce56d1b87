"""Rank 0 is in one collective more than the others, which passes by itself: a sender does not wait for receivers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpi(min_size=4)


def test_rank_0_sends_alone() -> None:
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(1), src=0)


def test_the_next_test_starts_clean() -> None:
    value = torch.tensor(float(dist.get_rank()))
    dist.broadcast(value, src=3)
    assert value.item() == 3.0

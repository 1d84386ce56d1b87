"""Rank 2 ends its session."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpi(min_size=4)


def test_rank_2_ends_its_session() -> None:
    if dist.get_rank() == 2:
        pytest.exit("enough", returncode=0)
    dist.all_reduce(torch.ones(1))


def test_is_never_reached() -> None:
    dist.barrier()

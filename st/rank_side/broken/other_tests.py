"""Rank 1 has other tests than the rest."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpi(min_size=4)


if os.environ["PMI_RANK"] != "1":

    def test_that_rank_1_lacks() -> None:
        dist.barrier()


def test_that_all_have() -> None:
    assert torch.ones(1).item() == 1.0

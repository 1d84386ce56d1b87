"""Rank 1 ends its process with exit code 0, as if all were well."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpi(min_size=4)


def test_rank_1_goes_away() -> None:
    if dist.get_rank() == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(1))

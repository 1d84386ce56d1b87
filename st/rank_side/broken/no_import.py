"""Rank 3 can't import its tests."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpi(min_size=4)


if os.environ["PMI_RANK"] == "3":
    raise ImportError("of rank 3 only")


def test_that_rank_3_lacks() -> None:
    assert dist.is_initialized()
    assert torch.ones(1).item() == 1.0

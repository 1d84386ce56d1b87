"""Rank 1 waits for something that never comes, where Python can still be interrupted."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpi(min_size=4)


def test_rank_1_hangs() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()
    dist.all_reduce(torch.ones(1))


def test_the_next_test_starts_clean() -> None:
    dist.barrier()

"""Rank 2 is killed."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpi(min_size=4)


def test_rank_2_is_killed() -> None:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))

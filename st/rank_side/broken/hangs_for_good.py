"""Rank 3 can't be interrupted, as in a C library that waits for good."""

from __future__ import annotations

import signal
import time

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpi(min_size=4)


def test_rank_3_hangs_for_good() -> None:
    if dist.get_rank() == 3:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))


def test_is_never_reached() -> None:
    dist.barrier()

"""No rank can be interrupted, and none is left to tell."""

from __future__ import annotations

import signal
import time

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpi(min_size=4)


def test_all_ranks_hang_for_good() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    dist.all_reduce(torch.ones(1))
    time.sleep(1000)

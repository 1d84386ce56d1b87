"""Three tests of a second each."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.mark.parametrize("number", range(3))
def test_takes_a_second(number: int) -> None:
    dist.all_reduce(torch.ones(1))
    time.sleep(1.0)

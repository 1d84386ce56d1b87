"""What only one rank does instead of passing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.fixture
def broken_setup() -> None:
    if _rank() == 1:
        raise OSError("no space left")


@pytest.fixture
def broken_teardown() -> Iterator[None]:
    yield
    if _rank() == 3:
        raise OSError("cannot be removed")


def _rank() -> int:
    rank: int = importlib.import_module("mpi4py.MPI").COMM_WORLD.rank
    return rank


def test_rank_1_fails_in_setup(broken_setup: None) -> None:
    dist.all_reduce(torch.ones(1))


def test_rank_3_fails_in_teardown(broken_teardown: None) -> None:
    dist.all_reduce(torch.ones(1))


def test_rank_2_skips() -> None:
    if dist.get_rank() == 2:
        pytest.skip("not today")


def test_rank_0_leaves_python() -> None:
    if dist.get_rank() == 0:
        raise SystemExit(0)


def test_all_pass() -> None:
    dist.barrier()

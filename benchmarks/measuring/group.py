"""The ranks of one point: a gloo group on the loopback interface, with a file as rendezvous."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(minutes=10)


class Group:
    """The default process group."""

    def wait(self) -> None:
        """Wait at a barrier."""
        dist.barrier()

    def largest(self, seconds: float) -> float:
        """Return the maximum over all ranks, on each rank."""
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)


@contextmanager
def joined(rank: int, world_size: int, rendezvous: Path) -> Iterator[Group]:
    """Join the group of ``world_size`` processes as ``rank``; leave it at the end."""
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=_TIMEOUT
    )
    try:
        yield Group()
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()

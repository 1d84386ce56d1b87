"""The gloo process group that a test runs in: joined by rank and size of MPI, its sockets shut down when the test fails.

A rank that fails before a collective leaves the others waiting in it. Destroying its group does not help them: gloo's
sockets stay open as long as anything refers to the group, and the traceback of the failure does. So a failing rank
shuts the sockets down; every rank that waits for it then fails at once with "Connection closed by peer", and so on.
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # exported, but not by name

from conformance.processes.joining import wait_for_all


class TestGroup:
    """One process group after the other, each joined by a new file in a folder that all ranks share."""

    __test__ = False

    def __init__(self, folder: Path, rank: int, size: int, seconds: float) -> None:
        """Take the folder and a limit for each collective."""
        self._folder, self._rank, self._size = folder, rank, size
        self._limit = timedelta(seconds=seconds)
        self._number = 0
        self._other_sockets: set[str] = set()

    @property
    def is_joined(self) -> bool:
        """True when there is a group: of this test, or of those before it as long as they pass."""
        return dist.is_initialized()

    def join(self) -> None:
        """Make the default process group."""
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._other_sockets = set(_sockets())
        self._number += 1
        store = FileStore(str(self._folder / f"group-{self._number}"), self._size)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._size, timeout=self._limit)
        wait_for_all(store, self._rank, self._size, self._limit)

    def check_matched(self) -> None:
        """Run one more collective: a rank with one collective too many or too few fails in this test, not in the next."""
        dist.barrier()

    def leave(self) -> None:
        """Shut this rank's connections down and drop the group; every rank that waits for this one fails."""
        for name, descriptor in _sockets().items():
            if name not in self._other_sockets:
                _shut_down(descriptor)
        if dist.is_initialized():
            dist.destroy_process_group()


def _sockets() -> dict[str, int]:
    """This process's sockets: the kernel's name -> descriptor."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        # The list contains its own descriptor, and gloo's threads close some meanwhile.
        with contextlib.suppress(OSError):
            name = str(entry.readlink())
            if name.startswith("socket:"):
                found[name] = int(entry.name)
    return found


def _shut_down(descriptor: int) -> None:
    """Shut a TCP connection down; other sockets are not changed.

    Listening sockets neither: gloo ends the whole process when its ``accept`` fails.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        is_tcp = connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM
        if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)

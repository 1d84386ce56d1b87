"""What a process group leaves open: that a rank has joined says nothing about the others."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol


class _Store(Protocol):
    def set(self, key: str, value: str, /) -> None: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


def wait_for_all(store: _Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Return when every rank has come here; to be called right after ``init_process_group``, with the store it was given.

    gloo's ``init_process_group`` returns on a rank whose own connections stand, while another may be in the middle of its
    handshake. A rank that ends then makes the other's ``init_process_group`` raise (connectFullMesh: connection closed by
    peer), and a death in the test looks like a failure to start. The store is met in, and not the group: the last collective
    of a meeting has the same gap.

    Raises:
        RuntimeError: from the store; ``timeout`` has passed.
    """
    store.set(f"joined/{rank}", "")
    store.wait([f"joined/{one}" for one in range(world_size)], timeout)

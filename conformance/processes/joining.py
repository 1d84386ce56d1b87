"""Waiting until every rank has joined a process group: that one rank has joined says nothing about the others."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol


class _Store(Protocol):
    def set(self, key: str, value: str, /) -> None: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


def wait_for_all(store: _Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Return when every rank has called this. Call it right after ``init_process_group``, with the same store.

    gloo's ``init_process_group`` returns on a rank whose own connections are ready while another rank may still be in its
    handshake. If the first rank exits then, ``init_process_group`` raises on the other (connectFullMesh: connection closed by
    peer), and a death in the test looks like a failure to start. The ranks wait in the store and not in a collective of the
    group, because the last collective has the same gap.

    Raises:
        RuntimeError: from the store; ``timeout`` has passed.
    """
    store.set(f"joined/{rank}", "")
    store.wait([f"joined/{one}" for one in range(world_size)], timeout)

"""Asynchronous saves of other libraries. Each call returns once the state is copied, as training may change it from then on."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint import staging, state_dict_saver

from benchmarks.contenders import peers
from benchmarks.contenders.states import State
from benchmarks.protocol import GB

STOCK = "dcp.async_save"
STOCK_CACHED = "dcp.async_save, cached stager"
CHECKPOINTING = "torch_checkpointing, async save + fsync"
# Copies in addition to those that a peer keeps: the target of memcpy, this library's, and stock DCP's own per save.
_OTHER_COPIES = 3
# Everything that is not a copy of the payload.
_REST_BYTES = GB


class AsyncPeer(Protocol):
    """A way to save a flat state in the background; ``save`` returns once the state is copied."""

    name: str
    note: str

    def save(self, state: State, path: Path) -> None:
        """Return once the state may be changed."""

    def wait(self) -> None:
        """Wait until it is on the device."""

    def load(self, path: Path, target: State) -> State:
        """Return the saved state, in ``target`` or in new memory."""

    def close(self) -> None:
        """Release what is kept between saves."""


class StockAsync:
    """Stock DCP's asynchronous save, with its default stager or with one that is kept between saves."""

    def __init__(self, *, cached: bool) -> None:
        """Make the stager; without a device, pinned memory, other threads and non-blocking copies are off."""
        self.name = STOCK_CACHED if cached else STOCK
        self.note = ""
        self._stager = _cached_stager() if cached else None
        self._response: Any = None

    def save(self, state: State, path: Path) -> None:
        """Return once the state has been copied."""
        chosen = {} if self._stager is None else {"async_stager": self._stager}
        self._response = state_dict_saver.async_save({"model": state}, checkpoint_id=path, **chosen)  # type: ignore[arg-type]

    def wait(self) -> None:
        """Wait until it is on the device."""
        response, self._response = self._response, None
        getattr(response, "upload_completion", response).result()

    def load(self, path: Path, target: State) -> State:
        """Load as from any save of stock DCP."""
        return peers.stock_load(path, target)

    def close(self) -> None:
        """Release the kept copy."""
        if self._stager is not None:
            self._stager.close()


def _cached_stager() -> staging.DefaultStager:
    return staging.DefaultStager(
        staging.StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )


class CheckpointingAsync:
    """torch_checkpointing's manager. It copies into shared memory, which it keeps, and writes in another process."""

    name = CHECKPOINTING
    note = "written by another process, whose memory is not counted; direct I/O is off, because it fails on ext4"

    def __init__(self) -> None:
        """Start the manager. Without a device, pinned memory and non-blocking copies are off; ``save`` waits for the copy."""
        module: Any = importlib.import_module("torch_checkpointing")
        staging_config = module.CheckpointStagerConfig(
            use_pinned_memory=False, use_non_blocking_copy=False, use_async_staging=False
        )
        self._manager = peers.checkpointing_manager(module.AsyncCheckpointSaverConfig(staging_config=staging_config))
        self._written: Any = None
        self._path = Path()

    def save(self, state: State, path: Path) -> None:
        """Return once the state has been copied."""
        self._path = path
        self._written = self._manager.save(str(path), {"model": state})

    def wait(self) -> None:
        """Wait until it is on the device."""
        self._written.result()
        peers.sync_files(self._path)

    def load(self, path: Path, target: State) -> State:
        """Load as from its synchronous saves."""
        return peers.checkpointing_load(path, target)

    def close(self) -> None:
        """End the writing process."""
        self._manager.close()


def async_peers(
    payload_bytes: int, available_bytes: int
) -> tuple[list[AsyncPeer], Mapping[str, str], Callable[[], None]]:
    """Return the asynchronous peers, those that can't run here (name -> why), and a function that closes all of them.

    Args:
        payload_bytes: size of the state.
        available_bytes: free memory, with one payload allocated already. A peer that keeps a copy is left out where the
            memory does not suffice for it.
    """
    found: list[AsyncPeer] = []
    absent: dict[str, str] = {}
    has_stager = hasattr(staging, "DefaultStager") and hasattr(staging, "StagingOptions")
    candidates: list[tuple[str, str, Callable[[], AsyncPeer]]] = [
        (STOCK, "", lambda: StockAsync(cached=False)),
        (
            STOCK_CACHED,
            "" if has_stager else "this torch has no stager that can be kept",
            lambda: StockAsync(cached=True),
        ),
        (CHECKPOINTING, peers.why_absent("torch_checkpointing"), CheckpointingAsync),
    ]
    with ExitStack() as opened:
        for name, reason, make in candidates:
            copies = _OTHER_COPIES + len(found)
            if not reason and found and copies * payload_bytes + _REST_BYTES > available_bytes:
                size, there = payload_bytes / GB, available_bytes / GB
                reason = f"its copy would be number {copies} of {size:g} GB each, and {there:.1f} GB of memory are free"
            if reason:
                absent[name] = reason
                continue
            found.append(make())
            opened.callback(found[-1].close)
        return found, absent, opened.pop_all().close

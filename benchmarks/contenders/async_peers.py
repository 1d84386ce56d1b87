"""What people use today to save beside training; every copy is waited for, as training must not change what is copied."""

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
# Beside those that are kept: where memcpy copies to, this library's, and the one that stock's default makes for each save.
_OTHER_COPIES = 3
# What is no copy of the payload.
_REST_BYTES = GB


class AsyncPeer(Protocol):
    """A way to save a flat state beside training; the copy is waited for."""

    name: str
    note: str

    def save(self, state: State, path: Path) -> None:
        """Return once the state may be changed."""

    def wait(self) -> None:
        """Wait until it is on the device."""

    def load(self, path: Path, target: State) -> State:
        """Return what was saved, in ``target`` or in memory of its own."""

    def close(self) -> None:
        """Give back what is kept from save to save."""


class StockAsync:
    """Stock DCP's asynchronous save, with the stager of its defaults or with one that is kept from save to save."""

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
        """What any save of stock DCP is loaded by."""
        return peers.stock_load(path, target)

    def close(self) -> None:
        """Give the kept copy back."""
        if self._stager is not None:
            self._stager.close()


def _cached_stager() -> staging.DefaultStager:
    return staging.DefaultStager(
        staging.StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )


class CheckpointingAsync:
    """torch_checkpointing's manager, which copies into shared memory that it keeps, and writes in a process of its own."""

    name = CHECKPOINTING
    note = "written by a process of its own, whose memory is not counted; direct I/O off, which fails on ext4"

    def __init__(self) -> None:
        """Without a device, pinned memory and non-blocking copies are off; the copy is waited for, as by the other peers."""
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
        """What its other saves are loaded by."""
        return peers.checkpointing_load(path, target)

    def close(self) -> None:
        """End its process."""
        self._manager.close()


def async_peers(
    payload_bytes: int, available_bytes: int
) -> tuple[list[AsyncPeer], Mapping[str, str], Callable[[], None]]:
    """The peers that save beside training, those that can't here (name -> why), and what closes them all.

    Args:
        payload_bytes: of what will be saved.
        available_bytes: of memory, with one payload in it already. Those that keep a copy are left out where it does not
            suffice for theirs.
    """
    found: list[AsyncPeer] = []
    absent: dict[str, str] = {}
    has_stager = hasattr(staging, "DefaultStager") and hasattr(staging, "StagingOptions")
    candidates: list[tuple[str, str, Callable[[], AsyncPeer]]] = [
        (STOCK, "", lambda: StockAsync(cached=False)),
        (STOCK_CACHED, "" if has_stager else "this torch has no stager to keep", lambda: StockAsync(cached=True)),
        (CHECKPOINTING, peers.why_absent("torch_checkpointing"), CheckpointingAsync),
    ]
    with ExitStack() as opened:
        for name, reason, make in candidates:
            copies = _OTHER_COPIES + len(found)
            if not reason and found and copies * payload_bytes + _REST_BYTES > available_bytes:
                size, there = payload_bytes / GB, available_bytes / GB
                reason = f"its copy would be the {copies}th of {size:g} GB, and there are {there:.1f}"
            if reason:
                absent[name] = reason
                continue
            found.append(make())
            opened.callback(found[-1].close)
        return found, absent, opened.pop_all().close

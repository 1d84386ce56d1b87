"""What people use today, each as its own documentation has it called, and brought to the device where it does not do that."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import staging, state_dict_loader, state_dict_saver

from benchmarks.states import State

STOCK_SAVE = "dcp.save"
STOCK_LOAD = "dcp.load"
STOCK_ASYNC = "dcp.async_save"
STOCK_CACHED_ASYNC = "dcp.async_save, cached stager"
TORCH_SAVE = "torch.save + fsync"
TORCH_LOAD = "torch.load"
SAFETENSORS_SAVE = "safetensors + fsync"
SAFETENSORS_LOAD = "safetensors.load_file + copy"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A way to save a flat state to a path that does not exist, and to get it back.

    ``load`` fills ``target`` and returns it, or returns a state of its own; ``load_note`` says which.
    """

    save_name: str
    load_name: str
    save: Callable[[State, Path], None]
    load: Callable[[Path, State], State]
    save_note: str = ""
    load_note: str = ""


def peers() -> tuple[list[Peer], Mapping[str, str]]:
    """The peers that are installed, and those that are not: name -> why."""
    found = [
        Peer(
            save_name=STOCK_SAVE,
            load_name=STOCK_LOAD,
            save=stock_save,
            load=stock_load,
            save_note="fsyncs; no digests",
            load_note="no digests; in place",
        ),
        Peer(
            save_name=TORCH_SAVE,
            load_name=TORCH_LOAD,
            save=_torch_save,
            load=_torch_load,
            save_note="no digests",
            load_note="mmap=False, weights_only=True; no digests; into new memory",
        ),
    ]
    absent: dict[str, str] = {}
    for name, peer in _OPTIONAL.items():
        try:
            importlib.import_module(name)
            found.append(peer)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            absent[name] = f"{name} is not installed" + ("" if missing == name else f" whole: it lacks {missing}")
    absent["torch_checkpointing"] = (
        "torch_checkpointing is not installed"
        if importlib.util.find_spec("torch_checkpointing") is None
        else "torch_checkpointing is installed, but nothing here knows how to call it"
    )
    return found, absent


def stock_save(state: State, path: Path) -> None:
    """Stock DCP with its defaults; it fsyncs."""
    state_dict_saver.save({"model": state}, checkpoint_id=path)


def stock_load(path: Path, target: State) -> State:
    """Stock DCP with its defaults, in place."""
    state_dict_loader.load({"model": target}, checkpoint_id=path)
    return target


class StockAsync:
    """Stock DCP's asynchronous save, with the stager of its defaults or with one that is kept from save to save."""

    def __init__(self, *, cached: bool) -> None:
        """Make the stager; without a device, pinned memory, other threads and non-blocking copies are off."""
        options = staging.StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = staging.DefaultStager(options) if cached else None
        self._response: Any = None

    def save(self, state: State, path: Path) -> None:
        """Return once the state has been copied."""
        chosen = {} if self._stager is None else {"async_stager": self._stager}
        self._response = state_dict_saver.async_save({"model": state}, checkpoint_id=path, **chosen)  # type: ignore[arg-type]

    def wait(self) -> None:
        """Wait until it is on the device."""
        response, self._response = self._response, None
        getattr(response, "upload_completion", response).result()

    def close(self) -> None:
        """Give the kept copy back."""
        if self._stager is not None:
            self._stager.close()


def has_cached_stager() -> bool:
    """True where this torch has a stager whose copy can be kept."""
    return hasattr(staging, "DefaultStager") and hasattr(staging, "StagingOptions")


def _torch_save(state: State, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _torch_load(path: Path, target: State) -> State:
    found: State = torch.load(path, mmap=False, weights_only=True)
    return found


def _safetensors_save(state: State, path: Path) -> None:
    module: Any = importlib.import_module("safetensors.torch")
    module.save_file(state, path)
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _safetensors_load(path: Path, target: State) -> State:
    module: Any = importlib.import_module("safetensors.torch")
    for name, tensor in module.load_file(path).items():
        target[name].copy_(tensor)
    return target


def _torchsnapshot_save(state: State, path: Path) -> None:
    module: Any = importlib.import_module("torchsnapshot")
    module.Snapshot.take(path=str(path), app_state={"model": module.StateDict(**state)})


def _torchsnapshot_load(path: Path, target: State) -> State:
    module: Any = importlib.import_module("torchsnapshot")
    holder = module.StateDict(**target)
    module.Snapshot(path=str(path)).restore({"model": holder})
    found: State = dict(holder)
    return found


_OPTIONAL: Mapping[str, Peer] = {
    "safetensors": Peer(
        save_name=SAFETENSORS_SAVE,
        load_name=SAFETENSORS_LOAD,
        save=_safetensors_save,
        load=_safetensors_load,
        save_note="no digests",
        load_note="load_file only maps the file, so its tensors are copied into those that are there; no digests",
    ),
    "torchsnapshot": Peer(
        save_name="torchsnapshot.take",
        load_name="torchsnapshot.restore",
        save=_torchsnapshot_save,
        load=_torchsnapshot_load,
        save_note="does not fsync; no digests",
        load_note="no digests; in place",
    ),
}

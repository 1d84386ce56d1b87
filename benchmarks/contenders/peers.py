"""Other libraries, each called as its documentation says, with an fsync where the library does none."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from benchmarks.contenders.states import State

STOCK_SAVE = "dcp.save"
STOCK_LOAD = "dcp.load"
TORCH_SAVE = "torch.save + fsync"
TORCH_LOAD = "torch.load"
SAFETENSORS_SAVE = "safetensors + fsync"
CHECKPOINTING_SAVE = "torch_checkpointing.save + fsync"
SAFETENSORS_LOAD = "safetensors.load_file + copy"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A way to save a flat state to a new path, and to load it.

    ``load`` fills ``target`` and returns it, or returns a new state; ``load_note`` says which.
    """

    save_name: str
    load_name: str
    save: Callable[[State, Path], None]
    load: Callable[[Path, State], State]
    save_note: str = ""
    load_note: str = ""


def peers() -> tuple[list[Peer], Mapping[str, str]]:
    """Return the installed peers, and why each of the others is absent (name -> reason)."""
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
        reason = why_absent(name)
        if reason:
            absent[name] = reason
        else:
            found.append(peer)
    return found, absent


def why_absent(name: str) -> str:
    """Return why a package can't be used here, or an empty text."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{name} is not installed" + ("" if error.name == name else f" completely: {error.name} is missing")
    return ""


def stock_save(state: State, path: Path) -> None:
    """Save with stock DCP and its defaults; it fsyncs."""
    state_dict_saver.save({"model": state}, checkpoint_id=path)


def stock_load(path: Path, target: State) -> State:
    """Load with stock DCP and its defaults, in place."""
    state_dict_loader.load({"model": target}, checkpoint_id=path)
    return target


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


def checkpointing_manager(save: Any) -> Any:
    """Return torch_checkpointing's manager with direct I/O off.

    Direct I/O is its default, and fails on ext4: the size of torch.save's archive is no multiple of a sector.
    """
    module: Any = importlib.import_module("torch_checkpointing")
    storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
    no_direct_io = storage.LocalFileSystemStorageConfig(use_direct_io=False)
    return module.CheckpointManager(module.CheckpointManager.Config(save=save, storage_config=no_direct_io))


def _checkpointing_save(state: State, path: Path) -> None:
    module: Any = importlib.import_module("torch_checkpointing")
    manager = checkpointing_manager(module.SyncCheckpointSaverConfig())
    manager.save(str(path), {"model": state})
    manager.close()
    sync_files(path)


def checkpointing_load(path: Path, target: State) -> State:
    """Load into ``target``."""
    module: Any = importlib.import_module("torch_checkpointing")
    manager = checkpointing_manager(module.SyncCheckpointSaverConfig())
    found: State = manager.load(str(path), into={"model": target})["model"]
    manager.close()
    return found


def sync_files(folder: Path) -> None:
    """fsync a folder and everything below it."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


_OPTIONAL: Mapping[str, Peer] = {
    "safetensors": Peer(
        save_name=SAFETENSORS_SAVE,
        load_name=SAFETENSORS_LOAD,
        save=_safetensors_save,
        load=_safetensors_load,
        save_note="no digests",
        load_note="load_file only maps the file, so its tensors are copied into the existing ones; no digests",
    ),
    "torchsnapshot": Peer(
        save_name="torchsnapshot.take",
        load_name="torchsnapshot.restore",
        save=_torchsnapshot_save,
        load=_torchsnapshot_load,
        save_note="does not fsync; no digests",
        load_note="no digests; in place",
    ),
    "torch_checkpointing": Peer(
        save_name=CHECKPOINTING_SAVE,
        load_name="torch_checkpointing.load",
        save=_checkpointing_save,
        load=checkpointing_load,
        save_note="no digests; direct I/O is off, because it fails on ext4",
        load_note="no digests; in place",
    ),
}

"""Looking into a step directory, and damaging one, with stock torch only: none of the library's own readers is used."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from conformance.adapters.hyper_resume_parts import TroubleError
from conformance.probe import describe

_BUCKET_OF = {"global_step": "progress", "epoch": "progress"}
_EMBEDDED = re.compile(r"extra_state\.(rank_[0-9]+)\.(.+)")
# Drawn anew for every save: told by its kind only, so that two runs of one case have the same records.
_DRAWN_ANEW = frozenset({"save_id"})
_RANK_FILE = re.compile(r"extra_state_(rank_[0-9]+)\.pt")


def look_into(step_directory: Path) -> dict[str, dict[str, str]]:
    """Bucket -> entry -> description. ``layout`` has an entry ``per_rank`` or ``embedded`` where there is training state."""
    found: dict[str, dict[str, str]] = {}
    for name, entry in _metadata(step_directory).state_dict_metadata.items():
        match = _EMBEDDED.fullmatch(name)
        if match:
            bucket = _BUCKET_OF.get(match.group(2), match.group(2))
            found.setdefault(bucket, {})[f"{match.group(1)}.{match.group(2)}"] = "embedded"
            found.setdefault("layout", {})["embedded"] = "yes"
        else:
            bucket, _, rest = name.partition(".")
            found.setdefault(bucket, {})[rest] = _kind(entry)
    for path in sorted(step_directory.glob("extra_state/*.pt")):
        match = _RANK_FILE.fullmatch(path.name)
        if match:
            found.setdefault("layout", {})["per_rank"] = "yes"
            for key, value in torch.load(path, weights_only=True).items():
                bucket = _BUCKET_OF.get(key, key)
                found.setdefault(bucket, {})[f"{match.group(1)}.{key}"] = (
                    type(value).__name__ if key in _DRAWN_ANEW else describe(value)
                )
    return found


def edit_step_directory(step_directory: Path, edit: Mapping[str, Any]) -> str:
    """Carry out one of the faults that need the trainer's format; returns what was done."""
    kind = edit["kind"]
    if kind == "remove_model_key":
        key = edit["key"] if edit["key"].startswith("model.") else f"model.{edit['key']}"
        return _forget(step_directory, [key])
    if kind == "remove_optimizer_entry":
        names = _metadata(step_directory).state_dict_metadata
        wanted = [name for name in names if name.startswith("optimizer.") and name.endswith(edit["entry"])]
        return _forget(step_directory, wanted)
    if kind == "remove_extra_state":
        names = _metadata(step_directory).state_dict_metadata
        return _forget(step_directory, [name for name in names if name.startswith("extra_state.")])
    if kind == "edit_extra_state":
        return _edit_extra_state(step_directory, edit)
    raise TroubleError(f"no edit is called {kind!r}")


def _metadata(step_directory: Path) -> Metadata:
    return FileSystemReader(step_directory).read_metadata()


def _kind(entry: Any) -> str:
    if isinstance(entry, TensorStorageMetadata):
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        return f"{dtype}[{','.join(map(str, entry.size))}]"
    return "bytes"


def _forget(step_directory: Path, names: list[str]) -> str:
    """Take entries out of the checkpoint's own description, so that it does not have them any more."""
    metadata = _metadata(step_directory)
    lacking = [name for name in names if name not in metadata.state_dict_metadata]
    if not names or lacking:
        raise TroubleError(f"{step_directory.name} has no entry {(lacking or ['of this kind'])[0]}")
    for name in names:
        del metadata.state_dict_metadata[name]
        if isinstance(metadata.planner_data, dict):
            metadata.planner_data.pop(name, None)
    gone = set(names)
    storage = metadata.storage_data or {}
    metadata.storage_data = {index: place for index, place in storage.items() if index.fqn not in gone}
    with (step_directory / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    return f"removed {', '.join(names)}"


def _edit_extra_state(step_directory: Path, edit: Mapping[str, Any]) -> str:
    rank = edit.get("rank", 0)
    path = step_directory / "extra_state" / f"extra_state_rank_{rank}.pt"
    if path.exists():
        state = torch.load(path, weights_only=True)
        _set(state, edit)
        torch.save(state, path)
        return f"edited {edit['path']} of rank {rank}"
    payload = _read_all(step_directory)
    bucket, _, rest = edit["path"].partition(".")
    name = f"extra_state.rank_{rank}.{bucket}"
    if name not in payload:
        raise TroubleError(f"{step_directory.name} has no {name}")
    state = {bucket: payload[name][0]}
    _set(state, edit)
    payload.pop(name)
    if bucket in state:
        payload[name] = (state[bucket],)
    _write_all(step_directory, payload)
    return f"edited {bucket}{'.' if rest else ''}{rest} of rank {rank}"


def _set(state: Any, edit: Mapping[str, Any]) -> None:
    *parents, last = edit["path"].split(".")
    for name in parents:
        state = state[int(name) if isinstance(state, (list, tuple)) else name]
    if last not in state:
        raise TroubleError(f"the training state has no {edit['path']}")
    if edit.get("delete"):
        del state[last]
    elif state[last] == edit.get("value"):
        raise TroubleError(f"{edit['path']} is {edit.get('value')!r} already")
    else:
        state[last] = edit.get("value")


def _read_all(step_directory: Path) -> dict[str, Any]:
    entries = _metadata(step_directory).state_dict_metadata
    payload: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in entries.items()
    }
    dcp_load(payload, checkpoint_id=step_directory, no_dist=True)
    return payload


def _write_all(step_directory: Path, payload: dict[str, Any]) -> None:
    fresh = step_directory.with_name(f"{step_directory.name}.edited")
    dcp_save(payload, checkpoint_id=fresh, no_dist=True)
    shutil.rmtree(step_directory)
    fresh.rename(step_directory)

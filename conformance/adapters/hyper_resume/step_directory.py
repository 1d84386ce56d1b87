"""Describes and edits step directories with stock torch only: none of the library's readers is used.

The library verifies every file against ``manifest.json`` before it reads any, so it refuses an edited file because of its
digest. The edits here test something else: a checkpoint that never had an entry. So each edit also removes the manifest and
the save ids (:func:`_make_foreign`), as if another tool had written the directory. Edits that keep the manifest are the faults
on bytes (``flip_byte``, ``truncate``, ...).
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
import shutil
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from conformance.adapters.hyper_resume.components import TroubleError
from conformance.running.probe import describe

_BUCKET_OF = {"global_step": "progress", "epoch": "progress"}
_EMBEDDED = re.compile(r"extra_state\.(rank_[0-9]+)\.(.+)")
# Different in every save: only its type is reported, so that two runs of one case have the same records.
_DRAWN_ANEW = frozenset({"save_id"})
_RANK_FILE = re.compile(r"extra_state_(rank_[0-9]+)\.pt")
_MANIFEST = "manifest.json"
_MARK = re.compile(r"(extra_state\.rank_[0-9]+\.)?save_id(\..*)?")
# A zip file ends in a record of this size, when it has no comment.
_END_BYTES = 22


def describe_step_directory(step_directory: Path) -> dict[str, dict[str, str]]:
    """Bucket -> entry -> description. ``layout`` has an entry ``per_rank`` or ``embedded`` if there is training state;
    ``manifest`` has the manifest's ``step``, ``world_size``, ``mesh``, ``ancestors`` (steps), ``file.NAME``, ``metric.NAME``,
    ``bucket.rank_R.NAME``.
    """
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
    with contextlib.suppress(FileNotFoundError):
        found["manifest"] = _manifest_entries(json.loads((step_directory / _MANIFEST).read_text(encoding="utf-8")))
    return found


def _manifest_entries(manifest: Mapping[str, Any]) -> dict[str, str]:
    mesh = manifest["mesh"]
    return {
        "step": str(manifest["step"]),
        "world_size": str(manifest["world_size"]),
        "mesh": "none" if mesh is None else f"{','.join(mesh['names'])} {'x'.join(map(str, mesh['shape']))}",
        "ancestors": " ".join(str(step) for step, _ in manifest["ancestors"]),
        **{f"file.{name}": f"of rank {entry['rank']}" for name, entry in manifest["files"].items()},
        **{f"metric.{name}": describe(value) for name, value in manifest["metrics"].items()},
        **{
            f"bucket.rank_{rank}.{bucket}": digest.partition(":")[0]
            for rank, digests in manifest["buckets"].items()
            for bucket, digest in digests.items()
        },
    }


def edit_step_directory(step_directory: Path, edit: Mapping[str, Any]) -> str:
    """Carry out one of the faults that need the trainer's format; returns what was done."""
    if edit["kind"] == "flip_tensor_byte":
        return _flip_tensor_byte(step_directory, edit["entry"], edit.get("rank", 0), edit.get("part", "numbers"))
    done = _edit(step_directory, edit["kind"], edit)
    _make_foreign(step_directory)
    return done


def _edit(step_directory: Path, kind: str, edit: Mapping[str, Any]) -> str:
    if kind == "make_foreign":
        if not (step_directory / _MANIFEST).exists():
            raise TroubleError(f"{step_directory.name} has no {_MANIFEST}")
        return "removed the manifest and the marks of its save"
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


def _flip_tensor_byte(step_directory: Path, entry: str, rank: int, part: str) -> str:
    if part not in ("numbers", "end"):
        raise TroubleError(f"a tensor has no part {part!r}; it has numbers and an end")
    for index, place in (_metadata(step_directory).storage_data or {}).items():
        if index.fqn == entry and place.relative_path.startswith(f"__{rank}_"):
            path = step_directory / place.relative_path
            content = bytearray(path.read_bytes())
            archive = bytes(content[place.offset : place.offset + place.length])
            content[
                place.offset + (_place_of_numbers(archive) if part == "numbers" else place.length - _END_BYTES)
            ] ^= 1
            path.write_bytes(content)
            return f"flipped a bit of the {part} of {entry} in {place.relative_path}"
    raise TroubleError(f"rank {rank} stored no part of {entry}")


def _place_of_numbers(archive: bytes) -> int:
    """The offset of the numbers in a ``torch.save`` archive: after the header of their record, which states its lengths."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        begin = next(item for item in opened.infolist() if "/data/" in item.filename).header_offset
    name, extra = struct.unpack_from("<HH", archive, begin + 26)
    place: int = begin + 30 + name + extra
    return place


def _make_foreign(step_directory: Path) -> None:
    """Remove the manifest and the save ids, which only this library writes."""
    (step_directory / _MANIFEST).unlink(missing_ok=True)
    marks = [name for name in _metadata(step_directory).state_dict_metadata if _MARK.fullmatch(name)]
    if marks:
        _forget(step_directory, marks)
    for path in sorted(step_directory.glob("extra_state/*.pt")):
        state = torch.load(path, weights_only=True)
        state.pop("save_id", None)
        torch.save(state, path)


def _metadata(step_directory: Path) -> Metadata:
    return FileSystemReader(step_directory).read_metadata()


def _kind(entry: Any) -> str:
    if isinstance(entry, TensorStorageMetadata):
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        return f"{dtype}[{','.join(map(str, entry.size))}]"
    return "bytes"


def _forget(step_directory: Path, names: list[str]) -> str:
    """Remove entries from the checkpoint's ``.metadata``."""
    metadata = _metadata(step_directory)
    lacking = [name for name in names if name not in metadata.state_dict_metadata]
    if not names or lacking:
        raise TroubleError(f"{step_directory.name} has no entry {(lacking or ['of this kind'])[0]}")
    for name in names:
        del metadata.state_dict_metadata[name]
        if isinstance(metadata.planner_data, dict):
            metadata.planner_data.pop(name, None)
    removed = set(names)
    storage = metadata.storage_data or {}
    metadata.storage_data = {index: place for index, place in storage.items() if index.fqn not in removed}
    # As stock DCP writes it; the library's names its staging directory.
    metadata.storage_meta = StorageMeta()
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

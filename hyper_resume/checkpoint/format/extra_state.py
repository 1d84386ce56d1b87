"""The training state (all buckets but model and optimizer) of each rank on disk, in one of two layouts; a load detects which.

Per-rank layout: ``extra_state/extra_state_rank_{R}.pt``, one file per rank. Embedded layout: entries
``extra_state.rank_{R}.{bucket}`` in the DCP payload. The rank is part of the name because DCP keeps only one of several
entries with the same name; without it, every rank would get back the random streams of one rank.

Both hold tensors and plain values only and are read with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from hyper_resume import digest
from hyper_resume.checkpoint.disk import operations, reading
from hyper_resume.checkpoint.format.manifest import FileEntry, Manifest
from hyper_resume.checkpoint.format.mesh import MAX_RANKS, Mesh, mesh_from_plain
from hyper_resume.checkpoint.parsing import safe_load
from hyper_resume.checkpoint.parsing.pickle_subset import shorten
from hyper_resume.checkpoint.parsing.strict_json import MAX_TEXT
from hyper_resume.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointUnreadableError,
    StateNotPlainError,
    describe,
)

FORMAT_VERSION = 1
DIRECTORY_NAME = "extra_state"
PAYLOAD_KEY = "extra_state"
# A step that no checkpoint can hold. It is the default of the step to read; if it is still there afterwards, none was read.
_UNRESTORED_STEP = -1
UNCOVERED = "uncovered"
"""Paths of what moved on this rank and was not saved: a remark on the state, and no part of it."""
MESH = "mesh"
"""The mesh of the run (``Mesh.to_plain``): the same for all ranks, so this library's storage keeps it once, in the manifest."""
RUN = "run"
"""What the run on this rank is made of, as plain values; it is compared at a restore, and no part of the state."""
SHARDED = "sharded"
"""Path of each sharded tensor of the stateful objects, where there are any -> [shape, offsets, sizes] of the saved part.

Version 0.2.0 has a list of the paths."""
RESHARDED = "resharded"
"""In a training state that was read: [objects of which the rest differs between the ranks that saved, paths of the tensors of
which this rank's part was put together]."""
# The keys that identify the rank and the save of a training state, and remarks; they belong to no bucket.
IDENTITY_KEYS = frozenset({"format_version", "rank", "world_size", "save_id", UNCOVERED, MESH, RUN, SHARDED, RESHARDED})
PROGRESS = "progress"
_PROGRESS_KEYS = frozenset({"global_step", "epoch", "epoch_ended"})

# The types of the parts that are read without a check of their bucket.
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "rng_state": dict,
    "stateful": (dict, type(None)),
    "lr_scheduler": (list, tuple, type(None)),
    "epoch": int,
    "epoch_ended": bool,
    UNCOVERED: (list, tuple, type(None)),
    SHARDED: (dict, list, tuple, type(None)),
    MESH: (dict, type(None)),
}
_MAX_STEP = 1 << 62

_FILE = re.compile(r"extra_state_rank_([0-9]+)\.pt")
_EMBEDDED = re.compile(r"extra_state\.rank_([0-9]+)\.(.+)")
# torch.load(weights_only=True) reads whole numbers of up to 255 bytes, sign included.
_MAX_FILE_BYTES = 4 << 30
_INT_BITS = 255 * 8 - 1
# A reader takes 100, those that a save puts around a value included.
_MAX_NESTING = 90
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, torch.dtype, torch.Size, torch.device)


@dataclass(frozen=True, kw_only=True)
class ExtraStateLayout:
    """In which layout a step directory keeps its training state, and of which ranks."""

    kind: Literal["per_rank", "embedded"]
    ranks: tuple[int, ...]


def file_name(rank: int) -> str:
    """Return the path of one rank's file below the step directory."""
    return f"{DIRECTORY_NAME}/extra_state_rank_{rank}.pt"


def file_path(step_directory: Path, rank: int) -> Path:
    """Return the path of one rank's file."""
    return step_directory / file_name(rank)


def embedded_key(rank: int) -> str:
    """Return the payload key of one rank's training state."""
    return f"rank_{rank}"


def to_plain_state(value: Any, where: str = "", depth: int = 0) -> Any:
    """Return ``value`` as ``torch.load(weights_only=True)`` will read it back; containers are copied, tensors are not.

    An object that could be written but not be read back is refused here, at the save. This includes sharded tensors in a
    training state, because their mesh can't be stored. A tensor of a training state that repeats its elements (``expand``) is
    copied, because a load refuses a tensor that is larger than its bytes. NumPy float64, integer and boolean scalars become
    Python numbers with the same value (a schedule that calls ``np.cos`` leaves them in learning rates).

    Raises:
        StateNotPlainError: names the path inside the state and the type that was found.
    """
    if depth > _MAX_NESTING:
        raise StateNotPlainError(
            describe(
                "the state is nested too deep to be saved",
                where=f"{where[:80]}...",
                expected=f"at most {_MAX_NESTING} containers in one another, and none in itself",
                found="more",
                do="return a flatter state_dict() from that object",
            )
        )
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)(
            {
                # A short cut for text keys and tensors, which are nearly all of them.
                key if type(key) is str else to_plain_state(key, f"{_below(where, key)} (as a key)", depth + 1): item
                if type(item) is torch.Tensor and _is_plain_leaf(item) and not where.startswith(PAYLOAD_KEY)
                else to_plain_state(item, _below(where, key), depth + 1)
                for key, item in value.items()
            }
        )
    if type(value) in (list, tuple, set):
        return type(value)(to_plain_state(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value))
    if isinstance(value, (np.float64, np.integer, np.bool_)):
        return value.item()
    if not _is_plain_leaf(value) or (isinstance(value, DTensor) and where.startswith(f"{PAYLOAD_KEY}.")):
        raise StateNotPlainError(
            describe(
                "the state holds an object that can't be saved",
                where=where,
                expected="tensors, numbers of up to 255 bytes, text, None, and dicts, lists, tuples, sets of them",
                found=_kind_of(value),
                do="return plain values from that object's state_dict() (numpy arrays: torch.from_numpy)",
            )
        )
    if where.startswith(PAYLOAD_KEY) and isinstance(value, torch.Tensor) and _repeats_elements(value):
        return value.detach().clone(memory_format=torch.contiguous_format)
    return value


def _repeats_elements(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()


def _below(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def _is_plain_leaf(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and not (value.is_meta or value.is_quantized or value.is_nested)
    if type(value) is int:
        return value.bit_length() <= _INT_BITS
    # torch pickles empty bytes as a call of `bytes`, which weights_only refuses.
    return value != b"" if type(value) is bytes else type(value) in _PLAIN or isinstance(value, torch.Size)


def _kind_of(value: Any) -> str:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        kinds = [kind for kind in ("meta", "quantized", "nested", "sparse") if getattr(value, f"is_{kind}")]
        return f"{name} ({', '.join(kinds)})" if kinds else name
    return "empty bytes" if type(value) is bytes else name


def encode(extra_state: Mapping[str, Any]) -> bytes:
    """Serialise one rank's training state. Equal states give equal bytes."""
    buffer = io.BytesIO()
    torch.save(dict(extra_state), buffer)
    return buffer.getvalue()


def write_file(step_directory: Path, rank: int, content: bytes) -> FileEntry:
    """Write and sync one rank's file, creating the directory if it is missing. Returns the file's manifest entry."""
    path = file_path(step_directory, rank)
    with contextlib.suppress(FileExistsError):
        operations.current().make_directory(path.parent)
    operations.write_file(path, content)
    return FileEntry(size_bytes=len(content), digest=digest.bytes_digest_text([content]), rank=rank)


def bucket_of(key: str) -> str:
    """Return the bucket of a key of the training state; all counters belong to the bucket ``progress``."""
    return PROGRESS if key in _PROGRESS_KEYS else key


def take_mesh(training_state: dict[str, Any] | None) -> Mesh | None:
    """Remove the mesh of the run from one rank's training state, and return it; None without one."""
    return mesh_from_plain((training_state or {}).pop(MESH, None))


def saved_digests(manifest: Manifest | None, training_state: Mapping[str, Any]) -> dict[str, str]:
    """Return bucket -> digest at the save, for the buckets of a training state that was read, whichever rank's it is."""
    if manifest is None or not training_state:
        return {}
    saved = manifest.buckets.get(str(training_state["rank"]), {})
    # What was put together from the parts of several ranks has been compared with each one's digest.
    others = {"stateful"} if RESHARDED in training_state else set()
    return {
        bucket: saved[bucket] for bucket in map(bucket_of, training_state) if bucket in saved and bucket not in others
    }


def bucket_digests(training_state: Mapping[str, Any]) -> dict[str, str]:
    """Return bucket -> digest of one rank's training state."""
    buckets: dict[str, Any] = {}
    for key, value in training_state.items():
        if bucket_of(key) == PROGRESS:
            buckets.setdefault(PROGRESS, {})[key] = value
        elif key not in IDENTITY_KEYS:
            buckets[key] = value
    return {bucket: digest.state_digest_text(value) for bucket, value in buckets.items()}


def read_file(step_directory: Path, rank: int, manifest: Manifest | None = None) -> dict[str, Any]:
    """Read one rank's file. With a manifest, the bytes that are decoded are those that have the digest in it.

    Raises:
        CheckpointNotFoundError: it is missing.
        CheckpointMismatchError: it can't be decoded, has a newer format, or was written by another rank, or it was changed.
        CheckpointUnreadableError: it can't be read now.
    """
    path = file_path(step_directory, rank)
    try:
        content = reading.again(lambda: operations.read_bytes(path, _MAX_FILE_BYTES), path)
    except CheckpointUnreadableError:
        raise
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            describe(
                f"the extra_state file of rank {rank} is missing",
                where=str(path),
                expected="one file per rank, written with the checkpoint",
                found="no such file",
                do="restore the file, or set checkpoint.restore_train_state=false to load weights only",
            )
        ) from None
    except OSError as error:
        raise CheckpointMismatchError(
            describe(
                "an extra_state file can't be read",
                where=str(path),
                found=f"{type(error).__name__}: {error}",
                do="restore the file from a copy, or resume from another checkpoint",
            )
        ) from error
    entry = None if manifest is None else manifest.files.get(file_name(rank))
    if entry is not None and (found := digest.content_digest_text(content, like=entry.digest)) != entry.digest:
        raise CheckpointMismatchError(
            describe(
                "an extra_state file is not as it was written",
                where=str(path),
                expected=f"digest {entry.digest}",
                found=found,
                do="find out who else writes there; restore the file from a copy, or resume from another checkpoint",
            )
        )
    return check_format(safe_load.load_plain(content, str(path)), str(path), rank)


def embed(extra_state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the part of the payload for one rank. Each bucket is wrapped in a 1-tuple, which DCP keeps as one entry."""
    return {embedded_key(rank): {bucket: (value,) for bucket, value in extra_state.items()}}


def embedded_names(metadata: Metadata, rank: int) -> dict[str, str]:
    """Return key of the training state -> name of the entry that holds it, for one rank."""
    matches = map(_EMBEDDED.fullmatch, metadata.state_dict_metadata)
    return {match.group(2): match.group(0) for match in matches if match and int(match.group(1)) == rank}


def unwrap_embedded(values: Mapping[str, Any], rank: int, where: str) -> dict[str, Any]:
    """Turn the values of one rank's entries into its training state.

    Raises:
        CheckpointNotFoundError: there is no step among them.
        CheckpointMismatchError: a value is not a 1-tuple, or the training state is not this rank's.
    """
    values = {"global_step": (_UNRESTORED_STEP,), **values}
    if values["global_step"] == (_UNRESTORED_STEP,):
        raise no_training_state_error(where, f"no embedded extra_state of rank {rank}")
    wrong = sorted(key for key, value in values.items() if not (isinstance(value, tuple) and len(value) == 1))
    if wrong:
        raise CheckpointMismatchError(
            describe(
                f"embedded extra_state of rank {rank} does not have the form that a save writes",
                where=where,
                expected="each part in a tuple of one item",
                found=f"{wrong[0]}: {type(values[wrong[0]]).__name__}",
                do="resume from another checkpoint",
            )
        )
    return check_format({key: value[0] for key, value in values.items()}, where, rank)


def check_format(state: Any, where: str, rank: int) -> dict[str, Any]:
    """Return ``state`` if it is the training state of ``rank`` in a format that this version reads.

    Raises:
        CheckpointMismatchError: another format, a missing key, or the training state of another rank.
    """
    version = state.get("format_version") if isinstance(state, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointMismatchError(
            describe(
                "the extra_state has a format that this version does not read",
                where=where,
                expected=f"a dict with format_version {FORMAT_VERSION}",
                found=f"{type(state).__name__} with format_version {version!r}",
                do="resume with the version of hyper_resume that wrote it",
            )
        )
    complaint = form_complaint(state)
    if complaint:
        raise CheckpointMismatchError(
            describe(
                "the extra_state does not have the form that a save writes",
                where=where,
                expected="a dict of named parts, for a rank of a run",
                found=complaint,
                do="resume from another checkpoint, and find out who wrote this one",
            )
        )
    lacking = [name for name in ("rank", "world_size", "global_step") if type(state.get(name)) is not int]
    if lacking or state["rank"] != rank:
        raise CheckpointMismatchError(
            describe(
                "the extra_state is not this rank's" if not lacking else f"the extra_state has no {', '.join(lacking)}",
                where=where,
                expected=f"the training state that rank {rank} saved",
                found=f"rank {state.get('rank')!r} of {state.get('world_size')!r}, step {state.get('global_step')!r}",
                do="restore the file that this rank wrote, or resume from another checkpoint",
            )
        )
    result: dict[str, Any] = state
    return result


def form_complaint(state: Mapping[Any, Any]) -> str:
    """Return what a load would refuse; "" if there is nothing. What is in the parts is for their buckets to check."""
    odd = [key for key in state if type(key) is not str]
    if odd:
        return f"a part whose name is not text: {shorten(odd[0])}"
    longest = max(state, key=len, default="")
    if len(longest) > MAX_TEXT:
        return f"a part whose name has {len(longest)} characters"
    world_size, rank, step = (state.get(name) for name in ("world_size", "rank", "global_step"))
    if type(world_size) is int and not 1 <= world_size <= MAX_RANKS:
        return f"world_size {shorten(world_size)}; 1 to {MAX_RANKS:,} are read"
    if type(rank) is int and not 0 <= rank < MAX_RANKS:
        return f"rank {shorten(rank)}"
    if type(step) is int and not 0 <= step <= _MAX_STEP:
        return f"global_step {shorten(step)}"
    for name, kinds in _KINDS.items():
        if name in state and not isinstance(state[name], kinds):
            return f"{name} that is {shorten(state[name])}"
    return ""


def no_training_state_error(where: str, found: str) -> CheckpointNotFoundError:
    """Return the error for a checkpoint without the training state that a load requested (specification 9.3)."""
    return CheckpointNotFoundError(
        describe(
            "the checkpoint holds no training state",
            where=where,
            expected="extra_state (progress, lr scheduler, data position, random streams) of every rank",
            found=found,
            do="set checkpoint.restore_train_state=false to start from its weights only",
        )
    )


def refuse_missing_parts(where: str, lacking: list[str]) -> None:
    """Refuse a training state in which requested parts are missing.

    Raises:
        CheckpointNotFoundError: ``lacking`` is not empty.
    """
    if lacking:
        raise CheckpointNotFoundError(
            describe(
                f"the checkpoint's extra_state lacks {', '.join(lacking)}",
                where=where,
                expected="all parts of the training state that this run restores",
                found="some of them",
                do="set checkpoint.restore_train_state=false to start from its weights only",
            )
        )


def detect_layout(step_directory: Path, metadata: Metadata, manifest: Manifest | None = None) -> ExtraStateLayout:
    """Detect the layout of the training state in a step directory, whatever the current configuration says.

    With a manifest, only the files that it lists count; other files in the folder are ignored.

    Raises:
        CheckpointNotFoundError: the directory has no training state.
    """
    folder = step_directory / DIRECTORY_NAME
    if manifest is not None:
        names = [name.removeprefix(f"{DIRECTORY_NAME}/") for name in manifest.files]
    else:
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    file_ranks = sorted(int(match.group(1)) for match in map(_FILE.fullmatch, names) if match)
    if file_ranks:
        return ExtraStateLayout(kind="per_rank", ranks=tuple(file_ranks))
    matches = map(_EMBEDDED.fullmatch, metadata.state_dict_metadata)
    ranks = sorted({int(match.group(1)) for match in matches if match})
    if ranks:
        return ExtraStateLayout(kind="embedded", ranks=tuple(ranks))
    raise no_training_state_error(str(step_directory), "neither extra_state files nor embedded extra_state entries")

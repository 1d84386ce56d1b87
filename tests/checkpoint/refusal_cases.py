"""What can be wrong with a step directory, and what is said of it where no manifest tells first."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError

STEP = 3

Change = Callable[[Path], object]


def edit_metadata(directory: Path, keep: Callable[[str], bool]) -> None:
    """Take entries out of DCP's own description."""
    file = directory / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata = {k: v for k, v in metadata.state_dict_metadata.items() if keep(k)}
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if keep(k.fqn)}
    file.write_bytes(pickle.dumps(metadata))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def rank_file(directory: Path, rank: int) -> Path:
    return directory / "extra_state" / f"extra_state_rank_{rank}.pt"


def make_directory_of(file: Path) -> None:
    file.unlink()
    file.mkdir()


def make_file_of(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("file")


def another_attempt(directory: Path) -> Path:
    """The same state saved once more: names and sizes of all files are equal."""
    return directory.parents[1] / "again" / directory.name


def rewrite(file: Path, **changes: Any) -> None:
    torch.save({**torch.load(file, weights_only=True), **changes}, file)


def nothing(directory: Path) -> None:
    """The directory stays as it was saved; the running model differs."""


MISMATCH, NOT_FOUND = CheckpointMismatchError, CheckpointNotFoundError
# case: (checkpoint, what is done to it, how the model differs, error, part of the message) once no manifest is there
CASES: dict[str, tuple[str, Change, str, type[Exception], str]] = {
    "model key missing": ("files", nothing, "key", MISMATCH, "missing model key: model.head.weight"),
    "model key removed from the checkpoint": (
        "files",
        lambda d: edit_metadata(d, lambda name: name != "model.up.weight"),
        "",
        MISMATCH,
        "missing model key: model.up.weight",
    ),
    "another shape": ("files", nothing, "shape", MISMATCH, "model entry model.scale does not fit"),
    "another type": ("files", nothing, "type", MISMATCH, "model entry model.scale does not fit"),
    "weights only": ("weights", nothing, "", NOT_FOUND, "no training state"),
    "files removed": ("files", lambda d: shutil.rmtree(d / "extra_state"), "", NOT_FOUND, "no training state"),
    "entries removed": (
        "embedded",
        lambda d: edit_metadata(d, lambda name: not name.startswith("extra_state")),
        "",
        NOT_FOUND,
        "extra_state",
    ),
    "step of rank 2 removed": (
        "embedded",
        lambda d: edit_metadata(d, lambda name: name != "extra_state.rank_2.global_step"),
        "",
        NOT_FOUND,
        "no embedded extra_state of rank 2",
    ),
    "streams of rank 2 removed": (
        "embedded",
        lambda d: edit_metadata(d, lambda name: name != "extra_state.rank_2.rng_state"),
        "",
        NOT_FOUND,
        "extra_state lacks rng_state",
    ),
    "file of rank 2 missing": (
        "files",
        lambda d: rank_file(d, 2).unlink(),
        "",
        NOT_FOUND,
        "extra_state file of rank 2 is missing",
    ),
    "file of rank 0 missing": (
        "files",
        lambda d: rank_file(d, 0).unlink(),
        "",
        NOT_FOUND,
        "extra_state file of rank 0 is missing",
    ),
    "file of rank 2 truncated": (
        "files",
        lambda d: truncate(rank_file(d, 2)),
        "",
        MISMATCH,
        "extra_state/extra_state_rank_2.pt; expected: an archive of tensors and plain values",
    ),
    "file of rank 2 empty": (
        "files",
        lambda d: rank_file(d, 2).write_bytes(b""),
        "",
        MISMATCH,
        "extra_state/extra_state_rank_2.pt; expected: an archive of tensors and plain values",
    ),
    "file of rank 2 a directory": (
        "files",
        lambda d: make_directory_of(rank_file(d, 2)),
        "",
        MISMATCH,
        "extra_state file can't be read",
    ),
    "file of rank 2 of another step": (
        "files",
        lambda d: shutil.copy(rank_file(d.parents[1] / "later" / "global_step_9", 2), rank_file(d, 2)),
        "",
        MISMATCH,
        "rank 2: step 9",
    ),
    "file of rank 2 of another world": (
        "files",
        lambda d: rewrite(rank_file(d, 2), world_size=8),
        "",
        MISMATCH,
        "rank 2: step 3 of 8 ranks",
    ),
    "file of rank 2 is rank 1's": (
        "files",
        lambda d: shutil.copy(rank_file(d, 1), rank_file(d, 2)),
        "",
        MISMATCH,
        "not this rank's",
    ),
    "shard of another attempt": (
        "files",
        lambda d: shutil.copy(another_attempt(d) / "__2_0.distcp", d),
        "",
        MISMATCH,
        "parts of different saves",
    ),
    "file of rank 2 of another attempt": (
        "files",
        lambda d: shutil.copy(rank_file(another_attempt(d), 2), rank_file(d, 2)),
        "",
        MISMATCH,
        "parts of different saves",
    ),
    "metadata of another attempt": (
        "files",
        lambda d: shutil.copy(another_attempt(d) / ".metadata", d),
        "",
        MISMATCH,
        "parts of different saves",
    ),
    "metadata garbled": (
        "files",
        lambda d: (d / ".metadata").write_bytes(b"\x80garbage"),
        "",
        MISMATCH,
        "metadata can't be read",
    ),
    "metadata truncated": ("files", lambda d: truncate(d / ".metadata"), "", MISMATCH, "metadata can't be read"),
    "metadata of another kind": (
        "files",
        lambda d: (d / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        "",
        MISMATCH,
        "metadata can't be read",
    ),
    "metadata empty": (
        "files",
        lambda d: (d / ".metadata").write_bytes(b""),
        "",
        NOT_FOUND,
        "not a complete checkpoint",
    ),
    "path missing": ("files", shutil.rmtree, "", NOT_FOUND, "no such directory"),
    "path a file": (
        "files",
        make_file_of,
        "",
        NOT_FOUND,
        "not a complete checkpoint",
    ),
    "shard missing": (
        "files",
        lambda d: (d / "__2_0.distcp").unlink(),
        "",
        MISMATCH,
        "shard file of the checkpoint is incomplete",
    ),
    "shard truncated": (
        "files",
        lambda d: truncate(d / "__2_0.distcp"),
        "",
        MISMATCH,
        "shard file of the checkpoint is incomplete",
    ),
    "shard overwritten": (
        "files",
        lambda d: (d / "__2_0.distcp").write_bytes(b"x" * (d / "__2_0.distcp").stat().st_size),
        "",
        MISMATCH,
        "the checkpoint can't be read",
    ),
    "shard empty": (
        "files",
        lambda d: (d / "__2_0.distcp").write_bytes(b""),
        "",
        MISMATCH,
        "shard file of the checkpoint is incomplete",
    ),
}

"""What can't be restored fails on all ranks alike, within seconds, and changes nothing on disk."""

from __future__ import annotations

import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError
from hyper_resume.state.model import collect_model
from tests.checkpoint.directories import listing
from tests.checkpoint.payloads import SKELETON, full_state, payload, same, sharded_tiny
from tests.ranks import run_ranks

STEP = 3
RANKS = 4
SECONDS = 5.0

Change = Callable[[Path], object]


def _save_all(folder: str) -> None:
    """The checkpoints that the cases start from."""
    model = sharded_tiny(1)
    optimizer = torch.optim.AdamW(model.parameters())
    for name, per_rank in (("files", True), ("embedded", False)):
        checkpointer = DistributedCheckpointer(extra_state_per_rank=per_rank)
        checkpointer.save(f"{folder}/{name}/global_step_{STEP}", payload(model, optimizer, STEP), global_step=STEP)
    files = DistributedCheckpointer()
    files.save(f"{folder}/again/global_step_{STEP}", payload(model, optimizer, STEP), global_step=STEP)
    files.save(f"{folder}/weights/global_step_{STEP}", payload(model), global_step=STEP)
    files.save(f"{folder}/later/global_step_9", payload(model, step=9), global_step=9)


def _try_to_load(paths: dict[str, tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Attempt every case on every rank, one after the other in the same process group.

    The second of each pair says how the running model differs from the one that was saved.
    """
    checkpointer = DistributedCheckpointer()
    reports = {}
    for case, (path, difference) in paths.items():
        model = sharded_tiny(7)
        parts: dict[str, Any] = {"model": collect_model(model)}
        if difference == "key":
            parts["model"]["head.weight"] = torch.zeros(2)
        elif difference == "shape":
            parts["model"]["scale"] = torch.zeros(4)
        elif difference == "type":
            parts["model"]["scale"] = torch.zeros(3, dtype=torch.float64)
        before = full_state(model)
        started = time.monotonic()
        error: Exception | None = None
        try:
            checkpointer.load(path, parts, extra_state_skeleton=dict(SKELETON))
        except Exception as caught:  # noqa: BLE001  the error is what is looked at
            error = caught
        reports[case] = {
            "error": error,
            "seconds": time.monotonic() - started,
            "untouched": same(full_state(model), before),
        }
    # The group must still work after all of these.
    dist.barrier()
    return reports


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
# case: (checkpoint, what is done to it, how the model differs, error, part of the message, found before reading tensors)
CASES: dict[str, tuple[str, Change, str, type[Exception], str, bool]] = {
    "model key missing": ("files", nothing, "key", MISMATCH, "missing model key: model.head.weight", True),
    "model key removed from the checkpoint": (
        "files",
        lambda d: edit_metadata(d, lambda name: name != "model.up.weight"),
        "",
        MISMATCH,
        "missing model key: model.up.weight",
        True,
    ),
    "another shape": ("files", nothing, "shape", MISMATCH, "model entry model.scale does not fit", True),
    "another type": ("files", nothing, "type", MISMATCH, "model entry model.scale does not fit", True),
    "weights only": ("weights", nothing, "", NOT_FOUND, "no training state", True),
    "files removed": ("files", lambda d: shutil.rmtree(d / "extra_state"), "", NOT_FOUND, "no training state", True),
    "entries removed": (
        "embedded",
        lambda d: edit_metadata(d, lambda name: not name.startswith("extra_state")),
        "",
        NOT_FOUND,
        "extra_state",
        True,
    ),
    "step of rank 2 removed": (
        "embedded",
        lambda d: edit_metadata(d, lambda name: name != "extra_state.rank_2.global_step"),
        "",
        NOT_FOUND,
        "no embedded extra_state of rank 2",
        True,
    ),
    "streams of rank 2 removed": (
        "embedded",
        lambda d: edit_metadata(d, lambda name: name != "extra_state.rank_2.rng_state"),
        "",
        NOT_FOUND,
        "extra_state lacks rng_state",
        True,
    ),
    "file of rank 2 missing": (
        "files",
        lambda d: rank_file(d, 2).unlink(),
        "",
        NOT_FOUND,
        "extra_state file of rank 2 is missing",
        True,
    ),
    "file of rank 0 missing": (
        "files",
        lambda d: rank_file(d, 0).unlink(),
        "",
        NOT_FOUND,
        "extra_state file of rank 0 is missing",
        True,
    ),
    "file of rank 2 truncated": (
        "files",
        lambda d: truncate(rank_file(d, 2)),
        "",
        MISMATCH,
        "extra_state file can't be read",
        True,
    ),
    "file of rank 2 empty": (
        "files",
        lambda d: rank_file(d, 2).write_bytes(b""),
        "",
        MISMATCH,
        "extra_state file can't be read",
        True,
    ),
    "file of rank 2 a directory": (
        "files",
        lambda d: make_directory_of(rank_file(d, 2)),
        "",
        MISMATCH,
        "extra_state file can't be read",
        True,
    ),
    "file of rank 2 of another step": (
        "files",
        lambda d: shutil.copy(rank_file(d.parents[1] / "later" / "global_step_9", 2), rank_file(d, 2)),
        "",
        MISMATCH,
        "rank 2: step 9",
        True,
    ),
    "file of rank 2 of another world": (
        "files",
        lambda d: rewrite(rank_file(d, 2), world_size=8),
        "",
        MISMATCH,
        "rank 2: step 3 of 8 ranks",
        True,
    ),
    "file of rank 2 is rank 1's": (
        "files",
        lambda d: shutil.copy(rank_file(d, 1), rank_file(d, 2)),
        "",
        MISMATCH,
        "not this rank's",
        True,
    ),
    "shard of another attempt": (
        "files",
        lambda d: shutil.copy(another_attempt(d) / "__2_0.distcp", d),
        "",
        MISMATCH,
        "parts of different saves",
        True,
    ),
    "file of rank 2 of another attempt": (
        "files",
        lambda d: shutil.copy(rank_file(another_attempt(d), 2), rank_file(d, 2)),
        "",
        MISMATCH,
        "parts of different saves",
        True,
    ),
    "metadata of another attempt": (
        "files",
        lambda d: shutil.copy(another_attempt(d) / ".metadata", d),
        "",
        MISMATCH,
        "parts of different saves",
        True,
    ),
    "metadata garbled": (
        "files",
        lambda d: (d / ".metadata").write_bytes(b"\x80garbage"),
        "",
        MISMATCH,
        "metadata can't be read",
        True,
    ),
    "metadata truncated": ("files", lambda d: truncate(d / ".metadata"), "", MISMATCH, "metadata can't be read", True),
    "metadata of another kind": (
        "files",
        lambda d: (d / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        "",
        MISMATCH,
        "metadata can't be read",
        True,
    ),
    "metadata empty": (
        "files",
        lambda d: (d / ".metadata").write_bytes(b""),
        "",
        NOT_FOUND,
        "not a complete checkpoint",
        True,
    ),
    "path missing": ("files", shutil.rmtree, "", NOT_FOUND, "no such directory", True),
    "path a file": (
        "files",
        make_file_of,
        "",
        NOT_FOUND,
        "not a complete checkpoint",
        True,
    ),
    "shard missing": (
        "files",
        lambda d: (d / "__2_0.distcp").unlink(),
        "",
        MISMATCH,
        "shard file of the checkpoint is not whole",
        True,
    ),
    "shard truncated": (
        "files",
        lambda d: truncate(d / "__2_0.distcp"),
        "",
        MISMATCH,
        "shard file of the checkpoint is not whole",
        True,
    ),
    "shard overwritten": (
        "files",
        lambda d: (d / "__2_0.distcp").write_bytes(b"x" * (d / "__2_0.distcp").stat().st_size),
        "",
        MISMATCH,
        "the checkpoint can't be read",
        False,
    ),
    "shard empty": (
        "files",
        lambda d: (d / "__2_0.distcp").write_bytes(b""),
        "",
        MISMATCH,
        "shard file of the checkpoint is not whole",
        True,
    ),
}


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every case in one world of four ranks: case -> reports of all ranks, and whether the disk changed."""
    root = tmp_path_factory.mktemp("refusals")
    run_ranks(_save_all, RANKS, str(root / "saved"))
    paths = {}
    for number, (case, (source, change, difference, *_)) in enumerate(CASES.items()):
        shutil.copytree(root / "saved", root / str(number))
        directory = root / str(number) / source / f"global_step_{STEP}"
        change(directory)
        paths[case] = (str(directory), difference)
    paths["root instead of a step"] = (str(root / "saved" / "files"), "")
    before = listing(root)
    results = run_ranks(_try_to_load, RANKS, paths)
    assert listing(root) == before
    return {case: {"ranks": [result[case] for result in results]} for case in paths}


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_is_the_same_on_all_ranks(case: str, attempts: dict[str, dict[str, Any]]) -> None:
    _, _, _, error_class, message, before_reading = CASES[case]
    reports = attempts[case]["ranks"]
    for rank, report in enumerate(reports):
        assert type(report["error"]) is error_class, (rank, report["error"])
        assert message in str(report["error"]), rank
        assert report["seconds"] < SECONDS, rank
        if before_reading:
            assert report["untouched"], rank
    assert len({str(report["error"]) for report in reports}) == 1


def test_a_root_that_is_named_instead_of_a_step_says_what_to_name(attempts: dict[str, dict[str, Any]]) -> None:
    for report in attempts["root instead of a step"]["ranks"]:
        assert isinstance(report["error"], CheckpointNotFoundError)
        assert "name one global_step_N of this directory" in str(report["error"])


def test_a_refusal_is_the_builtin_that_the_specification_names() -> None:
    assert issubclass(CheckpointNotFoundError, FileNotFoundError)
    assert issubclass(CheckpointMismatchError, RuntimeError)

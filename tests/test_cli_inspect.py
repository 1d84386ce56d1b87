"""``hyper-resume inspect``: what it shows of a checkpoint, and how it exits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_resume import cli
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer
from tests.trainer.tiny_training import disk_listing

pytestmark = pytest.mark.xdist_group("cli")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 7 in both layouts, and without training state and optimizer."""
    folder = tmp_path_factory.mktemp("inspect")
    layouts: dict[str, dict[str, Any]] = {
        "per_rank": {},
        "embedded": {"save_extra_state_per_rank": False},
        "weights": {"save_optimizer": False, "save_train_state": False},
        "two": {"optimizers": 2},
    }
    for name, options in layouts.items():
        train_custom_trainer(make_custom_trainer(folder / name, save_epochs=0, **options), until_step=7)
    return folder


def _inspect(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["inspect", str(path), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("layout", ["per_rank", "embedded"])
def test_inspect_shows_counters_buckets_and_streams_in_either_layout(
    checkpoints: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _inspect(checkpoints / layout / "global_step_7", capsys)
    assert (found["step"], found["layout"]) == (7, layout)
    (rank,) = found["ranks"]
    assert (rank["rank"], rank["world_size"], rank["global_step"], rank["epoch"]) == (0, 1, 7, 1)
    assert {"lr_scheduler", "train_dataloader", "rng_state", "stateful"} <= set(rank["buckets"])
    assert rank["rng_streams"] == ["torch_cpu", "python", "numpy"]
    assert found["run"]["versions"]["torch"] == torch.__version__
    assert found["run"]["optimizer"]["0"]["class"] == "torch.optim.adamw.AdamW"
    # The net: embedding 64 x 8, linear 8 x 8 + 8, norm 8 + 8, head 8 + 1, all float32.
    numbers = 64 * 8 + 8 * 8 + 8 + 8 + 8 + 8 + 1
    assert found["buckets"] == [
        {"name": "model", "tensors": 7, "others": 0, "size_bytes": 4 * numbers, "dtypes": ["float32"]},
        {
            "name": "optimizer.0",
            "tensors": 21,
            "others": 1,  # the groups' options
            "size_bytes": 4 * (2 * numbers + 7),
            "dtypes": ["float32"],
        },
    ]


def test_inspect_tells_two_optimizers_apart(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _inspect(checkpoints / "two" / "global_step_7", capsys)
    assert [(bucket["name"], bucket["tensors"]) for bucket in found["buckets"]] == [
        ("model", 7),
        ("optimizer.0", 6),
        ("optimizer.1", 15),
    ]


def test_inspect_of_weights_only_says_that_there_is_no_training_state(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _inspect(checkpoints / "weights" / "global_step_7", capsys)
    assert ([bucket["name"] for bucket in found["buckets"]], found["layout"], found["ranks"]) == (["model"], "none", [])
    assert cli.main(["inspect", str(checkpoints / "weights" / "global_step_7")]) == 0
    assert "training state: none" in capsys.readouterr().out


def test_inspect_prints_a_table_that_names_every_bucket_and_rank(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(checkpoints / "per_rank" / "global_step_7")]) == 0
    lines = capsys.readouterr().out.splitlines()
    directory = checkpoints / "per_rank" / "global_step_7"
    files = [path for path in directory.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    assert lines[0] == f"{directory}: step 7, {len(files)} files, {size:,} bytes on disk"
    assert [line.split()[:2] for line in lines if line.startswith(("model", "optimizer"))] == [
        ["model", "7"],
        ["optimizer.0", "21"],
    ]
    (rank,) = [line for line in lines if "rank 0 of 1" in line]
    assert "global_step=7, epoch=1" in rank
    assert rank.endswith("random streams: torch_cpu, python, numpy")


def test_inspect_changes_nothing_on_disk(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listing = disk_listing(checkpoints)
    for name in ("per_rank", "embedded", "weights"):
        _inspect(checkpoints / name / "global_step_7", capsys)
    assert disk_listing(checkpoints) == listing


def test_inspect_of_a_root_lists_its_step_directories_and_latest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "checkpoints"
    train_custom_trainer(make_custom_trainer(root, save_steps=2, save_epochs=0), until_step=6)
    (root / "global_step_6" / ".metadata").unlink()
    assert cli.main(["inspect", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{root}: a root (checkpoint_dir), with one step directory, global_step_N, per saved step"
    sizes = {
        step: [path.stat().st_size for path in (root / f"global_step_{step}").rglob("*") if path.is_file()]
        for step in (2, 4, 6)
    }
    rows = [line.split(maxsplit=3) for line in lines if line.strip()[:1].isdigit()]
    assert [row[:3] for row in rows] == [[str(n), str(len(found)), f"{sum(found):,}"] for n, found in sizes.items()]
    assert [row[3] for row in rows] == ["complete", "complete", "is incomplete: .metadata: it is missing"]
    assert f"LATEST: {root / 'global_step_4'}" in lines
    assert cli.main(["inspect", "--json", str(root)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["latest"], [one["step"] for one in found["steps"]]) == (str(root / "global_step_4"), [2, 4, 6])


def _without_metadata(folder: Path) -> Path:
    train_custom_trainer(make_custom_trainer(folder), until_step=1)
    (folder / "global_step_1" / ".metadata").unlink()
    return folder / "global_step_1"


def _with_garbage_metadata(folder: Path) -> Path:
    train_custom_trainer(make_custom_trainer(folder), until_step=1)
    (folder / "global_step_1" / ".metadata").write_bytes(b"no pickle")
    # With it the wrong size would be reported first.
    (folder / "global_step_1" / "manifest.json").unlink()
    return folder / "global_step_1"


def _with_garbage_extra_state(folder: Path) -> Path:
    train_custom_trainer(make_custom_trainer(folder), until_step=1)
    (folder / "global_step_1" / "extra_state" / "extra_state_rank_0.pt").write_bytes(b"no archive")
    (folder / "global_step_1" / "manifest.json").unlink()
    return folder / "global_step_1"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: folder / "absent", "no such directory"),
        (_without_metadata, "not a complete checkpoint"),
        (_with_garbage_metadata, "metadata can't be read"),
        (_with_garbage_extra_state, "a part of the checkpoint can't be read"),
    ],
    ids=["absent", "incomplete", "garbage-metadata", "garbage-extra-state"],
)
def test_inspect_of_something_that_is_no_checkpoint_exits_with_1_and_one_line(
    tmp_path: Path, make: Any, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(tmp_path / "checkpoints")
    capsys.readouterr()
    assert cli.main(["inspect", str(path)]) == cli.EXIT_ERROR
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("hyper-resume: error: ")
    assert expected in output.err
    assert str(path) in output.err

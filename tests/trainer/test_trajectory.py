"""The records that two runs are compared by."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_resume.config import RunConfig, TrajectoryConfig
from tests.trainer.tiny_training import Record, StoppedOnPurpose, run_config, stop_after, train

KEYS = {"global_step", "epoch", "batch_index", "loss", "lr", "group_lrs", "grad_norm", "sample_ids", "seconds"}


def _recording(config: RunConfig, folder: Path, *, digests: bool = False) -> RunConfig:
    return dataclasses.replace(config, trajectory=TrajectoryConfig(dir=str(folder), digests=digests))


def _read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trajectory_rank_0.jsonl").read_text().splitlines()]


def test_a_record_holds_what_the_step_was_to_the_last_bit(tmp_path: Path) -> None:
    config = run_config(tmp_path, training={"num_train_epochs": 2, "gradient_accumulation_steps": 2}, save_ckpt=False)
    records = train(_recording(config, tmp_path / "deep" / "folder"))
    found = _read(tmp_path / "deep" / "folder")
    assert all(set(line) == KEYS for line in found)
    assert all(line["seconds"] > 0 for line in found)
    assert [
        (line["global_step"], line["epoch"], line["batch_index"], line["loss"], line["group_lrs"], line["grad_norm"])
        for line in found
    ] == [(r.global_step, r.epoch, r.batch_index, r.loss, list(r.lrs), r.grad_norm) for r in records]
    assert [line["lr"] for line in found] == [record.lrs[0] for record in records]
    assert [line["sample_ids"] for line in found] == [list(record.sample_ids) for record in records]
    # 20 samples in batches of 3, 2 batches a step: the last step of an epoch has the batch of 2 alone.
    assert [len(line["sample_ids"]) for line in found] == [6, 6, 6, 2] * 2


def test_digests_follow_every_bucket_and_change_nothing_in_the_run(tmp_path: Path) -> None:
    config = run_config(tmp_path, training={"max_steps": 4}, save_ckpt=False)
    plain = train(config)
    assert train(_recording(config, tmp_path / "first", digests=True)) == plain
    train(_recording(config, tmp_path / "second", digests=True))

    first, second = ([line["digests"] for line in _read(tmp_path / name)] for name in ("first", "second"))
    assert first == second
    assert {"model", "optimizer", "rng"} == set(first[0])
    assert {"torch_cpu", "torch_device", "python", "numpy"} == set(first[0]["rng"])
    assert {line["rng"]["torch_device"] for line in first} == {None}
    for column in ("model", "optimizer"):
        assert len({line[column] for line in first}) == 4
    for stream in ("torch_cpu", "python", "numpy"):
        assert len({line["rng"][stream] for line in first}) == 4


def test_a_run_that_is_broken_off_has_a_record_of_every_finished_step_and_its_resume_appends(tmp_path: Path) -> None:
    config = _recording(run_config(tmp_path, save_steps=2, restore_from="LATEST"), tmp_path / "records")
    with pytest.raises(StoppedOnPurpose):
        train(config, callbacks=[stop_after(4)])
    assert [line["global_step"] for line in _read(tmp_path / "records")] == [1, 2, 3, 4]
    train(config)
    found = _read(tmp_path / "records")
    assert [line["global_step"] for line in found] == [1, 2, 3, 4, 3, 4, 5, 6, 7]
    for again, once in zip(found[4:6], found[2:4], strict=True):
        assert {**again, "seconds": 0} == {**once, "seconds": 0}


@pytest.mark.parametrize("torn", [b'{"global_step": 3, "lo', b'{"global_step": 3}\n{"glo', b"{"])
def test_a_line_torn_by_a_kill_is_dropped_before_the_next_one_is_appended(tmp_path: Path, torn: bytes) -> None:
    folder = tmp_path / "records"
    config = _recording(run_config(tmp_path, training={"max_steps": 1}, save_ckpt=False), folder)
    train(config)
    (folder / "trajectory_rank_0.jsonl").open("ab").write(torn)
    train(config)
    assert [line["global_step"] for line in _read(folder)] == ([1, 3, 1] if torn.count(b"\n") else [1, 1])


def test_a_run_that_can_not_start_leaves_no_folder(tmp_path: Path) -> None:
    config = run_config(tmp_path, restore_from=str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError):
        train(_recording(config, tmp_path / "records"))
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_no_number_is_recorded_as_such(tmp_path: Path) -> None:
    def broken_loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(ids).sum() * float("nan")
        return loss

    config = run_config(tmp_path, training={"max_steps": 1}, save_ckpt=False)
    records: list[Record] = train(_recording(config, tmp_path / "records"), loss_function=broken_loss)
    (line,) = _read(tmp_path / "records")
    assert math.isnan(records[0].loss)
    assert math.isnan(line["loss"])
    assert math.isnan(line["grad_norm"])

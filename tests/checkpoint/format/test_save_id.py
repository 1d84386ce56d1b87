"""Parts of different saves are never put together, though their names, shapes and sizes fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.errors import CheckpointMismatchError
from tests.checkpoint.directories import forget_manifest

PARTS = ("__0_0.distcp", ".metadata", "extra_state/extra_state_rank_0.pt")


def _save(root: Path, step: int, *, value: float = 1.0, per_rank: bool = True, save_async: bool = False) -> Path:
    checkpointer = DistributedCheckpointer(extra_state_per_rank=per_rank)
    state = {"model": {"weight": torch.full((4,), value)}, "extra_state": {"epoch": 0}}
    directory = root / f"global_step_{step}"
    checkpointer.save(str(directory), state, global_step=step, save_async=save_async)
    checkpointer.maybe_wait_for_async_save()
    return directory


def _id(directory: Path) -> str:
    """The id of the save, as the manifest says it."""
    found: str = json.loads((directory / "manifest.json").read_text())["attempt"]
    return found


def _load(directory: Path, *, training_state: bool = True) -> float:
    weight = torch.zeros(4)
    skeleton = {"epoch": None} if training_state else None
    DistributedCheckpointer().load(str(directory), {"model": {"weight": weight}}, extra_state_skeleton=skeleton)
    return float(weight[0])


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
def test_a_part_of_another_attempt_at_the_same_step_is_refused(tmp_path: Path, part: str, save_async: bool) -> None:
    directory = _save(tmp_path / "one", 3, save_async=save_async)
    other = _save(tmp_path / "two", 3, value=2.0, save_async=save_async)
    assert (directory / part).stat().st_size == (other / part).stat().st_size
    shutil.copyfile(other / part, directory / part)
    with pytest.raises(CheckpointMismatchError, match=f"{part}: expected digest .* part of another save: {_id(other)}"):
        _load(directory)
    with pytest.raises(CheckpointMismatchError, match="parts of different saves"):
        _load(forget_manifest(directory))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_another_step_is_refused(tmp_path: Path, part: str) -> None:
    directory, other = _save(tmp_path, 3), _save(tmp_path, 4, value=2.0)
    shutil.copyfile(other / part, directory / part)
    with pytest.raises(CheckpointMismatchError, match=f"{part}: expected .* part of another save: {_id(other)}"):
        _load(directory)
    with pytest.raises(CheckpointMismatchError, match="global_step_4"):
        _load(forget_manifest(directory))


def test_a_manifest_of_another_save_is_refused_for_every_file(tmp_path: Path) -> None:
    directory, other = _save(tmp_path / "one", 3), _save(tmp_path / "two", 3, value=2.0)
    own = _id(directory)
    shutil.copyfile(other / "manifest.json", directory / "manifest.json")
    with pytest.raises(CheckpointMismatchError) as caught:
        _load(directory)
    for part in PARTS:
        assert f"{part}: expected digest" in str(caught.value)
    assert str(caught.value).count(f"(it is a part of another save: {own})") == len(PARTS)


def test_a_whole_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, 3).rename(tmp_path / "global_step_4")
    with pytest.raises(CheckpointMismatchError, match="the directory's name says step 4, its manifest step 3"):
        _load(tmp_path / "global_step_4")


def test_shards_of_another_save_are_refused_when_only_weights_are_asked_for(tmp_path: Path) -> None:
    directory, other = _save(tmp_path, 3), _save(tmp_path, 4, value=2.0)
    shutil.copyfile(other / "__0_0.distcp", directory / "__0_0.distcp")
    with pytest.raises(CheckpointMismatchError, match=f"__0_0.distcp: .* part of another save: {_id(other)}"):
        _load(directory, training_state=False)
    with pytest.raises(CheckpointMismatchError, match="shards of rank_0: global_step_4"):
        _load(forget_manifest(directory), training_state=False)


def test_embedded_training_state_is_refused_with_the_shard_that_holds_it(tmp_path: Path) -> None:
    directory = _save(tmp_path, 3, per_rank=False)
    other = _save(tmp_path, 4, value=2.0, per_rank=False)
    shutil.copyfile(other / "__0_0.distcp", directory / "__0_0.distcp")
    with pytest.raises(CheckpointMismatchError, match=f"__0_0.distcp: .* part of another save: {_id(other)}"):
        _load(directory)
    with pytest.raises(CheckpointMismatchError, match="parts of different saves"):
        _load(forget_manifest(directory))


def test_a_checkpoint_that_was_renamed_or_copied_as_a_whole_is_read(tmp_path: Path) -> None:
    directory = _save(tmp_path, 3)
    copy = shutil.copytree(directory, tmp_path / "the best one")
    assert _load(copy) == 1.0


def test_a_checkpoint_of_stock_dcp_carries_no_mark_and_is_read(tmp_path: Path) -> None:
    dcp_save({"model": {"weight": torch.full((4,), 5.0)}}, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert _load(tmp_path / "stock", training_state=False) == 5.0

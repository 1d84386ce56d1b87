"""The description of a step directory, and the effect of each edit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as stock_load

from conformance.adapters.hyper_resume.components import TroubleError
from conformance.adapters.hyper_resume.step_directory import describe_step_directory, edit_step_directory
from hyper_resume.checkpoint import DistributedCheckpointer


@pytest.mark.parametrize("per_rank", [True, False])
def test_two_saves_of_one_state_look_the_same(tmp_path: Path, per_rank: bool) -> None:
    looks = []
    for run in ("first", "second"):
        state = {"model": {"w": torch.ones(2, 3)}, "extra_state": {"global_step": 4, "epoch": 1, "rng_state": {"a": 7}}}
        directory = tmp_path / run / "global_step_4"
        DistributedCheckpointer(extra_state_per_rank=per_rank).save(str(directory), state, global_step=4)
        looks.append(describe_step_directory(directory))
    assert looks[0] == looks[1]
    assert looks[0]["model"] == {"w": "float32[2,3]"}
    assert looks[0]["layout"] == {"per_rank" if per_rank else "embedded": "yes"}
    assert set(looks[0]["progress"]) == {"rank_0.epoch", "rank_0.global_step"}


def saved_in(folder: Path, *, per_rank: bool = True) -> Path:
    state = {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "v": torch.ones(4)},
        "extra_state": {"global_step": 4, "epoch": 1, "rng_state": {"a": 7}},
    }
    directory = folder / "global_step_4"
    DistributedCheckpointer(extra_state_per_rank=per_rank).save(str(directory), state, global_step=4)
    return directory


def test_a_look_tells_what_the_manifest_says(tmp_path: Path) -> None:
    told = describe_step_directory(saved_in(tmp_path))["manifest"]
    assert (told["step"], told["world_size"], told["mesh"], told["ancestors"]) == ("4", "1", "none", "")
    files = {"file..metadata", "file.index.json", "file.__0_0.distcp", "file.extra_state/extra_state_rank_0.pt"}
    assert {name for name in told if name.startswith("file.")} == files
    assert {"bucket.rank_0.model", "bucket.rank_0.rng_state", "bucket.rank_0.progress"} <= set(told)


@pytest.mark.parametrize("per_rank", [True, False])
def test_an_edit_leaves_a_directory_that_stock_tools_could_have_written(tmp_path: Path, per_rank: bool) -> None:
    directory = saved_in(tmp_path, per_rank=per_rank)
    edit_step_directory(directory, {"kind": "remove_model_key", "step": 4, "key": "v"})
    assert not (directory / "manifest.json").exists()
    found = describe_step_directory(directory)
    assert (set(found["model"]), "save_id" in found, "manifest" in found) == ({"w"}, False, False)
    live = {"model": {"w": torch.zeros(2, 3)}}
    state = DistributedCheckpointer().load(str(directory), live, extra_state_skeleton={"global_step": None})
    assert (live["model"]["w"].tolist(), state["global_step"]) == ([[0, 1, 2], [3, 4, 5]], 4)


def test_a_flipped_bit_is_one_number_a_little_off_in_a_file_of_the_same_size(tmp_path: Path) -> None:
    directory = saved_in(tmp_path)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    edit_step_directory(directory, {"kind": "flip_tensor_byte", "step": 4, "entry": "model.w"})
    changed = [path.name for path, content in before.items() if path.read_bytes() != content]
    assert changed == ["__0_0.distcp"]
    found = {"model": {"w": torch.zeros(2, 3)}}
    stock_load(found, checkpoint_id=directory, no_dist=True)
    assert found["model"]["w"].flatten().tolist() == [pytest.approx(1.4e-45, rel=1), 1, 2, 3, 4, 5]
    with pytest.raises(TroubleError, match=r"rank 1 stored no part of model\.w"):
        edit_step_directory(directory, {"kind": "flip_tensor_byte", "step": 4, "entry": "model.w", "rank": 1})

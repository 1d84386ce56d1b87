"""Strict about the model, lenient about the optimizer, and no code run from an entry."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.errors import CheckpointMismatchError
from tests.checkpoint.payloads import same


def save(path: Path, state: dict[str, Any]) -> None:
    DistributedCheckpointer().save(str(path), state, global_step=1)


def load(path: Path, state: dict[str, Any], *, strict_model: bool = True) -> dict[str, Any]:
    DistributedCheckpointer().load(str(path), state, strict_model=strict_model)
    return state


def moments(value: float) -> dict[str, Any]:
    return {"exp_avg": torch.full((2,), value), "step": torch.tensor(value)}


def test_an_optimizer_key_that_the_checkpoint_lacks_keeps_what_is_there(tmp_path: Path) -> None:
    save(
        tmp_path / "global_step_1", {"model": {"w": torch.ones(2)}, "optimizer": {"0": {"state": {"w": moments(5.0)}}}}
    )
    live: dict[str, Any] = {
        "model": {"w": torch.zeros(2)},
        "optimizer": {"0": {"state": {"w": moments(0.0), "frozen": moments(7.0)}, "param_groups": ("mine",)}},
    }
    load(tmp_path / "global_step_1", live)
    assert same(live["model"]["w"], torch.ones(2))
    assert same(live["optimizer"]["0"]["state"], {"w": moments(5.0), "frozen": moments(7.0)})
    assert live["optimizer"]["0"]["param_groups"] == ("mine",)


def test_a_model_key_that_the_checkpoint_lacks_is_an_error_and_nothing_is_read(tmp_path: Path) -> None:
    save(tmp_path / "global_step_1", {"model": {"a": torch.ones(2)}})
    live = {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}}
    with pytest.raises(CheckpointMismatchError, match=r"missing model key: model\.b;") as caught:
        load(tmp_path / "global_step_1", live)
    assert isinstance(caught.value, RuntimeError)
    assert same(live["model"], {"a": torch.zeros(2), "b": torch.zeros(2)})


def test_many_missing_model_keys_are_counted_not_listed(tmp_path: Path) -> None:
    save(tmp_path / "global_step_1", {"model": {"a": torch.ones(2)}})
    with pytest.raises(CheckpointMismatchError, match=r"missing model key: model\.k0, .*model\.k4 and 95 more;"):
        load(tmp_path / "global_step_1", {"model": {f"k{i}": torch.zeros(1) for i in range(100)}})


def test_a_missing_model_key_is_passed_over_when_the_model_is_not_strict(tmp_path: Path) -> None:
    save(tmp_path / "global_step_1", {"model": {"adapter": torch.ones(2)}})
    live = {"model": {"adapter": torch.zeros(2), "base": torch.full((2,), 3.0)}}
    load(tmp_path / "global_step_1", live, strict_model=False)
    assert same(live["model"], {"adapter": torch.ones(2), "base": torch.full((2,), 3.0)})


def test_an_entry_that_this_run_does_not_have_is_left_unread(tmp_path: Path) -> None:
    save(tmp_path / "global_step_1", {"model": {"a": torch.ones(2), "dropped": torch.ones(9)}})
    assert same(load(tmp_path / "global_step_1", {"model": {"a": torch.zeros(2)}})["model"], {"a": torch.ones(2)})


@pytest.mark.parametrize(
    ("saved", "found"),
    [(torch.ones(3), "shape"), (torch.ones(2, 1), "shape"), (torch.ones(2, dtype=torch.float64), "float64")],
    ids=["longer", "another dimension", "another type"],
)
@pytest.mark.parametrize("strict_model", [True, False])
def test_a_model_entry_of_another_shape_or_type_is_an_error_and_nothing_is_read(
    tmp_path: Path, saved: torch.Tensor, found: str, strict_model: bool
) -> None:
    save(tmp_path / "global_step_1", {"model": {"a": torch.ones(2), "b": saved}})
    live = {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}}
    with pytest.raises(CheckpointMismatchError, match=r"model entry model\.b does not fit") as caught:
        load(tmp_path / "global_step_1", live, strict_model=strict_model)
    assert found in str(caught.value)
    assert same(live["model"], {"a": torch.zeros(2), "b": torch.zeros(2)})


def test_a_model_entry_that_is_a_tensor_on_one_side_only_is_an_error(tmp_path: Path) -> None:
    save(tmp_path / "global_step_1", {"model": {"tensor": torch.ones(2), "value": ({"calls": 3},)}})
    with pytest.raises(CheckpointMismatchError, match=r"model\.value does not fit.*found: no tensor"):
        load(tmp_path / "global_step_1", {"model": {"value": torch.ones(2)}})
    with pytest.raises(CheckpointMismatchError, match=r"model\.tensor does not fit.*expected: no tensor"):
        load(tmp_path / "global_step_1", {"model": {"tensor": (1,)}})


def test_live_tensors_are_filled_in_place(tmp_path: Path) -> None:
    save(tmp_path / "global_step_1", {"model": {"a": torch.ones(2)}})
    tensor = torch.zeros(2)
    live = {"model": {"a": tensor}}
    load(tmp_path / "global_step_1", live)
    assert live["model"]["a"] is tensor
    assert same(tensor, torch.ones(2))


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_an_entry_of_the_payload_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "global_step_1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save({"model": {"w": torch.ones(1), "x": Bomb(tmp_path / "exploded")}}, checkpoint_id=path, no_dist=True)
    with pytest.raises(CheckpointMismatchError, match="can't be read"):
        load(path, {"model": {"w": torch.zeros(1), "x": (None,)}})
    assert not (tmp_path / "exploded").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load({"model": {"x": None}}, checkpoint_id=path, no_dist=True)
    assert (tmp_path / "exploded").exists(), "the bomb must work, or the test proves nothing"

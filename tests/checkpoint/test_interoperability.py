"""Stock tools read what is written here, and what they write is read here."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.errors import CheckpointNotFoundError
from tests.checkpoint.payloads import full_state, payload, same, sharded_tiny, tiny, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

KINDS: dict[str, torch.Tensor] = {
    "float32": torch.tensor([1.5, -0.0, float("nan")]),
    "bfloat16": torch.tensor([1.5], dtype=torch.bfloat16),
    "int64": torch.arange(6).reshape(2, 3),
    "bool": torch.tensor([True, False]),
    "complex64": torch.tensor([1 + 2j]),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "part of a storage": torch.arange(100.0)[3:5],
    "transposed": torch.arange(6.0).reshape(2, 3).T,
}


@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
def test_stock_load_reads_tensors_of_every_kind(tmp_path: Path, save_async: bool) -> None:
    checkpointer = DistributedCheckpointer()
    path = tmp_path / "global_step_1"
    checkpointer.save(str(path), {"model": dict(KINDS)}, global_step=1, save_async=save_async)
    checkpointer.maybe_wait_for_async_save()
    found = {"model": {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in KINDS.items()}}
    dcp_load(found, checkpoint_id=path, no_dist=True)
    assert same(found["model"], {name: value.contiguous() for name, value in KINDS.items()})


def _save_sharded(folder: str) -> dict[str, torch.Tensor]:
    model = sharded_tiny(1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    DistributedCheckpointer().save(f"{folder}/global_step_2", payload(model, optimizer, 2), global_step=2)
    return full_state(model, optimizer)


def test_stock_conversion_makes_one_file_of_what_four_ranks_wrote(tmp_path: Path) -> None:
    expected = run_ranks(_save_sharded, 4, str(tmp_path))[0]
    dcp_to_torch_save(tmp_path / "global_step_2", tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    model = found["model"]
    assert model.keys() == {name for name in expected if "/" not in name}
    assert all(same(model[name], expected[name]) for name in model)
    moments = found["optimizer"]["0"]["state"]
    assert same(moments["embed.weight"]["exp_avg_sq"], expected["embed.weight/exp_avg_sq"])
    assert found["save_id"]["rank_3"].startswith("global_step_2.")


def test_what_stock_conversion_writes_is_read(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.arange(5.0)}}, tmp_path / "one.pt")
    torch_save_to_dcp(tmp_path / "one.pt", tmp_path / "global_step_7")
    live = {"model": {"w": torch.zeros(5)}}
    checkpointer = DistributedCheckpointer()
    found = checkpointer.find_latest_checkpoint(str(tmp_path))
    assert found == str(tmp_path / "global_step_7")
    checkpointer.load(found, live)
    assert same(live["model"]["w"], torch.arange(5.0))


def _stock_save(folder: str) -> dict[str, torch.Tensor]:
    model = sharded_tiny(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save({"model": model.state_dict(), "step": 7}, checkpoint_id=f"{folder}/global_step_7")
    return full_state(model)


def _load(folder: str) -> tuple[bool, dict[str, torch.Tensor]]:
    model = sharded_tiny(2)
    checkpointer = DistributedCheckpointer()
    found = checkpointer.find_latest_checkpoint(folder)
    assert found == f"{folder}/global_step_7"
    state: dict[str, Any] = {"model": model.state_dict()}
    checkpointer.load(found, state)
    return checkpointer.last_load is not None, full_state(model)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 2), (2, 4)])
def test_what_stock_save_writes_on_some_ranks_is_read_on_others(tmp_path: Path, before: int, after: int) -> None:
    expected = run_ranks(_stock_save, before, str(tmp_path))[0]
    for has_report, found in run_ranks(_load, after, str(tmp_path)):
        assert has_report
        assert same(found, expected)


def test_a_stock_directory_has_no_training_state_and_says_so(tmp_path: Path) -> None:
    dcp_save({"model": tiny(1).state_dict()}, checkpoint_id=tmp_path / "global_step_7", no_dist=True)
    with pytest.raises(CheckpointNotFoundError, match="holds no training state"):
        DistributedCheckpointer().load(str(tmp_path / "global_step_7"), {}, extra_state_skeleton={"global_step": None})


def test_a_stock_metadata_of_0_bytes_is_not_complete(tmp_path: Path) -> None:
    """What a power cut leaves of a stock save: the name was on the device before the bytes."""
    path = tmp_path / "global_step_7"
    dcp_save({"model": {"w": torch.ones(2)}}, checkpoint_id=path, no_dist=True)
    (path / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match=r"not a complete checkpoint.*no usable \.metadata"):
        DistributedCheckpointer().load(str(path), {"model": {"w": torch.zeros(2)}})
    assert DistributedCheckpointer().find_latest_checkpoint(str(tmp_path)) is None


def test_a_stock_save_over_a_directory_of_this_library_is_refused_until_its_manifest_goes(tmp_path: Path) -> None:
    """Stock DCP writes into what is there, and leaves the manifest of the earlier save beside its files."""
    path = tmp_path / "global_step_1"
    DistributedCheckpointer().save(str(path), {"model": {"w": torch.ones(2)}}, global_step=1)
    dcp_save({"model": {"w": torch.full((2,), 5.0)}}, checkpoint_id=path, no_dist=True)
    live = {"model": {"w": torch.zeros(2)}}
    with pytest.raises(RuntimeError, match="the checkpoint is not as it was written"):
        DistributedCheckpointer().load(str(path), live)
    (path / "manifest.json").unlink()
    DistributedCheckpointer().load(str(path), live)
    assert same(live["model"]["w"], torch.full((2,), 5.0))

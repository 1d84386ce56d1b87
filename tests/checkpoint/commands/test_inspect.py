"""What `inspect` says of a step directory."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.commands.inspect import inspect_step_directory
from hyper_resume.errors import CheckpointNotFoundError
from tests.checkpoint.directories import forget_manifest, listing
from tests.checkpoint.payloads import payload, tiny, train


@pytest.mark.parametrize(("per_rank", "layout"), [(True, "per_rank"), (False, "embedded")])
def test_buckets_ranks_and_sizes_are_told_without_a_change_on_disk(tmp_path: Path, per_rank: bool, layout: str) -> None:
    model = tiny(1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    directory = tmp_path / "global_step_4"
    checkpointer = DistributedCheckpointer(extra_state_per_rank=per_rank)
    checkpointer.save(str(directory), payload(model, optimizer, 4), global_step=4)
    before = listing(tmp_path)

    found = inspect_step_directory(directory)

    assert listing(tmp_path) == before
    assert (found.step, found.layout) == (4, layout)
    assert found.files == len([kind for kind in listing(directory).values() if kind != "folder"])
    assert found.size_bytes == sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    buckets = {bucket.name: bucket for bucket in found.buckets}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert set(buckets) == {"model", "optimizer.0"}
    assert (buckets["model"].tensors, buckets["model"].others) == (6, 0)
    assert buckets["model"].size_bytes == 4 * (parameters + 3)
    # Two moments and a step for each of five parameters, and the group options.
    assert (buckets["optimizer.0"].tensors, buckets["optimizer.0"].others) == (15, 1)
    assert buckets["optimizer.0"].size_bytes == 4 * (2 * parameters + 5)
    assert buckets["optimizer.0"].dtypes == ("float32",)
    (rank,) = found.ranks
    assert (rank.rank, rank.global_step, rank.epoch, rank.world_size) == (0, 4, 1, 1)
    assert rank.rng_streams == ("torch_cpu", "python", "numpy")
    assert rank.buckets == ("epoch", "global_step", "lr_scheduler", "rng_state", "stateful", "train_dataloader")
    assert found.missing_ranks == ()
    assert json.loads(json.dumps(found.as_plain()))["ranks"][0]["global_step"] == 4


def test_a_checkpoint_without_training_state_says_none(tmp_path: Path) -> None:
    DistributedCheckpointer().save(str(tmp_path / "global_step_1"), payload(tiny(1)), global_step=1)
    found = inspect_step_directory(tmp_path / "global_step_1")
    assert (found.layout, found.ranks) == ("none", ())


def test_a_training_state_without_an_epoch_is_told_all_the_same(tmp_path: Path) -> None:
    DistributedCheckpointer().save(str(tmp_path / "global_step_1"), {"model": {}, "extra_state": {}}, global_step=1)
    (rank,) = inspect_step_directory(tmp_path / "global_step_1").ranks
    assert (rank.global_step, rank.epoch) == (1, None)


def test_a_stock_directory_can_be_inspected(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(
            {"model": {"w": torch.ones(2, dtype=torch.bfloat16)}, "n": 1}, checkpoint_id=tmp_path / "x", no_dist=True
        )
    found = inspect_step_directory(tmp_path / "x")
    assert found.step is None
    assert [(bucket.name, bucket.size_bytes, bucket.dtypes) for bucket in found.buckets] == [
        ("model", 4, ("bfloat16",)),
        ("n", 0, ()),
    ]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="not a complete checkpoint"):
        inspect_step_directory(tmp_path)


def test_a_rank_whose_training_state_is_gone_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "global_step_1"
    DistributedCheckpointer().save(str(directory), payload(tiny(1), step=1), global_step=1)
    file = directory / "extra_state" / "extra_state_rank_0.pt"
    torch.save({**torch.load(file, weights_only=True), "world_size": 3}, file)
    with pytest.raises(CheckpointNotFoundError, match=r"extra_state_rank_0\.pt: expected \d+ bytes, found \d+"):
        inspect_step_directory(directory)
    forget_manifest(directory)
    assert inspect_step_directory(directory).missing_ranks == (1, 2)

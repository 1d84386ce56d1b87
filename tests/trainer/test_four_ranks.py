"""TP 2 x FSDP2 2 on four gloo processes, with the real text trainer on a tiny mixture of experts."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hyper_resume import cli
from hyper_resume.config import (
    AcceleratorConfig,
    CheckpointingConfig,
    DataConfig,
    LRSchedulerConfig,
    ModelConfig,
    RunConfig,
    TrainingConfig,
    TrajectoryConfig,
)
from hyper_resume.trainer.text_trainer import TextTrainer
from tests.ranks import run_ranks
from tests.trainer.tiny_training import disk_listing, saved_steps

pytestmark = pytest.mark.xdist_group("four-ranks")

RANKS = 4
QUICKLY_SECONDS = 20.0  # a rank that waits for another is freed by the group's time-out only, after 30
DRIFTED = "model.layers.1.self_attn.q_norm.weight"


def _config(folder: Path, trajectory: str, *, max_steps: int = 4, **checkpoint: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(preset="tiny-qwen3-moe", overrides={"attention_dropout": 0.2}),
        data=DataConfig(paths=(str(folder / "text.txt"),), seq_length=16, batch_size=2, max_samples=12),
        accelerator=AcceleratorConfig(device="cpu", tp_size=2, dp_shard_size=2),
        lr_scheduler=LRSchedulerConfig(warmup_steps=1, decay_steps=6),
        training=TrainingConfig(num_train_epochs=2, max_steps=max_steps, progress_bar=False),
        checkpoint=CheckpointingConfig(
            **{"checkpoint_dir": str(folder / "checkpoints"), "save_epochs": 0, **checkpoint}
        ),
        trajectory=TrajectoryConfig(dir=str(folder / trajectory), digests=True),
    )


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An error as one rank got it."""

    kind: str
    message: str
    seconds: float


def _failure(trainer: TextTrainer) -> Failure:
    dist.barrier()
    started = time.monotonic()
    try:
        trainer.train()
    except Exception as error:  # noqa: BLE001  # what comes is what is looked at
        return Failure(kind=type(error).__name__, message=str(error), seconds=time.monotonic() - started)
    raise AssertionError("nothing was raised")


def _all_legs(folder: Path) -> dict[str, Failure]:
    """Every rank: three legs that must agree, then three that must fail, in one process group."""
    TextTrainer(_config(folder, "straight", save_steps=1)).train()
    step_2, embedded = str(folder / "checkpoints" / "global_step_2"), str(folder / "embedded")
    # From per-rank files to the embedded layout, and on from there.
    TextTrainer(
        _config(
            folder, "second", max_steps=3, restore_from=step_2, checkpoint_dir=embedded, save_extra_state_per_rank=False
        )
    ).train()
    TextTrainer(_config(folder, "third", save_ckpt=False, restore_from="LATEST", checkpoint_dir=embedded)).train()

    if dist.get_rank() == 0:
        shutil.copytree(step_2, folder / "broken" / "global_step_2")
        (folder / "broken" / "global_step_2" / "extra_state" / "extra_state_rank_2.pt").unlink()
    dist.barrier()
    broken = TextTrainer(
        _config(
            folder, "never", restore_from=str(folder / "broken" / "global_step_2"), checkpoint_dir=str(folder / "new")
        )
    )
    absent = TextTrainer(_config(folder, "never", restore_from=str(folder / "absent")))
    drifting = TextTrainer(_config(folder, "drift", save_steps=1, max_steps=1, checkpoint_dir=str(folder / "drifted")))
    if dist.get_rank() == 1:
        _shift(drifting)
    return {"broken": _failure(broken), "absent": _failure(absent), "drifted": _failure(drifting)}


@torch.no_grad()
def _shift(trainer: TextTrainer) -> None:
    """Change this rank's copy of a parameter that tensor parallelism replicates."""
    parameter = dict(trainer.base.model.named_parameters())[DRIFTED]
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    local.add_(0.25)


@dataclass(frozen=True, kw_only=True)
class Legs:
    folder: Path
    failures: list[dict[str, Failure]]

    def records(self, trajectory: str, rank: int) -> list[dict[str, Any]]:
        lines = (self.folder / trajectory / f"trajectory_rank_{rank}.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def legs(tmp_path_factory: pytest.TempPathFactory) -> Legs:
    folder = tmp_path_factory.mktemp("legs")
    (folder / "text.txt").write_text("".join(f"line {i} of a short text\n" for i in range(20)))
    return Legs(folder=folder, failures=run_ranks(_all_legs, RANKS, folder, timeout_seconds=100))


@pytest.mark.parametrize("rank", range(RANKS))
def test_both_layouts_continue_bit_for_bit_on_every_rank(legs: Legs, rank: int) -> None:
    straight = legs.records("straight", rank)
    assert [record["global_step"] for record in straight] == [1, 2, 3, 4]
    assert [(record["epoch"], record["batch_index"]) for record in straight] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert legs.records("second", rank) == straight[2:3]
    assert legs.records("third", rank) == straight[3:]
    for column in ("loss", "lr", "grad_norm"):
        assert len({record[column] for record in straight}) == 4
    assert {"model", "optimizer", "rng"} == set(straight[0]["digests"])


def test_ranks_have_streams_and_samples_of_their_own_where_they_should(legs: Legs) -> None:
    last = [legs.records("straight", rank)[-1] for rank in range(RANKS)]
    # TP is the inner dimension: ranks 0 and 1 share samples, as 2 and 3 do.
    assert last[0]["sample_ids"] == last[1]["sample_ids"]
    assert last[2]["sample_ids"] == last[3]["sample_ids"]
    assert set(last[0]["sample_ids"]).isdisjoint(last[2]["sample_ids"])
    # Ranks that share a sample draw the same numbers for it; others draw their own.
    for stream in ("python", "numpy", "torch_cpu"):
        digests = [record["digests"]["rng"][stream] for record in last]
        assert digests[0] == digests[1] != digests[2] == digests[3]
    assert len({record["loss"] for record in last}) == 1


def test_only_the_steps_that_were_asked_for_are_on_disk(legs: Legs) -> None:
    assert saved_steps(legs.folder / "checkpoints") == [1, 2, 3, 4]
    assert saved_steps(legs.folder / "embedded") == [3]
    files = sorted(path.name for path in (legs.folder / "checkpoints" / "global_step_2" / "extra_state").iterdir())
    assert files == [f"extra_state_rank_{rank}.pt" for rank in range(RANKS)]
    assert not (legs.folder / "embedded" / "global_step_3" / "extra_state").exists()


def test_a_missing_extra_state_file_is_the_same_error_on_all_ranks_at_once(legs: Legs) -> None:
    failures = [failure["broken"] for failure in legs.failures]
    assert {failure.kind for failure in failures} == {"CheckpointNotFoundError"}
    assert len({failure.message for failure in failures}) == 1
    assert "extra_state_rank_2.pt" in failures[0].message
    assert max(failure.seconds for failure in failures) < QUICKLY_SECONDS
    # Nothing trained, nothing written.
    assert not (legs.folder / "never").exists()
    assert not (legs.folder / "new").exists()
    whole, broken = (disk_listing(legs.folder / name / "global_step_2") for name in ("checkpoints", "broken"))
    assert set(whole) - set(broken) == {"extra_state/extra_state_rank_2.pt"}
    assert set(broken) <= set(whole)


def test_an_absent_path_is_the_same_error_on_all_ranks_at_once(legs: Legs) -> None:
    failures = [failure["absent"] for failure in legs.failures]
    assert {failure.kind for failure in failures} == {"CheckpointNotFoundError"}
    assert all("restore_from is not a directory" in failure.message for failure in failures)
    assert max(failure.seconds for failure in failures) < QUICKLY_SECONDS


def test_copies_that_drifted_apart_are_refused_at_the_save_with_parameter_and_ranks(legs: Legs) -> None:
    failures = [failure["drifted"] for failure in legs.failures]
    assert {failure.kind for failure in failures} == {"ReplicaMismatchError"}
    assert len({failure.message for failure in failures}) == 1
    assert f"model.{DRIFTED}" in failures[0].message
    assert "rank 0 != rank 1" in failures[0].message
    assert not (legs.folder / "drifted").exists()


# ---- inspect


@pytest.mark.parametrize(
    ("step", "layout"), [("checkpoints/global_step_2", "per_rank"), ("embedded/global_step_3", "embedded")]
)
def test_inspect_shows_what_four_ranks_saved_in_either_layout(
    legs: Legs, step: str, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = legs.folder / step
    assert cli.main(["inspect", str(directory), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    number = int(step[-1])
    assert (found["step"], found["layout"]) == (number, layout)
    on_disk = [path for path in directory.rglob("*") if path.is_file()]
    assert (found["files"], found["size_bytes"]) == (len(on_disk), sum(path.stat().st_size for path in on_disk))
    ranks = found["ranks"]
    assert [(rank["rank"], rank["world_size"], rank["global_step"], rank["epoch"]) for rank in ranks] == [
        (rank, RANKS, number, 0) for rank in range(RANKS)
    ]
    assert found["missing_ranks"] == []
    for rank in ranks:
        assert {"global_step", "epoch", "lr_scheduler", "train_dataloader", "rng_state"} <= set(rank["buckets"])
        assert rank["rng_streams"] == ["torch_cpu", "python", "numpy"]
    model, optimizer = found["buckets"]
    assert (model["name"], optimizer["name"]) == ("model", "optimizer.0")
    # A step, two moments for each parameter; moments as large as the parameters, in float32 like them.
    assert optimizer["tensors"] == 3 * model["tensors"]
    assert optimizer["size_bytes"] == 2 * model["size_bytes"] + 4 * model["tensors"]
    assert model["dtypes"] == optimizer["dtypes"] == ["float32"]
    parameters = _model_size(_config(legs.folder, "none").model)
    assert (model["tensors"], model["size_bytes"]) == parameters

    assert cli.main(["inspect", f"{directory}/"]) == 0
    text = capsys.readouterr().out
    assert f"step {number}, {len(on_disk)} files" in text
    for rank in range(RANKS):
        assert f"rank {rank} of 4: global_step={number}, epoch=0" in text
    assert f"training state: {layout}" in text


def test_inspect_names_the_rank_whose_training_state_is_missing(legs: Legs, capsys: pytest.CaptureFixture[str]) -> None:
    broken = legs.folder / "broken" / "global_step_2"
    assert cli.main(["inspect", str(broken)]) == cli.EXIT_ERROR
    assert "extra_state/extra_state_rank_2.pt" in capsys.readouterr().err
    # A directory of another tool has no manifest, and is recognised by its files.
    (broken / "manifest.json").unlink()
    assert cli.main(["inspect", str(broken), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 3]
    assert found["missing_ranks"] == [2]
    assert cli.main(["inspect", str(broken)]) == 0
    assert "rank 2: missing, so the training state can't be restored" in capsys.readouterr().out


def _model_size(config: ModelConfig) -> tuple[int, int]:
    from hyper_resume.models.build import build_model

    state = build_model(config, vocab_size=264).state_dict()
    return len(state), sum(value.numel() * value.element_size() for value in state.values())

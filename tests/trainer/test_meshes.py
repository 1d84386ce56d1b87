"""Four gloo processes on another mesh than was saved: dp 4, tp 2 x dp 2 and its dimensions swapped, with dropout."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hyper_resume.checkpoint.format import mesh as meshes
from hyper_resume.checkpoint.format.mesh import Mesh
from hyper_resume.checkpoint.loading import reading
from hyper_resume.config import (
    AcceleratorConfig,
    CheckpointingConfig,
    DataConfig,
    LRSchedulerConfig,
    ModelConfig,
    RunConfig,
    TrainingConfig,
)
from hyper_resume.errors import CheckpointMismatchError
from hyper_resume.models.build import build_model
from hyper_resume.parallel import ParallelMesh
from hyper_resume.state.stateful import refuse_sharded_parts
from hyper_resume.trainer import text_trainer
from hyper_resume.trainer.callbacks import Callback
from hyper_resume.trainer.run.mesh import find_run_mesh
from hyper_resume.trainer.text_trainer import TextTrainer
from tests.ranks import run_ranks
from tests.trainer.tiny_training import LiveState, live_state

pytestmark = pytest.mark.xdist_group("four-ranks")

RANKS = 4
SEED = 1234
# The data-parallel coordinate of each rank.
COORDINATES = {"dp": [0, 1, 2, 3], "tp": [0, 0, 1, 1], "swapped": [0, 1, 0, 1]}
WORDS = {"dp": "dp_shard 4 x tp 1", "tp": "dp_shard 2 x tp 2", "swapped": "tp 2 x dp_shard 2"}


@dataclass(kw_only=True)
class Leg:
    """Of one rank: streams and weights after each step, those of the start first; or the error that ended it."""

    streams: list[tuple[str, str, str]] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    error: str = ""
    start: tuple[int, int, int] = (0, 0, 0)


class Watch(Callback):
    """Notes what a leg's rank has before its first step and after each."""

    def __init__(self, trainer: Any, leg: Leg) -> None:
        super().__init__(trainer)
        self.leg = leg

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.leg.start = (self.trainer.state.global_step, self.trainer.start_epoch, self.trainer.start_step)
        self._note()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.leg.samples.append(list(self.trainer.state.sample_ids))
        self.leg.losses.append(self.trainer.state.loss)
        self._note()

    def _note(self) -> None:
        self.leg.streams.append(_streams(live_state(torch.nn.Module())))
        self.leg.weights.append(
            {name: tensor.full_tensor().clone() for name, tensor in self.trainer.model.state_dict().items()}
        )


def _own_state(trainer: TextTrainer) -> Any:
    base = trainer.base
    parts = {name: tensor.to_local().numpy().tobytes() for name, tensor in base.model.state_dict().items()}
    counters = (base.state.global_step, base.start_epoch, base.start_step, len(base.optimizer.state))
    return parts, counters, base.train_dataloader.state_dict(), _streams(live_state(torch.nn.Module()))


def _streams(live: LiveState) -> tuple[str, str, str]:
    return live.torch_stream, live.python_stream, live.numpy_stream


def _dropping(*args: Any, **options: Any) -> torch.nn.Module:
    """The model, with dropout of activations that the ranks of a tensor group hold as copies."""
    model = build_model(*args, **options)

    def drop(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, 0.2, training=module.training)

    model.get_submodule("model.norm").register_forward_hook(drop)
    return model


def _swapped(accelerator: AcceleratorConfig, device_type: str, world_size: int) -> ParallelMesh:
    """As ``build_mesh``, with data parallelism as the inner dimension."""
    mesh = init_device_mesh(device_type, (2, 2), mesh_dim_names=("tp", "dp_shard"))
    dp_rank, tp_rank = mesh.get_local_rank("dp_shard"), mesh.get_local_rank("tp")
    return ParallelMesh(device_mesh=mesh, dp_rank=dp_rank, dp_size=2, tp_rank=tp_rank, tp_size=2)


def _train(folder: Path, name: str, mesh: str, *, max_steps: int, source: str = "", **checkpoint: Any) -> Leg:
    config = RunConfig(
        model=ModelConfig(preset="tiny-qwen3-moe"),
        data=DataConfig(paths=(str(folder / "text.txt"),), seq_length=16, batch_size=1, max_samples=24),
        accelerator=AcceleratorConfig(device="cpu", tp_size=1 if mesh == "dp" else 2),
        lr_scheduler=LRSchedulerConfig(warmup_steps=1, decay_steps=20),
        training=TrainingConfig(num_train_epochs=9, max_steps=max_steps, progress_bar=False, seed=SEED),
        checkpoint=CheckpointingConfig(
            checkpoint_dir=str(folder / name),
            save_epochs=0,
            save_steps=1,
            restore_from=str(folder / source) if source else None,
            **checkpoint,
        ),
    )
    with (
        mock.patch.object(text_trainer, "build_model", _dropping),
        mock.patch.object(text_trainer, "build_mesh", _swapped) if mesh == "swapped" else nullcontext(),
    ):
        trainer = TextTrainer(config)
    leg = Leg()
    trainer.base.callbacks.append(Watch(trainer.base, leg))
    before = _own_state(trainer)
    try:
        trainer.train()
    except RuntimeError as error:
        leg.error = f"{type(error).__name__}: {error}"
        if _own_state(trainer) != before:
            leg.error += " (and something had changed)"
    return leg


def _all_legs(folder: Path) -> dict[str, Leg]:
    """Every rank: the meshes one after the other, in one process group."""
    legs = {
        "dp": _train(folder, "dp", "dp", max_steps=2),
        "tp": _train(folder, "tp", "tp", max_steps=4, source="dp/global_step_2"),
        "tp again": _train(folder, "again", "tp", max_steps=3, source="dp/global_step_2"),
        "tp from 1": _train(folder, "from 1", "tp", max_steps=2, source="dp/global_step_1"),
        "tp on": _train(folder, "on", "tp", max_steps=4, source="tp/global_step_3"),
        "swapped": _train(folder, "swapped", "swapped", max_steps=6, source="tp/global_step_4"),
        "dp back": _train(folder, "back", "dp", max_steps=8, source="swapped/global_step_6"),
        "refused": _train(folder, "refused", "swapped", max_steps=6, source="tp/global_step_4", on_mismatch="error"),
    }
    # The negative controls: streams and positions by the number of the rank, whatever the mesh is.
    with (
        mock.patch.object(meshes, "same_places", return_value=True),
        mock.patch.object(reading, "same_places", return_value=True),
    ):
        legs["tp by number"] = _train(folder, "by number", "tp", max_steps=4, source="dp/global_step_2")
        legs["swapped by number"] = _train(folder, "by number too", "swapped", max_steps=6, source="tp/global_step_4")
    return legs


@dataclass(frozen=True, kw_only=True)
class Run:
    folder: Path
    ranks: list[dict[str, Leg]]

    def of(self, name: str) -> list[Leg]:
        return [legs[name] for legs in self.ranks]

    def certificate(self, name: str) -> dict[str, set[str]]:
        """Bucket -> verdicts with their reasons, over all ranks."""
        (path,) = (self.folder / name / "certificates").iterdir()
        found: dict[str, set[str]] = {}
        for part in json.loads(path.read_text())["parts"]:
            found.setdefault(part["bucket"], set()).add(f"{part['verdict']} {part['reason']}".strip())
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("meshes")
    (folder / "text.txt").write_text("".join(f"line {i} of a short text\n" for i in range(40)))
    return Run(folder=folder, ranks=run_ranks(_all_legs, RANKS, folder, timeout_seconds=200))


CHANGES = [("tp", "dp", "tp", 2), ("swapped", "tp", "swapped", 2), ("dp back", "swapped", "dp", 2)]
FOLDERS = {"tp": "tp", "swapped": "swapped", "dp back": "back", "dp": "dp", "tp on": "on"}


@pytest.mark.parametrize(("leg", "before", "mesh", "steps"), CHANGES, ids=[change[0] for change in CHANGES])
def test_a_run_goes_on_with_the_same_weights_on_another_mesh_and_saves(
    run: Run, leg: str, before: str, mesh: str, steps: int
) -> None:
    for old, new in zip(run.of(before), run.of(leg), strict=True):
        assert new.error == ""
        assert len(new.losses) == steps
        assert new.weights[0].keys() == old.weights[-1].keys()
        for name, weight in new.weights[0].items():
            assert torch.equal(weight, old.weights[-1][name]), name
    saved = sorted(path.name for path in (run.folder / FOLDERS[leg]).glob("global_step_*"))
    first = run.of(leg)[0].start[0] + 1
    assert saved == [f"global_step_{step}" for step in range(first, first + steps)]


@pytest.mark.parametrize(("leg", "before", "mesh", "steps"), CHANGES, ids=[change[0] for change in CHANGES])
def test_streams_are_equal_within_a_tensor_group_and_distinct_between_data_parallel_coordinates(
    run: Run, leg: str, before: str, mesh: str, steps: int
) -> None:
    for moment in range(steps + 1):
        for stream in range(3):
            found = [rank.streams[moment][stream] for rank in run.of(leg)]
            by_coordinate = dict(zip(COORDINATES[mesh], found, strict=True))
            assert found == [by_coordinate[coordinate] for coordinate in COORDINATES[mesh]]
            assert len(set(by_coordinate.values())) == len(by_coordinate)
    # None of them goes on with a stream that another place of the mesh had.
    assert not {rank.streams[0] for rank in run.of(leg)} & {rank.streams[-1] for rank in run.of(before)}


@pytest.mark.parametrize(("leg", "before", "mesh", "steps"), CHANGES, ids=[change[0] for change in CHANGES])
def test_the_streams_follow_from_seed_step_and_coordinate_alone(
    run: Run, leg: str, before: str, mesh: str, steps: int
) -> None:
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        for coordinate, rank in zip(COORDINATES[mesh], run.of(leg), strict=True):
            (word,) = np.random.SeedSequence((SEED, rank.start[0], coordinate)).generate_state(1, np.uint64)
            seed = int(word) // 2
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            assert rank.streams[0] == _streams(live_state(torch.nn.Module()))
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])


def test_a_second_restore_draws_the_same_numbers_and_one_of_another_step_others(run: Run) -> None:
    for first, second, earlier in zip(run.of("tp"), run.of("tp again"), run.of("tp from 1"), strict=True):
        assert second.streams == first.streams[:2]
        assert second.losses == first.losses[:1]
        assert earlier.streams[0] != first.streams[0]


@pytest.mark.parametrize(("leg", "before", "mesh", "steps"), CHANGES, ids=[change[0] for change in CHANGES])
def test_the_certificate_names_both_meshes(run: Run, leg: str, before: str, mesh: str, steps: int) -> None:
    old = {"dp": "dp", "tp": "tp", "swapped": "swapped"}[before]
    verdicts = run.certificate(FOLDERS[leg])
    assert verdicts["rng_state"] == {
        "degraded the mesh changed: random streams start from the seed, the step and the data-parallel coordinate "
        f"(the mesh was {WORDS[old]}, is {WORDS[mesh]})"
    }
    assert verdicts["model"] == verdicts["optimizer"] == verdicts["lr_scheduler"] == {"exact"}


def test_the_same_data_parallel_size_keeps_the_position(run: Run) -> None:
    assert run.certificate("swapped")["train_dataloader"] == {"exact"}
    # Two data-parallel ranks, 24 samples, one at a time: the epoch that began at step 2 has gone two steps.
    old, new = run.of("tp"), run.of("swapped")
    assert [rank.start for rank in new] == [(4, 0, 2)] * RANKS
    read = [sample for rank in (old[0], old[2], new[0], new[1]) for step in rank.samples for sample in step]
    assert len(read) == len(set(read)) == 8
    for peers in ((0, 2), (1, 3)):
        assert new[peers[0]].samples == new[peers[1]].samples


def test_on_the_same_mesh_everything_goes_on_exactly(run: Run) -> None:
    verdicts = run.certificate("on")
    assert {bucket for bucket, found in verdicts.items() if found == {"exact"}} == {
        *("model", "optimizer", "lr_scheduler", "train_dataloader", "rng_state")
    }
    # The epoch that was read again when the mesh changed is longer than the steps say.
    assert all("the data position is used" in verdict for verdict in verdicts["progress"])
    for straight, resumed in zip(run.of("tp"), run.of("tp on"), strict=True):
        assert resumed.error == ""
        assert resumed.streams == straight.streams[1:]
        assert resumed.losses == straight.losses[1:]


def test_another_mesh_is_refused_with_error_and_nothing_changes(run: Run) -> None:
    errors = {rank.error for rank in run.of("refused")}
    assert len(errors) == 1
    (error,) = errors
    assert error.startswith("CheckpointMismatchError: the restore would not be exact")
    assert f"the mesh was {WORDS['tp']}, is {WORDS['swapped']}" in error
    assert "something had changed" not in error
    assert not (run.folder / "refused").exists()


@pytest.mark.parametrize("leg", ["tp by number", "swapped by number"])
def test_streams_by_the_number_of_the_rank_would_end_at_the_next_save(run: Run, leg: str) -> None:
    """So dropout shows the difference: peers of a tensor group that draw other numbers drift apart."""
    errors = {rank.error for rank in run.of(leg)}
    assert len(errors) == 1
    assert errors.pop().startswith("ReplicaMismatchError: copies that a checkpoint would merge differ")


# ---- where the mesh comes from


def _found_meshes() -> dict[str, Any]:
    """Every rank: the mesh of trainers whose models are divided in ways of their own."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (RANKS,))
    split = {"0": ColwiseParallel(), "1": RowwiseParallel()}

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))

    models = {
        "whole": make(),
        "sharded": fully_shard(make(), mesh=line),
        "split": parallelize_module(make(), line, split),
        "split by a part": parallelize_module(make(), grid["tp"], split),
    }
    config = SimpleNamespace()
    found = {name: find_run_mesh(SimpleNamespace(model=model, config=config)) for name, model in models.items()}
    config.accelerator = AcceleratorConfig(tp_size=2)
    found["configured"] = find_run_mesh(SimpleNamespace(model=models["whole"], config=config))
    return found


def test_the_mesh_is_that_of_the_parameters_or_the_configured_one() -> None:
    for found in run_ranks(_found_meshes, RANKS):
        assert found == {
            "whole": None,
            # Dimensions without names divide the data with FSDP2, and otherwise the layers.
            "sharded": Mesh(names=("dp_0",), shape=(4,)),
            "split": Mesh(names=("tp_0",), shape=(4,)),
            "split by a part": Mesh(names=("dp", "tp"), shape=(2, 2)),
            "configured": Mesh(names=("dp_shard", "tp"), shape=(2, 2)),
        }


# ---- other objects


class Average:
    """Holds what it is given."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": [self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["shadow"][0]


def _sharded_objects() -> str:
    line = init_device_mesh("cpu", (RANKS,))
    copied = DTensor.from_local(torch.ones(8), line, [Replicate()])
    refuse_sharded_parts({"copied": Average(copied), "stream": torch.Generator()}, "the mesh changed")
    with pytest.raises(CheckpointMismatchError) as caught:
        refuse_sharded_parts(
            {"average": Average(DTensor.from_local(torch.ones(2), line, [Shard(0)]))}, "the mesh changed"
        )
    return str(caught.value)


def test_the_part_of_a_sharded_object_is_never_that_of_another_mesh() -> None:
    for error in run_ranks(_sharded_objects, RANKS):
        assert error.startswith("the saved part of average does not fit this rank")
        assert "those of another mesh (the mesh changed)" in error


# ---- the manifest


@pytest.mark.parametrize(("name", "mesh"), [("dp", "dp"), ("tp", "tp"), ("swapped", "swapped")])
def test_the_manifest_has_the_mesh_of_the_run_once(run: Run, name: str, mesh: str) -> None:
    step = max((run.folder / name).glob("global_step_*"))
    words = WORDS[mesh].split(" x ")
    expected = {"names": [word.split()[0] for word in words], "shape": [int(word.split()[1]) for word in words]}
    assert json.loads((step / "manifest.json").read_text())["mesh"] == expected
    training_state = torch.load(step / "extra_state" / "extra_state_rank_0.pt", weights_only=True)
    assert "mesh" not in training_state

"""Averages of a sharded model, as a list and a dict of sharded tensors, on another number of ranks and on another mesh."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hyper_resume import collective
from hyper_resume.checkpoint.loading.resharding import Part, parts_from_plain, reshard
from hyper_resume.config import CheckpointingConfig
from hyper_resume.data import DataLoader
from hyper_resume.errors import CheckpointMismatchError
from hyper_resume.trainer.callbacks import CheckpointerCallback, TrainerState
from tests.ranks import run_ranks
from tests.trainer.tiny_training import Ids

pytestmark = pytest.mark.xdist_group("four-ranks")

# Name of a layout -> its number of ranks. Ten rows do not divide by four, nor five by two.
RANKS = {"one": 1, "dp2": 2, "dp4": 4, "tp": 4}


class Averages:
    """Averages of the parameters by name and, of their squares, in order, with a count; and what this rank has seen."""

    def __init__(self, model: nn.Module, *, own: int = 0) -> None:
        self.named = {name: torch.zeros_like(one.detach()) for name, one in model.named_parameters()}
        self.listed = [torch.zeros_like(one.detach()) for one in model.parameters()]
        self.updates, self.own = 0, own

    def state_dict(self) -> dict[str, Any]:
        return {"named": self.named, "more": {"listed": self.listed}, "updates": self.updates, "own": self.own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.named, self.listed = state["named"], state["more"]["listed"]
        self.updates, self.own = state["updates"], state["own"]


def _values(name: str, shape: torch.Size) -> torch.Tensor:
    """The whole tensor of a name: numbers that no two places share."""
    begin = {"0.weight": 0, "0.bias": 100, "1.weight": 200, "1.bias": 300}[name]
    return begin + torch.arange(shape.numel(), dtype=torch.float32).reshape(shape) / 4


def _model(layout: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.copy_(_values(name, one.shape))
    if layout == "tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp_shard"])
    elif layout != "one":
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS[layout],)))
    return model


def _trainer(folder: Path, name: str, layout: str, source: str, checkpoint: dict[str, Any]) -> Any:
    model = _model(layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    config = CheckpointingConfig(
        checkpoint_dir=str(folder / name),
        save_steps=1,
        restore_from=str(folder / source) if source else None,
        check_coverage=False,
        **checkpoint,
    )
    return SimpleNamespace(
        config=SimpleNamespace(checkpoint=config),
        model=model,
        optimizer=optimizer,
        lr_scheduler=None,
        train_dataloader=DataLoader(Ids(8), batch_size=1, seed=3),
        state=TrainerState(),
        train_steps=100,
        start_epoch=0,
        start_step=0,
        averages=Averages(model),
    )


def _fill(trainer: Any, *, updates: int, own: int) -> None:
    averages, parameters = trainer.averages, dict(trainer.model.named_parameters())
    averages.named = {name: one.detach().clone() for name, one in parameters.items()}
    averages.listed = [one.detach() ** 2 for one in parameters.values()]
    averages.updates, averages.own = updates, own


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _leg(folder: Path, name: str, layout: str, source: str, *, own_differs: bool = False, **checkpoint: Any) -> Any:
    """Every rank: restore where there is a source, or set the averages; save one step; tell what the averages are."""
    trainer = _trainer(folder, name, layout, source, checkpoint)
    callback = CheckpointerCallback(trainer)
    if not source:
        _fill(trainer, updates=7, own=collective.rank() if own_differs else 5)
    callback.on_train_begin(trainer.state)
    trainer.state.global_step += 1
    callback.on_step_end(trainer.state)
    callback.on_train_end(trainer.state)
    averages = trainer.averages
    return {
        "named": {name: _whole(one) for name, one in averages.named.items()},
        "listed": [_whole(one) for one in averages.listed],
        "placed": [
            getattr(one, "placements", None) == getattr(parameter, "placements", None)
            for one, parameter in zip(averages.listed, trainer.model.parameters(), strict=True)
        ],
        "rest": (averages.updates, averages.own),
    }


# (name, layout, source, further arguments) of a leg.
Legs = list[tuple[str, str, str, dict[str, Any]]]


def _all_legs(folder: Path, legs: Legs) -> dict[str, Any]:
    """Every rank: one leg after the other, in one process group."""
    return {name: _leg(folder, name, layout, source, **more) for name, layout, source, more in legs}


def verdict(folder: Path, name: str) -> set[str]:
    (path,) = (folder / name / "certificates").iterdir()
    parts = json.loads(path.read_text())["parts"]
    return {f"{part['verdict']} {part['reason']}".strip() for part in parts if part["bucket"] == "stateful"}


def assert_as_saved(ranks: list[Any]) -> None:
    shapes = {name: one.shape for name, one in _model("one").named_parameters()}
    for rank in ranks:
        assert rank["rest"] == (7, 5)
        assert all(rank["placed"])
        assert rank["named"].keys() == shapes.keys()
        for (name, shape), square in zip(shapes.items(), rank["listed"], strict=True):
            assert torch.equal(rank["named"][name], _values(name, shape)), name
            assert torch.equal(square, _values(name, shape) ** 2), name


CHANGES = [("dp2", "dp4"), ("dp4", "dp2"), ("dp4", "tp"), ("tp", "dp4"), ("tp", "dp2"), ("dp2", "tp"), ("tp", "one")]


@dataclass(frozen=True, kw_only=True)
class Run:
    folder: Path
    legs: dict[str, list[Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Saved by two ranks, by four and by two pairs, in both layouts of the training state; then every change of them."""
    folder = tmp_path_factory.mktemp("resharded")
    found: dict[str, list[Any]] = {}

    def legs(ranks: int, *chosen: Any) -> None:
        results = [_all_legs(folder, list(chosen))] if ranks == 1 else run_ranks(_all_legs, ranks, folder, list(chosen))
        found.update({name: [rank[name] for rank in results] for name, *_ in chosen})

    def changes_to(ranks: int) -> Iterator[Any]:
        for before, now in CHANGES:
            if RANKS[now] == ranks:
                yield f"{before} to {now}", now, f"{before}/global_step_1", {}
                # What was put together is saved as any other state.
                yield f"{before} to {now} and on", now, f"{before} to {now}/global_step_2", {}

    legs(2, ("dp2", "dp2", "", {}))
    legs(
        4,
        ("dp4", "dp4", "", {"save_extra_state_per_rank": False}),
        ("tp", "tp", "", {}),
        ("of its own", "dp4", "", {"own_differs": True}),
        *changes_to(4),
    )
    legs(2, *changes_to(2), ("of another", "dp2", "of its own/global_step_1", {}))
    legs(1, *changes_to(1))
    return Run(folder=folder, legs=found)


@pytest.mark.parametrize(("before", "now"), CHANGES, ids=[" to ".join(change) for change in CHANGES])
def test_averages_come_back_as_they_were_on_another_mesh_and_are_certified_so(run: Run, before: str, now: str) -> None:
    for name in (f"{before} to {now}", f"{before} to {now} and on"):
        assert len(run.legs[name]) == RANKS[now]
        assert_as_saved(run.legs[name])
        assert verdict(run.folder, name) == {"exact"}


def test_what_differs_between_the_ranks_that_saved_is_that_of_one_of_them_and_named(run: Run) -> None:
    for rank in run.legs["of another"]:
        assert rank["rest"] == (7, 0)
        assert torch.equal(rank["named"]["0.weight"], _values("0.weight", torch.Size((10, 6))))
    reason = "degraded the number of ranks changed: this is the state of rank 0 (averages)"
    assert verdict(run.folder, "of another") == {reason}


# ---- the parts by themselves ----------------------------------------------------------------------------------------


def state(rank: int, parts: dict[str, list[list[int]]] | list[str], **tensors: torch.Tensor) -> dict[str, Any]:
    """A training state with an object ``ema`` of these tensors."""
    return {"rank": rank, "world_size": 2, "global_step": 1, "sharded": parts, "stateful": {"ema": dict(tensors)}}


def halves(*, second: list[list[int]] | None = None, copies: bool = False) -> list[dict[str, Any]]:
    """Two ranks with three rows and one of a tensor of 4 x 2; with ``copies`` the second has the first's last row too."""
    values = torch.arange(8.0).reshape(4, 2)
    begin = 2 if copies else 3
    return [
        state(0, {"ema.w": [[4, 2], [0, 0], [3, 2]]}, w=values[:3]),
        state(1, {"ema.w": second or [[4, 2], [begin, 0], [4 - begin, 2]]}, w=values[begin:].clone()),
    ]


def put_together(states: list[dict[str, Any]], *, offsets: list[int], sizes: list[int]) -> torch.Tensor:
    wanted = {"ema.w": Part(shape=(4, 2), offsets=tuple(offsets), sizes=tuple(sizes))}
    result = reshard(states[0], range(len(states)), states.__getitem__, wanted, None)
    found: torch.Tensor = result["stateful"]["ema"]["w"]
    assert result["resharded"] == [[], ["ema.w"]]
    assert result["sharded"] == {"ema.w": [[4, 2], offsets, sizes]}
    return found


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize(("begin", "end"), [(0, 4), (0, 2), (2, 4), (3, 4), (1, 1)])
def test_a_part_is_cut_out_of_those_that_hold_it(begin: int, end: int, copies: bool) -> None:
    found = put_together(halves(copies=copies), offsets=[begin, 0], sizes=[end - begin, 2])
    assert torch.equal(found, torch.arange(8.0).reshape(4, 2)[begin:end])


def test_copies_of_a_part_that_differ_are_refused() -> None:
    states = halves(copies=True)
    states[1]["stateful"]["ema"]["w"][0, 0] += 1
    with pytest.raises(CheckpointMismatchError, match=r"stateful\.ema\.w.*the same values on all ranks"):
        put_together(states, offsets=[0, 0], sizes=[4, 2])


def test_parts_of_two_saves_are_refused() -> None:
    states = halves()
    states[1]["save_id"] = "another"
    with pytest.raises(CheckpointMismatchError, match=r"the extra_state of rank 1.*step 1 of the same save"):
        put_together(states, offsets=[0, 0], sizes=[4, 2])


def test_a_part_that_no_rank_saved_is_refused() -> None:
    with pytest.raises(CheckpointMismatchError, match="parts for all of its 8 elements"):
        put_together(halves()[:1], offsets=[0, 0], sizes=[4, 2])


@pytest.mark.parametrize("second", [[[4, 2], [3, 0], [2, 2]], [[4, 2], [3, 0]], [[4, 2], [-1, 0], [1, 2]], "4 x 2", []])
def test_a_place_outside_of_its_tensor_is_refused(second: Any) -> None:
    states = halves()
    states[1]["sharded"] = {"ema.w": second}
    with pytest.raises(CheckpointMismatchError, match="a part within its tensor"):
        put_together(states, offsets=[0, 0], sizes=[4, 2])


def test_a_place_of_another_size_than_its_part_is_refused() -> None:
    with pytest.raises(CheckpointMismatchError, match="do not fit together"):
        put_together(halves(second=[[4, 2], [2, 0], [2, 2]]), offsets=[0, 0], sizes=[4, 2])


def test_a_training_state_without_places_is_left_as_it_is() -> None:
    states = [state(rank, ["ema.w"], w=torch.zeros(2, 2)) for rank in range(2)]
    assert parts_from_plain(states[0]["sharded"]) == {}

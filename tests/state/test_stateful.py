"""Whatever else a trainer holds that has a state: found by looking, saved by name."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hyper_resume.checkpoint.format.extra_state import encode, to_plain_state
from hyper_resume.errors import CheckpointMismatchError
from hyper_resume.state.stateful import (
    apply_stateful,
    check_sharding,
    collect_stateful,
    find_stateful,
    live_states,
    sharded_parts,
)
from tests.ranks import run_ranks
from tests.state.disk import same_bits


class EarlyStopping:
    """A callback that counts."""

    def __init__(self) -> None:
        self.best = float("inf")
        self.patience = 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "patience": self.patience}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.patience = state["best"], state["patience"]


class Silent:
    """A callback without a state."""


class Metric(nn.Module):
    """Only buffers: torchmetrics look like this."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1))


class Remembering(nn.Module):
    """Neither parameter nor buffer, and yet a state."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Calibrated(nn.Module):
    """A part of the model with a buffer that the model does not have."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.register_buffer("temperature", torch.ones(1))


def trainer() -> SimpleNamespace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        encoder=model[0],
        head=Calibrated(model[0]),
        whole=nn.ModuleList([model[0], model[1]]),
        loss=nn.CrossEntropyLoss(),
        compiled=torch.compile(model, backend="eager"),
        ema=AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),  # type: ignore[no-untyped-call]
        scaler=torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2),
        noise=torch.Generator().manual_seed(3),
        metric=Metric(),
        remembering=Remembering(),
        config={"lr": 0.1},
        name="run",
        device=torch.device("cpu"),
    )


def find(owner: SimpleNamespace, callbacks: tuple[Any, ...] = ()) -> dict[str, Any]:
    return find_stateful(owner, callbacks, [owner.model, owner.optimizer])


def through_bytes(state: dict[str, Any]) -> dict[str, Any]:
    return dict(torch.load(io.BytesIO(encode(to_plain_state({"stateful": state}))), weights_only=True)["stateful"])


def test_everything_with_a_state_is_found_once_and_the_model_not_again() -> None:
    assert set(find(trainer())) == {"ema", "scaler", "noise", "metric", "remembering", "head"}


def test_callbacks_are_named_by_class_and_number() -> None:
    first, second, third = EarlyStopping(), EarlyStopping(), EarlyStopping()
    found = find_stateful(SimpleNamespace(), [first, Silent(), second, third], [])
    assert found == {
        "callback.EarlyStopping": first,
        "callback.EarlyStopping.2": second,
        "callback.EarlyStopping.3": third,
    }


def test_half_a_protocol_is_none() -> None:
    owner = SimpleNamespace(reader=SimpleNamespace(state_dict=dict), writer=SimpleNamespace(load_state_dict=print))
    assert find_stateful(owner, [], []) == {}


def disturb(owner: SimpleNamespace) -> None:
    """Move every state on."""
    with torch.no_grad():
        for parameter in owner.model.parameters():
            parameter.add_(1.0)
    owner.ema.update_parameters(owner.model)
    owner.ema.update_parameters(owner.model)
    owner.scaler.scale(torch.tensor(1.0))
    owner.scaler.update(128.0)
    torch.rand(3, generator=owner.noise)
    owner.metric.total += 5
    owner.head.temperature *= 3
    owner.remembering.seen += 2


def test_every_state_comes_back_through_the_file_format() -> None:
    saved = trainer()
    stopping = EarlyStopping()
    disturb(saved)
    stopping.best, stopping.patience = 0.5, 2
    state = through_bytes(collect_stateful(find(saved, (stopping,))))

    fresh, fresh_stopping = trainer(), EarlyStopping()
    apply_stateful(find(fresh, (fresh_stopping,)), state)

    assert (fresh_stopping.best, fresh_stopping.patience) == (0.5, 2)
    assert same_bits(dict(fresh.ema.state_dict()), dict(saved.ema.state_dict()))
    assert fresh.ema.n_averaged.item() == 2
    assert fresh.scaler.state_dict() == saved.scaler.state_dict()
    assert fresh.scaler.get_scale() == 128.0
    assert torch.equal(torch.rand(4, generator=fresh.noise), torch.rand(4, generator=saved.noise))
    assert fresh.metric.total.item() == 5
    assert fresh.head.temperature.item() == 3
    assert fresh.remembering.seen == 2


def test_what_is_collected_is_a_copy() -> None:
    owner = trainer()
    state = collect_stateful(find(owner))
    before = through_bytes(state)
    disturb(owner)
    assert same_bits(through_bytes(state), before)


def test_a_state_on_one_side_only_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    kept = EarlyStopping()
    kept.patience = 7
    with caplog.at_level(logging.WARNING):
        apply_stateful({"new": kept}, {"gone": {"best": 1.0}})
    assert "state of gone, which this trainer does not have" in caplog.text
    assert "no state of new" in caplog.text
    assert kept.patience == 7


class Shadow:
    """A moving average as a plain dict of sharded tensors, with a plain counter."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: value.detach() * 0.5 for name, value in model.state_dict().items()}
        self.updates = 0

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates = state["shadow"], state["updates"]


def _averages_of_a_sharded_model() -> dict[str, Any]:
    """Their tensors are sharded as the model's; each rank keeps its own part."""

    def make(seed: int) -> SimpleNamespace:
        torch.manual_seed(seed)
        parts = [nn.Linear(3, 5), nn.Linear(3, 5)]
        for part in parts:
            fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return SimpleNamespace(model=parts[0], ema=parts[1], shadow=Shadow(parts[0]))

    def local(owner: SimpleNamespace) -> list[dict[str, torch.Tensor]]:
        states = [owner.ema.state_dict(), owner.shadow.shadow]
        return [{name: value.to_local().clone() for name, value in state.items()} for state in states]

    saved, fresh = make(0), make(1)
    saved.shadow.updates = 9
    state = through_bytes(collect_stateful(find_stateful(saved, [], [saved.model])))
    kinds = {type(value).__name__ for part in (state["ema"], state["shadow"]["shadow"]) for value in part.values()}
    apply_stateful(find_stateful(fresh, [], [fresh.model]), state)
    restored = same_bits(local(fresh), local(saved))
    torn = {"ema": {**state["ema"], "weight": torch.zeros(9, 9)}}
    message = ""
    try:
        apply_stateful(find_stateful(fresh, [], [fresh.model]), torn)
    except CheckpointMismatchError as error:
        message = str(error)
    return {
        "kinds": kinds,
        "restored": restored,
        "updates": fresh.shadow.updates,
        "sharded": isinstance(fresh.ema.weight, DTensor) and isinstance(fresh.shadow.shadow["weight"], DTensor),
        "message": message,
    }


def test_averages_of_a_sharded_model_keep_each_ranks_part() -> None:
    for result in run_ranks(_averages_of_a_sharded_model, 2):
        assert result["kinds"] == {"Tensor"}
        assert result["restored"]
        assert result["updates"] == 9
        assert result["sharded"]
        assert "saved part of ema.weight does not fit this rank" in result["message"]


class ListedShadow:
    """A moving average as a list of sharded tensors in a list; ``made`` says whether it is made at once."""

    def __init__(self, model: nn.Module, *, made: bool = True) -> None:
        self.shadow = [[value.detach() * 0.5 for value in model.parameters()]] if made else []

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def _lists_of_sharded_tensors() -> dict[str, Any]:
    def sharded(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Linear(3, 5)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model

    saved, fresh = ListedShadow(sharded(0)), ListedShadow(sharded(1))
    late, longer = ListedShadow(sharded(1), made=False), ListedShadow(sharded(1))
    longer.shadow[0].append(longer.shadow[0][0])
    state, parts = through_bytes(collect_stateful({"ema": saved})), sharded_parts(live_states({"ema": saved}))
    apply_stateful({"ema": fresh}, state)
    message = ""
    try:
        apply_stateful({"ema": longer}, state)
    except CheckpointMismatchError as error:
        message = str(error)
    return {
        "restored": [
            isinstance(new, DTensor) and same_bits(new.to_local(), old.to_local()) and new.shape == old.shape
            for new, old in zip(fresh.shadow[0], saved.shadow[0], strict=True)
        ],
        "parts": parts,
        "reasons": [check_sharding({"ema": one}, [*parts, "gone.shadow.0"]) for one in (fresh, late)],
        "message": message,
    }


def test_lists_of_sharded_tensors_come_back_sharded() -> None:
    for rank, result in enumerate(run_ranks(_lists_of_sharded_tensors, 2)):
        assert result["restored"] == [True, True]
        # Five rows on two ranks: three and two.
        assert result["parts"] == {
            "ema.shadow.0.0": [[5, 3], [3 * rank, 0], [3 - rank, 3]],
            "ema.shadow.0.1": [[5], [3 * rank], [3 - rank]],
        }
        assert "the saved list ema.shadow.0 of sharded tensors does not fit this run" in result["message"]


def test_a_list_that_this_run_has_not_made_yet_is_named() -> None:
    for result in run_ranks(_lists_of_sharded_tensors, 2):
        made, late = result["reasons"]
        assert made == []
        assert late == [
            "tensors that were sharded are not made in this run yet, so their local parts come back: "
            "ema.shadow.0.0, ema.shadow.0.1"
        ]

"""The lr_scheduler bucket: the group's lr equals the saved one, and the curve goes on, whatever the scheduler."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.format.extra_state import to_plain_state
from hyper_resume.errors import CheckpointMismatchError, StateNotPlainError
from hyper_resume.state.optimizer import apply_optimizers, collect_optimizers
from hyper_resume.state.scheduler import apply_schedulers, collect_schedulers, expected_scheduler_states

Optimizer = torch.optim.Optimizer
Factory = Callable[[Optimizer], Any]


def sequential(optimizer: Optimizer) -> lrs.SequentialLR:
    parts = [
        lrs.LinearLR(optimizer, 0.1, total_iters=3),
        lrs.CosineAnnealingLR(optimizer, 6),
        lrs.ConstantLR(optimizer),
    ]
    return lrs.SequentialLR(optimizer, parts, milestones=[3, 6])


def half_cosine(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / 12))


def numpy_cosine(step: int) -> float:
    return 0.5 * (1 + np.cos(np.pi * step / 12))  # type: ignore[no-any-return]  # a numpy.float64, as users write it


SCHEDULERS: dict[str, Factory] = {
    "LinearLR": lambda o: lrs.LinearLR(o, 0.1, total_iters=8),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, total_iters=7),
    "SequentialLR": sequential,
    "LambdaLR": lambda o: lrs.LambdaLR(o, half_cosine),
    "LambdaLR on numpy": lambda o: lrs.LambdaLR(o, numpy_cosine),
    "LambdaLR per group": lambda o: lrs.LambdaLR(o, [half_cosine, lambda step: 1 / (1 + step)]),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.9),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, max_lr=[0.5, 0.4], total_steps=20),
    "OneCycleLR linear": lambda o: lrs.OneCycleLR(o, max_lr=0.5, total_steps=20, anneal_strategy="linear"),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 12),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 2, 7, 9], gamma=0.5),
    "StepLR": lambda o: lrs.StepLR(o, 2, gamma=0.5),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 12, power=2.0),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.5, step_size_up=3),
    "CyclicLR triangular2": lambda o: lrs.CyclicLR(o, 0.01, 0.5, step_size_up=3, mode="triangular2"),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.LinearLR(o, 0.2, total_iters=4), lrs.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=8),
}


def make_optimizer(seed: int) -> torch.optim.SGD:
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(3, generator=generator)) for _ in range(2)]
    return torch.optim.SGD([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.2}], momentum=0.9)


def advance(optimizer: Optimizer, scheduler: Any, steps: range) -> list[list[tuple[float, float]]]:
    """Step both; returns what the groups used at each update."""
    used = []
    for step in steps:
        used.append([(float(group["lr"]), group["momentum"]) for group in optimizer.param_groups])
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
        optimizer.step()
        if isinstance(scheduler, lrs.ReduceLROnPlateau):
            scheduler.step(1.0 + (step % 3))
        else:
            scheduler.step()
    return used


def names(optimizer: Optimizer) -> dict[int, str]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(parameter): f"p{index}" for index, parameter in enumerate(parameters)}


def through_disk(folder: Path, optimizer: Optimizer, schedulers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
    """Save both buckets and read them back."""
    checkpointer = DistributedCheckpointer()
    bucket = collect_optimizers([optimizer], names(optimizer))
    state = {"optimizer": bucket, "extra_state": {"lr_scheduler": collect_schedulers(schedulers)}}
    checkpointer.save(str(folder / "global_step_1"), state, global_step=1)
    target: dict[str, Any] = {"optimizer": {"0": {"state": {}, "param_groups": None}}}
    for name, entries in bucket["0"]["state"].items():
        target["optimizer"]["0"]["state"][name] = {key: torch.zeros_like(value) for key, value in entries.items()}
    extra = checkpointer.load(str(folder / "global_step_1"), target, extra_state_skeleton={"lr_scheduler": None})
    return target["optimizer"], extra["lr_scheduler"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stop", [1, 4, 7])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("build", ["scheduler first", "optimizer restored first", "without the optimizer's bucket"])
def test_the_lr_curve_goes_on(tmp_path: Path, name: str, stop: int, build: str) -> None:
    optimizer = make_optimizer(0)
    scheduler = SCHEDULERS[name](optimizer)
    advance(optimizer, scheduler, range(stop))
    saved_lrs = [group["lr"] for group in optimizer.param_groups]
    bucket, saved = through_disk(tmp_path, optimizer, [scheduler])
    expected = advance(optimizer, scheduler, range(stop, stop + 6))

    fresh = make_optimizer(1)
    if build == "optimizer restored first":
        apply_optimizers([fresh], names(fresh), bucket)
        fresh_scheduler = SCHEDULERS[name](fresh)
    else:
        fresh_scheduler = SCHEDULERS[name](fresh)
        if build == "scheduler first":
            apply_optimizers([fresh], names(fresh), bucket)
    apply_schedulers([fresh_scheduler], saved)

    assert [float(group["lr"]) for group in fresh.param_groups] == [float(lr) for lr in saved_lrs]
    assert advance(fresh, fresh_scheduler, range(stop, stop + 6)) == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_every_scheduler_of_torch_is_plain(name: str) -> None:
    optimizer = make_optimizer(0)
    scheduler = SCHEDULERS[name](optimizer)
    advance(optimizer, scheduler, range(3))
    to_plain_state({"lr_scheduler": collect_schedulers([scheduler])})


class StatefulLambda:
    """A lambda with something in it that can't be saved."""

    def __init__(self) -> None:
        self.table = np.ones(3)

    def __call__(self, step: int) -> float:
        return float(self.table[step % 3])


def test_a_lambda_object_that_holds_an_array_is_refused_by_name() -> None:
    scheduler = lrs.LambdaLR(make_optimizer(0), StatefulLambda())
    with pytest.raises(StateNotPlainError, match=r"lr_scheduler\[0\]\.lr_lambdas\[0\]\.table.*numpy\.ndarray"):
        to_plain_state({"lr_scheduler": collect_schedulers([scheduler])})


def test_a_tensor_lr_stays_the_same_tensor(tmp_path: Path) -> None:
    def make() -> tuple[torch.optim.AdamW, lrs.LinearLR]:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1))
        return optimizer, lrs.LinearLR(optimizer, 0.1, total_iters=8)

    optimizer, scheduler = make()
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    fresh, fresh_scheduler = make()
    held = fresh.param_groups[0]["lr"]
    bucket, saved = through_disk(tmp_path, optimizer, [scheduler])
    apply_optimizers([fresh], names(fresh), bucket)
    apply_schedulers([fresh_scheduler], saved)
    assert fresh.param_groups[0]["lr"] is held
    assert held.item() == optimizer.param_groups[0]["lr"].item()
    for pair in ((optimizer, scheduler), (fresh, fresh_scheduler)):
        pair[0].step()
        pair[1].step()
    assert held.item() == optimizer.param_groups[0]["lr"].item()


def test_an_lr_that_was_changed_by_hand_is_not_undone_by_the_scheduler(tmp_path: Path) -> None:
    optimizer = make_optimizer(0)
    scheduler = lrs.ExponentialLR(optimizer, 0.5)
    advance(optimizer, scheduler, range(2))
    optimizer.param_groups[0]["lr"] = 0.0625
    bucket, saved = through_disk(tmp_path, optimizer, [scheduler])
    expected = advance(optimizer, scheduler, range(2, 5))
    fresh = make_optimizer(1)
    fresh_scheduler = lrs.ExponentialLR(fresh, 0.5)
    apply_optimizers([fresh], names(fresh), bucket)
    apply_schedulers([fresh_scheduler], saved)
    assert advance(fresh, fresh_scheduler, range(2, 5)) == expected


@pytest.mark.filterwarnings("ignore")
def test_two_schedulers_on_one_optimizer_leave_the_lr_that_both_made(tmp_path: Path) -> None:
    """The plateau is stepped once an epoch, so its idea of the lr is old by the time of the save."""

    def make(seed: int) -> tuple[Optimizer, list[Any]]:
        optimizer = make_optimizer(seed)
        return optimizer, [lrs.LinearLR(optimizer, 0.1, total_iters=8), lrs.ReduceLROnPlateau(optimizer, patience=0)]

    optimizer, (each_step, each_epoch) = make(0)
    advance(optimizer, each_step, range(2))
    each_epoch.step(1.0)
    advance(optimizer, each_step, range(2, 4))
    bucket, saved = through_disk(tmp_path, optimizer, [each_step, each_epoch])
    expected = advance(optimizer, each_step, range(4, 7))
    for order in (("before",), ("after",)):
        fresh, schedulers = make(1)
        if order == ("before",):
            apply_optimizers([fresh], names(fresh), bucket)
        apply_schedulers(schedulers, saved)
        assert advance(fresh, schedulers[0], range(4, 7)) == expected


@pytest.mark.parametrize(("saved_count", "running_count"), [(2, 1), (1, 2), (0, 1), (1, 0)])
def test_a_changed_number_of_schedulers_pairs_the_first_ones_with_a_warning(
    saved_count: int, running_count: int, caplog: pytest.LogCaptureFixture
) -> None:
    def make(count: int) -> list[lrs.StepLR]:
        return [lrs.StepLR(make_optimizer(index), 1, gamma=0.5) for index in range(count)]

    saved = make(saved_count)
    for scheduler in saved:
        advance(scheduler.optimizer, scheduler, range(3))
    running = make(running_count)
    apply_schedulers(running, collect_schedulers(saved))
    assert f"holds {saved_count} lr schedulers and this run has {running_count}" in caplog.text
    paired = min(saved_count, running_count)
    assert [scheduler.last_epoch for scheduler in running] == [3] * paired + [0] * (running_count - paired)


def test_an_optimizer_with_another_number_of_groups_is_an_error() -> None:
    saved = collect_schedulers([lrs.StepLR(make_optimizer(0), 1)])
    single = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(CheckpointMismatchError, match=r"StepLR does not fit.*expected: 1 parameter groups.*found: 2"):
        apply_schedulers([lrs.StepLR(single, 1)], saved)


def test_a_state_without_group_options_falls_back_to_the_last_lr() -> None:
    scheduler = lrs.LinearLR(make_optimizer(0), 0.1, total_iters=8)
    advance(scheduler.optimizer, scheduler, range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = lrs.LinearLR(make_optimizer(1), 0.1, total_iters=8)
    apply_schedulers([other], [scheduler.state_dict()])
    assert [group["lr"] for group in other.optimizer.param_groups] == scheduler.get_last_lr()


class Foreign:
    """A schedule that is none of torch's: no optimizer, only a position."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.position,) = state.values()


def test_a_scheduler_without_an_optimizer_gets_its_own_state_and_nothing_more() -> None:
    saved, fresh = Foreign(), Foreign()
    saved.position = 5
    apply_schedulers([fresh], collect_schedulers([saved]))
    assert fresh.position == 5


def with_two_groups(*, reverse: bool) -> tuple[Optimizer, dict[int, str]]:
    """Two groups of different lr; ``reverse`` gives them in the other order. The names stay."""
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups[::-1] if reverse else groups, momentum=0.9)
    return optimizer, {id(first): "first", id(second): "second"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name not in ("LambdaLR per group", "OneCycleLR")])
def test_groups_in_another_order_each_get_their_own_lr_back(name: str) -> None:
    optimizer, own_names = with_two_groups(reverse=False)
    scheduler = SCHEDULERS[name](optimizer)
    advance(optimizer, scheduler, range(4))
    saved = collect_schedulers([scheduler], own_names)
    buckets = collect_optimizers([optimizer], own_names)
    expected = advance(optimizer, scheduler, range(4, 10))

    other, other_names = with_two_groups(reverse=True)
    other_scheduler = SCHEDULERS[name](other)
    apply_optimizers([other], other_names, buckets)
    apply_schedulers([other_scheduler], saved, other_names)

    assert [step[::-1] for step in advance(other, other_scheduler, range(4, 10))] == expected


def test_parameters_of_a_group_in_another_order_are_the_same_state() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    own_names = dict(zip(map(id, parameters), ("first", "second"), strict=True))
    one, turned = (lrs.LinearLR(torch.optim.SGD(order)) for order in (parameters, parameters[::-1]))
    assert collect_schedulers([one], own_names) == collect_schedulers([turned], own_names)

    (saved,) = collect_schedulers([one], own_names)
    saved["group_options"][0]["params"] = ["second", "first"]  # as an earlier version saved it
    assert expected_scheduler_states([one], [saved], own_names) == collect_schedulers([one], own_names)
    assert saved["group_options"][0]["params"] == ["second", "first"]


def test_an_empty_group_takes_the_place_that_is_left_over() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    own_names = {id(first): "first", id(second): "second"}
    groups: list[dict[str, Any]] = [
        {"params": [first], "lr": 0.1},
        {"params": [second], "lr": 0.2},
        {"params": [], "lr": 0.3},
    ]
    saved = collect_schedulers([lrs.ConstantLR(torch.optim.SGD(groups), 1.0)], own_names)

    other = torch.optim.SGD([{**group, "lr": 1.0} for group in (groups[2], groups[1], groups[0])])
    apply_schedulers([lrs.ConstantLR(other, 1.0)], saved, own_names)

    assert [group["lr"] for group in other.param_groups] == [0.3, 0.2, 0.1]


def test_groups_that_were_cut_anew_keep_their_places() -> None:
    optimizer, own_names = with_two_groups(reverse=False)
    saved = collect_schedulers([lrs.ConstantLR(optimizer, 1.0)], own_names)
    both = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    other = torch.optim.SGD([{"params": both, "lr": 1.0}, {"params": [nn.Parameter(torch.ones(3))], "lr": 1.0}])
    apply_schedulers([lrs.ConstantLR(other, 1.0)], saved, own_names)

    assert [group["lr"] for group in other.param_groups] == [0.1, 0.2]

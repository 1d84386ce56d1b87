"""A schedule is described by its arguments and functions, and its later learning rates are those of a run that steps it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from hyper_resume.state.planned_schedule import replay, schedule_options
from hyper_resume.state.scheduler import collect_schedulers

Optimizer = torch.optim.Optimizer


def new_optimizer() -> Optimizer:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    return torch.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.3}], lr=0.1)


def half(step: int) -> float:
    return 0.5**step


def falling(step: int, *, horizon: int, shape: Callable[[float], float]) -> float:
    return shape(1 - step / horizon)


def sequential(optimizer: Optimizer) -> Any:
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.CosineAnnealingLR(optimizer, T_max=9)]
    return schedules.SequentialLR(optimizer, parts, milestones=[3])


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, half),
    "partial": lambda optimizer: schedules.LambdaLR(optimizer, functools.partial(falling, horizon=9, shape=math.sqrt)),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, T_max=9, eta_min=0.01),
    "restarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, T_0=3, T_mult=2),
    "step": lambda optimizer: schedules.StepLR(optimizer, step_size=2),
    "milestones": lambda optimizer: schedules.MultiStepLR(optimizer, [2, 5], gamma=0.5),
    "onecycle": lambda optimizer: schedules.OneCycleLR(optimizer, max_lr=[1.0, 2.0], total_steps=12),
    "cyclic": lambda optimizer: schedules.CyclicLR(optimizer, 0.1, 0.5, step_size_up=3, cycle_momentum=False),
    "sequential": sequential,
    "chained": lambda optimizer: schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.5, total_iters=3), schedules.ExponentialLR(optimizer, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_replay_has_the_state_of_a_scheduler_that_was_stepped_and_moves_nothing(name: str) -> None:
    stepped, new = (SCHEDULES[name](new_optimizer()) for _ in range(2))
    for _ in range(7):
        stepped.optimizer.step()
        stepped.step()
    before = collect_schedulers([new])
    saved = collect_schedulers([stepped])
    found = replay([new], saved)
    assert found is not None
    assert collect_schedulers(found.schedulers) == saved
    assert collect_schedulers([new]) == before
    groups = found.groups_of(new.optimizer)
    assert groups is not None
    assert [group["lr"] for group in groups] == [group["lr"] for group in stepped.optimizer.param_groups]
    assert found.groups_of(stepped.optimizer) is None


def test_two_schedulers_of_one_optimizer_are_replayed_together() -> None:
    def both(optimizer: Optimizer) -> list[Any]:
        return [schedules.LinearLR(optimizer, 1.0, 0.5, total_iters=9), schedules.ExponentialLR(optimizer, 0.97)]

    stepped, new = both(new_optimizer()), both(new_optimizer())
    for _ in range(5):
        stepped[0].optimizer.step()
        for one in stepped:
            one.step()
    found = replay(new, collect_schedulers(stepped))
    assert found is not None
    assert collect_schedulers(found.schedulers) == collect_schedulers(stepped)


def test_a_replay_copies_no_object_whose_method_is_the_schedule() -> None:
    class Owner:
        weight = torch.ones(3)

        def factor(self, step: int) -> float:
            return half(step)

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

    new = schedules.LambdaLR(new_optimizer(), Owner().factor)
    assert replay([new], [{"last_epoch": 3}]) is not None


@pytest.mark.parametrize(
    ("scheduler", "saved"),
    [
        (lambda optimizer: schedules.ReduceLROnPlateau(optimizer), [{"last_epoch": 3}]),
        (lambda optimizer: schedules.OneCycleLR(optimizer, max_lr=1.0, total_steps=3), [{"last_epoch": 7}]),
        (lambda optimizer: schedules.LambdaLR(optimizer, half), [{}]),
        (lambda optimizer: schedules.LambdaLR(optimizer, half), []),
    ],
    ids=["metric", "ended", "no-count", "other-number"],
)
def test_what_can_not_be_computed_is_none(scheduler: Callable[[Optimizer], Any], saved: list[Any]) -> None:
    assert replay([scheduler(new_optimizer())], saved) is None


def test_the_options_are_arguments_and_what_is_bound_to_functions() -> None:
    found = {name: schedule_options(make(new_optimizer())) for name, make in SCHEDULES.items()}
    assert found["partial"] == {
        "class": "torch.optim.lr_scheduler.LambdaLR",
        "function": f"{__name__}.falling",
        "code": found["partial"]["code"],
        "horizon": 9,
        "shape": "math.sqrt",
    }
    assert found["cosine"] == {"class": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": 9, "eta_min": 0.01}
    assert found["milestones"]["milestones"] == [[2, 1], [5, 1]]
    assert found["onecycle"]["total_steps"] == 12
    inner = found["sequential"]["schedulers"]
    assert (inner["0"]["start_factor"], inner["1"]["T_max"]) == (0.1, 9)
    assert found["sequential"]["milestones"] == [3]


def test_options_do_not_move_with_the_schedule_but_with_its_function() -> None:
    def closure(horizon: int) -> Callable[[int], float]:
        return lambda step: 1 - step / horizon

    options = [schedule_options(schedules.LambdaLR(new_optimizer(), closure(horizon))) for horizon in (4, 4, 5)]
    assert options[0] == options[1]
    assert (options[0]["horizon"], options[2]["horizon"]) == (4, 5)
    functions = (lambda step: 0.9**step, lambda step: 0.8**step)
    codes = [schedule_options(schedules.LambdaLR(new_optimizer(), one))["code"] for one in functions]
    assert codes[0] != codes[1]

"""Optimizers and schedules as configured."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from hyper_resume.config.schema import LRSchedulerConfig, OptimizerConfig
from hyper_resume.errors import ConfigError
from hyper_resume.optim import ChainedOptimizer, build_lr_schedulers, build_optimizer


class Model(nn.Module):
    """The parts that the rules tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 4)
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 5, bias=False)


def names_of(model: nn.Module, group: dict[str, Any]) -> set[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in group["params"]}


def test_adamw_decays_matrices_only() -> None:
    model = Model()
    config = OptimizerConfig(name="adamw", lr=0.02, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)
    optimizer = build_optimizer(model, config)
    assert isinstance(optimizer, torch.optim.AdamW)
    decay, rest = optimizer.param_groups
    assert names_of(model, decay) == {"embed_tokens.weight", "layer.weight", "lm_head.weight"}
    assert names_of(model, rest) == {"layer.bias", "norm.weight", "norm.bias"}
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    for group in (decay, rest):
        assert (group["lr"], group["betas"], group["eps"]) == (0.02, (0.8, 0.9), 1e-6)


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    model = Model()
    config = OptimizerConfig(name="muon", lr=0.01, muon_lr=0.03, muon_momentum=0.8, weight_decay=0.2)
    optimizer = build_optimizer(model, config)
    assert isinstance(optimizer, ChainedOptimizer)
    muon, adamw = optimizer.chained_optimizers
    assert isinstance(muon, torch.optim.Muon)
    assert names_of(model, muon.param_groups[0]) == {"layer.weight"}
    assert (muon.param_groups[0]["lr"], muon.param_groups[0]["momentum"]) == (0.03, 0.8)
    rest = set().union(*(names_of(model, group) for group in adamw.param_groups))
    assert rest == {name for name, _ in model.named_parameters()} - {"layer.weight"}


def test_frozen_parameters_are_left_out() -> None:
    model = Model()
    for parameter in (*model.embed_tokens.parameters(), *model.norm.parameters()):
        parameter.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig(name="adamw"))
    found = set().union(*(names_of(model, group) for group in optimizer.param_groups))
    assert found == {"layer.weight", "layer.bias", "lm_head.weight"}


def test_a_group_without_members_is_not_made() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2, bias=False), OptimizerConfig(name="adamw"))
    assert len(optimizer.param_groups) == 1


def test_a_model_that_the_optimizer_has_nothing_of_is_refused() -> None:
    frozen = Model()
    frozen.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_optimizer(frozen, OptimizerConfig(name="adamw"))
    with pytest.raises(ConfigError, match="0 hidden matrices, 2 others"):
        build_optimizer(nn.LayerNorm(4), OptimizerConfig(name="muon"))
    with pytest.raises(ConfigError, match="1 hidden matrices, 0 others"):
        build_optimizer(nn.Linear(2, 2, bias=False), OptimizerConfig(name="muon"))


def curve(config: LRSchedulerConfig, planned: int, *, lr: float = 2.0) -> list[float]:
    """The lr that each of the planned steps uses."""
    model = Model()
    optimizer = build_optimizer(model, OptimizerConfig(name="adamw", lr=lr))
    (scheduler,) = build_lr_schedulers(optimizer, config, planned)
    used = []
    for _ in range(planned):
        used.append(optimizer.param_groups[0]["lr"])
        assert optimizer.param_groups[1]["lr"] == used[-1]
        optimizer.step()
        scheduler.step()
    return used


def test_the_schedules_have_the_shape_they_are_named_after() -> None:
    assert curve(LRSchedulerConfig(name="constant", warmup_steps=0), 4) == [2.0] * 4
    assert curve(LRSchedulerConfig(name="linear", warmup_steps=0), 4) == [2.0, 1.5, 1.0, 0.5]
    assert curve(LRSchedulerConfig(name="linear", warmup_steps=2), 6) == [0.0, 1.0, 2.0, 1.5, 1.0, 0.5]
    cosine = curve(LRSchedulerConfig(name="cosine", warmup_steps=1), 5)
    assert cosine == pytest.approx([0.0, *(1 + math.cos(math.pi * i / 4) for i in range(4))])


def test_a_schedule_that_ends_before_the_run_stays_at_its_end() -> None:
    used = curve(LRSchedulerConfig(name="linear", warmup_steps=0, decay_steps=2), 5)
    assert used == [2.0, 1.0, 0.0, 0.0, 0.0]


def test_warmup_as_long_as_the_run_divides_by_nothing() -> None:
    assert curve(LRSchedulerConfig(name="cosine", warmup_steps=3), 3) == pytest.approx([0.0, 2 / 3, 4 / 3])


@pytest.mark.parametrize("decay_steps", [None, 3, 50])
def test_one_cycle_lasts_as_long_as_the_run(decay_steps: int | None) -> None:
    used = curve(LRSchedulerConfig(name="onecycle", warmup_steps=0, decay_steps=decay_steps), 12)
    assert max(used) <= 2.0
    assert used[0] < max(used)


def test_a_chain_gets_one_schedule_for_each_member() -> None:
    optimizer = build_optimizer(Model(), OptimizerConfig(name="muon", lr=1.0, muon_lr=3.0))
    schedulers = build_lr_schedulers(optimizer, LRSchedulerConfig(name="linear", warmup_steps=0), 4)
    assert len(schedulers) == 2
    optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [2.25, 0.75, 0.75]

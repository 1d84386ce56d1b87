"""Builds optimizers and learning rate schedulers from the configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from hyper_resume.config.schema import LRSchedulerConfig, OptimizerConfig
from hyper_resume.errors import ConfigError, describe
from hyper_resume.optim.chained import ChainedOptimizer

# These modules are not hidden layers; Muon's authors use AdamW for them (https://kellerjordan.github.io/posts/muon).
_NOT_HIDDEN = ("embed_tokens", "lm_head")


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer | ChainedOptimizer:
    """Build the configured optimizer for ``model``'s trainable parameters.

    There are two groups, in the order of the model's parameters: matrices with weight decay, vectors (norms, biases) without.

    Raises:
        ConfigError: the model has no trainable parameter, or none that Muon can train.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise ConfigError(describe("the model has no trainable parameter", do="enable model.lora, or do not freeze it"))
    if config.name == "adamw":
        return _adamw(named, config)
    hidden = [(n, p) for n, p in named if p.ndim == 2 and not any(part in n.split(".") for part in _NOT_HIDDEN)]
    hidden_names = {name for name, _ in hidden}
    rest = [(name, parameter) for name, parameter in named if name not in hidden_names]
    if not hidden or not rest:
        raise ConfigError(
            describe(
                "muon needs matrices of hidden layers, and other parameters in addition to them",
                found=f"{len(hidden)} hidden matrices, {len(rest)} others",
                do="set optimizer.name=adamw",
            )
        )
    muon = torch.optim.Muon(
        [parameter for _, parameter in hidden],
        lr=config.muon_lr,
        momentum=config.muon_momentum,
        weight_decay=config.weight_decay,
    )
    return ChainedOptimizer([muon, _adamw(rest, config)])


def _adamw(named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> torch.optim.AdamW:
    named = list(named)
    decay = [parameter for _, parameter in named if parameter.ndim >= 2]
    no_decay = [parameter for _, parameter in named if parameter.ndim < 2]
    groups = [
        {"params": parameters, "weight_decay": weight_decay}
        for parameters, weight_decay in ((decay, config.weight_decay), (no_decay, 0.0))
        if parameters
    ]
    # foreach=False, because parameters on different meshes can't be updated in one fused call.
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=False)


def build_lr_schedulers(
    optimizer: torch.optim.Optimizer | ChainedOptimizer, config: LRSchedulerConfig, planned_steps: int
) -> list[LRScheduler]:
    """Build one scheduler for each plain optimizer in ``optimizer``; each is stepped once per optimizer step.

    Args:
        optimizer: a plain optimizer or a chain.
        config: the schedule; the warm-up rises linearly from 0 to the configured learning rate in ``warmup_steps`` steps.
        planned_steps: optimizer steps of the whole run; the length of the schedule if ``decay_steps`` is not set.
    """
    horizon = config.decay_steps or planned_steps
    members = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    if config.name == "onecycle":
        # It raises if it is stepped beyond its total, so decay_steps can't make it shorter than the run.
        return [_one_cycle(member, max(horizon, planned_steps) + 1) for member in members]
    return [_lambda(member, config, horizon) for member in members]


def _one_cycle(optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    # Cycling momentum needs betas or momentum in the group, and Muon's momentum should stay constant.
    return OneCycleLR(optimizer, max_lr=peaks, total_steps=total_steps, cycle_momentum=False)


def _lambda(optimizer: torch.optim.Optimizer, config: LRSchedulerConfig, horizon: int) -> LRScheduler:
    shape = {"constant": _constant, "linear": _linear, "cosine": _cosine}[config.name]
    return LambdaLR(optimizer, partial(_with_warmup, shape=shape, warmup=config.warmup_steps, horizon=horizon))


def _with_warmup(step: int, *, shape: Callable[[float], float], warmup: int, horizon: int) -> float:
    if step < warmup:
        return step / warmup
    progress = min(1.0, (step - warmup) / max(1, horizon - warmup))
    return shape(progress)


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))

"""A trainer's live state as text, by bucket and entry, and as digests.

It reads the live objects and not the library's collectors, so that a collector that forgets something is detected.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from conformance.running.probe import describe, digest, flatten

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "module")


def plain_name(name: str) -> str:
    """A parameter's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def model_state(model: nn.Module) -> dict[str, Any]:
    """Entries of the model's state dict by plain name."""
    return {plain_name(name): value for name, value in model.state_dict().items()}


def optimizer_state(model: nn.Module, optimizers: list[Any]) -> dict[str, Any]:
    """``{"0": {"state": {parameter: {...}}, "groups": [{option: value, "params": [names]}]}}`` of plain optimizers."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    found: dict[str, Any] = {}
    for index, optimizer in enumerate(optimizers):
        state = {names.get(id(parameter), "unnamed"): dict(entries) for parameter, entries in optimizer.state.items()}
        groups = {
            str(place): {
                **{key: value for key, value in group.items() if key not in ("params", "param_names")},
                "params": ", ".join(names.get(id(parameter), "unnamed") for parameter in group["params"]),
            }
            for place, group in enumerate(optimizer.param_groups)
        }
        found[str(index)] = {"state": state, "groups": groups}
    return found


def streams(device: torch.device) -> dict[str, Any]:
    """The random streams of this process; ``torch_device`` is None on the CPU."""
    on_device = None
    if device.type != "cpu":
        on_device = getattr(torch, device.type).get_rng_state(device)
    numpy_state: Any = np.random.get_state()
    return {
        "torch_cpu": torch.get_rng_state(),
        "torch_device": on_device,
        "python": random.getstate(),
        "numpy": list(numpy_state),
    }


def scheduler_state(scheduler: Any) -> Any:
    """The data in a schedule's state dict. Lambdas and methods are left out: their text contains an address."""
    return _data(scheduler.state_dict())


def _data(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _data(item) for key, item in value.items() if not callable(item)}
    if isinstance(value, (list, tuple)):
        return [_data(item) for item in value if not callable(item)]
    return value


def stateful_state(found: Mapping[str, Any]) -> dict[str, Any]:
    """The state of other objects by name."""
    return {
        name: value.get_state() if isinstance(value, torch.Generator) else value.state_dict()
        for name, value in found.items()
    }


def buckets(trainer: Any, optimizers: list[Any], device: torch.device, extras: Mapping[str, Any]) -> dict[str, Any]:
    """All buckets of a trainer: bucket -> entry -> text."""
    schedulers = trainer.lr_scheduler or []
    schedulers = list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers]
    lrs = {f"lr.{i}": [group["lr"] for group in optimizer.param_groups] for i, optimizer in enumerate(optimizers)}
    return {
        "model": flatten(model_state(trainer.model)),
        "optimizer": flatten(optimizer_state(trainer.model, optimizers)),
        "progress": {"global_step": str(trainer.state.global_step), "epoch": str(trainer.state.epoch)},
        "lr_scheduler": {
            **flatten({str(index): scheduler_state(scheduler) for index, scheduler in enumerate(schedulers)}),
            **{name: ", ".join(describe(float(lr)) for lr in values) for name, values in lrs.items() if schedulers},
        },
        "train_dataloader": flatten(_position(trainer)),
        "rng_state": {name: digest(value) for name, value in streams(device).items() if value is not None},
        "stateful": flatten(stateful_state(extras)),
    }


def _position(trainer: Any) -> dict[str, Any]:
    """The loader's position; with a prefetcher, that of the batch that was trained last."""
    for source in (getattr(trainer, "data_iterator", None), trainer.train_dataloader):
        if source is not None and getattr(source, "has_state", hasattr(source, "state_dict")):
            return dict(source.state_dict())
    return {}


def step_digests(
    trainer: Any, optimizers: list[Any], device: torch.device, extras: Mapping[str, Any]
) -> dict[str, Any]:
    """The digests for a step's record."""
    found: dict[str, Any] = {
        "model": digest(model_state(trainer.model)),
        "optimizer": digest(optimizer_state(trainer.model, optimizers)),
        "rng": {name: None if value is None else digest(value) for name, value in streams(device).items()},
    }
    if extras:
        found["extras"] = {name: digest(value) for name, value in stateful_state(extras).items()}
    return found

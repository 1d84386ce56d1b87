"""Model and optimizers through a real checkpoint on disk, and updates to compare afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.state.model import apply_model, collect_model
from hyper_resume.state.names import parameter_names
from hyper_resume.state.optimizer import apply_optimizers, collect_optimizers, optimizer_template


class Net(nn.Module):
    """Two matrices, a vector and a parameter that no forward uses."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(6, 4, generator=generator))
        self.second = nn.Parameter(torch.randn(3, 6, generator=generator))
        self.bias = nn.Parameter(torch.randn(3, generator=generator))
        self.unused = nn.Parameter(torch.randn(2, generator=generator))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.tanh(values @ self.first.T) @ self.second.T + self.bias


def steps(model: nn.Module, optimizers: Iterable[Any], numbers: range) -> list[float]:
    """One update a number, on data that depends on the number only; returns the losses."""
    losses = []
    optimizers = list(optimizers)
    for number in numbers:
        values = torch.randn(5, 4, generator=torch.Generator().manual_seed(900 + number))
        loss = model(values).pow(2).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def write(directory: Path, model: nn.Module, optimizers: Sequence[Any]) -> str:
    """Save; returns the path."""
    path = str(directory / "global_step_1")
    state = {"model": collect_model(model), "optimizer": collect_optimizers(optimizers, parameter_names(model))}
    DistributedCheckpointer().save(path, state, global_step=1)
    return path


def read(path: str, model: nn.Module, optimizers: Sequence[Any]) -> None:
    """Restore into live objects, as the trainer does."""
    checkpointer, names = DistributedCheckpointer(), parameter_names(model)
    model_state = collect_model(model)
    template = optimizer_template(optimizers, names, checkpointer.describe(path))
    state: dict[str, Any] = {"model": model_state, "optimizer": template}
    checkpointer.load(path, state)
    apply_model(model, state["model"], strict=True)
    apply_optimizers(optimizers, names, state["optimizer"])


def same_bits(left: Any, right: Any) -> bool:
    """Equal in type, structure and every bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(
            left.detach().reshape(-1).view(torch.uint8), right.detach().reshape(-1).view(torch.uint8)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_bits(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same_bits, left, right))
    return bool(left == right)


def everything(model: nn.Module, optimizers: Sequence[Any]) -> dict[str, Any]:
    """Weights, moments and group options by name, as copies."""
    names = parameter_names(model)
    found: dict[str, Any] = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for index, optimizer in enumerate(optimizers):
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items():
                copied = value.detach().clone() if isinstance(value, torch.Tensor) else value
                found[f"{index}/{names[id(parameter)]}/{key}"] = copied
        for place, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            found[f"{index}/group {place}"] = {
                key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()
            }
    return found


def moments_by_name(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The optimizer's live state under the parameters' names."""
    names = parameter_names(model)
    return {names[id(parameter)]: dict(entries) for parameter, entries in optimizer.state.items()}

"""Payloads to save and load: tiny models, one process or sharded, and a training state that differs on every rank."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hyper_resume import collective
from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.state.model import apply_model, collect_model
from hyper_resume.state.names import parameter_names
from hyper_resume.state.optimizer import apply_optimizers, collect_optimizers, optimizer_template
from hyper_resume.state.rng import collect_rng

SKELETON = dict.fromkeys(("global_step", "epoch", "lr_scheduler", "train_dataloader", "stateful", "rng_state"))


class Tiny(nn.Module):
    """An embedding whose rows no mesh divides, two layers that tensor parallelism can split, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(self.embed(tokens))))
        return result


def tiny(seed: int) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


def sharded_tiny(seed: int) -> nn.Module:
    """Tensor parallelism by 2 where the world has 4 ranks, FSDP2 over the rest."""
    model = tiny(seed)
    mesh = _mesh(dist.get_world_size())
    if mesh.ndim == 2:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=mesh)
    return model


@cache
def _mesh(world_size: int) -> DeviceMesh:
    """One for all models of a rank's process, as a training has: each mesh makes process groups, which stay until the end."""
    if world_size == 4:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first_seed: int = 100) -> list[float]:
    """Run ``steps`` updates on data that depends on the step only; returns the losses."""
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(first_seed + step)
        tokens = torch.randint(0, 7, (4,), generator=generator)
        loss = model(tokens).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def training_state(global_step: int) -> dict[str, Any]:
    """What a trainer hands over; rng streams and data position are of this rank only."""
    rank = collective.rank()
    torch.manual_seed(1000 + 17 * rank)
    random.seed(2000 + 17 * rank)
    np.random.seed(3000 + 17 * rank)
    torch.rand(rank + 1)
    return {
        "global_step": global_step,
        "epoch": 1,
        "lr_scheduler": [{"last_epoch": global_step, "_last_lr": [0.1, 0.2]}],
        "train_dataloader": {"epoch": 1, "batches_consumed": 5 + rank},
        "stateful": {"average": {"weight": torch.full((2,), float(rank))}},
        "rng_state": collect_rng("cpu"),
    }


def payload(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, step: int | None = None
) -> dict[str, Any]:
    """The three parts of a payload; without an optimizer or a step, without that part."""
    parts: dict[str, Any] = {"model": collect_model(model)}
    if optimizer is not None:
        parts["optimizer"] = collect_optimizers([optimizer], parameter_names(model))
    if step is not None:
        parts["extra_state"] = training_state(step)
    return parts


def restore(
    checkpointer: DistributedCheckpointer,
    path: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    with_training_state: bool = True,
) -> dict[str, Any]:
    """Load ``path`` into live objects and return the training state."""
    parts: dict[str, Any] = {"model": collect_model(model)}
    names = parameter_names(model)
    if optimizer is not None:
        parts["optimizer"] = optimizer_template([optimizer], names, checkpointer.describe(path))
    extra = checkpointer.load(path, parts, extra_state_skeleton=dict(SKELETON) if with_training_state else None)
    apply_model(model, parts["model"], strict=True)
    if optimizer is not None:
        apply_optimizers([optimizer], names, parts["optimizer"])
    return extra


def full(value: torch.Tensor) -> torch.Tensor:
    """The unsharded tensor, a copy."""
    tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return tensor.detach().clone()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Every weight and every optimizer tensor, unsharded, by a flat name."""
    tensors = {name: full(value) for name, value in collect_model(model).items()}
    if optimizer is not None:
        for name, entries in collect_optimizers([optimizer], parameter_names(model))["0"]["state"].items():
            tensors.update({f"{name}/{key}": full(value) for key, value in entries.items()})
    return tensors


def same(left: Any, right: Any) -> bool:
    """Equal in type, structure and every bit."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and torch.equal(full(left).reshape(-1).view(torch.uint8), full(right).reshape(-1).view(torch.uint8))
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right or (left != left and right != right))

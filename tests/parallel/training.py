"""A few optimizer steps of a tiny model, whole in one process or split over several, with everything measured.

Run under ``run_ranks``; what comes back is plain, so that a split run can be compared with a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyper_resume.config.schema import AcceleratorConfig, LoraConfig, ModelConfig
from hyper_resume.models import apply_lora, build_model
from hyper_resume.parallel import ParallelMesh, build_mesh, check_replicas, clip_grad_norm, mean_over_group, parallelize

MAX_NORM = 0.05  # below the norms of these models, so that clipping acts
BATCH, LENGTH = 4, 32


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained and how it is split; ``tp`` and ``dp`` 1 is the whole model in one process."""

    preset: str
    tp: int = 1
    dp: int = 1
    steps: int = 3
    vocab_size: int = 260
    optimizer: str = "adamw"
    max_norm: float | None = MAX_NORM
    overrides: Mapping[str, Any] = field(default_factory=dict)
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one rank: the mean loss and the norm of each step, the first step's clipped gradients, the last weights."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    initial: dict[str, Tensor]
    trainable: set[str]


def build(job: Job) -> nn.Module:
    torch.manual_seed(0)
    config = ModelConfig(preset=job.preset, overrides=dict(job.overrides))
    model = apply_lora(build_model(config, vocab_size=job.vocab_size), job.lora)
    with torch.no_grad():
        # Away from ones and zeros, where a wrong gradient of a norm or a bias would hardly move the loss.
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "lora_B" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def train(job: Job) -> Measured:
    model = build(job)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    mesh = build_mesh(AcceleratorConfig(tp_size=job.tp, dp_shard_size=job.dp), "cpu", dist.get_world_size())
    parallelize(model, mesh)
    initial = {name: full(parameter) for name, parameter in model.named_parameters()}
    losses, norms, grads = run_steps(model, mesh, job)
    now_trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert now_trainable == trainable
    weights = {name: full(parameter) for name, parameter in model.named_parameters()}
    return Measured(losses=losses, norms=norms, grads=grads, weights=weights, initial=initial, trainable=trainable)


def train_twice(job: Job) -> tuple[Measured, Measured]:
    return train(job), train(job)


def run_steps(
    model: nn.Module, mesh: ParallelMesh | None, job: Job
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    optimizers = build_optimizers(model, job.optimizer)
    generator = torch.Generator().manual_seed(5)
    losses, norms, grads = [], [], {}
    for step in range(job.steps):
        batch = torch.randint(job.vocab_size, (BATCH, LENGTH), generator=generator)
        mine = batch if mesh is None else batch.tensor_split(mesh.dp_size)[mesh.dp_rank]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        group = None if mesh is None else mesh.dp_mesh.get_group()
        losses.append(mean_over_group(loss, group).item())
        norms.append(clip_grad_norm(model.parameters(), job.max_norm).item())
        if step == 0:
            grads = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_replicas(training_state(model, optimizers))
    return losses, norms, grads


def build_optimizers(model: nn.Module, name: str) -> list[torch.optim.Optimizer]:
    named = [(key, parameter) for key, parameter in model.named_parameters() if parameter.requires_grad]
    if name == "adamw":
        return [torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2)]
    hidden = [parameter for key, parameter in named if parameter.dim() == 2 and ".layers." in key]
    chosen = {id(parameter) for parameter in hidden}
    rest = [parameter for _, parameter in named if id(parameter) not in chosen]
    return [torch.optim.Muon(hidden, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


def training_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Weights and optimizer state under one name each, as a checkpoint would hold them."""
    entries: dict[str, Tensor] = dict(model.named_parameters())
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            entries.update({f"{names[parameter]}.{key}": value for key, value in tensors.items()})
    return entries


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; a collective for a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    whole: Tensor = tensor.full_tensor()
    return whole.detach().clone()


def assert_same_training(split: Measured, whole: Measured, *, rtol: float = 2e-4, atol: float = 2e-6) -> None:
    """Everything that was measured agrees up to the rounding of another order of summation."""
    assert split.trainable == whole.trainable
    torch.testing.assert_close(split.losses, whole.losses, rtol=rtol, atol=atol)
    torch.testing.assert_close(split.norms, whole.norms, rtol=rtol, atol=atol)
    for compared in ("grads", "initial"):
        _assert_close_by_name(getattr(split, compared), getattr(whole, compared), rtol, atol)


def assert_same_bits(first: Measured, second: Measured) -> None:
    assert first.losses == second.losses
    assert first.norms == second.norms
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name]), name


def _assert_close_by_name(split: dict[str, Tensor], whole: dict[str, Tensor], rtol: float, atol: float) -> None:
    assert split.keys() == whole.keys()
    describe: Callable[[str], Callable[[str], str]] = lambda name: lambda text: f"{name}: {text}"  # noqa: E731
    for name, tensor in whole.items():
        torch.testing.assert_close(split[name], tensor, rtol=rtol, atol=atol, msg=describe(name))

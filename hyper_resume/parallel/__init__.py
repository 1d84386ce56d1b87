"""Tensor parallelism and FSDP2 on one device mesh, and what follows: gradient norms, and copies that must agree."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from hyper_resume.parallel.fsdp import apply_fsdp
from hyper_resume.parallel.grad_norm import clip_grad_norm
from hyper_resume.parallel.mesh import ParallelMesh, build_mesh
from hyper_resume.parallel.replicas import check_replicas
from hyper_resume.parallel.tensor_parallel import apply_tensor_parallel

__all__ = [
    "ParallelMesh",
    "apply_fsdp",
    "apply_tensor_parallel",
    "build_mesh",
    "check_replicas",
    "clip_grad_norm",
    "mean_over_group",
    "parallelize",
]


def parallelize(model: nn.Module, mesh: ParallelMesh | None) -> nn.Module:
    """Split ``model`` in place: tensor parallelism, then FSDP2; without a mesh it stays as it is. A collective.

    ``model`` is whole on every rank, on its device, with adapters attached; each rank keeps its own part of its own
    copy, so the copies must be equal.

    Raises:
        ReplicaMismatchError: the ranks built different weights, which sharding would mix into a model nobody built.
        ConfigError: sizes of the model can't be divided by the mesh.
        UnsupportedError: the model has parts that can't be parallelised.
    """
    if mesh is None:
        return model
    check_replicas({**dict(model.named_parameters()), **dict(model.named_buffers())})
    apply_tensor_parallel(model, mesh.tp_mesh)
    apply_fsdp(model, mesh)
    return model


def mean_over_group(value: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The mean of ``value`` over the ranks of ``group``; ``value`` itself, detached, when ``group`` is None.

    A sum and a division, because gloo has no mean. The result is equal on all ranks of the group.
    """
    mean = value.detach().clone()
    if group is None:
        return mean
    dist.all_reduce(mean, group=group)
    return mean / dist.get_world_size(group)

"""Tensor parallelism and FSDP2 on one mesh, gradient norms, and checks of replicas.

``mesh`` the device mesh · ``layers`` the decoder layers of a model · ``tensor_parallel`` the plan for each module · ``fsdp``
sharding over data-parallel ranks · ``grad_norm`` gradient clipping · ``replicas`` the check that copies are equal
"""

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
    """Apply tensor parallelism and then FSDP2 to ``model`` in place; without a mesh it is not changed. A collective.

    Every rank passes the whole model, on its device, with adapters attached. Each rank keeps a part of its own copy, so the
    copies must be equal.

    Raises:
        ReplicaMismatchError: the ranks built different weights; sharding would mix them.
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
    """The mean of ``value`` over the ranks of ``group``; a detached copy of ``value`` if ``group`` is None.

    Computed as a sum and a division, because gloo has no mean. The result is equal on all ranks of the group.
    """
    mean = value.detach().clone()
    if group is None:
        return mean
    dist.all_reduce(mean, group=group)
    return mean / dist.get_world_size(group)

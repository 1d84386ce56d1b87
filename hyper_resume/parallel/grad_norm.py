"""Gradient clipping with one norm and one factor for parameters on different meshes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyper_resume.errors import UnsupportedError, describe

# The mesh and the dimensions of it that shard a tensor; None for a plain tensor.
_Sharding = tuple[DeviceMesh, tuple[int, ...]] | None

# The value of torch.nn.utils.clip_grad_norm_; it avoids a division by zero.
_EPS = 1e-6


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their total 2-norm is at most ``max_norm``; with None, only compute the norm.

    Each parameter counts once, however many ranks hold a shard or a copy of it. torch's own function accepts DTensors of one
    mesh only. Here parameters with the same mesh and sharding form a group; each rank computes the norm of its local shards,
    and the squares are summed over the mesh dimensions that shard the group. One factor then scales all local shards. A
    collective: every rank passes the same parameters, with gradients on the same ones.

    Returns:
        The total norm before clipping: a plain 0-dimensional tensor, equal on all ranks; 0 if there is no gradient.

    Raises:
        UnsupportedError: a gradient is a partial sum that was not reduced, as with tensor parallelism without FSDP2.
    """
    groups: dict[_Sharding, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            groups.setdefault(_sharding_of(grad), []).append(local)
    squares = [_square(sharding, grads) for sharding, grads in groups.items()]
    if not squares:
        return torch.tensor(0.0)
    total = torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
    if max_norm is not None:
        factor = (max_norm / (total + _EPS)).clamp(max=1.0)
        for grad in (grad for grads in groups.values() for grad in grads):
            grad.mul_(factor.to(grad.device))
    return total


def _sharding_of(grad: Tensor) -> _Sharding:
    if not isinstance(grad, DTensor):
        return None
    if any(placement.is_partial() for placement in grad.placements):
        raise UnsupportedError(
            describe(
                "a gradient is a partial sum",
                found=f"placements {grad.placements}",
                do="apply FSDP2 after tensor parallelism, or reduce the gradient before clipping",
            )
        )
    dims = tuple(dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate())
    return grad.device_mesh, dims


def _square(sharding: _Sharding, grads: list[Tensor]) -> Tensor:
    """The squared 2-norm of one group as a plain tensor, equal on all ranks; ``grads`` are this rank's shards."""
    square = torch.nn.utils.get_total_norm(grads).square()
    if sharding is not None:
        mesh, dims = sharding
        for dim in dims:
            dist.all_reduce(square, group=mesh.get_group(dim))
    return square

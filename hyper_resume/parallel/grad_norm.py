"""One gradient norm and one clipping factor for parameters that live on different meshes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyper_resume.errors import UnsupportedError, describe

# The mesh and those of its dimensions that hold different parts of a tensor; None for a plain tensor.
_Spread = tuple[DeviceMesh, tuple[int, ...]] | None

# As torch.nn.utils.clip_grad_norm_ has it: a zero norm must not divide.
_EPS = 1e-6


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their common 2-norm is at most ``max_norm``; with None only measure.

    A parameter counts once, however many ranks hold a shard or a copy of it. torch's own function takes DTensors of
    one mesh only; here each rank takes the norm of its local shards, group by group, and the squares are summed over
    the mesh dimensions that shard the group. One factor then scales all local shards. A collective: every rank passes
    the same parameters, with gradients on the same ones.

    Returns:
        The total norm before clipping: a plain 0-dimensional tensor, equal on all ranks; 0 when nothing has a gradient.

    Raises:
        UnsupportedError: a gradient is a partial sum that nothing has reduced, as tensor parallelism without FSDP2
            leaves it.
    """
    groups: dict[_Spread, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            groups.setdefault(_spread(grad), []).append(local)
    squares = [_square(spread, grads) for spread, grads in groups.items()]
    if not squares:
        return torch.tensor(0.0)
    total = torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
    if max_norm is not None:
        factor = (max_norm / (total + _EPS)).clamp(max=1.0)
        for grad in (grad for grads in groups.values() for grad in grads):
            grad.mul_(factor.to(grad.device))
    return total


def _spread(grad: Tensor) -> _Spread:
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
    sharding = tuple(dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate())
    return grad.device_mesh, sharding


def _square(spread: _Spread, grads: list[Tensor]) -> Tensor:
    """The squared 2-norm of one group, of which ``grads`` are this rank's shards: plain, equal on all ranks."""
    square = torch.nn.utils.get_total_norm(grads).square()
    if spread is not None:
        mesh, sharding = spread
        for dim in sharding:
            dist.all_reduce(square, group=mesh.get_group(dim))
    return square

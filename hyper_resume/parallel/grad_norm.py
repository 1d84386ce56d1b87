"""One gradient norm and one clipping factor for parameters that live on different meshes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their common 2-norm is at most ``max_norm``; with None only measure.

    A parameter counts once, however many ranks hold a shard or a copy of it. torch's own function takes DTensors of
    one mesh only, so the norm is taken group by group (same mesh, same placements) and put together; the factor is the
    same for all groups. A collective: every rank passes the same parameters, with gradients on the same ones.

    Returns:
        The total norm before clipping: a plain 0-dimensional tensor, equal on all ranks; 0 when nothing has a gradient.
    """
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
            groups.setdefault(key, []).append(parameter)
    norms = [_group_norm(group) for group in groups.values()]
    if not norms:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    if max_norm is not None:
        for group in groups.values():
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _group_norm(parameters: list[Tensor]) -> Tensor:
    """The 2-norm of the gradients of one group, as a plain tensor."""
    norm: Tensor = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if not isinstance(norm, DTensor):
        return norm
    full: Tensor = norm.full_tensor()
    return full

"""One norm for parameters of several meshes: against numbers worked out by hand, and torch's own on whole tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from hyper_resume.errors import UnsupportedError
from hyper_resume.parallel import clip_grad_norm
from tests.ranks import run_ranks


def _with_grad(parameter: Tensor, grad: Tensor) -> nn.Parameter:
    leaf = nn.Parameter(parameter)
    leaf.grad = grad
    return leaf


def _spread_out(full_grads: list[Tensor]) -> tuple[float, list[Tensor]]:
    """The same gradients in every way in which a job holds them; returns the norm and the clipped whole gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    dp = mesh["dp_shard"]
    layouts: list[tuple[object, list[Placement]]] = [
        (mesh, [Shard(0), Shard(1)]),
        (mesh, [Shard(0), Replicate()]),
        (dp, [Shard(0)]),
        (mesh, [Replicate(), Replicate()]),
    ]
    parameters = []
    for grad, (where, placements) in zip(full_grads, layouts, strict=False):
        split = distribute_tensor(grad, where, placements)  # type: ignore[arg-type]
        parameters.append(_with_grad(torch.zeros_like(split), split))
    parameters.append(_with_grad(torch.zeros_like(full_grads[4]), full_grads[4].clone()))
    total = clip_grad_norm(parameters, 1.0)
    assert not isinstance(total, DTensor)
    clipped = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    return total.item(), [grad for grad in clipped if grad is not None]


def _partial_grad() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ones = torch.ones(2)
    grad = DTensor.from_local(ones, mesh, [Partial()])
    clip_grad_norm([_with_grad(DTensor.from_local(ones, mesh, [Replicate()]), grad)], None)


def test_every_parameter_counts_once_and_all_are_scaled_by_one_factor() -> None:
    torch.manual_seed(3)
    # Five rows over two ranks: uneven shards. One row: the second rank's shard is empty.
    grads = [torch.randn(shape) for shape in ((5, 4), (5,), (1, 3), (2, 2), (3,))]
    expected_norm = torch.cat([grad.flatten() for grad in grads]).norm()
    reference = [_with_grad(torch.zeros_like(grad), grad.clone()) for grad in grads]
    torch.nn.utils.clip_grad_norm_(reference, 1.0)
    for norm, clipped in run_ranks(_spread_out, 4, grads):
        torch.testing.assert_close(norm, expected_norm.item())
        torch.testing.assert_close(clipped, [parameter.grad for parameter in reference])


def test_norm_and_factor_of_known_numbers() -> None:
    first = _with_grad(torch.zeros(2), torch.tensor([3.0, 0.0]))
    second = _with_grad(torch.zeros(1, 1), torch.tensor([[4.0]]))
    without_grad = nn.Parameter(torch.zeros(1))
    assert clip_grad_norm([first, second, without_grad], 2.5).item() == 5.0
    assert first.grad is not None
    assert second.grad is not None
    torch.testing.assert_close(first.grad, torch.tensor([1.5, 0.0]))
    torch.testing.assert_close(second.grad, torch.tensor([[2.0]]))


@pytest.mark.parametrize("max_norm", [None, 7.0])
def test_gradients_below_the_limit_keep_their_bits(max_norm: float | None) -> None:
    parameter = _with_grad(torch.zeros(2), torch.tensor([0.3, -0.1]))
    clip_grad_norm([parameter], max_norm)
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.tensor([0.3, -0.1]))


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip_grad_norm([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0


def test_a_gradient_that_was_never_reduced_is_refused() -> None:
    for error in run_ranks(_partial_grad, 2, expect_errors=True):
        assert isinstance(error, UnsupportedError)
        assert "partial sum" in str(error)

"""Several optimizers that step as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hyper_resume.optim import ChainedOptimizer

SGD = torch.optim.SGD


def two() -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))


def test_every_optimizer_steps_once_with_its_own_options() -> None:
    a, b = two()
    chain = ChainedOptimizer([SGD([a], lr=0.5), SGD([b], lr=0.25)])
    a.grad, b.grad = torch.ones(2), torch.ones(3)
    chain.step()
    assert a.tolist() == [0.5, 0.5]
    assert b.tolist() == [0.75, 0.75, 0.75]


def test_they_step_in_order() -> None:
    order: list[str] = []

    class Named(SGD):
        """Notes its turn."""

        def __init__(self, parameter: nn.Parameter, name: str) -> None:
            super().__init__([parameter], lr=0.1)
            self.name = name

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            order.append(self.name)

    a, b = two()
    ChainedOptimizer([Named(a, "first"), Named(b, "second")]).step()
    assert order == ["first", "second"]


def test_gradients_are_cleared_everywhere() -> None:
    a, b = two()
    chain = ChainedOptimizer([SGD([a]), SGD([b])])
    a.grad, b.grad = torch.ones(2), torch.ones(3)
    chain.zero_grad(set_to_none=False)
    assert (a.grad.tolist(), b.grad.tolist()) == ([0, 0], [0, 0, 0])
    chain.zero_grad()
    assert [a.grad, b.grad] == [None, None]


def test_the_groups_of_all_are_the_live_ones() -> None:
    a, b = two()
    chain = ChainedOptimizer([SGD([a], lr=0.5), SGD([b], lr=0.25)])
    chain.param_groups[1]["lr"] = 0.125
    assert chain.chained_optimizers[1].param_groups[0]["lr"] == 0.125
    assert [group["lr"] for group in chain.param_groups] == [0.5, 0.125]


def test_state_dicts_go_to_the_optimizer_they_came_from() -> None:
    def make() -> tuple[list[nn.Parameter], ChainedOptimizer]:
        a, b = two()
        return [a, b], ChainedOptimizer([SGD([a], lr=0.5, momentum=0.9), torch.optim.AdamW([b], lr=0.25)])

    parameters, chain = make()
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    chain.step()
    fresh_parameters, fresh = make()
    fresh.load_state_dict(chain.state_dict())
    assert torch.equal(fresh.chained_optimizers[0].state[fresh_parameters[0]]["momentum_buffer"], torch.full((2,), 2.0))
    assert fresh.chained_optimizers[1].state[fresh_parameters[1]]["step"] == 1


def test_state_dicts_of_another_count_are_refused() -> None:
    a, b = two()
    chain = ChainedOptimizer([SGD([a]), SGD([b])])
    with pytest.raises(ValueError, match="zip"):
        chain.load_state_dict(chain.state_dict()[:1])


def test_an_empty_chain_and_a_shared_parameter_and_a_closure_are_refused() -> None:
    a, b = two()
    with pytest.raises(ValueError, match="at least one optimizer"):
        ChainedOptimizer([])
    with pytest.raises(ValueError, match="stepped twice"):
        ChainedOptimizer([SGD([a, b]), SGD([b])])
    with pytest.raises(ValueError, match="no closure"):
        ChainedOptimizer([SGD([a])]).step(lambda: 0.0)


def test_it_has_no_state_of_its_own() -> None:
    a, _ = two()
    assert not hasattr(ChainedOptimizer([SGD([a])]), "state")

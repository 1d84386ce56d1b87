"""initialize_optimizer_state: the state that an optimizer begins with, and nothing else changed."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LinearLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hyper_resume.optim import ChainedOptimizer, initialize_optimizer_state
from tests.ranks import run_ranks

O = torch.optim  # noqa: E741  it stands in every line below

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def parameters(seed: int = 0) -> list[nn.Parameter]:
    """Two matrices; a negative zero among the numbers, and one parameter that is not trained."""
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(3)]
    with torch.no_grad():
        made[0][0, 0] = -0.0
    made[2].requires_grad_(False)
    return made


def update(its: list[nn.Parameter], optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(300 + number)
    for parameter in its[:2]:
        parameter.grad = torch.randn(4, 3, generator=generator)
    optimizer.step()
    optimizer.zero_grad()


def bits(value: Any) -> Any:
    """A tensor as bytes and type; other values as they are."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().reshape(-1).view(torch.uint8).tolist()
    return value


def state_bits(its: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Any]:
    return [{key: bits(value) for key, value in optimizer.state.get(p, {}).items()} for p in its]


class Lion(torch.optim.Optimizer):
    """An optimizer that is none of torch's: an update by sign, its decay decoupled."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                blend = state["exp_avg"] * group["betas"][0] + parameter.grad * (1 - group["betas"][0])
                parameter.add_(blend.sign(), alpha=-group["lr"])
                state["exp_avg"].lerp_(parameter.grad, 1 - group["betas"][1])


class MasterWeights(torch.optim.Optimizer):
    """Keeps a copy of the parameter in its state and a counter that is a plain int."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.mine = [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.mine:
            if parameter.grad is not None:
                state = self.state[parameter]
                state.setdefault("step", 0)
                state.setdefault("master", parameter.double())
                state["step"] += 1
                state["master"] -= parameter.grad.double() / state["step"]
                parameter.copy_(state["master"])


class Noisy(torch.optim.SGD):
    """Draws from the global stream at every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter].setdefault("steps", torch.tensor(0))
                self.state[parameter]["steps"] += 1
                parameter.add_(torch.randn_like(parameter), alpha=-0.01)


ZERO_TENSOR = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
# name: (how it is made, what its state begins with; {} where it makes its state at its first step)
OPTIMIZERS: dict[str, tuple[Factory, dict[str, float]]] = {
    "AdamW": (lambda p: O.AdamW(p, weight_decay=0.1), {"step": 0, **ZERO_TENSOR}),
    "AdamW amsgrad": (lambda p: O.AdamW(p, amsgrad=True), {"step": 0, **ZERO_TENSOR, "max_exp_avg_sq": 0.0}),
    "AdamW fused": (lambda p: O.AdamW(p, fused=True), {"step": 0, **ZERO_TENSOR}),
    "AdamW foreach": (lambda p: O.AdamW(p, foreach=True), {"step": 0, **ZERO_TENSOR}),
    "AdamW tensor lr": (lambda p: O.AdamW(p, lr=torch.tensor(0.01)), {"step": 0, **ZERO_TENSOR}),
    "Adam coupled decay": (lambda p: O.Adam(p, weight_decay=0.1), {"step": 0, **ZERO_TENSOR}),
    "Adamax": (O.Adamax, {"step": 0, "exp_avg": 0.0, "exp_inf": 0.0}),
    "Adadelta": (O.Adadelta, {"step": 0, "square_avg": 0.0, "acc_delta": 0.0}),
    "Adafactor": (O.Adafactor, {"step": 0, "row_var": 0.0, "col_var": 0.0}),
    "Adagrad": (lambda p: O.Adagrad(p, initial_accumulator_value=0.5), {"step": 0, "sum": 0.5}),
    "ASGD": (lambda p: O.ASGD(p, lr=0.5), {"step": 0, "eta": 0.5, "mu": 1.0, "ax": 0.0}),
    "NAdam": (O.NAdam, {"step": 0, "mu_product": 1.0, **ZERO_TENSOR}),
    "RAdam": (O.RAdam, {"step": 0, **ZERO_TENSOR}),
    "RMSprop": (lambda p: O.RMSprop(p, centered=True), {"step": 0, "square_avg": 0.0, "grad_avg": 0.0}),
    "Rprop": (lambda p: O.Rprop(p, lr=0.25), {"step": 0, "prev": 0.0, "step_size": 0.25}),
    "Muon": (O.Muon, {"momentum_buffer": 0.0}),
    "SGD": (O.SGD, {}),
    "SGD momentum": (lambda p: O.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), {"momentum_buffer": 0.0}),
    "SGD nesterov": (lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True), {"momentum_buffer": 0.0}),
    # Its first gradient counts whole, all later ones are dampened; no beginning but none gives that.
    "SGD dampening": (lambda p: O.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), {}),
    "Lion": (Lion, {"exp_avg": 0.0}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_is_what_the_optimizer_begins_with(name: str) -> None:
    factory, expected = OPTIMIZERS[name]
    its = parameters()
    optimizer = factory(its[:2] if name == "Muon" else its)
    initialize_optimizer_state(optimizer)
    for parameter in its[:2]:
        found = optimizer.state.get(parameter, {})
        assert set(found) == set(expected)
        for key, value in expected.items():
            assert torch.equal(found[key], torch.full_like(found[key], value)), key
    if name != "Adagrad":  # which makes its state when it is constructed, for frozen parameters too
        assert its[2] not in optimizer.state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_else_changes(name: str) -> None:
    its = parameters()
    optimizer = OPTIMIZERS[name][0](its[:2] if name == "Muon" else its)
    scheduler = LinearLR(optimizer, 0.5, total_iters=4)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    everywhere = register_optimizer_step_pre_hook(lambda *_: calls.append("global"))
    its[0].grad = torch.full((4, 3), 7.0)

    def outside() -> list[Any]:
        groups = [{key: bits(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        return [
            [bits(parameter) for parameter in its],
            [bits(parameter.grad) for parameter in its],
            [id(parameter) for group in optimizer.param_groups for parameter in group["params"]],
            [parameter.requires_grad for parameter in its],
            groups,
            dict(scheduler.state_dict()),
            getattr(optimizer, "calls", None),
            getattr(optimizer, "_opt_called", None),
            sorted(vars(optimizer)),
            bits(torch.get_rng_state()),
            random.getstate(),
            str(np.random.get_state()),
        ]

    before = outside()
    initialize_optimizer_state(optimizer)
    everywhere.remove()
    assert outside() == before
    assert calls == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_updates_after_priming_are_those_without_it(name: str) -> None:
    factory, _ = OPTIMIZERS[name]
    plain, primed = parameters(), parameters()
    pair = [factory(its[:2] if name == "Muon" else its) for its in (plain, primed)]
    initialize_optimizer_state(pair[1])
    for number in range(4):
        update(plain, pair[0], number)
        update(primed, pair[1], number)
        assert [bits(parameter) for parameter in primed] == [bits(parameter) for parameter in plain], number
        assert state_bits(primed, pair[1]) == state_bits(plain, pair[0]), number


def test_state_that_is_there_is_kept() -> None:
    its = parameters()
    optimizer = O.AdamW(its)
    its[0].grad = torch.ones(4, 3)
    optimizer.step()
    before = state_bits(its[:1], optimizer)
    tensor = optimizer.state[its[0]]["exp_avg"]
    initialize_optimizer_state(optimizer)
    assert state_bits(its[:1], optimizer) == before
    assert optimizer.state[its[0]]["exp_avg"] is tensor
    assert optimizer.state[its[1]]["step"] == 0
    initialize_optimizer_state(optimizer)
    assert state_bits(its[:1], optimizer) == before


def test_a_copy_of_the_weights_in_the_state_is_a_copy_of_the_real_ones() -> None:
    plain, primed = parameters()[:2], parameters()[:2]
    pair = MasterWeights(plain), MasterWeights(primed)
    initialize_optimizer_state(pair[1])
    for parameter in primed:
        assert pair[1].state[parameter]["step"] == 0
        assert torch.equal(pair[1].state[parameter]["master"], parameter.double())
    for number in range(3):
        update(plain, pair[0], number)
        update(primed, pair[1], number)
    assert [bits(parameter) for parameter in primed] == [bits(parameter) for parameter in plain]


def test_an_optimizer_that_draws_moves_no_stream() -> None:
    its = parameters()[:2]
    optimizer = Noisy(its)
    before = torch.get_rng_state()
    initialize_optimizer_state(optimizer)
    assert torch.equal(torch.get_rng_state(), before)
    assert optimizer.state[its[0]]["steps"] == 0


@pytest.mark.parametrize(("name", "reason"), [("LBFGS", "closure"), ("SparseAdam", "dense gradients")])
def test_an_optimizer_that_cant_be_tried_out_is_left_alone_with_a_warning(
    name: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    its = parameters()[:2]
    before = [bits(parameter) for parameter in its]
    optimizer = getattr(O, name)(its)
    state = {key: dict(value) for key, value in optimizer.state.items()}
    with caplog.at_level(logging.WARNING):
        initialize_optimizer_state(optimizer)
    assert f"the state of {name} can't be created before its first step" in caplog.text
    assert reason in caplog.text
    assert {key: dict(value) for key, value in optimizer.state.items()} == state
    assert [bits(parameter) for parameter in its] == before


def test_every_optimizer_of_a_chain_is_primed() -> None:
    its = parameters()
    chain = ChainedOptimizer([O.Muon(its[:1]), O.AdamW(its[1:])])
    initialize_optimizer_state(chain)
    muon, adamw = chain.chained_optimizers
    assert set(muon.state[its[0]]) == {"momentum_buffer"}
    assert set(adamw.state[its[1]]) == {"step", "exp_avg", "exp_avg_sq"}


class Counting(torch.optim.Optimizer):
    """A wrapper that derives from torch's class and forwards, counting its steps: a gradient scaler's cousin."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.steps = 0

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        self.optimizer.step()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda o: [o],
        lambda o: (o, None),
        lambda o: SimpleNamespace(optimizer=o),
        lambda o: SimpleNamespace(optimizer=[o]),
        lambda o: SimpleNamespace(chained_optimizers=(SimpleNamespace(optimizer=o),)),
        lambda o: SimpleNamespace(optimizer=ChainedOptimizer([o])),
        Counting,
    ],
    ids=["list", "tuple with none", "wrapper", "list in wrapper", "wrapper in chain", "chain in wrapper", "subclass"],
)
def test_optimizers_are_found_behind_lists_chains_and_wrappers(wrap: Callable[[Any], Any]) -> None:
    its = parameters()
    before = [bits(parameter) for parameter in its]
    optimizer = O.AdamW(its)
    wrapped = wrap(optimizer)
    its[0].grad = torch.ones(4, 3)
    initialize_optimizer_state(wrapped)
    assert optimizer.state[its[0]]["step"] == 0
    assert getattr(wrapped, "steps", 0) == 0
    assert [bits(parameter) for parameter in its] == before


def test_an_unknown_wrapper_is_named_in_a_warning_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Unknown:
        """Neither an optimizer nor a chain."""

        def step(self) -> None:
            raise AssertionError("must not be stepped")

    with caplog.at_level(logging.WARNING):
        initialize_optimizer_state(Unknown())
    (record,) = caplog.records
    assert "optimizer wrapper tests.optim.test_initial_state." in record.getMessage()
    assert "Unknown is unknown" in record.getMessage()
    assert "give it a chained_optimizers list" in record.getMessage()


@pytest.mark.parametrize(
    ("make", "has_state"),
    [
        (lambda its: O.AdamW(its), True),
        (lambda its: O.SGD(its, lr=0.1), False),
        (lambda its: O.SGD(its, lr=0.1, momentum=0.9), True),
        (lambda its: O.AdamW(its[2:]), False),
        (lambda its: ChainedOptimizer([O.Muon(its[:1]), O.AdamW(its[1:])]), True),
        (lambda its: [O.SGD(its[:1], lr=0.1), O.AdamW(its[1:])], False),
        (lambda its: [O.AdamW(its), None], True),
        (lambda its: SimpleNamespace(optimizer=O.AdamW(its)), True),
        (lambda its: SimpleNamespace(), False),
        (lambda its: None, False),
    ],
    ids=["AdamW", "SGD", "momentum", "frozen", "chain", "one without", "with none", "wrapper", "unknown", "none"],
)
def test_it_returns_whether_every_optimizer_has_state_now(make: Callable[[Any], Any], has_state: bool) -> None:
    optimizer = make(parameters())
    assert initialize_optimizer_state(optimizer) is has_state
    # The second call finds what the first has made.
    assert initialize_optimizer_state(optimizer) is has_state


def test_none_and_an_empty_list_need_nothing(caplog: pytest.LogCaptureFixture) -> None:
    initialize_optimizer_state(None)
    initialize_optimizer_state([])
    assert not caplog.records


def _prime_sharded() -> list[str]:
    model = nn.Linear(5, 7)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = O.AdamW(model.parameters(), foreach=False)
    momentum = O.SGD([model.weight], lr=0.1, momentum=0.9)
    initialize_optimizer_state([optimizer, momentum])
    entries = optimizer.state[model.weight]
    assert isinstance(entries["exp_avg"], DTensor)
    assert isinstance(model.weight, DTensor)
    assert entries["exp_avg"].placements == model.weight.placements
    assert torch.equal(entries["exp_avg"].full_tensor(), torch.zeros(7, 5))
    assert entries["step"] == 0
    assert torch.equal(momentum.state[model.weight]["momentum_buffer"].full_tensor(), torch.zeros(7, 5))
    return sorted(entries)


def test_the_state_of_a_sharded_parameter_is_sharded_like_it() -> None:
    assert run_ranks(_prime_sharded, 2) == [["exp_avg", "exp_avg_sq", "step"]] * 2

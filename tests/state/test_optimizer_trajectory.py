"""Every optimizer of torch: three updates, through the disk into a fresh one, and the next three are the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hyper_resume.optim import ChainedOptimizer
from hyper_resume.state.optimizer import collect_optimizers, flatten_optimizers
from tests.state.disk import Net, everything, read, same_bits, steps, write

O = torch.optim  # noqa: E741  it stands in every line below

Factory = Callable[[Net], Any]


def matrices(model: Net) -> list[nn.Parameter]:
    return [model.first, model.second]


OPTIMIZERS: dict[str, Factory] = {
    "AdamW": lambda m: O.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "AdamW amsgrad": lambda m: O.AdamW(m.parameters(), lr=0.01, amsgrad=True),
    "AdamW foreach": lambda m: O.AdamW(m.parameters(), lr=0.01, foreach=True),
    "AdamW fused": lambda m: O.AdamW(m.parameters(), lr=0.01, fused=True),
    "AdamW maximize": lambda m: O.AdamW(m.parameters(), lr=0.01, maximize=True),
    "AdamW tensor lr": lambda m: O.AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "AdamW two groups": lambda m: O.AdamW(
        [{"params": matrices(m), "weight_decay": 0.1}, {"params": [m.bias, m.unused], "lr": 0.05, "betas": (0.5, 0.6)}]
    ),
    "AdamW named": lambda m: O.AdamW(m.named_parameters(), lr=0.01),
    "Adam coupled decay": lambda m: O.Adam(m.parameters(), lr=0.01, weight_decay=0.1),
    "SGD": lambda m: O.SGD(m.parameters(), lr=0.1),
    "SGD momentum": lambda m: O.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "SGD dampening": lambda m: O.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "SGD nesterov": lambda m: O.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "Muon": lambda m: O.Muon(matrices(m), lr=0.02, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda m: O.Adagrad(m.parameters(), lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    "NAdam": lambda m: O.NAdam(m.parameters(), lr=0.01),
    "NAdam decoupled": lambda m: O.NAdam(m.parameters(), lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": lambda m: O.RAdam(m.parameters(), lr=0.01),
    "RMSprop": lambda m: O.RMSprop(m.parameters(), lr=0.01),
    "RMSprop centered": lambda m: O.RMSprop(m.parameters(), lr=0.01, centered=True, momentum=0.9),
    "Adafactor": lambda m: O.Adafactor(m.parameters(), lr=0.01),
    "Adadelta": lambda m: O.Adadelta(m.parameters()),
    "Adamax": lambda m: O.Adamax(m.parameters(), lr=0.01),
    "ASGD": lambda m: O.ASGD(m.parameters(), lr=0.01, t0=2),
    "Rprop": lambda m: O.Rprop(m.parameters(), lr=0.01),
    "chain of Muon and AdamW": lambda m: ChainedOptimizer(
        [O.Muon(matrices(m), lr=0.02), O.AdamW([m.bias, m.unused], lr=0.01)]
    ),
    "list of two": lambda m: [O.SGD(matrices(m), lr=0.1, momentum=0.9), O.AdamW([m.bias], lr=0.01)],
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_updates_after_a_restore_are_those_of_the_uninterrupted_run(tmp_path: Path, name: str) -> None:
    model = Net()
    optimizers = flatten_optimizers(OPTIMIZERS[name](model))
    steps(model, optimizers, range(3))
    path = write(tmp_path, model, optimizers)
    at_save = everything(model, optimizers)
    losses = steps(model, optimizers, range(3, 6))

    fresh = Net(seed=1)
    fresh_optimizers = flatten_optimizers(OPTIMIZERS[name](fresh))
    # Gradients and moments of another life must not survive.
    steps(fresh, fresh_optimizers, range(50, 52))
    read(path, fresh, fresh_optimizers)

    assert same_bits(everything(fresh, fresh_optimizers), at_save)
    assert steps(fresh, fresh_optimizers, range(3, 6)) == losses
    assert same_bits(everything(fresh, fresh_optimizers), everything(model, optimizers))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_save_before_the_first_update_restores_to_a_first_update(tmp_path: Path, name: str) -> None:
    model = Net()
    optimizers = flatten_optimizers(OPTIMIZERS[name](model))
    path = write(tmp_path, model, optimizers)
    fresh = Net(seed=1)
    fresh_optimizers = flatten_optimizers(OPTIMIZERS[name](fresh))
    steps(fresh, fresh_optimizers, range(50, 52))
    read(path, fresh, fresh_optimizers)
    assert steps(fresh, fresh_optimizers, range(3)) == steps(model, optimizers, range(3))
    assert same_bits(everything(fresh, fresh_optimizers), everything(model, optimizers))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_collecting_changes_no_later_update(name: str) -> None:
    watched, other = Net(), Net()
    optimizers = flatten_optimizers(OPTIMIZERS[name](watched))
    others = flatten_optimizers(OPTIMIZERS[name](other))
    for number in range(4):
        random_state = torch.get_rng_state()
        collect_optimizers(optimizers, {id(p): n for n, p in watched.named_parameters()})
        assert torch.equal(torch.get_rng_state(), random_state)
        steps(watched, optimizers, range(number, number + 1))
        steps(other, others, range(number, number + 1))
    assert same_bits(everything(watched, optimizers), everything(other, others))


def lbfgs_steps(model: Net, optimizer: O.LBFGS, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        values = torch.randn(5, 4, generator=torch.Generator().manual_seed(900 + number))

        def closure(values: torch.Tensor = values) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(values).pow(2).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        losses.append(float(optimizer.step(closure)))  # type: ignore[no-untyped-call]
    return losses


def test_the_history_of_lbfgs_comes_back(tmp_path: Path) -> None:
    def make(model: Net) -> O.LBFGS:
        return O.LBFGS([model.first, model.second, model.bias], lr=0.1, max_iter=3, history_size=4)

    model = Net()
    optimizer = make(model)
    lbfgs_steps(model, optimizer, range(3))
    assert len(optimizer.state[model.first]["old_dirs"]) > 1
    path = write(tmp_path, model, [optimizer])
    losses = lbfgs_steps(model, optimizer, range(3, 6))
    fresh = Net(seed=1)
    fresh_optimizer = make(fresh)
    read(path, fresh, [fresh_optimizer])
    assert lbfgs_steps(fresh, fresh_optimizer, range(3, 6)) == losses
    assert same_bits(everything(fresh, [fresh_optimizer]), everything(model, [optimizer]))


def test_sparse_gradients_keep_their_moments(tmp_path: Path) -> None:
    def run(embedding: nn.Embedding, optimizer: O.SparseAdam, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            embedding(torch.tensor([number % 3, 4])).pow(2).sum().backward()
            optimizer.step()  # type: ignore[no-untyped-call]

    model, fresh = nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2, sparse=True)
    optimizer, fresh_optimizer = O.SparseAdam(model.parameters()), O.SparseAdam(fresh.parameters())
    run(model, optimizer, range(3))
    path = write(tmp_path, model, [optimizer])
    run(model, optimizer, range(3, 6))
    read(path, fresh, [fresh_optimizer])
    run(fresh, fresh_optimizer, range(3, 6))
    assert same_bits(everything(fresh, [fresh_optimizer]), everything(model, [optimizer]))

"""Whatever moves between two saves and is not in the payload is named by its path, and nothing else is."""

from __future__ import annotations

import copy
import functools
import random
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hyper_resume.state import coverage
from hyper_resume.state.coverage import Coverage, Payload, is_skipped


class Net(nn.Module):
    """Two layers, a batch norm between them, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.norm(self.first(batch)))
        return found


class Trainer(SimpleNamespace):
    """A model, an optimizer, and whatever a test plants."""


def made() -> Trainer:
    torch.manual_seed(0)
    model = Net()
    return Trainer(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), callbacks=[])


def step(trainer: Trainer) -> None:
    loss = trainer.model(torch.randn(3, 4)).square().mean()
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def payload_of(trainer: Trainer, saved: dict[str, Any] | None = None) -> Payload:
    """The model's and the optimizer's state, and that of ``saved``: attribute -> its state."""
    payload = Payload()
    payload.add_live(trainer.model.state_dict())
    payload.add_live([dict(entries) for entries in trainer.optimizer.state.values()])
    for name, state in (saved or {}).items():
        payload.add_state_of(getattr(trainer, name), state)
    return payload


def uncovered(trainer: Trainer, move: Callable[[], Any], saved: Callable[[], dict[str, Any]] = dict) -> tuple[str, ...]:
    """What is named after three saves with a step and a ``move`` before each."""
    watch = Coverage()
    for _ in range(3):
        step(trainer)
        move()
        found = watch.observe({"trainer": trainer}, payload_of(trainer, saved()))
    return found


class Slotted:
    __slots__ = ("shadow", "unset")

    def __init__(self) -> None:
        self.shadow = torch.zeros(2)


class Counts:
    def __init__(self) -> None:
        self.patience = 0

    def on_step(self) -> None:
        self.patience += 1


class Average:
    """Has a state_dict, but is where nobody looks for one."""

    def __init__(self) -> None:
        self.value, self.updates = torch.zeros(2), 0

    def update(self) -> None:
        self.value = self.value * 0.9 + 1
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}


class SharpnessAware(torch.optim.Optimizer):
    """An optimizer that holds an optimizer, as SAM does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.base_optimizer = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base_optimizer.step()


def _tensor_in(make: Callable[[torch.Tensor], Any], path: str) -> Any:
    def plant(trainer: Trainer) -> tuple[Callable[[], Any], str]:
        tensor = torch.zeros(2)
        trainer.planted = make(tensor)
        return lambda: tensor.add_(1), path

    return plant


def _in_a_closure(trainer: Trainer) -> tuple[Callable[[], Any], str]:
    tensor = torch.zeros(2)

    def scale(loss: torch.Tensor) -> torch.Tensor:
        return loss * tensor

    trainer.scale = scale
    return lambda: tensor.add_(1), "trainer.scale.tensor"


def _in_a_forward_hook(trainer: Trainer) -> tuple[Callable[[], Any], str]:
    mean = torch.zeros(4)

    def follow(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        mean.add_(output.detach().mean(0))

    handle = trainer.model.first.register_forward_hook(follow)
    return lambda: None, f"trainer.model.first._forward_hooks.{handle.id}.mean"


def _on_a_parameter(trainer: Trainer) -> tuple[Callable[[], Any], str]:
    weight = trainer.model.first.weight
    weight.average = torch.zeros(2)
    return lambda: weight.average.add_(1), "trainer.model.first.weight.average"


def _in_a_buffer_that_is_not_saved(trainer: Trainer) -> tuple[Callable[[], Any], str]:
    return lambda: trainer.model.seen.add_(1), "trainer.model.seen"


def _in_a_callback(trainer: Trainer) -> tuple[Callable[[], Any], str]:
    trainer.callbacks.append(SimpleNamespace(shadow=torch.zeros(2)))
    return lambda: trainer.callbacks[0].shadow.mul_(2).add_(1), "trainer.callbacks.0.shadow"


def _generator(trainer: Trainer) -> tuple[Callable[[], Any], str]:
    generator = torch.Generator().manual_seed(1)
    trainer.dataset = SimpleNamespace(noise={"generator": generator})
    return lambda: torch.rand(1, generator=generator), "trainer.dataset.noise.generator"


def _python_stream(trainer: Trainer) -> tuple[Callable[[], Any], str]:
    trainer.augment = SimpleNamespace(stream=random.Random(1))
    return trainer.augment.stream.random, "trainer.augment.stream"


def _numpy_generator(trainer: Trainer) -> tuple[Callable[[], Any], str]:
    trainer.augment = [np.random.default_rng(1)]
    return trainer.augment[0].random, "trainer.augment.0"


def _numpy_random_state(trainer: Trainer) -> tuple[Callable[[], Any], str]:
    trainer.augment = [np.random.RandomState(1)]
    return trainer.augment[0].random, "trainer.augment.0"


def _array(trainer: Trainer) -> tuple[Callable[[], Any], str]:
    trainer.statistics = SimpleNamespace(mean=np.zeros(3))

    def move() -> None:
        trainer.statistics.mean += 1

    return move, "trainer.statistics.mean"


def _counter(trainer: Trainer) -> tuple[Callable[[], Any], str]:
    trainer.callbacks.append(Counts())
    return trainer.callbacks[0].on_step, "trainer.callbacks.0.patience"


def _behind_a_bound_method(trainer: Trainer) -> tuple[Callable[[], Any], str]:
    average = Average()
    trainer.after_step = average.update
    return average.update, "trainer.after_step.__self__.value"


def _replaced_each_time(trainer: Trainer) -> tuple[Callable[[], Any], str]:
    trainer.averages = {"decay": [Average()]}
    return trainer.averages["decay"][0].update, "trainer.averages.decay.0.value"


def _slow_weights(trainer: Trainer) -> tuple[Callable[[], Any], str]:
    slow = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.lookahead = SimpleNamespace(optimizer=trainer.optimizer, slow_weights=slow)

    def pull() -> None:
        for kept, parameter in zip(slow, trainer.model.parameters(), strict=True):
            kept.add_(parameter.detach() - kept, alpha=0.5)

    return pull, "trainer.lookahead.slow_weights.0"


def _inner_moments(trainer: Trainer) -> tuple[Callable[[], Any], str]:
    trainer.optimizer = SharpnessAware(trainer.optimizer)
    return lambda: None, "trainer.optimizer.base_optimizer.state.0.exp_avg"


PLANTED: dict[str, Callable[[Trainer], tuple[Callable[[], Any], str]]] = {
    "a list": _tensor_in(lambda tensor: [tensor], "trainer.planted.0"),
    "a dict": _tensor_in(lambda tensor: {"decay": tensor}, "trainer.planted.decay"),
    "a namespace": _tensor_in(lambda tensor: SimpleNamespace(shadow=tensor), "trainer.planted.shadow"),
    "a defaultdict": _tensor_in(lambda tensor: defaultdict(int, {"w": tensor}), "trainer.planted.w"),
    "a queue of past values": _tensor_in(lambda tensor: deque([tensor]), "trainer.planted.0"),
    "a partial": _tensor_in(lambda tensor: functools.partial(print, scale=tensor), "trainer.planted.keywords.scale"),
    "a view": _tensor_in(lambda tensor: (tensor[1:],), "trainer.planted.0"),
    "a closure": _in_a_closure,
    "a forward hook": _in_a_forward_hook,
    "a parameter's attribute": _on_a_parameter,
    "a buffer that is not saved": _in_a_buffer_that_is_not_saved,
    "a callback": _in_a_callback,
    "a generator in a data set": _generator,
    "a stream of Python": _python_stream,
    "a generator of NumPy": _numpy_generator,
    "a random state of NumPy": _numpy_random_state,
    "an array": _array,
    "a counter": _counter,
    "a bound method's object": _behind_a_bound_method,
    "an average that is replaced": _replaced_each_time,
    "slow weights": _slow_weights,
    "an optimizer inside an optimizer": _inner_moments,
}


@pytest.mark.parametrize("kind", PLANTED)
def test_what_moves_and_is_not_saved_is_named_by_its_path(kind: str) -> None:
    trainer = made()
    move, path = PLANTED[kind](trainer)
    assert path in uncovered(trainer, move)


def test_slots_are_looked_into_and_an_unset_one_is_passed_over() -> None:
    trainer = made()
    trainer.planted = Slotted()
    assert uncovered(trainer, lambda: trainer.planted.shadow.add_(1)) == ("trainer.planted.shadow",)


def test_running_statistics_and_parameters_that_a_save_of_adapters_leaves_out_are_named() -> None:
    trainer = made()
    watch = Coverage()
    for _ in range(3):
        step(trainer)
        payload = Payload()
        payload.add_live([trainer.model.last.weight, trainer.model.last.bias])
        payload.add_live([dict(entries) for entries in trainer.optimizer.state.values()])
        found = watch.observe({"trainer": trainer}, payload)
    names = {path.removeprefix("trainer.model.") for path in found}
    assert names >= {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "first.weight"}
    assert not names & {"last.weight", "last.bias"}


def test_an_object_whose_state_leaves_its_counter_out_is_named_and_its_tensor_is_not() -> None:
    trainer = made()
    trainer.average = Average()
    saved = lambda: {"average": trainer.average.state_dict()}  # noqa: E731
    assert uncovered(trainer, trainer.average.update, saved) == ("trainer.average.updates",)


def test_an_object_that_saves_a_copy_of_all_that_it_holds_is_covered() -> None:
    trainer = made()
    trainer.average = Average()
    saved = lambda: {"average": copy.deepcopy(vars(trainer.average))}  # noqa: E731
    assert uncovered(trainer, trainer.average.update, saved) == ()


def test_a_training_that_holds_nothing_else_has_nothing_uncovered() -> None:
    assert uncovered(made(), lambda: None) == ()


def test_activations_gradients_and_what_is_filled_once_are_no_state() -> None:
    trainer = made()
    trainer.cache, trainer.last = {}, None

    def move() -> None:
        trainer.cache.setdefault("mask", torch.ones(2))
        trainer.last = trainer.model(torch.randn(3, 4))
        trainer.last.sum().backward()

    assert uncovered(trainer, move) == ()


def test_a_declared_exception_is_not_named_and_others_still_are() -> None:
    trainer = made()
    trainer.timer, trainer.other = [torch.zeros(1)], [torch.zeros(1)]
    watch = Coverage(accepted=["trainer.timer.*"])
    for _ in range(2):
        trainer.timer[0].add_(1)
        trainer.other[0].add_(1)
        found = watch.observe({"trainer": trainer}, payload_of(trainer))
    assert found == ("trainer.other.0",)


def test_what_moved_once_stays_named() -> None:
    trainer = made()
    trainer.rare = [torch.zeros(1)]
    watch = Coverage()
    watch.observe({"trainer": trainer}, payload_of(trainer))
    trainer.rare[0].add_(1)
    watch.observe({"trainer": trainer}, payload_of(trainer))
    assert watch.observe({"trainer": trainer}, payload_of(trainer)) == ("trainer.rare.0",)


def test_the_walk_moves_no_stream_calls_no_property_and_ends_in_a_circle() -> None:
    class Trap:
        @property
        def value(self) -> torch.Tensor:
            raise AssertionError("a property was called")

        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("a state_dict was called")

    trainer = made()
    trainer.trap, trainer.circle = Trap(), []
    trainer.circle.append(trainer.circle)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    Coverage().observe({"trainer": trainer}, payload_of(trainer))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tobytes() == before[2]


def test_a_walk_that_is_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "MOST_OBJECTS", 5)
    trainer = made()
    assert not coverage.survey({"trainer": trainer}, payload_of(trainer)).is_whole


def test_only_whole_package_names_are_left_out() -> None:
    kinds = [type("Kind", (), {"__module__": name}) for name in ("re", "io", "logging.handlers", "recipes.sam", "iops")]
    assert [is_skipped(kind) for kind in kinds] == [True, True, True, False, False]

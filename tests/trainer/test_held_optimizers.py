"""Optimizers that hold optimizers, or keep state of their own: the resumed run is the uninterrupted one, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import nn

from hyper_resume.errors import CheckpointMismatchError, UnsupportedError
from hyper_resume.state.certificate import Certificate, read_certificate
from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.trainer.custom_trainer import make_custom_trainer, saved_entries, train_custom_trainer
from tests.trainer.held_optimizers import (
    Container,
    Counting,
    ListLookahead,
    Lookahead,
    PlainLookahead,
    Sam,
    adamw,
)

STEPS = 9
SAVED = 4

Make = Callable[[nn.Module], Any]


def _pair(model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    return [adamw(parameters[:2]), torch.optim.SGD(parameters[2:], lr=0.05, momentum=0.9)]


MADE: dict[str, Make] = {
    "sam": lambda m: Sam(m.parameters()),
    "sam with a copy of the list of groups": lambda m: Sam(m.parameters(), copied_groups=True),
    "lookahead": lambda m: Lookahead(adamw(m.parameters())),
    "lookahead of sam": lambda m: Lookahead(Sam(m.parameters())),
    "plain lookahead": lambda m: PlainLookahead(adamw(m.parameters())),
    "plain lookahead with lists": lambda m: ListLookahead(adamw(m.parameters())),
    "container of a list": lambda m: Container(_pair(m)),
    "container of a dictionary": lambda m: Container(dict(zip(("matrices", "rest"), _pair(m), strict=True))),
    "own attributes": lambda m: Counting(m.parameters()),
}


def made(root: Path, make: Make, **checkpoint: Any) -> Any:
    trainer = make_custom_trainer(root, save_epochs=0, save_steps=SAVED, **{"on_mismatch": "error", **checkpoint})
    trainer.optimizer = make(trainer.model)
    trainer.lr_scheduler = []
    return trainer


def models(records: list[Any]) -> list[tuple[float, str]]:
    return [(record.loss, record.live.model) for record in records]


def certificate_of(root: Path) -> Certificate:
    (file,) = (root / "certificates").iterdir()
    return read_certificate(file)


@pytest.mark.parametrize("kind", MADE)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    reference = train_custom_trainer(made(tmp_path / "whole", MADE[kind]), STEPS)
    train_custom_trainer(made(tmp_path / "saved", MADE[kind]), SAVED)
    assert "is not saved" not in caplog.text
    resumed = train_custom_trainer(made(tmp_path / "saved", MADE[kind], restore_from="LATEST"), STEPS)
    assert models(resumed) == models(reference)[SAVED:]
    assert len({model for _, model in models(reference)}) == STEPS
    assert certificate_of(tmp_path / "saved").is_exact


@pytest.mark.parametrize("kind", [kind for kind in MADE if kind != "own attributes"])
def test_without_what_is_held_the_run_is_another_one(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = train_custom_trainer(made(tmp_path / "whole", MADE[kind]), STEPS)
    monkeypatch.setattr("hyper_resume.state.held_optimizers._Search._hold", lambda self, name, holder: None)
    off: dict[str, Any] = {"check_coverage": False, "on_mismatch": "warn"}
    train_custom_trainer(made(tmp_path / "saved", MADE[kind], **off), SAVED)
    resumed = train_custom_trainer(made(tmp_path / "saved", MADE[kind], **off, restore_from="LATEST"), STEPS)
    assert models(resumed) != models(reference)[SAVED:]


@pytest.mark.parametrize("kind", ["lookahead", "plain lookahead", "plain lookahead with lists", "own attributes"])
def test_own_state_that_does_not_come_back_is_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_custom_trainer(made(tmp_path, MADE[kind]), SAVED)
    monkeypatch.setattr("hyper_resume.state.own_state.OwnState.load_state_dict", lambda self, state: None)
    with pytest.raises(CheckpointMismatchError, match="stateful: "):
        CheckpointerCallback(made(tmp_path, MADE[kind], restore_from="LATEST")).on_train_begin()


def test_each_optimizer_is_saved_once_under_its_path(tmp_path: Path) -> None:
    def groups_saved(name: str, make: Make) -> set[str]:
        train_custom_trainer(made(tmp_path / name, make), SAVED)
        entries = saved_entries(tmp_path / name / f"global_step_{SAVED}")
        return {entry.removeprefix("optimizer.") for entry in entries if entry.endswith("param_groups")}

    assert groups_saved("plain", lambda m: adamw(m.parameters())) == {"0.param_groups"}
    assert groups_saved("sam", MADE["sam"]) == {"0.param_groups", "0/base_optimizer.param_groups"}
    assert groups_saved("of sam", MADE["lookahead of sam"]) == {
        "0.param_groups",
        "0/base.param_groups",
        "0/base/base_optimizer.param_groups",
    }
    assert groups_saved("container", MADE["container of a dictionary"]) == {
        "0.param_groups",
        "0/inner/matrices.param_groups",
        "0/inner/rest.param_groups",
    }
    assert groups_saved("plain wrapper", MADE["plain lookahead"]) == {"0.param_groups"}


def test_the_order_of_a_dictionary_of_optimizers_does_not_matter(tmp_path: Path) -> None:
    def turned(model: nn.Module) -> Container:
        return Container(dict(reversed(list(zip(("matrices", "rest"), _pair(model), strict=True)))))

    reference = train_custom_trainer(made(tmp_path / "whole", MADE["container of a dictionary"]), STEPS)
    train_custom_trainer(made(tmp_path / "saved", MADE["container of a dictionary"]), SAVED)
    resumed = train_custom_trainer(made(tmp_path / "saved", turned, restore_from="LATEST"), STEPS)
    assert models(resumed) == models(reference)[SAVED:]


def test_a_wrapper_that_hands_out_state_and_groups_is_saved_as_the_optimizer_in_it(tmp_path: Path) -> None:
    class Facade(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            self.device_placement = True

        state = property(lambda self: self.inner.state)  # type: ignore[assignment]
        param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
        defaults = property(lambda self: self.inner.defaults)  # type: ignore[assignment]

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.inner.zero_grad(set_to_none)

    facade = made(tmp_path, lambda m: Facade(adamw(m.parameters())))
    train_custom_trainer(facade, SAVED)
    names = {name.partition(".state.")[0] for name in saved_entries(tmp_path / f"global_step_{SAVED}")}
    assert {name for name in names if name.startswith("optimizer")} == {"optimizer.0", "optimizer.0.param_groups"}
    plain = made(tmp_path, lambda m: adamw(m.parameters()), restore_from="LATEST")
    CheckpointerCallback(plain).on_train_begin()
    assert certificate_of(tmp_path).is_exact


def test_a_checkpoint_without_the_held_optimizer_is_degraded_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr("hyper_resume.state.held_optimizers._Search._hold", lambda self, name, holder: None)
        train_custom_trainer(made(tmp_path, MADE["sam"], check_coverage=False), SAVED)
    with pytest.raises(CheckpointMismatchError, match="the checkpoint holds 1 optimizers and this run has 2"):
        CheckpointerCallback(made(tmp_path, MADE["sam"], restore_from="LATEST")).on_train_begin()


def test_an_option_that_this_run_has_changed_is_kept_and_degrades(tmp_path: Path) -> None:
    train_custom_trainer(made(tmp_path, MADE["own attributes"]), SAVED)
    other = made(tmp_path, lambda m: Counting(m.parameters(), alpha=0.75), restore_from="LATEST")
    other.config.checkpoint = dataclasses.replace(other.config.checkpoint, on_mismatch="warn")
    CheckpointerCallback(other).on_train_begin()
    assert (other.optimizer.alpha, other.optimizer.steps) == (0.75, SAVED)
    assert not certificate_of(tmp_path).is_exact


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({torch.zeros(2)}, "a set"),
        (np.random.default_rng(1), "a Generator"),
        ({"a": {object(): torch.zeros(2)}}, "a dictionary with keys of type object"),
        (WeakKeyDictionary(), "a WeakKeyDictionary"),
    ],
    ids=["set", "numpy generator", "keys", "weak keys"],
)
def test_what_cannot_be_saved_is_refused_by_class_and_attribute(tmp_path: Path, value: Any, found: str) -> None:
    trainer = made(tmp_path, MADE["own attributes"])
    trainer.optimizer.extra = [value]
    with pytest.raises(UnsupportedError, match=rf"held_optimizers\.Counting\.extra\.0.*found: {found}"):
        CheckpointerCallback(trainer)
    trainer.config.checkpoint = dataclasses.replace(
        trainer.config.checkpoint, save_optimizer=False, restore_optimizer=False
    )
    CheckpointerCallback(trainer)


def test_own_state_is_not_restored_where_the_optimizer_is_not(tmp_path: Path) -> None:
    train_custom_trainer(made(tmp_path, MADE["plain lookahead"]), SAVED)
    trainer = made(tmp_path, MADE["plain lookahead"], restore_from="LATEST", restore_optimizer=False)
    CheckpointerCallback(trainer).on_train_begin()
    assert (trainer.optimizer.count, trainer.optimizer.slow) == (0, {})
    assert trainer.state.global_step == SAVED
    assert certificate_of(tmp_path).is_exact

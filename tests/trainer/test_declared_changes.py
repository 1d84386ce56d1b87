"""Schedules that were planned otherwise, and changes that ``checkpoint.override_on_restore`` declares."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from hyper_resume.config import RunConfig
from hyper_resume.errors import CheckpointMismatchError, ConfigError
from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.trainer.changed_runs import Change, certified, trained, warnings, with_options
from tests.trainer.custom_trainer import make_custom_trainer
from tests.trainer.tiny_training import Ids, run_config, train

# ---- schedules ------------------------------------------------------------------------------------------------------

_STEPS_SAVED, _STEPS_NOW, _WARMUP = 12, 18, 2


def cosine(step: int, horizon: int) -> float:
    """The lr of the step after ``step`` finished ones, as docs/configuration.md defines it."""
    if step < _WARMUP:
        return 0.01 * step / _WARMUP
    return 0.01 * 0.5 * (1 + math.cos(math.pi * (step - _WARMUP) / (horizon - _WARMUP)))


def paused(root: Path, max_steps: int = _STEPS_SAVED, **checkpoint: Any) -> RunConfig:
    return run_config(root, training={"max_steps": max_steps}, **{"save_steps": 4, "save_epochs": 0, **checkpoint})


def test_a_schedule_that_was_planned_shorter_says_which_lr_the_next_step_has_and_how_to_get_this_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(paused(tmp_path), dataset=Ids(60))
    with caplog.at_level(logging.WARNING):
        resumed = train(paused(tmp_path, _STEPS_NOW, restore_from="LATEST"), dataset=Ids(60))
    (warning,) = [message for message in warnings(caplog) if "lr_scheduler" in message]
    assert warning == (
        "lr_scheduler.horizon: 12 -> 18 (this run's holds); the next step has lr 0, as saved; planned by this run's "
        f"configuration it has lr {cosine(12, 18):.6g}; "
        "to take this run's schedule, set checkpoint.override_on_restore=[lr_scheduler]"
    )
    assert certified(tmp_path, 12)["lr_scheduler"].reason == warning
    assert [record.lrs[0] for record in resumed] == pytest.approx([0.0, *(cosine(step, 18) for step in range(13, 18))])
    with pytest.raises(CheckpointMismatchError, match=r"lr_scheduler\.horizon: 12 -> 20"):
        train(paused(tmp_path, 20, restore_from=str(tmp_path / "global_step_12"), on_mismatch="error"), dataset=Ids(60))


@pytest.mark.parametrize("declared", ["lr_scheduler", "lr_scheduler.horizon"])
def test_a_declared_schedule_gives_the_lr_of_a_run_that_was_planned_so(declared: str, tmp_path: Path) -> None:
    planned = train(paused(tmp_path / "planned", _STEPS_NOW), dataset=Ids(60))
    train(paused(tmp_path / "own"), dataset=Ids(60))
    options = {"restore_from": "LATEST", "on_mismatch": "error", "override_on_restore": (declared,)}
    resumed = train(paused(tmp_path / "own", _STEPS_NOW, **options), dataset=Ids(60))
    assert [record.lrs for record in resumed] == [record.lrs for record in planned[12:]]
    assert [record.lrs[0] for record in resumed] == pytest.approx([cosine(step, 18) for step in range(12, 18)])
    parts = certified(tmp_path / "own", 12)
    assert {part.verdict for part in parts.values()} == {"exact", "absent"}
    assert parts["lr_scheduler"].overridden == "lr_scheduler.horizon: 12 -> 18"
    # The same command once more, and without the field: the schedule is that of the newest save now.
    train(paused(tmp_path / "own", _STEPS_NOW, restore_from="LATEST", on_mismatch="error"), dataset=Ids(60))


def test_a_schedule_that_is_planned_from_the_start_goes_on_exactly(tmp_path: Path) -> None:
    longer = {"decay_steps": _STEPS_NOW}
    planned = train(paused(tmp_path / "planned", _STEPS_NOW), dataset=Ids(60))
    config = dataclasses.replace(paused(tmp_path / "own"))
    train(dataclasses.replace(config, lr_scheduler=dataclasses.replace(config.lr_scheduler, **longer)), dataset=Ids(60))
    resumed = train(paused(tmp_path / "own", _STEPS_NOW, restore_from="LATEST", on_mismatch="error"), dataset=Ids(60))
    assert [record.live for record in resumed] == [record.live for record in planned[12:]]


def annealing(horizon: int) -> Change:
    def change(trainer: Any) -> None:
        trainer.lr_scheduler = CosineAnnealingLR(
            torch.optim.AdamW(trainer.model.parameters(), lr=0.02), T_max=horizon, eta_min=0.001
        )
        trainer.optimizer = trainer.lr_scheduler.optimizer

    return change


def test_an_argument_that_a_scheduler_saves_holds_from_the_checkpoint_unless_it_is_declared(tmp_path: Path) -> None:
    shorter = trained(tmp_path / "shorter", 8, annealing(10))
    longer = trained(tmp_path / "longer", 8, annealing(20))
    for root in ("kept", "declared"):
        trained(tmp_path / root, 4, annealing(10))
    kept = trained(tmp_path / "kept", 8, annealing(20), restore_from="LATEST")
    assert [record.lrs for record in kept] == [record.lrs for record in shorter[4:]]
    reason = certified(tmp_path / "kept", 4)["lr_scheduler"].reason
    assert reason.startswith("lr_scheduler.T_max: 10 -> 20 (the checkpoint's holds); the next step has lr ")
    # Half a cosine of 10 (or 20) steps from 0.02 to 0.001, after 4 steps.
    for horizon, place in ((10, "has lr {}, as saved"), (20, "planned by this run's configuration it has lr {}")):
        expected = 0.001 + 0.019 * (1 + math.cos(math.pi * 4 / horizon)) / 2
        assert place.format(f"{expected:.6g}") in reason
    declared = trained(
        tmp_path / "declared", 8, annealing(20), restore_from="LATEST", override_on_restore=("lr_scheduler.T_max",)
    )
    assert [record.lrs for record in declared] == [record.lrs for record in longer[4:]]


# ---- declared changes -----------------------------------------------------------------------------------------------


def test_a_declared_lr_is_that_of_a_run_with_it_from_the_start(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 8, with_options(lr=0.5))
    trained(tmp_path / "own", 4)
    resumed = trained(
        tmp_path / "own", 8, with_options(lr=0.5), restore_from="LATEST", override_on_restore=("optimizer.lr",)
    )
    assert [record.lrs for record in resumed] == [record.lrs for record in whole[4:]]
    part = certified(tmp_path / "own", 4)["optimizer"]
    assert (part.verdict, part.overridden) == ("exact", "optimizer.lr: 0.01 -> 0.5")


def test_other_options_take_the_declared_value_and_the_rest_that_of_the_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path, 4)
    trainer = make_custom_trainer(tmp_path, restore_from="LATEST", override_on_restore=("optimizer.weight_decay",))
    with_options(weight_decay=0.3, eps=0.1)(trainer)
    CheckpointerCallback(trainer).on_train_begin()
    (group,) = trainer.optimizer.param_groups
    assert (group["weight_decay"], group["eps"]) == (0.3, 1e-8)
    part = certified(tmp_path, 4)["optimizer"]
    assert part.verdict == "degraded"
    assert part.reason == "optimizer.eps: 1e-08 -> 0.1 (the checkpoint's holds)"
    assert part.overridden == "optimizer.weight_decay: 0.1 -> 0.3"


def with_plateau(lr: float) -> Change:
    def change(trainer: Any) -> None:
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=lr)
        trainer.lr_scheduler = ReduceLROnPlateau(trainer.optimizer)

    return change


def test_a_schedule_that_follows_a_metric_goes_on_from_a_declared_lr(tmp_path: Path) -> None:
    saving = make_custom_trainer(tmp_path, save_epochs=0)
    with_plateau(0.01)(saving)
    callback = CheckpointerCallback(saving)
    callback.on_train_begin()
    saving.lr_scheduler.step(1.0)
    saving.state.global_step = 2
    callback.on_train_end()
    trainer = make_custom_trainer(tmp_path, restore_from="LATEST", override_on_restore=("optimizer.lr",))
    with_plateau(0.5)(trainer)
    CheckpointerCallback(trainer).on_train_begin()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5
    assert trainer.lr_scheduler.best == 1.0
    parts = certified(tmp_path, 2)
    assert {parts[bucket].verdict for bucket in ("optimizer", "lr_scheduler")} == {"exact"}
    assert parts["optimizer"].overridden == "optimizer.lr: 0.01 -> 0.5"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("optimizer.learning", "did you mean optimizer"),
        ("lr_schedulr", "did you mean lr_scheduler?"),
        ("zzz", "choose among"),
    ],
)
def test_an_unknown_name_is_refused_at_the_start_with_the_nearest(name: str, hint: str, tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path, override_on_restore=(name,))
    with pytest.raises(ConfigError, match="override_on_restore") as caught:
        CheckpointerCallback(trainer).on_train_begin()
    assert hint in str(caught.value)
    assert list(tmp_path.iterdir()) == []

"""Where training goes on: the loader's own position, or what follows from ``global_step``."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hyper_resume.data import DataLoader
from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.trainer.custom_trainer import make_custom_trainer, saved_extra_state
from tests.trainer.tiny_training import Ids

pytestmark = pytest.mark.xdist_group("duck")


# ---- data loaders of other kinds


class Stateless:
    """Five batches an epoch, no memory."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter(torch.arange(15).view(5, 3))


class Endless:
    """No length."""

    def __iter__(self) -> Any:
        while True:
            yield torch.arange(3)


def _at_step(trainer: Any, step: int, epoch: int) -> CheckpointerCallback:
    callback = CheckpointerCallback(trainer)
    callback.on_train_begin()
    trainer.state.global_step, trainer.state.epoch = step, epoch
    return callback


def test_a_loader_without_state_dict_warns_and_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = make_custom_trainer(tmp_path)
    saving.train_dataloader = Stateless()
    with caplog.at_level(logging.WARNING):
        _at_step(saving, 8, 1).on_train_end()
    assert "the dataloader has no state_dict: after a resume this epoch will be replayed from its start" in caplog.text
    assert saved_extra_state(tmp_path / "global_step_8")["train_dataloader"] is None

    caplog.clear()
    resumed = make_custom_trainer(tmp_path, restore_from="LATEST")
    resumed.train_dataloader = Stateless()
    with caplog.at_level(logging.WARNING):
        CheckpointerCallback(resumed).on_train_begin()
    assert (resumed.state.global_step, resumed.start_epoch, resumed.start_step) == (8, 1, 3)
    assert "this epoch is replayed from its start" in caplog.text


def test_a_saved_position_that_the_loader_can_not_take_warns_and_is_skipped(
    five_steps: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumed = make_custom_trainer(five_steps, restore_from="LATEST")
    resumed.train_dataloader = Stateless()
    with caplog.at_level(logging.WARNING):
        CheckpointerCallback(resumed).on_train_begin()
    assert "the dataloader has no load_state_dict: its saved position is skipped" in caplog.text
    assert (resumed.start_epoch, resumed.start_step) == (1, 0)


@pytest.mark.parametrize(("train_steps", "step", "expected"), [(100, 8, (0, 8)), (8, 8, (1, 0)), (5, 8, (1, 3))])
def test_a_loader_without_a_length_counts_train_steps_as_one_epoch(
    tmp_path: Path, train_steps: int, step: int, expected: tuple[int, int]
) -> None:
    saving = make_custom_trainer(tmp_path)
    saving.train_dataloader = Endless()
    _at_step(saving, step, 0).on_train_end()
    resumed = make_custom_trainer(tmp_path, restore_from="LATEST")
    resumed.train_dataloader, resumed.train_steps = Endless(), train_steps
    CheckpointerCallback(resumed).on_train_begin()
    assert (resumed.start_epoch, resumed.start_step) == expected


def test_the_iterators_position_is_saved_and_not_that_of_a_loader_that_has_read_ahead(tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path)
    trainer.data_iterator = SimpleNamespace(state_dict=lambda: {"read": 4})
    trainer.train_dataloader.load_state_dict({**trainer.train_dataloader.state_dict(), "batches_consumed": 5})
    _at_step(trainer, 4, 0).on_train_end()
    assert saved_extra_state(tmp_path / "global_step_4")["train_dataloader"] == {"read": 4}


# ---- where start_epoch and start_step come from


@pytest.mark.parametrize(
    ("samples", "batch_size", "accumulation", "consumed", "step", "expected"),
    [
        (25, 5, 1, (1, 3), 8, (1, 3)),  # specification C5
        (25, 5, 1, (0, 5), 5, (1, 0)),  # an epoch's end is the next one's start
        (25, 5, 1, (1, 0), 5, (1, 0)),
        (10, 1, 4, (0, 8), 2, (0, 2)),  # 10 batches by 4: 3 steps an epoch, the last of 2
        (10, 1, 4, (0, 10), 3, (1, 0)),
        (10, 1, 4, (1, 4), 4, (1, 1)),
        (10, 1, 4, (2, 8), 8, (2, 2)),
        (3, 1, 4, (5, 0), 5, (5, 0)),  # an epoch shorter than one accumulation window
    ],
)
def test_start_epoch_and_start_step_count_optimizer_steps(
    tmp_path: Path,
    samples: int,
    batch_size: int,
    accumulation: int,
    consumed: tuple[int, int],
    step: int,
    expected: tuple[int, int],
) -> None:
    def make(**checkpoint: Any) -> Any:
        trainer = make_custom_trainer(tmp_path, **checkpoint)
        trainer.config.training = SimpleNamespace(gradient_accumulation_steps=accumulation)
        trainer.train_dataloader = DataLoader(Ids(samples), batch_size=batch_size)
        return trainer

    saving = make()
    position = {"epoch": consumed[0], "batches_consumed": consumed[1]}
    saving.train_dataloader.load_state_dict({**saving.train_dataloader.state_dict(), **position})
    _at_step(saving, step, consumed[0]).on_train_end()

    resumed = make(restore_from="LATEST")
    CheckpointerCallback(resumed).on_train_begin()
    assert (resumed.start_epoch, resumed.start_step) == expected
    assert type(resumed.start_epoch) is type(resumed.start_step) is int


def test_a_data_position_that_contradicts_the_counter_is_followed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving = make_custom_trainer(tmp_path)
    saving.train_dataloader.load_state_dict({**saving.train_dataloader.state_dict(), "epoch": 3, "batches_consumed": 2})
    _at_step(saving, 8, 3).on_train_end()
    resumed = make_custom_trainer(tmp_path, restore_from="LATEST")
    with caplog.at_level(logging.WARNING):
        CheckpointerCallback(resumed).on_train_begin()
    assert (resumed.start_epoch, resumed.start_step) == (3, 2)
    assert "is epoch 1, step 3, but the data position is epoch 3, step 2" in caplog.text

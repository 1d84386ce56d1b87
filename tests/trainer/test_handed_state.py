"""The state that a hook is handed decides what is due and what is saved, also where it is not the trainer's own."""

from __future__ import annotations

import json
import logging
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hyper_resume.errors import ConfigError, PreemptedError
from hyper_resume.trainer.callbacks import (
    CheckpointerCallback,
    PreemptionCallback,
    ProgressCallback,
    TrainerState,
    TrajectoryCallback,
)
from tests.trainer.custom_trainer import make_custom_trainer, saved_extra_state
from tests.trainer.tiny_training import saved_steps

pytestmark = pytest.mark.xdist_group("duck")


def _begun(checkpoint_dir: Path, **settings: Any) -> tuple[Any, CheckpointerCallback]:
    trainer = make_custom_trainer(checkpoint_dir, **settings)
    callback = CheckpointerCallback(trainer)
    callback.on_train_begin(trainer.state)
    return trainer, callback


def test_a_step_is_due_and_saved_by_the_state_that_is_handed_in(tmp_path: Path) -> None:
    trainer, callback = _begun(tmp_path, save_steps=4, save_epochs=0)
    callback.on_step_end(TrainerState(global_step=7, epoch=1))
    assert saved_steps(tmp_path) == []
    callback.on_step_end(TrainerState(global_step=8, epoch=1, epoch_ended=False))
    assert saved_steps(tmp_path) == [8]
    assert (tmp_path / "latest_checkpoint_iteration.txt").read_text() == "8\n"
    saved = saved_extra_state(tmp_path / "global_step_8")
    assert (saved["global_step"], saved["epoch"], saved["epoch_ended"]) == (8, 1, False)
    assert (trainer.state.global_step, trainer.state.epoch) == (0, 0)


def test_an_epoch_is_due_by_the_state_that_is_handed_in(tmp_path: Path) -> None:
    _, callback = _begun(tmp_path, save_epochs=3)
    callback.on_epoch_end(TrainerState(global_step=10, epoch=1))
    assert saved_steps(tmp_path) == []
    callback.on_epoch_end(TrainerState(global_step=15, epoch=2, epoch_ended=True))
    assert saved_steps(tmp_path) == [15]
    assert saved_extra_state(tmp_path / "global_step_15")["epoch"] == 2


def test_the_end_saves_the_step_that_is_handed_in_unless_it_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, callback = _begun(tmp_path, save_steps=5, save_epochs=0)
    caplog.set_level(logging.INFO)
    callback.on_step_end(TrainerState(global_step=5))
    callback.on_train_end(TrainerState(global_step=5))
    assert [line for line in caplog.messages if line.startswith("Saving checkpoint")] == [
        f"Saving checkpoint: global_step=5, epoch=0, dir={tmp_path / 'global_step_5'}, save_async=False"
    ]
    callback.on_train_end(TrainerState(global_step=6))
    assert saved_steps(tmp_path) == [5, 6]


def test_a_hook_without_a_state_works_with_the_trainers_own(tmp_path: Path) -> None:
    trainer, callback = _begun(tmp_path, save_steps=2, save_epochs=0)
    callback.on_step_end(TrainerState(global_step=4))
    trainer.state.global_step = 6
    callback.on_step_end()
    assert saved_steps(tmp_path) == [4, 6]


def test_a_difference_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, callback = _begun(tmp_path, save_steps=100)
    trainer.state.global_step = 1
    callback.on_step_end(trainer.state)
    callback.on_step_end(TrainerState(global_step=1))
    assert not [line for line in caplog.messages if "handed" in line]
    callback.on_step_end(TrainerState(global_step=3, epoch=1))
    callback.on_step_end(TrainerState(global_step=4, epoch=1))
    assert [line for line in caplog.messages if "handed" in line] == [
        "a hook was handed a state with global_step 3, epoch 1 while trainer.state has global_step 1, epoch 0: "
        "the one that is handed in is saved"
    ]


def test_what_is_restored_reaches_the_state_that_is_handed_in_and_the_trainers_own(
    tmp_path: Path, five_steps: Path
) -> None:
    trainer = make_custom_trainer(tmp_path, save_epochs=0, restore_from=str(five_steps / "global_step_5"))
    own = TrainerState()
    callback = CheckpointerCallback(trainer)
    callback.on_train_begin(own)
    assert (own.global_step, own.epoch) == (5, 0)
    assert (trainer.state.global_step, trainer.state.epoch) == (5, 0)
    callback.on_train_end(own)
    assert saved_steps(tmp_path) == [], "the restored step is not written again"


def test_a_refused_restore_leaves_the_state_that_is_handed_in_as_it_was(tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path, restore_from=str(tmp_path / "none"))
    own = TrainerState(global_step=3, epoch=2)
    with pytest.raises(FileNotFoundError):
        CheckpointerCallback(trainer).on_train_begin(own)
    assert own == TrainerState(global_step=3, epoch=2)


def test_a_state_without_counters_is_refused_by_name(tmp_path: Path) -> None:
    _, callback = _begun(tmp_path, save_steps=1)
    state: Any = SimpleNamespace(step=1)
    with pytest.raises(ConfigError, match=r"a hook was handed a state that lacks counters.*no global_step, epoch"):
        callback.on_step_end(state)
    assert saved_steps(tmp_path) == []


def test_a_preempted_loop_saves_the_state_that_is_handed_in(tmp_path: Path) -> None:
    trainer, checkpointer = _begun(tmp_path, save_epochs=0)
    callback = PreemptionCallback(trainer, checkpointer)
    callback.on_train_begin()
    try:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(PreemptedError, match="after global_step 7 of 100"):
            callback.on_step_end(TrainerState(global_step=7))
    finally:
        callback.on_train_end()
    assert saved_steps(tmp_path) == [7]


def test_the_record_of_a_step_is_of_the_state_that_is_handed_in(tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path)
    callback = TrajectoryCallback(trainer, directory=str(tmp_path), digests=False)
    callback.on_step_end(TrainerState(global_step=9, epoch=2, loss=0.5, lrs=[0.25], sample_ids=[4]))
    (line,) = (tmp_path / "trajectory_rank_0.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert [record[key] for key in ("global_step", "epoch", "loss", "lr", "sample_ids")] == [9, 2, 0.5, 0.25, [4]]


def test_the_progress_is_of_the_state_that_is_handed_in(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    callback = ProgressCallback(make_custom_trainer(tmp_path))
    callback.on_step_end(TrainerState(global_step=50, loss=0.5, next_lrs=[0.25]))
    callback.on_train_end()
    assert "50/100" in capfd.readouterr().err

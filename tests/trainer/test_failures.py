"""Training that an error stops, data that ends early, saves that fail: what the user sees, and what is on disk then."""

from __future__ import annotations

import logging
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hyper_resume.checkpoint.base import SaveEvent
from hyper_resume.config import RunConfig
from hyper_resume.errors import CheckpointSaveError, ConfigError, TrainingIncompleteError
from hyper_resume.trainer.base import BaseTrainer
from hyper_resume.trainer.callbacks import Callback, CheckpointerCallback
from tests.trainer.tiny_training import (
    Ids,
    MakeCallback,
    StoppedOnPurpose,
    at_step,
    make_trainer,
    run_config,
    saved_steps,
    stop_after,
    train,
)

# Above everything that a training writes beside the shards of a wide net, and far below those.
FILE_SIZE_LIMIT_BYTES = 64 * 1024
WIDE = 192


@pytest.fixture
def refuse_large_files() -> Iterator[Callable[[Any], None]]:
    """From its call to the end of the test, every write past the limit fails in this process, as on a full disk.

    What is in flight at the call is let through.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def refuse(trainer: Any) -> None:
        _checkpointer_callback(trainer).wait_for_pending_save()
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE_LIMIT_BYTES, hard))

    yield refuse
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _leftovers(checkpoint_dir: Path) -> list[str]:
    return [path.name for path in (checkpoint_dir / ".staging").glob("*")]


def _pointer(checkpoint_dir: Path) -> str:
    return (checkpoint_dir / "latest_checkpoint_iteration.txt").read_text().strip()


# ---- saves that fail


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("max_steps", [4, 7], ids=["at-the-end", "in-mid-training"])
def test_a_failing_save_ends_training_with_an_error_and_keeps_the_older_checkpoint(
    tmp_path: Path, is_async: bool, max_steps: int, refuse_large_files: Callable[[Any], None]
) -> None:
    config = run_config(tmp_path, training={"max_steps": max_steps}, save_steps=2, is_async=is_async)
    trainer = make_trainer(config, width=WIDE, callbacks=[at_step(4, refuse_large_files)])
    with pytest.raises(CheckpointSaveError, match="the checkpoint was not saved") as caught:
        trainer.train()
    assert "global_step_4" in str(caught.value)
    # An asynchronous failure is raised by the next save at the latest.
    assert trainer.state.global_step == (min(6, max_steps) if is_async else 4)
    assert saved_steps(tmp_path) == [2]
    assert _pointer(tmp_path) == "2"
    assert _leftovers(tmp_path) == []


def test_a_save_that_fails_while_training_is_stopping_is_logged_and_the_first_error_is_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refuse_large_files: Callable[[Any], None]
) -> None:
    config = run_config(tmp_path, save_steps=4, is_async=True)
    trainer = make_trainer(config, width=WIDE, callbacks=[at_step(4, refuse_large_files), stop_after(5)])
    with pytest.raises(StoppedOnPurpose):
        trainer.train()
    assert "the save in flight failed while training was stopping" in caplog.messages
    assert saved_steps(tmp_path) == []
    assert _leftovers(tmp_path) == []


# ---- saves in flight


class Gate:
    """Holds a save between its last byte and its commit until it is opened."""

    def __init__(self) -> None:
        self.is_open = threading.Event()

    def __call__(self, event: SaveEvent) -> None:
        if event.state == "written":
            assert self.is_open.wait(timeout=60)


def _gated_trainer(config: RunConfig, *callbacks: MakeCallback) -> BaseTrainer:
    trainer = make_trainer(config, callbacks=callbacks)
    _checkpointer_callback(trainer).checkpointer.add_listener(Gate())
    return trainer


def _checkpointer_callback(trainer: BaseTrainer) -> CheckpointerCallback:
    return next(callback for callback in trainer.callbacks if isinstance(callback, CheckpointerCallback))


def _open_gate(trainer: BaseTrainer) -> None:
    (gate,) = [one for one in _checkpointer_callback(trainer).checkpointer.listeners if isinstance(one, Gate)]
    assert saved_steps(Path(trainer.config.checkpoint.checkpoint_dir)) == [], "nothing is in flight any more"
    gate.is_open.set()


class FailsWhenTold(Callback):
    def on_exception(self, state: Any = None, **kwargs: Any) -> None:
        raise ValueError("wrong while it is told of the error")


def test_a_save_in_flight_is_finished_when_the_loop_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = run_config(tmp_path, save_steps=2, is_async=True)
    trainer = _gated_trainer(config, at_step(3, _open_gate), stop_after(3), FailsWhenTold)
    with pytest.raises(StoppedOnPurpose):
        trainer.train()
    assert saved_steps(tmp_path) == [2]
    assert _pointer(tmp_path) == "2"
    assert _leftovers(tmp_path) == []
    assert "FailsWhenTold failed while training was stopping" in caplog.messages


def test_training_goes_on_during_a_save_and_the_next_save_waits_for_it(tmp_path: Path) -> None:
    config = run_config(tmp_path, training={"max_steps": 4}, save_steps=2, is_async=True)
    _gated_trainer(config, at_step(4, _open_gate)).train()
    assert saved_steps(tmp_path) == [2, 4]
    assert _pointer(tmp_path) == "4"


def test_an_async_save_holds_the_state_of_its_own_step_whatever_is_trained_meanwhile(tmp_path: Path) -> None:
    straight = train(run_config(tmp_path / "none", save_ckpt=False))
    config = run_config(
        tmp_path, training={"max_steps": 6}, save_steps=3, is_async=True, lr_scheduler={"decay_steps": 7}
    )
    _gated_trainer(config, at_step(6, _open_gate)).train()
    resumed = train(run_config(tmp_path, save_ckpt=False, restore_from=str(tmp_path / "global_step_3")))
    assert resumed == straight[3:]


# ---- data that ends early, runs that can't be planned


def test_data_that_ends_before_max_steps_is_an_error_after_the_last_step_was_saved(tmp_path: Path) -> None:
    config = run_config(tmp_path, training={"num_train_epochs": 2, "max_steps": 20}, save_epochs=0)
    with pytest.raises(TrainingIncompleteError, match="expected: 20 steps; found: 14 steps after 2 epochs"):
        train(config)
    assert saved_steps(tmp_path) == [14]


def test_data_that_shrank_since_the_checkpoint_is_an_error_and_not_a_short_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = {"num_train_epochs": 3, "max_steps": 21}
    train(run_config(tmp_path, training={**training, "max_steps": 8}), dataset=Ids(20))
    with caplog.at_level(logging.WARNING), pytest.raises(TrainingIncompleteError):
        train(run_config(tmp_path, training=training, restore_from="LATEST"), dataset=Ids(11))
    assert "the data has changed since the checkpoint (num_samples saved 20, current 11)" in caplog.text


def test_a_loader_without_a_length_needs_max_steps_and_says_so_before_training(tmp_path: Path) -> None:
    class NoLength:
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(ConfigError, match=r"training\.max_steps.*no length"):
        make_trainer(run_config(tmp_path), loader=NoLength())


def test_an_error_before_the_first_save_leaves_no_checkpoint_and_a_refused_restore_no_directory(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(FileNotFoundError):
        train(run_config(folder, restore_from=str(tmp_path / "absent")))
    assert not folder.exists()
    with pytest.raises(StoppedOnPurpose):
        train(run_config(folder, save_steps=1), callbacks=[stop_after(1)])
    # The start has made the root, and locked it.
    assert [path.name for path in folder.iterdir()] == [".writer.lock"]

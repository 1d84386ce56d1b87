"""Training that is broken off, data that ends early, saves that fail: what reaches the user, and what is on disk then."""

from __future__ import annotations

import logging
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hyper_resume.checkpoint.dcp import DistributedCheckpointer
from hyper_resume.errors import CheckpointSaveError, ConfigError, TrainingIncompleteError
from hyper_resume.trainer.base import BaseTrainer
from hyper_resume.trainer.callbacks import Callback, CheckpointerCallback
from tests.trainer.parts import Ids, StoppedOnPurpose, make_trainer, run_config, saved_steps, stop_after, train

# Above everything that a training writes beside the shards of a wide net.
FILE_SIZE_LIMIT_BYTES = 64 * 1024
WIDE = 192


@contextmanager
def no_large_files() -> Iterator[None]:
    """Let every write past the limit fail in this process, as on a full disk, in threads too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE_LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _leftovers(checkpoint_dir: Path) -> list[str]:
    return [path.name for path in (checkpoint_dir / ".staging").glob("*")]


def _pointer(checkpoint_dir: Path) -> str:
    return (checkpoint_dir / "latest_checkpoint_iteration.txt").read_text().strip()


class LimitFrom(Callback):
    """From the given step on no large file can be written; told as a callback, so before that step's save."""

    step = 0

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._context = no_large_files()

    def on_step_end(self, state: Any = None, **kwargs: Any) -> None:
        if self.trainer.state.global_step == self.step:
            self._context.__enter__()

    def on_exception(self, state: Any = None, **kwargs: Any) -> None:
        self._context.__exit__(None, None, None)


class LimitFromStep4(LimitFrom):
    step = 4


# ---- saves that fail


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("max_steps", [4, 7], ids=["at-the-end", "in-mid-training"])
def test_a_failing_save_ends_training_with_an_error_and_keeps_the_older_checkpoint(
    tmp_path: Path, is_async: bool, max_steps: int
) -> None:
    config = run_config(tmp_path, training={"max_steps": max_steps}, save_steps=2, is_async=is_async)
    trainer = make_trainer(config, width=WIDE, callbacks=[LimitFromStep4])
    with pytest.raises(CheckpointSaveError, match="File too large") as caught:
        trainer.train()
    assert "global_step_4" in str(caught.value)
    assert trainer.state.global_step in ({4} if not is_async or max_steps == 4 else {4, 5, 6})
    assert saved_steps(tmp_path) == [2]
    assert _pointer(tmp_path) == "2"
    assert _leftovers(tmp_path) == []

    resumed = make_trainer(run_config(tmp_path, training={"max_steps": 5}, restore_from="LATEST"), width=WIDE)
    resumed.train()
    assert resumed.start_step == 2
    assert saved_steps(tmp_path) == [2, 5]


class Gated(DistributedCheckpointer):
    """The real one, whose background save can't be published before the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def _finalize_checkpoint(self, *args: Any) -> None:
        assert self.gate.wait(timeout=60)
        super()._finalize_checkpoint(*args)


def _gate(trainer: BaseTrainer) -> Gated:
    checkpointer = Gated()
    callback = next(callback for callback in trainer.callbacks if isinstance(callback, CheckpointerCallback))
    callback.checkpointer = checkpointer
    return checkpointer


class OpenAndRaise(Callback):
    """Sees that the save of step 2 is still in flight, lets it go on, and breaks training off."""

    def on_step_end(self, state: Any = None, **kwargs: Any) -> None:
        if self.trainer.state.global_step == 3:
            assert saved_steps(Path(self.trainer.config.checkpoint.checkpoint_dir)) == []
            self.trainer.gated.gate.set()
            raise StoppedOnPurpose

    def on_exception(self, state: Any = None, **kwargs: Any) -> None:
        raise ValueError("a callback that fails while it is told of the error")


def test_a_save_in_flight_is_finished_when_the_loop_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer: Any = make_trainer(run_config(tmp_path, save_steps=2, is_async=True), callbacks=[OpenAndRaise])
    trainer.gated = _gate(trainer)
    with pytest.raises(StoppedOnPurpose):
        trainer.train()
    assert saved_steps(tmp_path) == [2]
    assert _pointer(tmp_path) == "2"
    assert _leftovers(tmp_path) == []
    assert "OpenAndRaise failed while training was broken off" in caplog.text


def test_a_save_that_fails_while_training_is_broken_off_is_logged_and_the_first_error_is_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(tmp_path, save_steps=4, is_async=True)
    trainer = make_trainer(config, width=WIDE, callbacks=[stop_after(5), LimitFromStep4])
    # The stop at step 5 comes before the limit is lifted, and nothing waited for the save of step 4 until then.
    limit = trainer.callbacks.pop(2)
    trainer.callbacks.append(limit)
    trainer.callbacks.remove(limit)
    trainer.callbacks.insert(0, limit)
    lift, limit.on_exception = limit.on_exception, lambda state=None, **kwargs: None  # type: ignore[method-assign]
    try:
        with pytest.raises(StoppedOnPurpose):
            trainer.train()
    finally:
        lift()
    assert "the save in flight failed while training was broken off" in caplog.text
    assert "File too large" in caplog.text
    assert saved_steps(tmp_path) == []


def test_training_goes_on_while_a_save_is_in_flight_and_the_next_save_waits_for_it(tmp_path: Path) -> None:
    class OpenAtStep4(Callback):
        def on_step_end(self, state: Any = None, **kwargs: Any) -> None:
            if self.trainer.state.global_step == 4:
                assert saved_steps(tmp_path) == []
                self.trainer.gated.gate.set()

    class SeesStep2(DistributedCheckpointer):
        """At the moment of a new save the one before must be published."""

    trainer: Any = make_trainer(
        run_config(tmp_path, training={"max_steps": 4}, save_steps=2, is_async=True), callbacks=[OpenAtStep4]
    )
    trainer.gated = _gate(trainer)
    trainer.train()
    assert saved_steps(tmp_path) == [2, 4]
    assert _pointer(tmp_path) == "4"


def test_an_async_save_holds_the_state_of_its_own_step_whatever_is_trained_meanwhile(tmp_path: Path) -> None:
    class OpenAtStep6(Callback):
        def on_step_end(self, state: Any = None, **kwargs: Any) -> None:
            if self.trainer.state.global_step == 6:
                self.trainer.gated.gate.set()

    straight = train(run_config(tmp_path / "none", save_ckpt=False))
    config = run_config(tmp_path, training={"max_steps": 6}, save_steps=3, is_async=True, lr_scheduler={"decay_steps": 7})
    trainer: Any = make_trainer(config, callbacks=[OpenAtStep6])
    trainer.gated = _gate(trainer)
    trainer.train()
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


def test_an_error_before_the_first_step_leaves_no_directory(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(FileNotFoundError):
        train(run_config(folder, restore_from=str(tmp_path / "absent")))
    with pytest.raises(StoppedOnPurpose):
        train(run_config(folder, save_steps=1), callbacks=[stop_after(1)])
    assert not folder.exists()

"""When a checkpoint is written, counted as real directories, and what the log says."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from hyper_resume.checkpoint.dcp import DistributedCheckpointer
from hyper_resume.config import CheckpointingConfig
from hyper_resume.trainer.base import BaseTrainer
from hyper_resume.trainer.callbacks import Callback, CheckpointerCallback
from tests.trainer.tiny_training import Ids, disk_listing, make_trainer, run_config, saved_steps, train

LOADED = re.compile(
    r"Checkpoint loaded successfully: path=(?P<path>.*), global_step=(\d+), start_epoch=(\d+), start_step=(\d+)"
)


def _checkpointers(trainer: BaseTrainer) -> list[CheckpointerCallback]:
    return [callback for callback in trainer.callbacks if isinstance(callback, CheckpointerCallback)]


class SeenOnDisk(Callback):
    """Lists the step directories after every step; callbacks of the user run before the checkpointer."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.steps: dict[int, list[int]] = {}

    def on_step_end(self, state: Any = None, **kwargs: Any) -> None:
        self.steps[self.trainer.state.global_step] = saved_steps(Path(self.trainer.config.checkpoint.checkpoint_dir))


# ---- cadence (7 batches of 3 from 20 samples an epoch)


def test_save_steps_saves_at_each_multiple_at_that_very_step(tmp_path: Path) -> None:
    config = run_config(tmp_path, training={"num_train_epochs": 3, "max_steps": 9}, save_steps=4, save_epochs=0)
    trainer = make_trainer(config, callbacks=[SeenOnDisk])
    trainer.train()
    seen = next(callback.steps for callback in trainer.callbacks if isinstance(callback, SeenOnDisk))
    # What a hook sees was written in an earlier step: 4 is there from 5 on, 8 from 9 on, 9 comes at the end of training.
    assert seen == {step: [s for s in (4, 8) if s < step] for step in range(1, 10)}
    assert saved_steps(tmp_path) == [4, 8, 9]


def test_save_epochs_saves_at_the_end_of_every_epoch(tmp_path: Path) -> None:
    train(run_config(tmp_path, training={"num_train_epochs": 3}))
    assert saved_steps(tmp_path) == [7, 14, 21]


def test_save_epochs_of_two_saves_every_other_epoch_and_the_end(tmp_path: Path) -> None:
    train(run_config(tmp_path, training={"num_train_epochs": 3}, save_epochs=2))
    assert saved_steps(tmp_path) == [14, 21]


def test_an_epoch_counts_as_ended_when_max_steps_is_its_last_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(tmp_path, training={"num_train_epochs": 3, "max_steps": 14}, save_epochs=2)
    trainer = make_trainer(config, callbacks=[SeenOnDisk])
    with caplog.at_level(logging.INFO):
        trainer.train()
    assert saved_steps(tmp_path) == [14]
    assert sum("Saving checkpoint" in message for message in caplog.messages) == 1


def test_an_epoch_that_max_steps_cuts_short_is_saved_as_the_end_of_training_only(tmp_path: Path) -> None:
    train(run_config(tmp_path, training={"num_train_epochs": 3, "max_steps": 13}))
    assert saved_steps(tmp_path) == [7, 13]


def test_a_step_hit_by_two_triggers_is_written_once_and_the_skip_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        train(run_config(tmp_path, training={"num_train_epochs": 2}, save_steps=7))
    assert saved_steps(tmp_path) == [7, 14]
    saving = [message for message in caplog.messages if message.startswith("Saving checkpoint")]
    assert len(saving) == 2
    assert "Skip saving at the end of epoch 0: global_step=7 is already saved" in caplog.messages
    assert "Skip saving at the end of epoch 1: global_step=14 is already saved" in caplog.messages


def test_with_both_periods_off_only_the_end_of_training_is_saved(tmp_path: Path) -> None:
    train(run_config(tmp_path, training={"num_train_epochs": 2}, save_steps=0, save_epochs=0))
    assert saved_steps(tmp_path) == [14]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_end_of_training_does_not_write_a_saved_step_again(tmp_path: Path, is_async: bool) -> None:
    config = run_config(tmp_path, training={"max_steps": 6}, save_steps=3, is_async=is_async)
    written: list[str] = []

    class Counting(DistributedCheckpointer):
        def save(self, path: str, state: dict[str, Any], *, global_step: int, **options: Any) -> None:
            written.append(f"{global_step} {'async' if options['save_async'] else 'sync'}")
            super().save(path, state, global_step=global_step, **options)

    trainer = make_trainer(config)
    _checkpointers(trainer)[0].checkpointer = Counting()
    trainer.train()
    kind = "async" if is_async else "sync"
    assert written == [f"3 {kind}", f"6 {kind}"]
    assert saved_steps(tmp_path) == [3, 6]
    assert (tmp_path / "latest_checkpoint_iteration.txt").read_text().strip() == "6"
    assert list((tmp_path / ".staging").iterdir()) == []


def test_the_last_save_is_synchronous_even_with_is_async(tmp_path: Path) -> None:
    kinds: list[tuple[int, bool]] = []

    class Counting(DistributedCheckpointer):
        def save(self, path: str, state: dict[str, Any], *, global_step: int, **options: Any) -> None:
            kinds.append((global_step, options["save_async"]))
            super().save(path, state, global_step=global_step, **options)

    trainer = make_trainer(run_config(tmp_path, training={"max_steps": 5}, save_steps=2, is_async=True))
    _checkpointers(trainer)[0].checkpointer = Counting()
    trainer.train()
    assert kinds == [(2, True), (4, True), (5, False)]
    assert saved_steps(tmp_path) == [2, 4, 5]


@pytest.mark.parametrize("max_steps", [5, 3], ids=["at-the-checkpoint", "before-the-checkpoint"])
def test_a_resume_without_new_training_trains_nothing_and_writes_nothing(tmp_path: Path, max_steps: int) -> None:
    train(run_config(tmp_path, training={"max_steps": 5}))
    listing = disk_listing(tmp_path)
    assert train(run_config(tmp_path, training={"max_steps": max_steps}, restore_from="LATEST")) == []
    assert _without_certificates(tmp_path) == _untimed(listing)


def test_a_resume_of_a_finished_run_of_epochs_trains_nothing_and_writes_nothing(tmp_path: Path) -> None:
    config = run_config(tmp_path, training={"num_train_epochs": 2})
    train(config)
    listing = disk_listing(tmp_path)
    resumed = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, restore_from="LATEST"))
    assert train(resumed) == []
    assert _without_certificates(tmp_path) == _untimed(listing)


def _without_certificates(folder: Path) -> dict[str, tuple[int, int]]:
    """What is on disk but the restore's certificate, without the time of ``.staging``, where the start tries to write."""
    listing = disk_listing(folder)
    certificates = [path for path in listing if path.startswith("certificates/")]
    assert len(certificates) == 1
    return _untimed({path: entry for path, entry in listing.items() if not path.startswith("certificates")})


def _untimed(listing: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return {path: (size, 0 if path == ".staging" else time) for path, (size, time) in listing.items()}


def test_a_resumed_run_saves_on_at_the_same_multiples(tmp_path: Path) -> None:
    train(run_config(tmp_path, training={"num_train_epochs": 3, "max_steps": 5}, save_steps=4, save_epochs=0))
    before = disk_listing(tmp_path)
    config = run_config(
        tmp_path, training={"num_train_epochs": 3, "max_steps": 10}, save_steps=4, save_epochs=0, restore_from="LATEST"
    )
    train(config)
    assert saved_steps(tmp_path) == [4, 5, 8, 10]
    after = disk_listing(tmp_path)
    old = [path for path in before if path.startswith(("global_step_4", "global_step_5"))]
    assert {path: after[path] for path in old} == {path: before[path] for path in old}


def test_going_back_to_an_older_step_writes_the_later_ones_anew_and_moves_the_pointer(tmp_path: Path) -> None:
    config = run_config(tmp_path, training={"max_steps": 6}, save_steps=2)
    train(config)
    before = disk_listing(tmp_path)
    train(run_config(tmp_path, training={"max_steps": 4}, save_steps=2, restore_from=str(tmp_path / "global_step_2")))
    after = disk_listing(tmp_path)
    changed = {path.split("/")[0] for path in after if before.get(path) != after[path]}
    assert {name for name in changed if name.startswith("global_step")} == {"global_step_4"}
    assert (tmp_path / "latest_checkpoint_iteration.txt").read_text().strip() == "4"
    assert saved_steps(tmp_path) == [2, 4, 6]


def test_without_a_checkpoint_block_every_epoch_is_saved_under_checkpoints_and_nothing_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = run_config(tmp_path, training={"num_train_epochs": 2})
    config = dataclasses.replace(config, checkpoint=CheckpointingConfig())
    first = train(config)
    assert saved_steps(tmp_path / "checkpoints") == [7, 14]
    assert train(config) == first


# ---- save_ckpt x restore_from


@pytest.mark.parametrize("restore", [None, "LATEST", "path"])
@pytest.mark.parametrize("save", [True, False])
def test_writing_and_reading_are_switched_independently(tmp_path: Path, save: bool, restore: str | None) -> None:
    source = tmp_path / "source"
    train(run_config(source, training={"max_steps": 3}))
    before = disk_listing(source)
    target = source if restore == "LATEST" else tmp_path / "target"
    restore_from = str(source / "global_step_3") if restore == "path" else restore
    trainer = make_trainer(
        run_config(target, training={"max_steps": 5}, save_ckpt=save, restore_from=restore_from, save_steps=4)
    )

    assert len(_checkpointers(trainer)) == (1 if save or restore else 0)
    trainer.train()

    assert trainer.start_step == (3 if restore else 0)
    assert trainer.state.global_step == 5
    new = {4, 5} if save else set()
    assert set(saved_steps(target)) == new | ({3} if target == source else set())
    assert {path: disk_listing(source)[path] for path in before if path.startswith("global_step")} == {
        path: value for path, value in before.items() if path.startswith("global_step")
    }
    if not save and target != source:
        assert not target.exists()


def test_the_checkpointer_comes_after_the_users_callbacks_and_preemption_last(tmp_path: Path) -> None:
    trainer = make_trainer(run_config(tmp_path), callbacks=[SeenOnDisk])
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert names[-3:] == ["SeenOnDisk", "CheckpointerCallback", "PreemptionCallback"]


# ---- the log


def test_the_log_lines_are_those_of_the_specification(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(**changes: Any) -> list[str]:
        config = run_config(tmp_path, save_steps=10, save_extra_state_per_rank=False, data={"batch_size": 2}, **changes)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            train(config, dataset=Ids(60))
        return list(caplog.messages)

    first = run(training={"max_steps": 15})
    assert "Rank0 Start training. Start step: 0. Train steps: 15. Start epoch: 0. Train epochs: 1." in first
    saving = [message for message in first if message.startswith("Saving checkpoint")]
    assert [line.split(", save_async")[0] for line in saving] == [
        f"Saving checkpoint: global_step=10, epoch=0, dir={tmp_path}/global_step_10",
        f"Saving checkpoint: global_step=15, epoch=0, dir={tmp_path}/global_step_15",
    ]
    assert first.index(saving[0]) < first.index(saving[1])

    second = run(training={"max_steps": 25}, restore_from="LATEST")
    wanted = [
        f"Resolved LATEST checkpoint: {tmp_path}/global_step_15",
        "Read extra_state embedded in the DCP state dict",
        f"Checkpoint loaded successfully: path={tmp_path}/global_step_15, global_step=15, start_epoch=0, start_step=15",
        "Rank0 Start training. Start step: 15. Train steps: 25. Start epoch: 0. Train epochs: 1.",
    ]
    assert [message for message in second if message in wanted] == wanted


def test_the_loaded_line_has_the_epoch_and_step_of_the_saving_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        train(run_config(tmp_path, training={"num_train_epochs": 2, "max_steps": 9}))
        train(run_config(tmp_path, training={"num_train_epochs": 2, "max_steps": 10}, restore_from="LATEST"))
    assert (
        f"Saving checkpoint: global_step=9, epoch=1, dir={tmp_path}/global_step_9, save_async=False" in caplog.messages
    )
    (loaded,) = [match for match in map(LOADED.fullmatch, caplog.messages) if match]
    assert loaded.groups() == (f"{tmp_path}/global_step_9", "9", "1", "2")


def test_progress_goes_on_from_the_resumed_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def bar(**options: Any) -> str:
        train(run_config(tmp_path, **options))
        return capfd.readouterr().err

    first = bar(training={"max_steps": 4, "progress_bar": True})
    assert re.search(r"Training: 100%\|█+\| 4/4 .*loss=\d+\.\d{5}, lr=", first)
    second = bar(
        training={"max_steps": 6, "progress_bar": True}, restore_from="LATEST", lr_scheduler={"decay_steps": 6}
    )
    assert re.search(r"Training:  67%\|█+▋?\s*\| 4/6 ", second)
    assert not re.search(r" [0-3]/6 ", second)
    assert re.search(r"Training: 100%\|█+\| 6/6 .*lr=0\]?\s*$", second)

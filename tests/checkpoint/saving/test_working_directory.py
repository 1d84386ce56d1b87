"""A relative path is resolved once: by a run at its start, by a call when it is made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.trainer.callbacks import CheckpointerCallback, TrajectoryCallback
from tests.checkpoint.directories import listing
from tests.checkpoint.single_value import manifest_content, state, value_of
from tests.ranks import run_ranks
from tests.trainer.custom_trainer import make_custom_trainer
from tests.trainer.tiny_training import at_step, make_trainer, run_config, saved_steps


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory at the start, and an empty one that a training may change to."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "there"


def _change_to(folder: Path) -> Callable[[Any], None]:
    return lambda trainer: os.chdir(folder)


@pytest.mark.parametrize("is_async", [False, True])
def test_all_saves_of_a_training_that_changes_directory_go_to_one_place(
    tmp_path: Path, there: Path, is_async: bool
) -> None:
    config = run_config(
        Path("runs/a"),
        training={"max_steps": 6},
        save_steps=2,
        save_epochs=0,
        keep_last=2,
        is_async=is_async,
    )
    config = type(config)(**{**vars(config), "trajectory": type(config.trajectory)(dir="records")})
    make_trainer(config, callbacks=[at_step(3, _change_to(there))]).train()
    assert listing(there) == {}
    root = tmp_path / "here" / "runs" / "a"
    assert saved_steps(root) == [4, 6]
    assert [step for step, _ in manifest_content(root / "global_step_6")["ancestors"]] == [2, 4]
    lines = (tmp_path / "here" / "records" / "trajectory_rank_0.jsonl").read_text().splitlines()
    assert len(lines) == 6


def test_what_a_run_was_restored_from_by_a_relative_path_is_kept_by_retention(tmp_path: Path, there: Path) -> None:
    make_trainer(run_config(Path("runs"), training={"max_steps": 4}, save_steps=2, save_epochs=0)).train()
    config = run_config(
        Path("runs"),
        training={"max_steps": 7},
        save_steps=2,
        save_epochs=0,
        keep_last=1,
        restore_from="runs/global_step_2",
    )
    make_trainer(config, callbacks=[at_step(3, _change_to(there))]).train()
    assert saved_steps(tmp_path / "here" / "runs") == [2, 7]
    assert listing(there) == {}


def test_the_directory_is_the_one_at_the_start_of_the_callback_and_the_field_counts_at_its_use(
    tmp_path: Path, there: Path
) -> None:
    trainer = make_custom_trainer(Path("runs"), save_steps=1, save_epochs=0)
    callback = CheckpointerCallback(trainer)
    os.chdir(there)
    callback.on_train_begin()
    trainer.state.global_step = 1
    callback.on_step_end()
    trainer.config.checkpoint.checkpoint_dir = "other"
    trainer.state.global_step = 2
    callback.on_step_end()
    assert saved_steps(tmp_path / "here" / "runs") == [1]
    assert saved_steps(tmp_path / "here" / "other") == [2]
    assert listing(there) == {}


def test_a_background_save_goes_where_the_path_led_at_the_call(tmp_path: Path, there: Path) -> None:
    checkpointer = DistributedCheckpointer()
    content = {"model": {"w": torch.ones(4_000_000)}}
    checkpointer.begin_run("runs", restored_from=None)
    checkpointer.save("runs/global_step_1", content, global_step=1, save_async=True)
    os.chdir(there)
    checkpointer.maybe_wait_for_async_save()
    assert listing(there) == {}
    assert (tmp_path / "here" / "runs" / "global_step_1" / "manifest.json").is_file()
    assert (tmp_path / "here" / "runs" / "latest_checkpoint_iteration.txt").read_text() == "1\n"


def _save_from_a_directory_of_ones_own(folder: str) -> None:
    rank = os.environ["RANK"]
    (Path(folder) / rank).mkdir()
    os.chdir(Path(folder) / rank)
    DistributedCheckpointer().save("runs/global_step_1", state(1.0), global_step=1)


def test_ranks_with_other_working_directories_save_where_rank_0_does(tmp_path: Path) -> None:
    run_ranks(_save_from_a_directory_of_ones_own, 2, str(tmp_path))
    assert value_of(tmp_path / "0" / "runs" / "global_step_1") == 1.0
    assert listing(tmp_path / "1") == {}


def test_a_working_directory_that_was_deleted_does_no_harm_to_an_absolute_path(tmp_path: Path, there: Path) -> None:
    os.chdir(there)
    there.rmdir()
    trainer = make_custom_trainer(tmp_path / "runs", save_steps=1, save_epochs=0)
    callback = CheckpointerCallback(trainer)
    TrajectoryCallback(trainer, directory=str(tmp_path / "records"), digests=False)
    callback.on_train_begin()
    trainer.state.global_step = 1
    callback.on_step_end()
    assert saved_steps(tmp_path / "runs") == [1]

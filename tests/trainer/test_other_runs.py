"""A run that starts anew where another run has saved: it is told so, or refused, and deletes nothing of the other's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hyper_resume.errors import CheckpointExistsError, CheckpointSaveError
from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.checkpoint.single_value import steps
from tests.ranks import run_ranks
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer
from tests.trainer.tiny_training import disk_listing, live_state

pytestmark = pytest.mark.xdist_group("duck")

TOLD = "this run starts anew in a checkpoint_dir that holds checkpoints of another run"


def begin(folder: Path, **checkpoint: Any) -> Any:
    trainer = make_custom_trainer(folder, **checkpoint)
    CheckpointerCallback(trainer).on_train_begin()
    return trainer


def test_a_run_without_restore_from_in_a_used_root_warns_and_says_how_to_resume(
    five_steps: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        begin(five_steps)
    (told,) = [line for line in caplog.messages if TOLD in line]
    assert f"where: {five_steps}; " in told
    assert "global_step_5" in told
    assert "set checkpoint.restore_from=LATEST" in told
    assert "checkpoint.on_other_run=error refuses" in told


@pytest.mark.parametrize(
    "checkpoint",
    [{"restore_from": "LATEST"}, {"save_ckpt": False}, {"restore_from": "LATEST", "on_other_run": "error"}],
    ids=lambda one: " ".join(one),
)
def test_a_run_that_resumes_or_does_not_save_is_told_nothing(
    five_steps: Path, checkpoint: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        begin(five_steps, **checkpoint)
    assert TOLD not in caplog.text


def test_with_the_field_the_run_is_refused_before_anything_changes(five_steps: Path) -> None:
    before = disk_listing(five_steps)
    trainer = make_custom_trainer(five_steps, on_other_run="error")
    weights = live_state(trainer.model)
    with pytest.raises(CheckpointExistsError, match=TOLD) as caught:
        CheckpointerCallback(trainer).on_train_begin()
    assert isinstance(caught.value, CheckpointSaveError)
    assert disk_listing(five_steps) == before
    assert live_state(trainer.model) == weights


def test_weights_of_another_run_begin_a_run_of_their_own(five_steps: Path, tmp_path: Path) -> None:
    """Neither the weights alone nor a checkpoint of another root continue what is there."""
    options: dict[str, Any] = {"on_other_run": "error"}
    with pytest.raises(CheckpointExistsError):
        begin(five_steps, restore_from="LATEST", restore_train_state=False, **options)
    train_custom_trainer(make_custom_trainer(tmp_path / "other"), until_step=1)
    with pytest.raises(CheckpointExistsError):
        begin(five_steps, restore_from=str(tmp_path / "other" / "global_step_1"), **options)


def test_an_empty_or_absent_root_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "empty" / "global_step_7").mkdir(parents=True)
    for folder in (tmp_path / "empty", tmp_path / "absent"):
        begin(folder, on_other_run="error")


def test_a_forgotten_restore_from_and_keep_last_leave_what_the_earlier_run_saved(tmp_path: Path) -> None:
    every = {"save_steps": 1, "save_epochs": 0}
    train_custom_trainer(make_custom_trainer(tmp_path, **every), until_step=4)
    train_custom_trainer(make_custom_trainer(tmp_path, keep_last=2, **every), until_step=3)
    assert steps(tmp_path) == [2, 3, 4], "1 to 3 took the places of the earlier 1 to 3; 1 was this run's own"


def _refused(folder: str) -> str:
    try:
        begin(Path(folder), on_other_run="error")
    except CheckpointExistsError as error:
        return str(error)
    return ""


def test_all_ranks_are_refused_alike(five_steps: Path) -> None:
    told = run_ranks(_refused, 2, str(five_steps))
    assert TOLD in told[0]
    assert told[0] == told[1]

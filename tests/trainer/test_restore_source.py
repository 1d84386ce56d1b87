"""Which checkpoint is read, and what must fail without touching anything."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hyper_resume.checkpoint.disk import operations
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError, ConfigError
from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer
from tests.trainer.tiny_training import disk_listing, live_state

pytestmark = pytest.mark.xdist_group("duck")


# ---- finding the checkpoint


@pytest.mark.parametrize("word", ["LATEST", "latest", "Latest"])
def test_latest_is_read_in_any_case(five_steps: Path, word: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_custom_trainer(five_steps, restore_from=word)
    with caplog.at_level(logging.INFO):
        CheckpointerCallback(trainer).on_train_begin()
    assert trainer.state.global_step == 5
    assert f"Resolved LATEST checkpoint: {five_steps / 'global_step_5'}" in caplog.messages


def test_latest_in_an_empty_directory_warns_and_starts_from_scratch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "absent"):
        trainer = make_custom_trainer(folder, restore_from="LATEST", save_ckpt=False)
        weights = live_state(trainer.model).model
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            CheckpointerCallback(trainer).on_train_begin()
        assert f"no checkpoint found under {folder}: training starts from scratch" in caplog.text
        assert (trainer.state.global_step, trainer.start_epoch, trainer.start_step) == (0, 0, 0)
        assert live_state(trainer.model).model == weights
    assert not (tmp_path / "absent").exists()


def test_latest_passes_over_an_incomplete_directory_to_the_next_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_custom_trainer(make_custom_trainer(tmp_path, save_steps=1, save_epochs=0), until_step=3)
    (tmp_path / "global_step_3" / ".metadata").unlink()
    trainer = make_custom_trainer(tmp_path, restore_from="LATEST")
    with caplog.at_level(logging.WARNING):
        CheckpointerCallback(trainer).on_train_begin()
    assert trainer.state.global_step == 2
    assert "names global_step_3, which" in caplog.text


class _Deleting(operations.FileOperations):
    """Deletes step 3 and publishes step 4, as another run would, when the training state of step 3 is opened to be loaded."""

    def __init__(self, root: Path, prepared: Path) -> None:
        self._root, self._prepared, self.opened = root, prepared, 0

    def open_read(self, path: Path) -> operations.InputFile:
        if path.parent.parent.name == "global_step_3" and path.parent.name == "extra_state":
            self.opened += 1
            # First by the verification, then by the load.
            if self.opened == 2:
                self._prepared.rename(self._root / "global_step_4")
                (self._root / "latest_checkpoint_iteration.txt").write_text("4\n")
                shutil.rmtree(self._root / "global_step_3")
        return super().open_read(path)


def test_latest_that_another_run_deletes_while_it_is_loaded_is_looked_for_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    train_custom_trainer(make_custom_trainer(root, save_steps=1, save_epochs=0), until_step=4)
    prepared = (root / "global_step_4").rename(tmp_path / "prepared")
    (root / "latest_checkpoint_iteration.txt").write_text("3\n")
    trainer = make_custom_trainer(root, restore_from="LATEST", save_ckpt=False)
    with operations.use(_Deleting(root, prepared)) as run, caplog.at_level(logging.WARNING):
        CheckpointerCallback(trainer).on_train_begin()
    assert isinstance(run, _Deleting)
    assert run.opened == 2
    assert trainer.state.global_step == 4
    assert "global_step_3 was deleted while it was read; LATEST is looked for again" in caplog.text


def _a_file(folder: Path) -> Path:
    folder.mkdir()
    (folder / "file").write_text("no directory")
    return folder / "file"


@pytest.mark.parametrize("make_path", [lambda folder: folder / "no" / "such" / "dir", _a_file], ids=["absent", "file"])
def test_an_explicit_path_that_is_no_directory_is_an_error(tmp_path: Path, make_path: Callable[[Path], Path]) -> None:
    path = make_path(tmp_path / "given")
    trainer = make_custom_trainer(tmp_path / "checkpoints", restore_from=str(path))
    with pytest.raises(FileNotFoundError, match="restore_from is not a directory") as caught:
        CheckpointerCallback(trainer).on_train_begin()
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, CheckpointNotFoundError)
    assert not (tmp_path / "checkpoints").exists()


def test_the_root_directory_instead_of_a_step_directory_is_an_error_that_says_what_to_name(five_steps: Path) -> None:
    trainer = make_custom_trainer(five_steps, restore_from=str(five_steps))
    with pytest.raises(FileNotFoundError, match="name one global_step_N of this directory, or use LATEST"):
        CheckpointerCallback(trainer).on_train_begin()


def test_an_explicit_path_may_be_relative_end_in_a_slash_and_hold_other_letters(
    five_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "global_step_900" / "Prüfung 断点"
    folder.mkdir(parents=True)
    (folder / "global_step_5").symlink_to(five_steps / "global_step_5")
    monkeypatch.chdir(folder)
    for text in ("global_step_5/", "./global_step_5", f"{folder}/global_step_5//"):
        trainer = make_custom_trainer(folder, restore_from=text, save_ckpt=False)
        CheckpointerCallback(trainer).on_train_begin()
        assert trainer.state.global_step == 5


# ---- what must fail


def test_a_weights_only_checkpoint_asked_for_its_training_state_is_an_error(tmp_path: Path) -> None:
    train_custom_trainer(make_custom_trainer(tmp_path, save_optimizer=False, save_train_state=False), until_step=1)
    listing = disk_listing(tmp_path)
    with pytest.raises(FileNotFoundError, match="no training state"):
        CheckpointerCallback(make_custom_trainer(tmp_path, restore_from="LATEST")).on_train_begin()
    assert disk_listing(tmp_path) == listing

    weights_only = make_custom_trainer(
        tmp_path, restore_from="LATEST", restore_train_state=False, restore_optimizer=False
    )
    CheckpointerCallback(weights_only).on_train_begin()
    assert weights_only.state.global_step == 0


def test_embedded_training_state_that_was_never_written_is_an_error_that_namessaved_extra_state(tmp_path: Path) -> None:
    train_custom_trainer(
        make_custom_trainer(tmp_path, save_extra_state_per_rank=False, save_train_state=False), until_step=1
    )
    trainer = make_custom_trainer(tmp_path, restore_from="LATEST", save_extra_state_per_rank=False)
    with pytest.raises(FileNotFoundError, match="extra_state"):
        CheckpointerCallback(trainer).on_train_begin()


def test_a_missing_model_key_is_an_error_and_no_weight_is_touched(five_steps: Path) -> None:
    trainer = make_custom_trainer(five_steps, restore_from="LATEST")
    trainer.model.register_parameter("added", torch.nn.Parameter(torch.zeros(2)))
    before = live_state(trainer.model)
    with pytest.raises(RuntimeError, match=r"missing model key: model\.added") as caught:
        CheckpointerCallback(trainer).on_train_begin()
    assert isinstance(caught.value, CheckpointMismatchError)
    assert live_state(trainer.model) == before


def test_a_checkpoint_without_optimizer_state_warns_and_starts_the_optimizer_fresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_custom_trainer(make_custom_trainer(tmp_path, save_optimizer=False), until_step=2)
    trainer = make_custom_trainer(tmp_path, restore_from="LATEST")
    with caplog.at_level(logging.WARNING):
        CheckpointerCallback(trainer).on_train_begin()
    assert "holds no optimizer state: the optimizer starts fresh" in caplog.text
    assert len(trainer.optimizer.state) == 0
    assert trainer.state.global_step == 2


# ---- from another run's checkpoint, or from one's own if there is one


def test_a_run_starts_from_another_runs_checkpoint_and_later_from_its_own(
    five_steps: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same configuration at each start."""
    initial, own = five_steps / "global_step_5", tmp_path / "own"
    options = {"restore_from": "LATEST", "initial_restore_from": str(initial), "save_steps": 1, "save_epochs": 0}
    reference = make_custom_trainer(tmp_path / "reference", restore_from=str(initial))
    train_custom_trainer(reference, until_step=8)

    with caplog.at_level(logging.INFO):
        train_custom_trainer(make_custom_trainer(own, **options), until_step=7)
    assert f"no checkpoint found under {own}: starting from {initial}" in caplog.messages
    assert sorted(path.name for path in own.glob("global_step_*")) == ["global_step_6", "global_step_7"]

    caplog.clear()
    again = make_custom_trainer(own, **options)
    with caplog.at_level(logging.INFO):
        train_custom_trainer(again, until_step=8)
    assert f"Resolved LATEST checkpoint: {own / 'global_step_7'}" in caplog.messages
    assert live_state(again.model) == live_state(reference.model)


def test_the_others_checkpoint_takes_no_damaged_ones_place(five_steps: Path, tmp_path: Path) -> None:
    options = {"restore_from": "LATEST", "initial_restore_from": str(five_steps / "global_step_5")}
    train_custom_trainer(make_custom_trainer(tmp_path, **options), until_step=6)
    (tmp_path / "global_step_6" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match="none can be resumed from"):
        CheckpointerCallback(make_custom_trainer(tmp_path, **options)).on_train_begin()


def test_an_initial_path_that_is_no_directory_is_an_error_that_names_the_field(tmp_path: Path) -> None:
    trainer = make_custom_trainer(
        tmp_path / "own", restore_from="LATEST", initial_restore_from=str(tmp_path / "absent")
    )
    with pytest.raises(CheckpointNotFoundError, match=r"checkpoint\.initial_restore_from is not a directory") as caught:
        CheckpointerCallback(trainer).on_train_begin()
    assert "expected: an existing global_step_N directory;" in str(caught.value)
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize(
    ("source", "initial"), [(None, "a/global_step_1"), ("b/global_step_2", "a/global_step_1"), ("LATEST", "latest")]
)
def test_an_initial_path_has_a_meaning_beside_latest_only(tmp_path: Path, source: str | None, initial: str) -> None:
    with pytest.raises(ConfigError, match="only beside restore_from: LATEST"):
        make_custom_trainer(tmp_path, restore_from=source, initial_restore_from=initial)


def test_a_missing_initial_path_is_no_matter_once_the_run_has_a_checkpoint(five_steps: Path, tmp_path: Path) -> None:
    trainer = make_custom_trainer(five_steps, restore_from="LATEST", initial_restore_from=str(tmp_path / "gone by now"))
    CheckpointerCallback(trainer).on_train_begin()
    assert trainer.state.global_step == 5

"""A run that could not save ends in ``on_train_begin``, on every rank, and the trial changes nothing."""

from __future__ import annotations

import errno
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.disk import operations
from hyper_resume.config import CheckpointingConfig
from hyper_resume.errors import (
    CheckpointSaveError,
    ConfigError,
    ReplicaMismatchError,
    StateNotPlainError,
)
from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.ranks import run_ranks
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer
from tests.trainer.live_snapshot import live_snapshot
from tests.trainer.tiny_training import disk_listing, saved_steps

pytestmark = pytest.mark.xdist_group("duck")


class Holder:
    """Returns what it is given as its state."""

    def __init__(self, state: Callable[[], Any]) -> None:
        self.state = state
        self.collected = 0

    def state_dict(self) -> dict[str, Any]:
        self.collected += 1
        return {"held": self.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is restored")


class ForeignLoader:
    """Its ``state_dict`` would start workers."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("must not be called before the first batch")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is restored")


# ---- what could not be saved


def test_state_that_is_not_plain_is_refused_by_its_path_and_leaves_no_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    trainer = make_custom_trainer(root)
    trainer.meter = Holder(lambda: object())
    with pytest.raises(StateNotPlainError, match=r"where: extra_state\.stateful\.meter\.held.*builtins\.object"):
        CheckpointerCallback(trainer).on_train_begin()
    assert not root.exists()


def test_state_that_is_not_saved_is_not_tried(tmp_path: Path) -> None:
    for settings in ({"save_train_state": False}, {"save_ckpt": False}):
        trainer = make_custom_trainer(tmp_path, check_coverage=False, **settings)
        trainer.meter = Holder(lambda: object())
        CheckpointerCallback(trainer).on_train_begin()
        assert trainer.meter.collected == 0


def test_a_root_that_cant_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / "root"
    with pytest.raises(CheckpointSaveError, match=r"checkpoint_dir can't be (written|taken)") as caught:
        CheckpointerCallback(make_custom_trainer(root)).on_train_begin()
    assert f"where: {root}, rank 0" in str(caught.value)
    assert "NotADirectoryError" in str(caught.value)


class _Full(operations.FileOperations):
    """A device without room for any byte of a file."""

    def create(self, path: Path) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_a_root_that_takes_no_file_is_refused_and_nothing_is_left_there(tmp_path: Path) -> None:
    with (
        operations.use(_Full()),
        pytest.raises(
            CheckpointSaveError, match=r"can't be written.*No space left on device.*checkpoint\.checkpoint_dir"
        ),
    ):
        CheckpointerCallback(make_custom_trainer(tmp_path)).on_train_begin()
    assert [path.name for path in tmp_path.iterdir()] == [".writer.lock"]


def test_the_root_is_made_locked_and_empty_after_the_start(tmp_path: Path) -> None:
    root = tmp_path / "new" / "root"
    CheckpointerCallback(make_custom_trainer(root)).on_train_begin()
    assert [path.name for path in root.iterdir()] == [".writer.lock"]

    (found,) = run_ranks(_begin_elsewhere, 1, str(root))
    assert found == "CheckpointLockedError"


def test_a_device_is_no_root() -> None:
    with pytest.raises(CheckpointSaveError, match=r"checkpoint_dir can't be written; where: /dev/null, rank 0"):
        CheckpointerCallback(make_custom_trainer(Path("/dev/null"))).on_train_begin()


def _staging_is_a_file(root: Path) -> None:
    (root / ".staging").write_text("in the way")


def _staging_leads_to_another_file_system(root: Path) -> None:
    elsewhere = Path(tempfile.mkdtemp(dir="/dev/shm"))
    (root / ".staging").symlink_to(elsewhere)
    if elsewhere.stat().st_dev == root.stat().st_dev:
        pytest.skip("needs two file systems")


def _pointer_is_a_directory(root: Path) -> None:
    (root / "latest_checkpoint_iteration.txt").mkdir()


def _lock_is_a_directory(root: Path) -> None:
    (root / ".writer.lock").mkdir()


@pytest.mark.parametrize(
    ("obstacle", "found"),
    [
        (_staging_is_a_file, "NotADirectoryError"),
        (_staging_leads_to_another_file_system, "Invalid cross-device link"),
        (_pointer_is_a_directory, "a directory has the name of the pointer"),
        (_lock_is_a_directory, "IsADirectoryError"),
    ],
)
def test_whatever_would_stop_the_first_save_stops_the_run_at_its_start(
    tmp_path: Path, obstacle: Callable[[Path], None], found: str
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    obstacle(root)
    before = {path.name for path in root.iterdir()}
    with pytest.raises(CheckpointSaveError, match=r"checkpoint_dir can't be (written|taken)") as caught:
        CheckpointerCallback(make_custom_trainer(root)).on_train_begin()
    assert found in str(caught.value)
    assert {path.name for path in root.iterdir()} - {".writer.lock"} == before - {".writer.lock"}


def test_an_empty_staging_directory_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / ".staging").mkdir()
    CheckpointerCallback(make_custom_trainer(tmp_path)).on_train_begin()
    assert {path.name for path in tmp_path.iterdir()} == {".staging", ".writer.lock"}


def _begin_run(root: str) -> str:
    try:
        DistributedCheckpointer().begin_run(root, restored_from=None)
    except CheckpointSaveError as error:
        return type(error).__name__
    return "not locked"


def test_the_second_of_two_runs_into_a_root_that_does_not_exist_yet_is_refused_at_its_start(tmp_path: Path) -> None:
    root = tmp_path / "new" / "root"
    DistributedCheckpointer().begin_run(str(root), restored_from=None)
    assert [path.name for path in root.iterdir()] == [".writer.lock"]
    (found,) = run_ranks(_begin_run, 1, str(root))
    assert found == "CheckpointLockedError"


def test_a_backend_that_cant_make_the_root_says_so_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "root", Path("/dev/null")):
        with pytest.raises(CheckpointSaveError, match="this run could not save: checkpoint_dir can't be written"):
            DistributedCheckpointer().begin_run(str(root), restored_from=None)


def _begin_elsewhere(root: str) -> str:
    try:
        CheckpointerCallback(make_custom_trainer(Path(root))).on_train_begin()
    except CheckpointSaveError as error:
        return type(error).__name__
    return "not locked"


class KeepsAnObject(torch.optim.SGD):
    """Its state appears at the first step, and one value of it can't be saved."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter].setdefault("note", object())
                    parameter.sub_(parameter.grad, alpha=group["lr"])


def test_optimizer_state_of_the_first_step_that_cant_be_saved_is_refused_by_its_path(tmp_path: Path) -> None:
    root = tmp_path / "root"
    trainer = make_custom_trainer(root)
    trainer.optimizer = KeepsAnObject(trainer.model.parameters(), lr=0.1)
    trainer.lr_scheduler = None
    with pytest.raises(StateNotPlainError, match=r"where: optimizer\.0\.state\..*\.note.*builtins\.object"):
        CheckpointerCallback(trainer).on_train_begin()
    assert not root.exists()
    assert not any(trainer.optimizer.state.values())
    trainer.config.checkpoint = CheckpointingConfig(checkpoint_dir=str(root), save_optimizer=False)
    CheckpointerCallback(trainer).on_train_begin()


# ---- the trial changes nothing


def test_the_trial_moves_no_stream_and_changes_no_object(tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path)
    trainer.drawing = Holder(lambda: [float(torch.rand(())), random.random(), float(np.random.rand())])
    callback = CheckpointerCallback(trainer)
    before = live_snapshot(SimpleNamespace(**{**vars(trainer), "drawing": None}))
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    callback.on_train_begin()
    assert trainer.drawing.collected >= 1
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == streams[1:]  # type: ignore[index]
    assert live_snapshot(SimpleNamespace(**{**vars(trainer), "drawing": None})) == before


def test_a_training_with_the_trial_is_the_training_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_trial = train_custom_trainer(make_custom_trainer(tmp_path / "a", save_steps=3), until_step=7)
    monkeypatch.setattr(CheckpointerCallback, "_try_save", lambda callback: None)
    assert train_custom_trainer(make_custom_trainer(tmp_path / "b", save_steps=3), until_step=7) == with_trial


def test_a_foreign_loader_is_not_asked_for_its_state(tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path)
    trainer.train_dataloader = ForeignLoader()
    CheckpointerCallback(trainer).on_train_begin()


def test_no_tensor_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_custom_trainer(tmp_path, check_coverage=False)
    trainer.average = Holder(lambda: held)
    held = torch.zeros(1000)
    seen: list[int] = []
    callback = CheckpointerCallback(trainer)
    monkeypatch.setattr(
        callback.checkpointer,
        "try_save",
        lambda root, state: seen.extend(
            [
                state["extra_state"]["stateful"]["average"]["held"].data_ptr(),
                state["model"]["hidden.weight"].data_ptr(),
            ]
        ),
    )
    callback.on_train_begin()
    assert seen == [held.data_ptr(), trainer.model.hidden.weight.data_ptr()]


def test_a_refused_restore_tries_nothing(tmp_path: Path) -> None:
    before = disk_listing(tmp_path)
    trainer = make_custom_trainer(tmp_path / "root", restore_from=str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        CheckpointerCallback(trainer).on_train_begin()
    assert disk_listing(tmp_path) == before


def test_what_a_killed_trial_leaves_is_removed_by_the_next_run(tmp_path: Path) -> None:
    left = tmp_path / ".trial.0123456789ab"
    left.mkdir()
    (left / "rank_0").write_text("")
    other = tmp_path / ".trial.mine"
    other.mkdir()
    CheckpointerCallback(make_custom_trainer(tmp_path)).on_train_begin()
    assert not left.exists()
    assert other.is_dir()


# ---- a configuration of another class


def test_any_object_with_fields_is_a_configuration(tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path)
    trainer.config = SimpleNamespace(
        checkpoint=SimpleNamespace(save_ckpt=True, checkpoint_dir=str(tmp_path), save_steps=2, save_epochs=0)
    )
    train_custom_trainer(trainer, until_step=3)
    assert saved_steps(tmp_path) == [2, 3]


def test_its_wrong_values_and_an_object_without_any_field_are_refused_by_name(tmp_path: Path) -> None:
    trainer = make_custom_trainer(tmp_path)
    trainer.config = SimpleNamespace(checkpoint=SimpleNamespace(save_steps="two"))
    with pytest.raises(ConfigError, match=r"checkpoint\.save_steps: wrong type"):
        CheckpointerCallback(trainer)
    trainer.config = SimpleNamespace(checkpoint=object())
    with pytest.raises(ConfigError, match=r"where: trainer\.config\.checkpoint.*save_ckpt, checkpoint_dir"):
        CheckpointerCallback(trainer)


# ---- several ranks


def _begin_on_a_rank(folder: str, defect: str) -> tuple[str, str, float]:
    trainer = make_custom_trainer(Path(folder))
    if dist.get_rank() == 1:
        if defect == "not plain":
            trainer.meter = Holder(lambda: object())
        elif defect == "drifted":
            with torch.no_grad():
                trainer.model.hidden.weight.add_(1)
        elif defect == "stage":
            del trainer.model.norm
        elif defect == "full":
            operations._current = _Full()
    started = time.monotonic()
    try:
        CheckpointerCallback(trainer).on_train_begin()
    except Exception as error:  # noqa: BLE001  which one it is, is compared
        return type(error).__name__, str(error), time.monotonic() - started
    return "none", "", 0.0


@pytest.mark.parametrize(
    ("defect", "kind", "words"),
    [
        ("not plain", StateNotPlainError, "extra_state.stateful.meter.held"),
        ("drifted", ReplicaMismatchError, "hidden.weight (rank 0 != rank 1)"),
        ("stage", ReplicaMismatchError, "ranks do not hold the same tensors"),
        ("full", CheckpointSaveError, "rank 1; expected: a directory, on storage that all ranks share"),
    ],
)
def test_a_defect_of_one_rank_ends_all_ranks_at_once(
    tmp_path: Path, defect: str, kind: type[Exception], words: str
) -> None:
    found = run_ranks(_begin_on_a_rank, 2, str(tmp_path / "root"), defect)
    for name, text, seconds in found:
        assert name == kind.__name__, text
        assert words in text
        assert seconds < 15
    assert saved_steps(tmp_path / "root") == []

"""A model key or the training state, deleted by hand from an ordinary checkpoint, is refused in the specified words."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer
from tests.trainer.live_snapshot import live_snapshot
from tests.trainer.tiny_training import disk_listing

KEY = "model.hidden.weight"


def _edit_metadata(step: Path, is_deleted: Callable[[str], bool]) -> None:
    """Delete entries from ``.metadata`` as somebody would who knows torch's own checkpoints only."""
    path = step / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    entries = metadata.state_dict_metadata
    assert any(map(is_deleted, entries))
    metadata.state_dict_metadata = {name: entry for name, entry in entries.items() if not is_deleted(name)}
    metadata.storage_data = {place: at for place, at in metadata.storage_data.items() if not is_deleted(place.fqn)}
    path.write_bytes(pickle.dumps(metadata))


def _edit_index(step: Path, is_deleted: Callable[[str], bool]) -> None:
    path = step / "index.json"
    content = json.loads(path.read_text())
    for kind in ("tensors", "values"):
        content[kind] = {name: entry for name, entry in content[kind].items() if not is_deleted(name)}
    path.write_text(json.dumps(content))


def _delete_key(step: Path) -> None:
    _edit_metadata(step, lambda name: name == KEY)


def _delete_key_from_the_index(step: Path) -> None:
    _edit_index(step, lambda name: name == KEY)


def _delete_key_and_the_index(step: Path) -> None:
    _delete_key(step)
    (step / "index.json").unlink()


def _delete_key_from_both(step: Path) -> None:
    _delete_key(step)
    _delete_key_from_the_index(step)


def _save_again_without_the_key(step: Path) -> None:
    """Read the tensors with torch, and save them again into the same directory."""
    kinds = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(kind.size, dtype=kind.properties.dtype)
        for name, kind in kinds.items()
        if name.startswith("model.") and hasattr(kind, "size")
    }
    dcp.load(state, checkpoint_id=step)
    del state[KEY]
    dcp.save(state, checkpoint_id=step)


def _delete_training_state_folder(step: Path) -> None:
    shutil.rmtree(step / "extra_state")


def _delete_training_state_entries(step: Path) -> None:
    _edit_metadata(step, lambda name: name.startswith("extra_state."))


def _delete_embedded_step(step: Path) -> None:
    _edit_metadata(step, lambda name: name == "extra_state.rank_0.global_step")


CASES = {
    "key": (True, _delete_key, RuntimeError, f"missing model key: {KEY}"),
    "key-in-index": (True, _delete_key_from_the_index, RuntimeError, f"missing model key: {KEY}"),
    "key-and-index": (True, _delete_key_and_the_index, RuntimeError, "missing model key: unknown"),
    "key-in-both": (True, _delete_key_from_both, RuntimeError, "missing model key: unknown"),
    "saved-again": (True, _save_again_without_the_key, RuntimeError, f"missing model key: {KEY}"),
    "files": (True, _delete_training_state_folder, FileNotFoundError, "no training state (extra_state)"),
    "entries": (False, _delete_training_state_entries, FileNotFoundError, "no training state (extra_state)"),
    "step": (False, _delete_embedded_step, FileNotFoundError, "no training state (extra_state)"),
}


@pytest.mark.parametrize("restore_from", ["LATEST", "global_step_3"])
@pytest.mark.parametrize("case", CASES)
def test_the_specified_words_come_and_nothing_is_changed(tmp_path: Path, restore_from: str, case: str) -> None:
    per_rank, delete, kind, words = CASES[case]
    settings: dict[str, Any] = {"save_epochs": 0, "save_extra_state_per_rank": per_rank}
    train_custom_trainer(make_custom_trainer(tmp_path, **settings), until_step=3)
    delete(tmp_path / "global_step_3")
    source = restore_from if restore_from == "LATEST" else str(tmp_path / restore_from)
    trainer = make_custom_trainer(tmp_path, save_ckpt=False, restore_from=source)
    before, listing = live_snapshot(trainer), disk_listing(tmp_path)
    with pytest.raises(kind) as caught:
        CheckpointerCallback(trainer).on_train_begin()
    assert str(caught.value).startswith(words)
    assert str(tmp_path / "global_step_3") in str(caught.value)
    assert live_snapshot(trainer) == before
    assert disk_listing(tmp_path) == listing


def test_latest_takes_an_older_one_that_verifies_and_warns_in_the_same_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"save_steps": 2, "save_epochs": 0}
    train_custom_trainer(make_custom_trainer(tmp_path, **settings), until_step=4)
    _delete_key(tmp_path / "global_step_4")
    caplog.set_level(logging.WARNING)
    trainer = make_custom_trainer(tmp_path, save_ckpt=False, restore_from="LATEST")
    CheckpointerCallback(trainer).on_train_begin()
    assert trainer.state.global_step == 2
    assert any("global_step_4" in line and f"missing model key: {KEY}" in line for line in caplog.messages)


def _cut_a_shard(step: Path) -> None:
    shard = next(step.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])


def _flip_a_byte_of_a_name(step: Path) -> None:
    path = step / ".metadata"
    content = path.read_bytes()
    assert KEY.encode() in content
    path.write_bytes(content.replace(KEY.encode(), KEY.replace("hidden", "hiddem").encode()))


@pytest.mark.parametrize("damage", [_cut_a_shard, _flip_a_byte_of_a_name])
def test_other_damage_is_none_of_these(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    train_custom_trainer(make_custom_trainer(tmp_path, save_epochs=0), until_step=3)
    damage(tmp_path / "global_step_3")
    trainer = make_custom_trainer(tmp_path, save_ckpt=False, restore_from=str(tmp_path / "global_step_3"))
    with pytest.raises(RuntimeError, match="the checkpoint is not as it was written") as caught:
        CheckpointerCallback(trainer).on_train_begin()
    assert "missing model key" not in str(caught.value)
    assert "no training state" not in str(caught.value)

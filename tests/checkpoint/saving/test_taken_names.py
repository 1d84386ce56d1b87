"""What this library did not write is never replaced: the save is refused, at the start of the run where it can be foreseen."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.base import SaveEvent
from hyper_resume.errors import CheckpointSaveError
from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.checkpoint.directories import forget_manifest, listing, make_step
from tests.checkpoint.single_value import save, value_of
from tests.trainer.custom_trainer import make_custom_trainer, train_custom_trainer
from tests.trainer.tiny_training import saved_steps


def _file(path: Path) -> None:
    path.write_text("an archive")


def _empty_directory(path: Path) -> None:
    path.mkdir(parents=True)


def _link_to_a_save(path: Path) -> None:
    path.symlink_to(save(path.parent / "elsewhere", 2, 2.0))


def _broken_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def _of_stock_dcp(path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=path, no_dist=True)


def _of_another_tool(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text('{"name": "a web site"}')
    (path / "model.safetensors").write_bytes(b"weights")


def _make_stock(save: Path) -> None:
    """Turn a save into a directory as stock DCP writes it."""
    forget_manifest(save)
    (save / "index.json").unlink()
    metadata = pickle.loads((save / ".metadata").read_bytes())
    metadata.storage_meta = None
    (save / ".metadata").write_bytes(pickle.dumps(metadata))


def _without_metadata(path: Path) -> None:
    make_step(path.parent, path.name, metadata=None)


def _save_with_a_note(path: Path) -> None:
    (save(path.parent, 2, 2.0) / "notes.txt").write_text("the best run")


def _save_with_a_link(path: Path) -> None:
    (save(path.parent, 2, 2.0) / "extra_state" / "extra_state_rank_1.pt").symlink_to("nowhere")


FOREIGN: dict[str, tuple[Callable[[Path], None], str]] = {
    "file": (_file, "found: a file"),
    "empty directory": (_empty_directory, "another tool wrote"),
    "link": (_link_to_a_save, "found: a link"),
    "broken link": (_broken_link, "found: a link"),
    "stock DCP": (_of_stock_dcp, "another tool wrote"),
    "another tool's": (_of_another_tool, "'model.safetensors', which no save wrote"),
    "no metadata": (_without_metadata, "another tool wrote"),
    "save with a note": (_save_with_a_note, "'notes.txt', which no save wrote"),
    "save with a link": (_save_with_a_link, "'extra_state/extra_state_rank_1.pt', which no save wrote"),
}
ALL = pytest.mark.parametrize(("make", "found"), FOREIGN.values(), ids=list(FOREIGN))


@ALL
def test_a_name_that_is_taken_is_refused_and_what_is_there_stays(
    tmp_path: Path, make: Callable[[Path], None], found: str
) -> None:
    save(tmp_path, 1, 1.0)
    make(tmp_path / "global_step_2")
    (tmp_path / "latest_checkpoint_iteration.txt").write_text("1\n")
    before = listing(tmp_path)
    with pytest.raises(CheckpointSaveError, match="would replace what this library did not write") as caught:
        save(tmp_path, 2, 22.0)
    assert f"where: {tmp_path / 'global_step_2'}" in str(caught.value)
    assert found in str(caught.value)
    assert listing(tmp_path) == before
    assert value_of(save(tmp_path, 3, 3.0)) == 3.0


class _TakesTheName:
    """Somebody else makes the directory while the save is written."""

    def __init__(self, make: Callable[[Path], None]) -> None:
        self.make = make
        self.content: dict[str, str] = {}

    def __call__(self, event: SaveEvent) -> None:
        if event.state == "written":
            path = Path(event.path)
            self.make(path)
            self.content = listing(path)


def test_a_name_that_is_taken_during_the_save_is_refused_at_the_commit(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    checkpointer, taking = DistributedCheckpointer(), _TakesTheName(_of_another_tool)
    checkpointer.add_listener(taking)
    with pytest.raises(CheckpointSaveError, match="would replace what this library did not write"):
        save(tmp_path, 2, 22.0, by=checkpointer)
    assert listing(tmp_path / "global_step_2") == taking.content != {}
    assert list((tmp_path / ".staging").iterdir()) == []
    assert (tmp_path / "latest_checkpoint_iteration.txt").read_text() == "1\n"


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty manifest": lambda path: os.truncate(path / "manifest.json", 0),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "no metadata": lambda path: (path / ".metadata").unlink(),
    "no index": lambda path: (path / "index.json").unlink(),
    "no shard": lambda path: (path / "__0_0.distcp").unlink(),
    "no training state": lambda path: shutil.rmtree(path / "extra_state"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_save_is_replaced_by_the_run_that_comes_to_its_step_again(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(save(tmp_path, 2, 2.0))
    assert value_of(save(tmp_path, 2, 22.0)) == 22.0


# ---- at the start of a run


@ALL
def test_a_run_that_plans_to_save_there_is_refused_at_its_start(
    tmp_path: Path, make: Callable[[Path], None], found: str
) -> None:
    make(tmp_path / "global_step_2")
    before = listing(tmp_path)
    with pytest.raises(CheckpointSaveError, match="would replace what this library did not write") as caught:
        CheckpointerCallback(make_custom_trainer(tmp_path, save_steps=2)).on_train_begin()
    assert found in str(caught.value)
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("planned", "settings"),
    [
        (4, {"save_steps": 2, "save_epochs": 0}),
        (10, {"save_steps": 0, "save_epochs": 2}),  # 5 steps an epoch
        (7, {"save_steps": 0, "save_epochs": 0}),  # the last one
    ],
)
def test_every_kind_of_planned_save_is_foreseen(tmp_path: Path, planned: int, settings: dict[str, int]) -> None:
    make_step(tmp_path, planned)
    trainer = make_custom_trainer(tmp_path, **settings)
    trainer.train_steps = 7 if planned == 7 else 100
    with pytest.raises(CheckpointSaveError, match=f"global_step_{planned};"):
        CheckpointerCallback(trainer).on_train_begin()


def test_a_step_that_is_not_saved_may_be_anybodys(tmp_path: Path) -> None:
    for step in (1, 3, 9):
        make_step(tmp_path, step)
    make_step(tmp_path, "global_step_4_old")
    trainer = make_custom_trainer(tmp_path, save_steps=2, save_epochs=0)
    trainer.train_steps = 6
    train_custom_trainer(trainer, until_step=6)
    found = {path.name for path in tmp_path.glob("global_step_*")}
    assert found == {*(f"global_step_{step}" for step in (1, 2, 3, 4, 6, 9)), "global_step_4_old"}


def test_what_a_run_has_passed_already_may_be_anybodys(tmp_path: Path) -> None:
    train_custom_trainer(make_custom_trainer(tmp_path, save_steps=2, save_epochs=0), until_step=4)
    _make_stock(tmp_path / "global_step_2")
    before = listing(tmp_path / "global_step_2")
    trainer = make_custom_trainer(tmp_path, save_steps=2, save_epochs=0, restore_from="LATEST")
    train_custom_trainer(trainer, until_step=6)
    assert listing(tmp_path / "global_step_2") == before
    assert saved_steps(tmp_path) == [2, 4, 6]


def test_weights_taken_from_a_stock_directory_leave_it_alone(tmp_path: Path) -> None:
    """The run starts at step 0 in the same root, and comes to the step that it took its weights from."""
    train_custom_trainer(make_custom_trainer(tmp_path, save_steps=2, save_epochs=0), until_step=2)
    _make_stock(tmp_path / "global_step_2")
    before = listing(tmp_path)
    trainer = make_custom_trainer(
        tmp_path,
        save_steps=2,
        save_epochs=0,
        restore_from=str(tmp_path / "global_step_2"),
        restore_train_state=False,
        restore_optimizer=False,
    )
    with pytest.raises(CheckpointSaveError, match="would replace what this library did not write"):
        CheckpointerCallback(trainer).on_train_begin()
    assert {name: kind for name, kind in listing(tmp_path).items() if name != ".writer.lock"} == {
        name: kind for name, kind in before.items() if name != ".writer.lock"
    }

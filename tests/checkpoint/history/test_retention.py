"""What is deleted after a save, and what never is."""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.disk.operations import FileOperations
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.history import lineage, retention
from hyper_resume.checkpoint.history.retention import Retention
from tests.checkpoint.directories import latest, listing, make_step
from tests.checkpoint.single_value import damage, manifest_content, save, steps, value_of
from tests.ranks import run_ranks

Losses = dict[int, float | None]


def run(root: Path, losses: Losses, restored_from: Path | None = None, **options: Any) -> DistributedCheckpointer:
    """One run that saves each step with its loss, under a retention of these options."""
    checkpointer = DistributedCheckpointer(retention=Retention(**options))
    checkpointer.begin_run(str(root), restored_from=None if restored_from is None else str(restored_from))
    for step, loss in losses.items():
        metrics = {} if loss is None else {"loss": loss, "accuracy": -loss}
        save(root, step, float(step), by=checkpointer, metrics=metrics)
    return checkpointer


def plain(*numbers: int) -> Losses:
    return dict.fromkeys(numbers)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 1}, [6]),
        ({"keep_last": 3}, [4, 5, 6]),
        ({"keep_last": 100}, [1, 2, 3, 4, 5, 6]),
        ({"keep_every": 2}, [2, 4, 6]),
        ({"keep_every": 4}, [4, 6]),
        ({"keep_last": 2, "keep_every": 3}, [3, 5, 6]),
        ({"keep_best": 1}, [2, 6]),
        ({"keep_best": 2}, [2, 4, 6]),
        ({"keep_best": 2, "keep_last": 2}, [2, 4, 5, 6]),
        ({"keep_best": 1, "best_mode": "max"}, [1, 6]),
        ({"keep_best": 1, "best_metric": "accuracy"}, [1, 6]),
        ({"keep_best": 1, "best_metric": "accuracy", "best_mode": "max"}, [2, 6]),
        ({"keep_best": 3, "best_metric": "absent"}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_what_is_kept_is_what_the_options_say(tmp_path: Path, options: dict[str, Any], kept: list[int]) -> None:
    run(tmp_path, {1: 9.0, 2: 1.0, 3: 5.0, 4: 2.0, 5: 6.0, 6: 8.0}, **options)
    assert steps(tmp_path) == kept
    for step in kept:
        assert value_of(tmp_path / f"global_step_{step}") == step
    assert not list((tmp_path / ".staging").iterdir())
    assert not (tmp_path / ".trash").exists() or not list((tmp_path / ".trash").iterdir())


def test_a_loss_that_is_no_number_or_missing_is_never_the_best_never_in_the_way_and_never_deleted(
    tmp_path: Path,
) -> None:
    losses: Losses = {1: math.nan, 2: 3.0, 3: None, 4: math.inf, 5: 2.0, 6: -math.inf, 7: math.nan, 8: 9.0, 9: 9.5}
    run(tmp_path, losses, keep_best=1)
    assert steps(tmp_path) == [1, 3, 4, 5, 6, 7, 9], "2 and 8 have a loss, and it isn't the best"
    assert manifest_content(tmp_path / "global_step_7")["metrics"] == {}
    assert value_of(tmp_path / "global_step_7") == 7.0, "a save with a loss of NaN is a good save"


def test_keep_best_that_is_switched_on_later_deletes_nothing_that_was_saved_without_it(tmp_path: Path) -> None:
    run(tmp_path, plain(1, 2, 3))
    run(tmp_path, {4: 4.0, 5: 5.0, 6: 6.0}, restored_from=tmp_path / "global_step_3", keep_best=1)
    assert steps(tmp_path) == [1, 2, 3, 4, 6]


def test_a_run_that_forgot_to_resume_deletes_only_its_own(tmp_path: Path) -> None:
    run(tmp_path, plain(10, 20, 30, 40))
    run(tmp_path, plain(1, 2, 3), keep_last=2)
    assert steps(tmp_path) == [2, 3, 10, 20, 30, 40]
    for step in (10, 20, 30, 40):
        assert value_of(tmp_path / f"global_step_{step}") == step


def test_a_run_that_goes_back_deletes_nothing_of_the_future_that_it_left(tmp_path: Path) -> None:
    run(tmp_path, plain(5, 10, 15, 20))
    run(tmp_path, plain(6, 7, 8), restored_from=tmp_path / "global_step_5", keep_last=2)
    assert steps(tmp_path) == [5, 7, 8, 10, 15, 20]
    run(tmp_path, plain(9, 11), restored_from=tmp_path / "global_step_8", keep_last=1)
    assert steps(tmp_path) == [8, 10, 11, 15, 20], "5 and 7 are of its line, too"


def test_another_runs_best_is_not_counted_as_this_runs_best(tmp_path: Path) -> None:
    run(tmp_path, {10: 0.5, 20: 0.25})
    run(tmp_path, {1: 7.0, 2: 8.0, 3: 9.0}, keep_best=1)
    assert steps(tmp_path) == [1, 3, 10, 20]


def test_a_run_of_more_saves_than_a_manifest_lists_still_deletes_its_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "MAX_ANCESTORS", 2)
    run(tmp_path, plain(1, 2, 3, 4, 5, 6))
    run(tmp_path, plain(7), restored_from=tmp_path / "global_step_6", keep_last=1)
    assert steps(tmp_path) == [6, 7]


def test_of_two_equally_good_ones_the_newer_stays(tmp_path: Path) -> None:
    run(tmp_path, {1: 1.0, 2: 1.0, 3: 1.0, 4: 5.0}, keep_best=2)
    assert steps(tmp_path) == [2, 3, 4]


def test_newest_means_saved_last_not_the_highest_step(tmp_path: Path) -> None:
    run(tmp_path, plain(10, 20, 30))
    run(tmp_path, plain(20), restored_from=tmp_path / "global_step_10")
    run(tmp_path, plain(25, 26), restored_from=tmp_path / "global_step_20", keep_last=2)
    assert steps(tmp_path) == [20, 25, 26, 30], "10 is of the line and 30 is not"


def test_where_a_run_was_restored_from_stays_for_all_of_the_run(tmp_path: Path) -> None:
    run(tmp_path, plain(10, 20))
    run(tmp_path, plain(15, 16, 17), restored_from=tmp_path / "global_step_10", keep_last=1)
    assert steps(tmp_path) == [10, 17, 20]
    run(tmp_path, plain(18), restored_from=tmp_path / "global_step_17", keep_last=1)
    assert steps(tmp_path) == [17, 18, 20]


def test_a_checkpoint_of_another_root_is_never_touched(tmp_path: Path) -> None:
    source = save(tmp_path / "pretrained", 1, 1.0)
    before = listing(tmp_path / "pretrained")
    run(tmp_path / "fine", plain(1, 2, 3), restored_from=source, keep_last=1)
    assert steps(tmp_path / "fine") == [3]
    assert listing(tmp_path / "pretrained") == before


def test_what_is_damaged_stays_and_takes_the_place_of_no_whole_one(tmp_path: Path) -> None:
    run(tmp_path, plain(1, 2, 3, 4))
    for step in (3, 4):
        (tmp_path / f"global_step_{step}" / "__0_0.distcp").write_bytes(b"")
    # 2 is the newest whole one. A read that fails now may work the next time, so 3 is nobody's to delete.
    assert [one.step for one in retention.find_outdated(Retention(keep_last=1), tmp_path)] == [1]


class _Fails(operations.FileOperations):
    """No read of one file succeeds."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open_read(self, path: Path) -> BinaryIO:
        if path == self._path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return super().open_read(path)

    def pause(self, seconds: float) -> None:
        return


@pytest.mark.parametrize("unreadable", [1, 2, 3])
def test_a_manifest_that_can_not_be_read_costs_no_checkpoint(tmp_path: Path, unreadable: int) -> None:
    run(tmp_path, plain(1, 2, 3))
    with operations.use(_Fails(tmp_path / f"global_step_{unreadable}" / "manifest.json")):
        doomed = {one.step for one in retention.find_outdated(Retention(keep_last=2), tmp_path)}
    assert doomed <= {1}
    assert unreadable not in doomed


def test_what_is_not_this_librarys_own_step_directory_is_never_deleted(tmp_path: Path) -> None:
    elsewhere = save(tmp_path / "elsewhere", 4, 4.0)
    root = tmp_path / "root"
    save(root, 1, 1.0)
    make_step(root, 2)
    shutil.copytree(root / "global_step_1", root / "global_step_3")
    (root / "global_step_4").symlink_to(elsewhere)
    (root / "global_step_5").mkdir()
    (root / "global_step_5" / "notes.txt").write_text("mine")
    damage(save(root, 6, 6.0), "manifest.json")
    shutil.copytree(root / "global_step_1", root / "global_step_1_kept")
    before = listing(root)
    run(root, plain(7, 8), restored_from=root / "global_step_1", keep_last=1)
    names = {path.name.removeprefix("global_step_") for path in root.glob("global_step_*")}
    assert names == {"1", "1_kept", "2", "3", "4", "5", "6", "8"}
    after = listing(root)
    untouched = {name: found for name, found in before.items() if name.startswith("global_step_")}
    assert {name: found for name, found in after.items() if name in untouched} == untouched
    assert value_of(elsewhere) == 4.0


class Failing(FileOperations):
    """Fails certain operations on what is below ``.trash`` or goes there."""

    def __init__(self, what: str) -> None:
        self.what = what

    def rename(self, source: Path, target: Path) -> None:
        if self.what == "rename" and ".trash" in target.parts:
            raise PermissionError(13, "no", str(source))
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        if self.what == "remove" and ".trash" in path.parts:
            raise PermissionError(13, "no", str(path))
        super().remove(path)


@pytest.mark.parametrize("what", ["rename", "remove"])
def test_a_deletion_that_fails_is_a_warning_and_the_save_counts(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), operations.use(Failing(what)):
        run(tmp_path, plain(1, 2), keep_last=1)
    assert "could not be deleted" in caplog.text
    assert latest(tmp_path) == tmp_path / "global_step_2"
    assert value_of(tmp_path / "global_step_2") == 2.0
    assert steps(tmp_path) == ([1, 2] if what == "rename" else [2])
    run(tmp_path, plain(3), restored_from=tmp_path / "global_step_2", keep_last=1)
    assert steps(tmp_path) == [2, 3]
    assert not list((tmp_path / ".trash").iterdir())


def test_the_trash_is_swept_when_a_run_begins(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    shutil.copytree(tmp_path / "global_step_1", tmp_path / ".trash" / "global_step_0.aaaaaaaaaaaa")
    run(tmp_path, {})
    assert not list((tmp_path / ".trash").iterdir())


@pytest.mark.parametrize("name", [".trash", ".staging"])
def test_what_has_no_name_of_a_save_or_a_deletion_is_never_swept(tmp_path: Path, name: str) -> None:
    """Other tools, and desktops, keep things in folders of these names."""
    (tmp_path / name / "notes").mkdir(parents=True)
    (tmp_path / name / "notes" / "precious").write_text("mine")
    (tmp_path / name / "global_step_3").mkdir()
    (tmp_path / name / "data.0123456789AB").write_text("mine")
    before = listing(tmp_path / name)
    run(tmp_path, {})
    assert listing(tmp_path / name) == before


@pytest.mark.parametrize("name", [".trash", ".staging"])
def test_what_is_behind_a_link_is_never_swept(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "precious").write_text("mine")
    (root / name).symlink_to(outside)
    run(root, {})
    assert (outside / "precious").read_text() == "mine"
    assert f"{root / name} is a link: its target is not changed" in caplog.text


class Order(FileOperations):
    """Notes what happens to step directories, the pointer and the root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[str] = []

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.calls.append(f"rename {target.relative_to(self.root).parts[0]}")

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.calls.append(f"remove {path.relative_to(self.root).parts[0]}")

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        if path == self.root:
            self.calls.append("sync root")


def test_nothing_is_deleted_before_the_newer_one_is_durable_and_pointed_to(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    (tmp_path / ".trash").mkdir()
    with operations.use(Order(tmp_path)) as order:
        # It continues the pointer's save.
        save(tmp_path, 2, 2.0, by=DistributedCheckpointer(retention=Retention(keep_last=1)))
    assert isinstance(order, Order)
    assert order.calls[:6] == [
        "rename global_step_2",
        "sync root",
        "rename latest_checkpoint_iteration.txt",
        "sync root",
        "rename .trash",
        "sync root",
    ]
    assert set(order.calls[6:]) == {"remove .trash"}


def _runs(folder: str) -> list[int]:
    run(Path(folder), plain(1, 2, 3), keep_last=2)
    return steps(Path(folder))


def test_rank_zero_deletes_and_all_ranks_go_on_when_it_has(tmp_path: Path) -> None:
    assert run_ranks(_runs, 2, str(tmp_path)) == [[2, 3], [2, 3]]


def test_a_copy_that_stepped_aside_and_can_not_be_read_is_put_back_the_next_time(tmp_path: Path) -> None:
    save(tmp_path, 2, 2.0)
    aside = tmp_path / ".staging" / "global_step_2.0123456789ab.replaced"
    (tmp_path / "global_step_2").rename(aside)
    with operations.use(_Fails(aside / "manifest.json")):
        layout.clear_leftovers(tmp_path)
    assert aside.is_dir()
    layout.clear_leftovers(tmp_path)
    assert value_of(tmp_path / "global_step_2") == 2.0
    assert not aside.exists()


def test_the_source_of_a_run_is_kept_by_whatever_link_it_was_named(tmp_path: Path) -> None:
    root = tmp_path / "root"
    save(root, 10, 10.0)
    (tmp_path / "link").symlink_to(root)
    checkpointer = DistributedCheckpointer(retention=Retention(keep_last=1))
    checkpointer.begin_run(str(root), restored_from=str(tmp_path / "link" / "global_step_10"))
    save(root, 20, 20.0, by=checkpointer)
    assert (root / "global_step_10").is_dir()

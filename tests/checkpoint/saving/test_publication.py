"""From staging to commit: what a reader sees at every moment, and what a killed save leaves behind."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.format import layout
from hyper_resume.errors import CheckpointSaveError
from tests.checkpoint.directories import latest, listing, make_step
from tests.checkpoint.single_value import save, state, value_of
from tests.ranks import run_ranks

# What Python reports before it changes something on disk.
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
OLD, NEW = 2.0, 22.0


def watch(root: str, fatal: int = 0) -> list[str]:
    """Note every change under ``root`` from now on; the process kills itself just before change number ``fatal``."""
    changes: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in CHANGES or not str(args[0]).startswith(root):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        names = [str(arg).removeprefix(root) for arg in args[:2] if isinstance(arg, (str, os.PathLike))]
        changes.append(" ".join([event, *names]))
        if len(changes) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return changes


def _changes_of_a_save(folder: str) -> list[str]:
    changes = watch(folder)
    save(Path(folder), 3, 3.0)
    return changes


def test_the_directory_appears_whole_and_the_pointer_moves_after_it(tmp_path: Path) -> None:
    (changes,) = run_ranks(_changes_of_a_save, 1, str(tmp_path))
    renames = [change for change in changes if change.startswith("os.rename") and ".metadata" not in change]
    assert len(renames) == 2
    assert renames[0].endswith(" /global_step_3")
    assert "/.staging/global_step_3." in renames[0]
    assert renames[1].startswith("os.rename /.staging/latest_checkpoint_iteration.txt.")
    assert renames[1].endswith(" /latest_checkpoint_iteration.txt")
    # Nothing is ever written under the final name.
    assert not [change for change in changes if change.startswith("open") and " /global_step_3" in change]
    assert changes.index(renames[0]) > max(i for i, change in enumerate(changes) if ".metadata" in change)


def _save_and_die(folder: str, step: int, value: float, fatal: int, can_exchange: bool) -> None:
    watch(folder, fatal)
    with operations.use(operations.FileOperations() if can_exchange else WithoutExchange()):
        save(Path(folder), step, value)


class WithoutExchange(operations.FileOperations):
    """A file system that can't let two names change places."""

    def exchange(self, one: Path, other: Path) -> bool:
        return False


def _die_alone(folder: Path, step: int, value: float, fatal: int, can_exchange: bool) -> int | None:
    """Run the save in a process of its own; returns its exit code."""
    process = multiprocessing.get_context("forkserver").Process(
        target=_save_and_die, args=(str(folder), step, value, fatal, can_exchange)
    )
    process.start()
    process.join(30)
    return process.exitcode


def assert_recoverable(root: Path, *, replaced_step: int | None = None) -> None:
    """After a killed save: LATEST gives a whole checkpoint, and the next run saves as if nothing had been."""
    found = latest(root)
    assert found is not None
    expected = {1: {1.0}, 2: {OLD, NEW}, 3: {3.0}}
    step = layout.parse_step(layout.final_path_of(found).name)
    assert step is not None
    assert value_of(found) in expected[step]
    pointed = root / f"global_step_{(root / layout.POINTER_NAME).read_text().strip()}"
    if pointed.exists():
        assert not layout.why_incomplete(pointed)
    else:
        # Only while one directory takes another's place, and then the old one is still whole.
        assert replaced_step is not None
        assert pointed.name == f"global_step_{replaced_step}"
        (aside,) = (root / ".staging").glob(f"{pointed.name}.*.replaced")
        assert value_of(aside) == OLD
    save(root, 4, 4.0)
    assert latest(root) == root / "global_step_4"
    assert list((root / ".staging").iterdir()) == []
    assert value_of(root / "global_step_1") == 1.0
    assert value_of(root / "global_step_2") in expected[2]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A root with steps 1 and 2."""
    save(tmp_path / "saved", 1, 1.0)
    save(tmp_path / "saved", 2, OLD)
    return tmp_path / "saved"


@pytest.mark.parametrize(
    ("step", "value", "can_exchange"),
    [
        pytest.param(3, 3.0, True, id="new step"),
        pytest.param(2, NEW, True, id="same step again"),
        pytest.param(2, NEW, False, id="same step again, by two renames"),
    ],
)
def test_a_save_killed_at_any_change_leaves_a_whole_checkpoint(
    tmp_path: Path, saved: Path, step: int, value: float, can_exchange: bool
) -> None:
    fatal, outcomes = 0, set()
    while True:
        fatal += 1
        root = tmp_path / str(fatal)
        shutil.copytree(saved, root)
        exit_code = _die_alone(root, step, value, fatal, can_exchange)
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
        found = latest(root)
        assert found is not None
        # Between two renames nothing stands under the name; the copy that stepped aside is then what LATEST means.
        outcomes.add((layout.final_path_of(found).name, value_of(found)))
        assert_recoverable(root, replaced_step=None if can_exchange else step)
    # The save has at least: staging, two files, metadata, manifest, commit, pointer.
    assert fatal > 9
    assert ("global_step_2", OLD) in outcomes
    if value == NEW:
        assert outcomes == {("global_step_2", OLD), ("global_step_2", NEW)}


def _save_together_and_die(folder: str, victim: int, fatal: int, save_async: bool) -> list[str]:
    dist.barrier()
    changes = watch(folder, fatal if dist.get_rank() == victim else 0)
    save(Path(folder), 3, 3.0, save_async=save_async)
    return changes


def test_a_save_of_two_ranks_killed_at_several_moments_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    run_ranks(_save_together, 2, str(tmp_path / "saved"))
    shutil.copytree(tmp_path / "saved", tmp_path / "counted")
    changes = run_ranks(_save_together_and_die, 2, str(tmp_path / "counted"), -1, 0, False)
    pointer = next(i for i, change in enumerate(changes[0], start=1) if "latest_checkpoint" in change)
    commit = next(i for i, change in enumerate(changes[0], start=1) if change.endswith(" /global_step_3"))
    assert 4 < commit < pointer
    moments = [(0, 2), (0, commit - 2), (0, commit), (0, pointer), (0, pointer + 1), (1, 1), (1, len(changes[1]))]
    for number, (victim, fatal) in enumerate(moments):
        root = tmp_path / f"{victim}-{fatal}"
        shutil.copytree(tmp_path / "saved", root)
        results = run_ranks(
            _save_together_and_die,
            2,
            str(root),
            victim,
            fatal,
            bool(number % 2),
            expect_errors=True,
            timeout_seconds=30,
        )
        assert f"exit code -{int(signal.SIGKILL)}" in str(results[victim])
        assert isinstance(results[1 - victim], CheckpointSaveError), "the survivor hears of it"
        # The pointer moves last, but a step 3 that is committed continues step 2, and is the latest already.
        is_committed = (root / "global_step_3").exists()
        assert is_committed == (victim == 0 and fatal > commit)
        assert latest(root) == root / f"global_step_{3 if is_committed else 2}"
        assert run_ranks(_value_of_two_and_save_four, 2, str(root)) == [OLD, OLD]
        assert latest(root) == root / "global_step_4"
        assert list((root / ".staging").iterdir()) == []


def _save_together(folder: str) -> None:
    for step, value in ((1, 1.0), (2, OLD)):
        save(Path(folder), step, value)


def _value_of_two_and_save_four(folder: str) -> float:
    value = value_of(Path(folder) / "global_step_2")
    save(Path(folder), 4, 4.0)
    return value


def test_leftovers_are_swept_by_the_first_save_of_a_run_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def leave() -> None:
        make_step(tmp_path / ".staging", "global_step_7.aaaaaaaaaaaa", metadata=None)
        (tmp_path / ".staging" / "latest_checkpoint_iteration.txt.bbbbbbbbbbbb").write_text("x")
        (tmp_path / ".staging" / "a link.cccccccccccc").symlink_to(tmp_path / "target")

    (tmp_path / "target").mkdir()
    leave()
    checkpointer = DistributedCheckpointer()
    with caplog.at_level(logging.WARNING):
        checkpointer.save(str(tmp_path / "global_step_1"), state(1.0), global_step=1)
    assert list((tmp_path / ".staging").iterdir()) == []
    assert caplog.text.count("left by a save that did not finish") == 3
    assert (tmp_path / "target").is_dir()
    leave()
    checkpointer.save(str(tmp_path / "global_step_2"), state(2.0), global_step=2)
    assert len(list((tmp_path / ".staging").iterdir())) == 3


def test_loading_sweeps_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    make_step(tmp_path / ".staging", "global_step_7.aaaaaaaaaaaa")
    before = listing(tmp_path)
    checkpointer = DistributedCheckpointer()
    assert checkpointer.find_latest_checkpoint(str(tmp_path)) == str(tmp_path / "global_step_1")
    assert value_of(tmp_path / "global_step_1") == 1.0
    assert listing(tmp_path) == before


def test_saving_a_step_again_replaces_it_whole(tmp_path: Path) -> None:
    save(tmp_path, 2, OLD)
    (tmp_path / "global_step_2" / "extra_state" / "extra_state_rank_3.pt").write_bytes(b"of a larger world")
    (tmp_path / "global_step_2" / "__3_0.distcp").write_bytes(b"of a larger world")
    save(tmp_path, 2, NEW)
    assert value_of(tmp_path / "global_step_2") == NEW
    names = sorted(name for name, kind in listing(tmp_path / "global_step_2").items() if kind != "folder")
    assert names == [".metadata", "__0_0.distcp", "extra_state/extra_state_rank_0.pt", "index.json", "manifest.json"]
    assert list((tmp_path / ".staging").iterdir()) == []


def test_a_lower_step_moves_the_pointer_back(tmp_path: Path) -> None:
    save(tmp_path, 9, 9.0)
    save(tmp_path, 5, 5.0)
    assert latest(tmp_path) == tmp_path / "global_step_5"


def test_a_directory_of_another_name_is_saved_but_never_pointed_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 1.0)
    DistributedCheckpointer().save(str(tmp_path / "best"), state(5.0), global_step=5)
    assert value_of(tmp_path / "best") == 5.0
    assert "LATEST will not find it" in caplog.text
    assert latest(tmp_path) == tmp_path / "global_step_1"


@pytest.mark.parametrize(
    "obstacle", ["root is a file", "parent is a file", "staging is a file", "pointer is a directory"]
)
def test_a_root_that_cant_be_written_is_a_save_error_and_changes_nothing(tmp_path: Path, obstacle: str) -> None:
    save(tmp_path / "good", 1, 1.0)
    root = tmp_path / "good"
    if obstacle == "root is a file":
        root = tmp_path / "file"
        root.write_text("x")
    elif obstacle == "parent is a file":
        (tmp_path / "file").write_text("x")
        root = tmp_path / "file" / "inside"
    elif obstacle == "staging is a file":
        (root / ".staging").rmdir()
        (root / ".staging").write_text("x")
    else:
        (root / layout.POINTER_NAME).unlink()
        (root / layout.POINTER_NAME).mkdir()
    before = listing(tmp_path)
    with pytest.raises(CheckpointSaveError) as caught:
        save(root, 2, 2.0)
    assert str(root) in str(caught.value)
    after = listing(tmp_path)
    if obstacle == "pointer is a directory":
        # The commit has happened by then, and the message says so.
        assert "the checkpoint is committed, but the pointer could not be moved" in str(caught.value)
        assert latest(root) == root / "global_step_2"
        assert {name: kind for name, kind in after.items() if not name.startswith("good/global_step_2")} == before
    else:
        assert after == before


def _save_where_a_file_stands(folder: str) -> BaseException | None:
    (Path(folder) / "file").touch()
    try:
        save(Path(folder) / "file", 1, 1.0)
    except Exception as error:  # noqa: BLE001  the error is what is looked at
        return error
    return None


def test_a_root_that_cant_be_written_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    errors = run_ranks(_save_where_a_file_stands, 2, str(tmp_path))
    assert {type(error) for error in errors} == {CheckpointSaveError}
    assert len({str(error) for error in errors}) == 1

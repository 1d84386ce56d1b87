"""One run a root: another is refused by name, a dead one holds nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.disk import lock
from hyper_resume.errors import CheckpointLockedError, CheckpointSaveError
from tests.checkpoint.directories import listing
from tests.checkpoint.single_value import save, state, steps, value_of
from tests.ranks import run_ranks, server_context


def _hold(root: Path, held: Connection) -> None:
    lock.acquire(root)
    held.send("held")
    held.poll(None)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[BaseProcess]:
    """Another process that has the root ``tmp_path / "root"``."""
    (tmp_path / "root").mkdir()
    here, there = server_context.Pipe()
    process = server_context.Process(target=_hold, args=(tmp_path / "root", there))
    process.start()
    there.close()
    assert here.recv() == "held"
    yield process
    process.kill()
    process.join()
    here.close()


def test_a_second_process_is_refused_by_pid_and_host_and_changes_nothing(tmp_path: Path, holder: BaseProcess) -> None:
    root = tmp_path / "root"
    before = listing(root)
    with pytest.raises(CheckpointLockedError, match="another run saves into this checkpoint_dir") as caught:
        save(root, 1, 1.0)
    assert f'"pid": {holder.pid}' in str(caught.value)
    assert f'"host": "{socket.gethostname()}"' in str(caught.value)
    assert isinstance(caught.value, CheckpointSaveError)
    with pytest.raises(CheckpointLockedError):
        DistributedCheckpointer().begin_run(str(root), restored_from=None)
    assert listing(root) == before


def test_reading_needs_no_lock(tmp_path: Path, holder: BaseProcess) -> None:
    source = save(tmp_path / "elsewhere", 1, 1.0)
    source.rename(tmp_path / "root" / "global_step_1")
    assert value_of(tmp_path / "root" / "global_step_1") == 1.0
    found = DistributedCheckpointer().find_latest_checkpoint(str(tmp_path / "root"))
    assert found == str(tmp_path / "root" / "global_step_1")


def test_a_lock_ends_with_the_process_that_held_it_however_it_died(tmp_path: Path, holder: BaseProcess) -> None:
    root = tmp_path / "root"
    with pytest.raises(CheckpointLockedError):
        save(root, 1, 1.0)
    holder.kill()
    holder.join(10)
    assert holder.exitcode == -signal.SIGKILL
    save(root, 1, 1.0)
    assert json.loads((root / ".writer.lock").read_text())["pid"] == os.getpid()


def _try_to_save(folder: str) -> BaseException | None:
    try:
        save(Path(folder), 1, 1.0)
    except Exception as error:  # noqa: BLE001  the error is what is looked at
        return error
    return None


def test_a_refusal_is_the_same_on_every_rank(tmp_path: Path, holder: BaseProcess) -> None:
    errors = run_ranks(_try_to_save, 3, str(tmp_path / "root"))
    assert {type(error) for error in errors} == {CheckpointLockedError}
    assert len({str(error) for error in errors}) == 1
    assert f'"pid": {holder.pid}' in str(errors[0])


def _begin(folder: str) -> BaseException | None:
    try:
        DistributedCheckpointer().begin_run(folder, restored_from=None)
    except Exception as error:  # noqa: BLE001  the error is what is looked at
        return error
    return None


def test_a_run_is_refused_at_its_beginning_on_every_rank(tmp_path: Path, holder: BaseProcess) -> None:
    errors = run_ranks(_begin, 2, str(tmp_path / "root"))
    assert {type(error) for error in errors} == {CheckpointLockedError}


def test_one_process_may_take_a_root_again_and_again(tmp_path: Path) -> None:
    for _ in range(3):
        lock.acquire(tmp_path)
    for step in (1, 2):
        save(tmp_path, step, float(step))
    DistributedCheckpointer().begin_run(str(tmp_path), restored_from=None)
    assert steps(tmp_path) == [1, 2]


def test_a_root_may_be_reached_by_another_way(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("root")
    lock.acquire(tmp_path / "root")
    lock.acquire(tmp_path / "link")
    save(tmp_path / "root", 1, 1.0)
    save(tmp_path / "link", 2, 2.0)
    assert steps(tmp_path / "root") == [1, 2]


def test_a_lock_file_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "root" / ".writer.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(CheckpointSaveError, match="symbolic link"):
        save(tmp_path / "root", 1, 1.0)
    assert (tmp_path / "victim").read_text() == "precious"


def refused_elsewhere(root: Path) -> bool:
    """Ask another process, which is this machine's kernel's word."""
    return _flock_elsewhere(root) == "BlockingIOError"


def _flock_elsewhere(root: Path) -> str:
    asked = subprocess.run(
        [sys.executable, "-c", ASKER, str(root / ".writer.lock")], capture_output=True, text=True, check=True
    )
    return asked.stdout.strip()


ASKER = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError as error:
    print(type(error).__name__)
"""


def test_the_lock_survives_a_copy_of_the_root_by_the_run_itself(tmp_path: Path) -> None:
    """An upload from within the run opens and closes every file; a lock of another kind is lost by that."""
    save(tmp_path / "root", 1, 1.0)
    assert refused_elsewhere(tmp_path / "root")
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    assert refused_elsewhere(tmp_path / "root")
    assert not refused_elsewhere(tmp_path / "copy")


def _save_in_forks(folder: str) -> None:
    """A child of a process that holds the lock inherits the checkpointer, and must not save beside its parent."""
    root = Path(folder)
    checkpointer = DistributedCheckpointer()
    save(root, 1, 1.0, by=checkpointer)
    child = os.fork()
    if child == 0:
        code = 3
        try:
            checkpointer.save(str(root / "global_step_2"), state(2.0), global_step=2)
        except CheckpointLockedError as error:
            code = 0 if f'"pid": {os.getppid()}' in str(error) else 4
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "3: it saved; 4: it was refused, but not by its parent's name"
    assert refused_elsewhere(root), "the child's end must not give the parent's lock away"


def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    # In a process of its own: a fork of pytest would inherit what other tests left.
    process = multiprocessing.get_context("forkserver").Process(target=_save_in_forks, args=(str(tmp_path),))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert steps(tmp_path) == [1]


ORPHAN = """
import os, sys
from pathlib import Path
from hyper_resume.checkpoint.disk import lock
lock.acquire(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_worker_that_outlives_a_killed_run_does_not_keep_the_root(tmp_path: Path) -> None:
    """A forked data loader worker may live on for seconds; the next run must not wait for it."""
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert refused_elsewhere(tmp_path)
    process.kill()
    process.wait(10)
    # The worker waits for the end of its input, which this process holds.
    save(tmp_path, 1, 1.0)
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_lock_that_is_held_for_a_while_leaves_a_file_only_where_there_was_one(tmp_path: Path, is_there: bool) -> None:
    if is_there:
        (tmp_path / ".writer.lock").write_text("of an earlier run\n")
    with lock.held(tmp_path):
        assert refused_elsewhere(tmp_path)
    assert (tmp_path / ".writer.lock").exists() == is_there
    if is_there:
        assert not refused_elsewhere(tmp_path)
    save(tmp_path, 1, 1.0)
    with lock.held(tmp_path):
        pass
    assert refused_elsewhere(tmp_path), "what a run holds is not given away"


def test_a_lock_file_that_lost_its_name_before_it_was_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command deletes the file between this process's open and its lock; a third process would make another one."""
    lock_it, calls = lock.fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            (tmp_path / ".writer.lock").unlink()
        lock_it(descriptor, operation)

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    lock.acquire(tmp_path)
    monkeypatch.undo()
    assert len(calls) == 2
    assert refused_elsewhere(tmp_path)


def test_a_root_that_was_made_anew_is_taken_anew(tmp_path: Path) -> None:
    root = tmp_path / "root"
    checkpointer = DistributedCheckpointer()
    save(root, 1, 1.0, by=checkpointer)
    root.rename(tmp_path / "away")
    save(root, 2, 2.0, by=checkpointer)
    assert refused_elsewhere(root)

"""Roots and files that are not what they should be: every command and every save ends soon, with a clear error."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from conformance.processes.forked_ranks import Ended, run_alone
from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.disk import lock
from hyper_resume.errors import CheckpointNotFoundError, CheckpointSaveError, HyperResumeError
from tests.checkpoint.forging import EXTRA, Told
from tests.checkpoint.single_value import save, state

_NOBODY = 65_534
# A FIFO without a writer hangs for ever; everything here takes milliseconds.
_SECONDS = 20.0


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with steps 1 and 2."""
    root = tmp_path_factory.mktemp("good")
    for step in (1, 2):
        save(root, step, float(step))
    return root


@pytest.fixture
def root(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "root")


def _all(root: Path) -> list[Told]:
    """What every command says of the root, and of its step 2."""
    words = [["verify"], ["verify", "--size-only"], ["inspect"], ["doctor"], ["prune", "--keep-last", "1"]]
    steps = [["verify"], ["inspect"], ["diff", str(root / "global_step_1")]]
    return [Told(*of, str(root)) for of in words] + [Told(*of, str(root / "global_step_2")) for of in steps]


def _is_clear(told: Told) -> bool:
    """A result on standard output, or one line of error."""
    lines = told.err.splitlines()
    return told.code in (0, 1, 2) and (not lines or lines[-1].startswith("hyper-resume: error: "))


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "name",
    [
        "latest_checkpoint_iteration.txt",
        "global_step_2/manifest.json",
        "global_step_2/.metadata",
        "global_step_2/index.json",
        "global_step_2/__0_0.distcp",
        f"global_step_2/{EXTRA}",
        ".writer.lock",
    ],
)
def test_a_fifo_in_the_place_of_a_file_hangs_nothing(root: Path, name: str) -> None:
    lock.release_after_fork()
    _fifo(root / name)

    def use_all() -> list[str]:
        told = _all(root)
        try:
            DistributedCheckpointer().find_latest_checkpoint(str(root))
            DistributedCheckpointer().load(str(root / "global_step_2"), {"model": {"w": torch.zeros(8)}})
        except HyperResumeError:
            pass
        return [one.text for one in told if not _is_clear(one)]

    # In a process of its own: one that hangs in an open can only be killed.
    ended = run_alone(use_all, limit_seconds=_SECONDS)
    assert (ended.how, ended.value) == ("returned", []), ended.trace


@pytest.mark.parametrize("kind", ["directory", "FIFO", "link"])
def test_a_lock_file_that_is_none_is_refused_with_a_clear_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / lock.LOCK_NAME
    if kind == "directory":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "elsewhere")
    for action in (
        lambda: lock.acquire(tmp_path),
        lambda: save(tmp_path, 1, 1.0),
        lambda: DistributedCheckpointer().begin_run(str(tmp_path), restored_from=None),
        lambda: DistributedCheckpointer().try_save(str(tmp_path), state(1.0)),
    ):
        with pytest.raises(
            CheckpointSaveError, match=r"the lock of checkpoint_dir can't be taken; where: .*\.writer\.lock"
        ):
            action()
    assert "problem  .writer.lock can't be read" in Told("doctor", str(tmp_path)).out
    assert not (tmp_path / "elsewhere").exists()


def test_a_name_of_more_than_255_characters_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for path in (
        tmp_path / ("a" * 300),
        tmp_path / "b" / ("a" * 300) / "global_step_1",
        tmp_path.joinpath(*["c" * 200] * 30),
    ):
        for told in _all(path):
            assert told.code != 0, told.text
            assert _is_clear(told), told.text
        with pytest.raises(CheckpointNotFoundError, match="File name too long"):
            DistributedCheckpointer().find_latest_checkpoint(str(path))
        for act in (
            lambda path=path: save(path, 1, 1.0),
            lambda path=path: DistributedCheckpointer().begin_run(str(path), restored_from=None),
            lambda path=path: DistributedCheckpointer().try_save(str(path), state(1.0)),
        ):
            with pytest.raises(CheckpointSaveError, match="File name too long"):
                act()


# ---- permissions ------------------------------------------------------------------------------------------------------


@pytest.fixture
def public(good: Path) -> Iterator[Path]:
    """A copy of the root where any user finds it; pytest's own folders are this user's."""
    folder = Path(tempfile.mkdtemp(prefix="public-"))
    folder.chmod(0o755)
    root = shutil.copytree(good, folder / "root")
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    yield root
    shutil.rmtree(folder)


def _as_nobody(action: Callable[[], object]) -> Ended:
    """Call it in a process without rights: this one may be root's, whom no permission stops."""

    def without_rights() -> object:
        lock.release_after_fork()
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
        return action()

    return run_alone(without_rights, limit_seconds=_SECONDS)


@pytest.mark.parametrize(
    "unreadable", [".", "global_step_2", "global_step_2/manifest.json", f"global_step_2/{EXTRA}", ".staging"]
)
def test_what_this_user_may_not_read_is_a_clear_error(public: Path, unreadable: str) -> None:
    (public / unreadable).chmod(0o000)

    def use_all() -> list[str]:
        unclear = [one.text for one in _all(public) if not _is_clear(one)]
        for action in (
            lambda: DistributedCheckpointer().find_latest_checkpoint(str(public)),
            lambda: DistributedCheckpointer().load(str(public / "global_step_2"), {"model": {"w": torch.zeros(8)}}),
            lambda: DistributedCheckpointer().begin_run(str(public), restored_from=None),
            lambda: save(public, 3, 3.0),
        ):
            try:
                action()
            except HyperResumeError:
                continue
            except Exception as error:  # noqa: BLE001  what is looked for
                unclear.append(repr(error))
        return unclear

    ended = _as_nobody(use_all)
    (public / unreadable).chmod(0o755)
    assert (ended.how, ended.value) == ("returned", []), ended.trace


def test_a_root_that_this_user_may_only_read_is_read_and_a_save_is_a_clear_error(public: Path) -> None:
    def use_all() -> list[object]:
        with pytest.raises(CheckpointSaveError, match="PermissionError: Permission denied"):
            save(public, 3, 3.0)
        return [one.code for one in _all(public)] + [DistributedCheckpointer().find_latest_checkpoint(str(public))]

    ended = _as_nobody(use_all)
    # verify and inspect succeed, doctor has a problem, prune can't lock, diff finds differences.
    assert ended.value == [0, 0, 0, 1, 1, 0, 0, 1, str(public / "global_step_2")], ended.trace


# ---- a read-only file system ------------------------------------------------------------------------------------------

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS


def _make_read_only(root: Path) -> bool:
    """Mount the root read-only, for this process alone; False where this user may not."""
    if ctypes.CDLL(None).unshare(_NEW_MOUNTS):
        return False
    mounts = (["--make-rprivate", "/"], ["--bind", str(root), str(root)], ["-o", "remount,bind,ro", str(root)])
    return not any(subprocess.run(["mount", *words], check=False, capture_output=True).returncode for words in mounts)


def test_a_root_on_a_read_only_file_system_is_read_and_a_save_is_a_clear_error(root: Path) -> None:
    def use_all() -> list[object] | None:
        lock.release_after_fork()
        if not _make_read_only(root):
            return None
        for action in (
            lambda: save(root, 3, 3.0),
            lambda: DistributedCheckpointer().begin_run(str(root), restored_from=None),
            lambda: DistributedCheckpointer().try_save(str(root), state(1.0)),
        ):
            with pytest.raises(CheckpointSaveError, match="Read-only file system"):
                action()
        told = _all(root)
        assert [one.text for one in told if not _is_clear(one)] == []
        return [one.code for one in told] + [DistributedCheckpointer().find_latest_checkpoint(str(root))]

    ended = run_alone(use_all, limit_seconds=_SECONDS)
    assert ended.how == "returned", ended.trace
    if ended.value is None:
        pytest.skip("this user may not mount anything")
    assert ended.value == [0, 0, 0, 1, 1, 0, 0, 1, str(root / "global_step_2")]

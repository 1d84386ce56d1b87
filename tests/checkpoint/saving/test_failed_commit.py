"""A commit that fails at its last steps is taken back: nothing is published, and the earlier copy is under its name."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.disk.operations import FileOperations
from hyper_resume.errors import CheckpointSaveError
from tests.checkpoint.directories import latest, listing
from tests.checkpoint.single_value import manifest_content, save, state, value_of
from tests.ranks import run_ranks


class Failing(FileOperations):
    """Fails once at one operation, after a step directory has been moved to or away from its name."""

    def __init__(self, root: Path, what: str, *, can_exchange: bool, for_good: bool = False) -> None:
        self.root = root
        self.what = what
        self.can_exchange = can_exchange
        self.for_good = for_good
        self.moved = False
        self.failed = 0

    def _perhaps_fail(self, what: str) -> None:
        if what == self.what and self.moved and (self.for_good or not self.failed):
            self.failed += 1
            raise OSError(errno.EIO, "Input/output error", what)

    def rename(self, source: Path, target: Path) -> None:
        self._perhaps_fail("rename")
        super().rename(source, target)
        self.moved = self.moved or "global_step_" in target.name

    def exchange(self, one: Path, other: Path) -> bool:
        if not self.can_exchange:
            return False
        self._perhaps_fail("exchange")
        self.moved = super().exchange(one, other)
        return self.moved

    def sync_directory(self, path: Path) -> None:
        if path == self.root:
            self._perhaps_fail("sync")
        super().sync_directory(path)


def names(root: Path) -> dict[str, str]:
    return {name: found for name, found in listing(root).items() if not name.startswith(".writer.lock")}


@pytest.mark.parametrize("step", [2, 3], ids=["same step again", "new step"])
@pytest.mark.parametrize("can_exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("what", ["sync", "rename"])
def test_what_fails_after_the_first_move_is_taken_back(
    tmp_path: Path, step: int, can_exchange: bool, what: str
) -> None:
    if what == "rename" and (step == 3 or can_exchange):
        # Then there is one move only, and the pointer's rename comes after the commit.
        what = "sync"
    save(tmp_path, 1, 1.0)
    save(tmp_path, 2, 2.0)
    before = names(tmp_path)
    with operations.use(Failing(tmp_path, what, can_exchange=can_exchange)) as failing:
        with pytest.raises(CheckpointSaveError, match="Input/output error"):
            save(tmp_path, step, 22.0)
        assert isinstance(failing, Failing)
        assert failing.failed == 1
    assert names(tmp_path) == before
    assert latest(tmp_path) == tmp_path / "global_step_2"
    assert value_of(tmp_path / "global_step_2") == 2.0
    save(tmp_path, step, 33.0)
    assert value_of(tmp_path / f"global_step_{step}") == 33.0


def test_an_earlier_copy_that_could_not_be_put_back_is_not_deleted(tmp_path: Path) -> None:
    """The disk fails for good at exchanges: the new copy stays under the name, the old one where it was moved to."""

    class Stuck(Failing):
        def exchange(self, one: Path, other: Path) -> bool:
            if self.moved:
                raise OSError(errno.EIO, "Input/output error", str(one))
            return super().exchange(one, other)

    save(tmp_path, 2, 2.0)
    with operations.use(Stuck(tmp_path, "sync", can_exchange=True)), pytest.raises(CheckpointSaveError):
        save(tmp_path, 2, 22.0)
    (aside,) = (tmp_path / ".staging").iterdir()
    # Loaded under another parent than `.staging` its name is of no consequence.
    assert value_of(aside) == 2.0
    assert value_of(tmp_path / "global_step_2") == 22.0


@pytest.mark.parametrize("name", ["global_step_2", "best.so.far"])
def test_a_directory_that_stood_aside_for_a_dead_save_comes_back_under_its_whole_name(
    tmp_path: Path, name: str
) -> None:
    DistributedCheckpointer().save(str(tmp_path / name), state(2.0), global_step=2)
    (tmp_path / name).rename(tmp_path / ".staging" / f"{name}.0123456789ab.replaced")
    save(tmp_path, 3, 3.0)
    assert value_of(tmp_path / name) == 2.0
    assert list((tmp_path / ".staging").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir() and path.name != ".staging") == sorted(
        [name, "global_step_3"]
    )


def test_a_directory_that_stands_aside_is_what_there_is_of_its_step_until_a_run_puts_it_back(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    aside = save(tmp_path, 2, 2.0).rename(tmp_path / ".staging" / "global_step_2.0123456789ab.replaced")
    before = names(tmp_path)
    assert latest(tmp_path) == aside
    assert value_of(aside) == 2.0
    assert names(tmp_path) == before
    checkpointer = DistributedCheckpointer()
    checkpointer.begin_run(str(tmp_path), restored_from=str(aside))
    assert latest(tmp_path) == tmp_path / "global_step_2"
    save(tmp_path, 3, 3.0, by=checkpointer)
    assert [step for step, _ in manifest_content(tmp_path / "global_step_3")["ancestors"]] == [1, 2]


def _fail_on_two_ranks(folder: str) -> str:
    root = Path(folder)
    save(root, 1, 1.0)
    try:
        # Only rank 0 commits.
        with operations.use(Failing(root, "sync", can_exchange=True)):
            save(root, 2, 2.0)
    except CheckpointSaveError as error:
        return str(error)
    raise AssertionError("the save must fail")


def test_a_failed_commit_is_the_same_error_on_every_rank(tmp_path: Path) -> None:
    errors = run_ranks(_fail_on_two_ranks, 2, str(tmp_path))
    assert errors[0] == errors[1]
    assert "Input/output error" in errors[0]
    assert not (tmp_path / "global_step_2").exists()
    assert latest(tmp_path) == tmp_path / "global_step_1"

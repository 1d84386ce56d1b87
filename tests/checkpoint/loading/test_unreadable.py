"""What can't be read is not damaged: it is tried again, and then the run stops; LATEST and the pointer do not step back."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conformance.storage.failing_operations.injection import FailingOperations, Fault
from conformance.storage.failing_operations.runs import ERRORS
from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.disk import operations, reading
from hyper_resume.checkpoint.history import lineage
from hyper_resume.errors import CheckpointMismatchError, CheckpointSaveError, CheckpointUnreadableError
from tests.checkpoint.directories import listing, make_step, point_to
from tests.checkpoint.single_value import damage, manifest_content, save

POINTER = "latest_checkpoint_iteration.txt"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 10, 20 and 30 of one run. Nothing below changes it but the lock of a run."""
    folder = tmp_path_factory.mktemp("root")
    checkpointer = DistributedCheckpointer()
    checkpointer.begin_run(str(folder), restored_from=None)
    for step in (10, 20, 30):
        save(folder, step, float(step), by=checkpointer)
    return folder


def resume(root: Path) -> float:
    """Search, load, and begin the run; returns the value that was loaded."""
    checkpointer, live = DistributedCheckpointer(), {"model": {"w": torch.zeros(8)}}
    found = checkpointer.find_latest_checkpoint(str(root))
    assert found is not None
    checkpointer.load(found, live, extra_state_skeleton={"value": None})
    checkpointer.begin_run(str(root), restored_from=found)
    return float(live["model"]["w"][0])


def fail_each(root: Path, error: str, *, persistent: bool, stride: int = 1) -> tuple[list[float], list[Exception]]:
    """Resume with the N-th operation failing, for N = 1, 1 + stride, ... to the last; what was loaded and what was raised."""
    loaded, raised = [], []
    for at in range(1, 500, stride):
        with operations.use(FailingOperations(Fault(error=error, at=at, persistent=persistent))) as failing:
            assert isinstance(failing, FailingOperations)
            try:
                loaded.append(resume(root))
            except Exception as caught:  # noqa: BLE001  which one it is, is looked at
                raised.append(caught)
        if not failing.struck:
            return loaded, raised
    raise AssertionError("more operations than a resume has")


@pytest.mark.parametrize("error", ERRORS)
def test_each_read_of_a_resume_that_fails_once_is_tried_again_and_the_newest_is_loaded(root: Path, error: str) -> None:
    before = listing(root)
    loaded, raised = fail_each(root, error, persistent=False, stride=1 if error == "EIO" else 5)
    assert raised == []
    assert set(loaded) == {30.0}
    if error in ("EIO", "ESTALE", "EACCES", "EMFILE", "EINTR"):
        assert len(loaded) > 3, "reads were struck"
    assert listing(root) == before


@pytest.mark.parametrize("error", ["EIO", "ESTALE", "EACCES"])
def test_what_stays_unreadable_stops_the_run_and_nothing_moves(root: Path, error: str) -> None:
    before = listing(root)
    loaded, raised = fail_each(root, error, persistent=True, stride=4)
    assert loaded == [30.0], "the last one, in which nothing failed"
    assert {type(one) for one in raised} == {CheckpointUnreadableError}
    assert all(f"{root}" in str(one) and "also when it was tried again" in str(one) for one in raised)
    assert listing(root) == before


class _Unreadable(operations.FileOperations):
    """Reads of some files fail, with an error of their own; every wait between two tries is noted."""

    def __init__(self, *names: str, error: int = errno.EIO, heals_after: int | None = None) -> None:
        self.waits: list[float] = []
        self._names, self._error, self._left = names, error, heals_after

    def open_read(self, path: Path) -> operations.InputFile:
        if str(path).endswith(self._names) and self._left != 0:
            self._left = None if self._left is None else self._left - 1
            raise OSError(self._error, os.strerror(self._error), str(path))
        return super().open_read(path)

    def pause(self, seconds: float) -> None:
        self.waits.append(seconds)


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_read_is_tried_three_times_more_with_longer_waits(
    root: Path, failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    with operations.use(_Unreadable("global_step_30/__0_0.distcp", heals_after=failures)) as failing:
        assert resume(root) == 30.0
    assert isinstance(failing, _Unreadable)
    assert failing.waits == [0.1, 0.4, 1.5][:failures]
    assert (
        f"{root / 'global_step_30' / '__0_0.distcp'} can't be read (Input/output error); trying again in" in caplog.text
    )


def test_the_waits_have_a_limit() -> None:
    assert sum(reading.WAITS_SECONDS) < 5


def test_of_many_files_that_can_not_be_read_only_the_first_is_waited_for(root: Path, tmp_path: Path) -> None:
    many = shutil.copytree(root, tmp_path / "many")
    for step in range(40, 60):
        shutil.copytree(root / "global_step_30", many / f"global_step_{step}")
    with operations.use(_Unreadable("manifest.json")) as failing:
        found = lineage.resume_order(many)
        failing.gave_up_at -= reading.OUTAGE_SECONDS
        lineage.resume_order(many)
    assert len(found.unreadable) >= 20
    assert isinstance(failing, _Unreadable)
    assert failing.waits == [*reading.WAITS_SECONDS, *reading.WAITS_SECONDS]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ELOOP])
def test_what_the_system_says_of_a_file_is_no_error_that_passes(root: Path, number: int) -> None:
    with operations.use(_Unreadable("global_step_30/__0_0.distcp", error=number)) as failing:
        assert resume_finds(root) == "global_step_20"
    assert isinstance(failing, _Unreadable)
    assert failing.waits == []


def resume_finds(root: Path) -> str:
    found = DistributedCheckpointer().find_latest_checkpoint(str(root))
    assert found is not None
    return Path(found).name


@pytest.mark.parametrize(
    ("unreadable", "finds"),
    [
        ("latest_checkpoint_iteration.txt", None),
        ("global_step_30/manifest.json", None),
        ("global_step_30/.metadata", None),
        ("global_step_30/extra_state/extra_state_rank_0.pt", None),
        # They are older than what the pointer names and is whole.
        ("global_step_20/manifest.json", "global_step_30"),
        ("global_step_10/manifest.json", "global_step_30"),
    ],
)
def test_only_what_may_be_newer_stops_a_search(root: Path, unreadable: str, finds: str | None) -> None:
    with operations.use(_Unreadable(unreadable)):
        if finds is None:
            with pytest.raises(CheckpointUnreadableError):
                resume_finds(root)
        else:
            assert resume_finds(root) == finds


def _copy(root: Path, tmp_path: Path) -> Path:
    import shutil

    shutil.copytree(root, tmp_path / "root")
    return tmp_path / "root"


def _damaged_newest(root: Path) -> None:
    damage(root / "global_step_30")


def _without_pointer(root: Path) -> None:
    (root / POINTER).unlink()


def _pointer_is_older(root: Path) -> None:
    point_to(root, "20\n")


@pytest.mark.parametrize(
    ("change", "unreadable", "finds"),
    [
        (_damaged_newest, "global_step_20/manifest.json", None),
        (_damaged_newest, "global_step_10/manifest.json", "global_step_20"),
        (_without_pointer, "global_step_10/manifest.json", None),
        (_pointer_is_older, "global_step_30/manifest.json", None),
        (_pointer_is_older, "global_step_10/manifest.json", "global_step_30"),
    ],
)
def test_a_search_that_steps_back_stops_at_what_it_can_not_read(
    root: Path, tmp_path: Path, change: Callable[[Path], None], unreadable: str, finds: str | None
) -> None:
    own = _copy(root, tmp_path)
    change(own)
    with operations.use(_Unreadable(unreadable)):
        if finds is None:
            with pytest.raises(CheckpointUnreadableError, match=unreadable):
                resume_finds(own)
        else:
            assert resume_finds(own) == finds


def test_an_unreadable_directory_that_is_of_no_run_of_latest_is_passed_over(root: Path, tmp_path: Path) -> None:
    own = _copy(root, tmp_path)
    make_step(own, 15)
    with operations.use(_Unreadable("global_step_15/manifest.json")):
        assert [path.name for path in lineage.resume_order(own).directories] == [
            "global_step_30",
            "global_step_20",
            "global_step_10",
        ]


def test_a_run_does_not_begin_while_the_order_of_the_saves_is_not_known(root: Path) -> None:
    with operations.use(_Unreadable("global_step_10/manifest.json")), pytest.raises(CheckpointUnreadableError):
        DistributedCheckpointer().begin_run(str(root), restored_from=str(root / "global_step_30"))


def test_unreadable_is_an_oserror_and_no_mismatch(root: Path) -> None:
    with (
        operations.use(_Unreadable("global_step_30/index.json")),
        pytest.raises(OSError, match="can't be read now") as caught,
    ):
        DistributedCheckpointer().load(str(root / "global_step_30"), {"model": {"w": torch.zeros(8)}})
    assert not isinstance(caught.value, CheckpointMismatchError)
    assert caught.type is CheckpointUnreadableError


def test_an_error_that_does_not_pass_is_not_logged_as_one_that_may(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        resume(root)
    assert "trying again" not in caplog.text


def test_a_save_that_fails_while_nothing_can_be_read_fails_as_a_save_and_the_next_one_continues(
    root: Path, tmp_path: Path
) -> None:
    """The step is saved again: how the failed save has ended would be read from the earlier copy."""
    mine = shutil.copytree(root, tmp_path / "mine")
    checkpointer = DistributedCheckpointer()
    with operations.use(_Unreadable("manifest.json", ".metadata")), pytest.raises(CheckpointSaveError):
        save(mine, 30, 31.0, by=checkpointer)
    save(mine, 40, 40.0, by=checkpointer)
    steps = [step for step, _ in manifest_content(mine / "global_step_40")["ancestors"]]
    assert steps == [10, 20, 30]
    (mine / POINTER).unlink()
    assert resume_finds(mine) == "global_step_40"

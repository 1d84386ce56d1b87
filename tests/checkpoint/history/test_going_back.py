"""Two things look alike on disk, and are not: a run that went back, and one that was killed before its pointer moved."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.history import lineage
from hyper_resume.checkpoint.history.retention import Retention
from hyper_resume.errors import CheckpointNotFoundError
from tests.checkpoint.directories import latest, point_to
from tests.checkpoint.single_value import damage, manifest_content, save, steps, value_of

MARK = "latest_checkpoint_went_back.json"


def run(root: Path, *saved: int, back_to: int | None = None, resumes: bool = False) -> DistributedCheckpointer:
    """One run: from scratch, back to a step by its name, or (``resumes``) from LATEST."""
    checkpointer = DistributedCheckpointer()
    source = None if back_to is None else str(root / f"global_step_{back_to}")
    if resumes:
        source = checkpointer.find_latest_checkpoint(str(root))
    checkpointer.begin_run(str(root), restored_from=source)
    for step in saved:
        save(root, step, float(step), by=checkpointer)
    return checkpointer


def killed_before_the_pointer(root: Path, *saved: int, **start: object) -> None:
    """A run whose last save is committed, and that is killed before the pointer moves."""
    run(root, **start)  # type: ignore[arg-type]
    before = (root / "latest_checkpoint_iteration.txt").read_bytes()
    run(root, *saved, **start)  # type: ignore[arg-type]
    if len(saved) > 1:
        before = f"{saved[-2]}\n".encode()
    point_to(root, before)


def test_a_save_that_was_committed_before_a_kill_is_latest_though_the_pointer_is_older(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 10)
    killed_before_the_pointer(tmp_path, 20, 30, resumes=True)
    with caplog.at_level(logging.INFO):
        assert latest(tmp_path) == tmp_path / "global_step_30"
    assert f"{tmp_path / 'global_step_30'} continues global_step_20, which the pointer names" in caplog.text
    run(tmp_path, 40, resumes=True)
    assert [step for step, _ in manifest_content(tmp_path / "global_step_40")["ancestors"]] == [10, 20, 30]
    assert not (tmp_path / MARK).exists()


def test_that_save_is_passed_over_only_if_it_is_damaged(tmp_path: Path) -> None:
    run(tmp_path, 10)
    killed_before_the_pointer(tmp_path, 20, resumes=True)
    damage(tmp_path / "global_step_20")
    assert latest(tmp_path) == tmp_path / "global_step_10"
    (tmp_path / "global_step_20" / "__0_0.distcp").unlink()
    assert latest(tmp_path) == tmp_path / "global_step_10"


def test_going_back_leaves_a_mark_with_the_save_and_all_that_was_there(tmp_path: Path) -> None:
    run(tmp_path, 10, 20, 30)
    run(tmp_path, back_to=10)
    assert latest(tmp_path) == tmp_path / "global_step_10"
    assert json.loads((tmp_path / MARK).read_text()) == {
        "format": "hyper_resume.went_back",
        "format_version": 1,
        "step": 10,
        "attempt": manifest_content(tmp_path / "global_step_10")["attempt"],
        "ordinal": 3,
    }


def test_after_going_back_the_first_save_counts_though_the_run_was_killed_before_its_pointer(tmp_path: Path) -> None:
    run(tmp_path, 10, 20, 30)
    killed_before_the_pointer(tmp_path, 15, back_to=10)
    assert latest(tmp_path) == tmp_path / "global_step_15"
    damage(tmp_path / "global_step_15")
    assert latest(tmp_path) == tmp_path / "global_step_10", "not 20 or 30, which are older than the mark"


def test_going_back_to_the_pointers_own_save_leaves_behind_what_was_committed_after_it(tmp_path: Path) -> None:
    run(tmp_path, 10)
    killed_before_the_pointer(tmp_path, 20, resumes=True)
    run(tmp_path, back_to=10)
    assert latest(tmp_path) == tmp_path / "global_step_10"


def test_a_resume_from_the_newest_by_its_name_is_no_going_back(tmp_path: Path) -> None:
    run(tmp_path, 10, 20)
    run(tmp_path, back_to=20)
    assert not (tmp_path / MARK).exists()


def test_a_mark_is_of_one_save_and_means_nothing_for_another_of_its_step(tmp_path: Path) -> None:
    run(tmp_path, 10, 20)
    run(tmp_path, back_to=10)
    run(tmp_path, 10)
    killed_before_the_pointer(tmp_path, 30, resumes=True)
    assert latest(tmp_path) == tmp_path / "global_step_30"


def test_saves_after_a_mark_come_after_it_though_what_was_left_behind_was_deleted(tmp_path: Path) -> None:
    run(tmp_path, 10, 20, 30)
    run(tmp_path, back_to=10)
    for step in (20, 30):
        shutil.rmtree(tmp_path / f"global_step_{step}")
    killed_before_the_pointer(tmp_path, 15, resumes=True)
    assert manifest_content(tmp_path / "global_step_15")["ordinal"] == 4
    assert latest(tmp_path) == tmp_path / "global_step_15"


@pytest.mark.parametrize("ruin", ["damaged", "manifest cut", "gone"])
def test_the_abandoned_future_is_not_chosen_when_the_save_that_was_gone_back_to_is_ruined(
    tmp_path: Path, ruin: str
) -> None:
    run(tmp_path, 10, 20, 30)
    run(tmp_path, back_to=10)
    directory = tmp_path / "global_step_10"
    if ruin == "damaged":
        (directory / "__0_0.distcp").write_bytes(b"")
    elif ruin == "manifest cut":
        (directory / "manifest.json").write_bytes(b"{")
    else:
        shutil.rmtree(directory)
    with pytest.raises(CheckpointNotFoundError, match="none can be resumed from"):
        latest(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b'{"format": "hyper_resume.went_back", "format_version": 2}', b"0" * 5000],
    ids=["empty", "no format", "a newer version", "too long"],
)
def test_with_a_mark_that_says_nothing_the_pointer_decides(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 10, 20, 30)
    run(tmp_path, back_to=10)
    (tmp_path / MARK).write_bytes(content)
    assert latest(tmp_path) == tmp_path / "global_step_10"
    assert f"{tmp_path / MARK} is not as it was written" in caplog.text


def test_stepping_back_from_damage_is_no_going_back_and_what_is_mended_counts_again(tmp_path: Path) -> None:
    run(tmp_path, 10, 20)
    whole = (tmp_path / "global_step_20" / "__0_0.distcp").read_bytes()
    damage(tmp_path / "global_step_20")
    run(tmp_path, resumes=True)
    assert (tmp_path / "latest_checkpoint_iteration.txt").read_text() == "10\n"
    (tmp_path / "global_step_20" / "__0_0.distcp").write_bytes(whole)
    assert latest(tmp_path) == tmp_path / "global_step_20"
    damage(tmp_path / "global_step_20")
    killed_before_the_pointer(tmp_path, 15, resumes=True)
    assert latest(tmp_path) == tmp_path / "global_step_15"


def test_where_another_tool_has_saved_the_pointer_decides(tmp_path: Path) -> None:
    """No manifest says what continues a directory of stock DCP."""
    run(tmp_path, 10)
    (tmp_path / "global_step_10" / "manifest.json").unlink()
    save(tmp_path, 20, 20.0)
    point_to(tmp_path, "10\n")
    assert [path.name for path in lineage.resume_order(tmp_path).directories][:1] == ["global_step_10"]


def test_a_save_to_another_root_in_between_does_not_bring_the_run_back_to_its_beginning(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    run(root, 10, 20)
    checkpointer = run(root, 15, back_to=10)
    save(other, 15, 15.0, by=checkpointer)
    save(root, 16, 16.0, by=checkpointer)
    assert [step for step, _ in manifest_content(root / "global_step_16")["ancestors"]] == [10, 15]


def test_what_was_left_behind_by_a_mark_is_not_retentions_to_delete(tmp_path: Path) -> None:
    run(tmp_path, 10, 20, 30)
    checkpointer = DistributedCheckpointer(retention=Retention(keep_last=1))
    checkpointer.begin_run(str(tmp_path), restored_from=str(tmp_path / "global_step_10"))
    for step in (15, 16):
        save(tmp_path, step, float(step), by=checkpointer)
    assert steps(tmp_path) == [10, 16, 20, 30]
    assert value_of(tmp_path / "global_step_30") == 30.0

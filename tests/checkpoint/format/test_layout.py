"""LATEST: the pointer, the scan behind it, and what counts as complete."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch.distributed as dist

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.format import layout
from hyper_resume.errors import CheckpointNotFoundError
from tests.checkpoint import directories
from tests.checkpoint.directories import listing, make_step, point_to
from tests.ranks import run_ranks


def latest(root: Path) -> str | None:
    """The name of what is found; nothing on disk may change by looking."""
    before = listing(root) if root.is_dir() else None
    found = directories.latest(root)
    assert (listing(root) if root.is_dir() else None) == before
    return found.name if found else None


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    with pytest.raises(CheckpointNotFoundError, match="checkpoint_dir is not a directory"):
        latest(tmp_path / "a file")


def test_the_pointer_decides_even_against_a_higher_step(tmp_path: Path) -> None:
    make_step(tmp_path, 10)
    make_step(tmp_path, 20)
    point_to(tmp_path, "10\n")
    assert latest(tmp_path) == "global_step_10"


@pytest.mark.parametrize("text", ["10", "10\n", "  10 \n", "010", "10\r\n"])
def test_the_pointer_may_have_space_around_its_number(tmp_path: Path, text: str) -> None:
    make_step(tmp_path, 10)
    make_step(tmp_path, 20)
    point_to(tmp_path, text)
    assert latest(tmp_path) == "global_step_10"


def test_without_a_pointer_the_highest_number_wins_not_the_last_by_text(tmp_path: Path) -> None:
    for step in (200, 1000, 5, 0):
        make_step(tmp_path, step)
    assert latest(tmp_path) == "global_step_1000"


def test_step_zero_is_a_step(tmp_path: Path) -> None:
    make_step(tmp_path, 0)
    assert latest(tmp_path) == "global_step_0"


BAD_POINTERS = {
    "empty": "",
    "word": "latest",
    "name": "global_step_5",
    "negative": "-5",
    "signed": "+5",
    "float": "5.0",
    "underscore": "1_0",
    "other digits": "٥",
    "two numbers": "5\n7",
    "binary": b"\xff\xfe\x00\x01",
    "nul": b"5\x00",
    "huge": "9" * 30,
    "a name too long for the disk": "9" * 300,
    "a number too long for Python": "9" * 5000,
    "absent step": "77",
}


@pytest.mark.parametrize("text", BAD_POINTERS.values(), ids=BAD_POINTERS.keys())
def test_a_pointer_that_says_nothing_usable_falls_back_to_the_scan(
    tmp_path: Path, text: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    make_step(tmp_path, 5)
    make_step(tmp_path, 3)
    point_to(tmp_path, text)
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path) == "global_step_5"
    assert "scanning" in caplog.text
    assert "latest_checkpoint_iteration.txt" in caplog.text


@pytest.mark.parametrize("text", BAD_POINTERS.values(), ids=BAD_POINTERS.keys())
def test_a_pointer_without_any_complete_checkpoint_is_an_error(tmp_path: Path, text: str | bytes) -> None:
    make_step(tmp_path, 5, metadata=None)
    point_to(tmp_path, text)
    with pytest.raises(CheckpointNotFoundError, match="a checkpoint was published here, but none can be") as caught:
        latest(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)


def test_a_pointer_that_is_a_directory_falls_back_to_the_scan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_step(tmp_path, 5)
    (tmp_path / layout.POINTER_NAME).mkdir()
    assert latest(tmp_path) == "global_step_5"
    assert "can't be read" in caplog.text


def test_a_pointer_that_is_a_broken_link_counts_as_none(tmp_path: Path) -> None:
    make_step(tmp_path, 5)
    (tmp_path / layout.POINTER_NAME).symlink_to("nowhere")
    assert latest(tmp_path) == "global_step_5"


INCOMPLETE = {"no .metadata": None, ".metadata of 0 bytes": b""}


@pytest.mark.parametrize("metadata", INCOMPLETE.values(), ids=INCOMPLETE.keys())
def test_an_incomplete_directory_is_skipped_with_a_warning(
    tmp_path: Path, metadata: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    make_step(tmp_path, 10)
    make_step(tmp_path, 20)
    make_step(tmp_path, 30, metadata=metadata)
    point_to(tmp_path, "30")
    assert latest(tmp_path) == "global_step_20"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, warnings
    assert "names global_step_30, which is incomplete (no usable .metadata)" in warnings[0]


@pytest.mark.parametrize("metadata", INCOMPLETE.values(), ids=INCOMPLETE.keys())
def test_an_incomplete_directory_that_nothing_points_to_is_skipped_with_a_warning(
    tmp_path: Path, metadata: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    make_step(tmp_path, 20)
    make_step(tmp_path, 30, metadata=metadata)
    assert latest(tmp_path) == "global_step_20"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"skipping {tmp_path / 'global_step_30'}: is incomplete (no usable .metadata)"]


def test_metadata_that_is_a_directory_is_no_metadata(tmp_path: Path) -> None:
    (make_step(tmp_path, 10, metadata=None) / ".metadata").mkdir()
    assert latest(tmp_path) is None


LOOK_ALIKES = [
    "global_step_10_old",
    "my_global_step_9",
    "global_step_007",
    "global_step_",
    "global_step_-8",
    "global_step_8.0",
    "global_step_٨",
    "Global_step_8",
    "global_step_8 ",
    "global_step_8\n",
    "global-step-8",
    "global_step_00",
]


def test_look_alikes_are_no_step_directories(tmp_path: Path) -> None:
    for name in LOOK_ALIKES:
        make_step(tmp_path, name)
        assert layout.parse_step(name) is None
    assert latest(tmp_path) is None
    make_step(tmp_path, 2)
    assert latest(tmp_path) == "global_step_2"


def test_a_file_named_like_a_step_directory_is_none(tmp_path: Path) -> None:
    (tmp_path / "global_step_5").write_text("a file")
    assert latest(tmp_path) is None
    make_step(tmp_path, 2)
    point_to(tmp_path, "5")
    assert latest(tmp_path) == "global_step_2"


def test_what_is_staged_is_never_the_latest(tmp_path: Path) -> None:
    make_step(tmp_path / ".staging", "global_step_9.0123456789ab")
    make_step(tmp_path / ".staging", "global_step_9")
    assert latest(tmp_path) is None


def test_a_step_above_in_the_path_does_not_count(tmp_path: Path) -> None:
    root = tmp_path / "global_step_900"
    make_step(root, 12)
    assert latest(root) == "global_step_12"


def test_a_step_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "global_step_5").symlink_to(make_step(tmp_path / "elsewhere", 5))
    assert latest(tmp_path) == "global_step_5"


def test_names_and_steps_are_each_others_inverse() -> None:
    for step in (0, 1, 10, 999_999_999):
        assert layout.parse_step(layout.step_directory_name(step)) == step


def _rank_zero_sees_the_checkpoint(folder: str) -> str | None:
    """Rank 1 looks into an empty directory, as on storage that is not shared, and still gets rank 0's answer."""
    return DistributedCheckpointer().find_latest_checkpoint(f"{folder}/{dist.get_rank()}")


def test_all_ranks_act_on_what_rank_zero_sees(tmp_path: Path) -> None:
    make_step(tmp_path / "0", 6)
    (tmp_path / "1").mkdir()
    expected = str(tmp_path / "0" / "global_step_6")
    assert run_ranks(_rank_zero_sees_the_checkpoint, 2, str(tmp_path)) == [expected, expected]


def test_all_ranks_get_the_same_error_for_a_pointer_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    point_to(tmp_path / "0", "5")
    errors = run_ranks(_rank_zero_sees_the_checkpoint, 2, str(tmp_path), expect_errors=True)
    assert {type(error) for error in errors} == {CheckpointNotFoundError}
    assert len({str(error) for error in errors}) == 1


def test_the_pointer_is_replaced_whole(tmp_path: Path) -> None:
    point_to(tmp_path, "1234567\n")
    layout.write_pointer(tmp_path, 8)
    assert listing(tmp_path).keys() == {layout.POINTER_NAME, ".staging"}
    assert (tmp_path / layout.POINTER_NAME).read_text() == "8\n"

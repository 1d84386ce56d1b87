"""Each fault does and reports its damage, stays inside the case's disk folder, and is an error if it changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.matrix.faults import FAULTS, Disk, FaultError, inject


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    checkpoints = tmp_path / "disk" / "checkpoints"
    for step in (2, 4):
        folder = checkpoints / f"global_step_{step}"
        folder.mkdir(parents=True)
        (folder / ".metadata").write_text(f"meta {step}")
        (folder / "__0_0.distcp").write_bytes(bytes(range(64)) + bytes([step]))
    (checkpoints / "latest_checkpoint_iteration.txt").write_text("4\n")
    return Disk(root=tmp_path / "disk", checkpoints=checkpoints)


def test_files_are_removed_cut_and_flipped(disk: Disk) -> None:
    shard = disk.checkpoints / "global_step_4" / "__0_0.distcp"
    assert inject("flip_byte", {"path": "global_step_4/*.distcp", "offset": 3}, disk) == [
        "flipped byte 3 of checkpoints/global_step_4/__0_0.distcp"
    ]
    assert shard.read_bytes()[:5] == bytes([0, 1, 2, 252, 4])
    assert inject("truncate", {"path": "global_step_4/__0_0.distcp", "keep_bytes": 10}, disk) == [
        "cut checkpoints/global_step_4/__0_0.distcp from 65 to 10 bytes"
    ]
    assert inject("remove_file", {"path": "global_step_*/.metadata"}, disk) == [
        "removed checkpoints/global_step_2/.metadata",
        "removed checkpoints/global_step_4/.metadata",
    ]


def test_directories_are_copied_renamed_and_replaced_in_part(disk: Disk) -> None:
    inject("copy_path", {"path": "global_step_2", "to": "../aside/global_step_2"}, disk)
    inject("rename", {"path": "global_step_2", "to": "global_step_2_old"}, disk)
    inject(
        "replace_file_from",
        {"path": "global_step_4/__0_0.distcp", "source": "../aside/global_step_2/__0_0.distcp"},
        disk,
    )
    assert (disk.checkpoints / "global_step_4" / "__0_0.distcp").read_bytes()[-1] == 2
    assert not (disk.checkpoints / "global_step_2").exists()
    inject("rename", {"path": ".", "to": "../moved"}, disk)
    assert (disk.root / "moved" / "global_step_4" / ".metadata").exists()


def test_the_pointer_is_written_and_removed(disk: Disk) -> None:
    inject("write_pointer", {"text": "nonsense"}, disk)
    assert (disk.checkpoints / "latest_checkpoint_iteration.txt").read_text() == "nonsense"
    inject("remove_pointer", {}, disk)
    inject("empty_metadata", {"step": 4}, disk)
    assert (disk.checkpoints / "global_step_4" / ".metadata").stat().st_size == 0


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        ("remove_file", {"path": "global_step_9/.metadata"}, "does not exist"),
        ("remove_file", {"path": "global_step_4/*.pt"}, "does not exist"),
        ("remove_metadata", {"step": 6}, "does not exist"),
        ("truncate", {"path": "global_step_4/.metadata", "keep_bytes": 6}, "has only 6 bytes"),
        ("replace_file_from", {"path": "global_step_4/.metadata", "source": "global_step_4/.metadata"}, "same bytes"),
        ("rename", {"path": "global_step_2", "to": "global_step_4"}, "exists already"),
        ("write_file", {"path": "../../outside", "text": "x"}, "leads out of the case's disk folder"),
        ("remove_file", {"path": "../../../*"}, "leads out of the case's disk folder"),
        ("remove_model_key", {"step": 4, "key": "x"}, "must be carried out by the adapter"),
        ("remove_file", {"path": "global_step_4"}, "remove_file: "),
    ],
)
def test_a_fault_that_can_do_nothing_is_an_error(disk: Disk, kind: str, parameters: Any, message: str) -> None:
    with pytest.raises(FaultError, match=message.replace("'", ".")):
        inject(kind, parameters, disk)


def test_every_fault_has_a_sentence() -> None:
    for name, entry in FAULTS.entries.items():
        assert entry.summary.endswith((".", "``).")), name

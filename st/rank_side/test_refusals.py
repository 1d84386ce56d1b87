"""What can't be restored or saved is refused on all ranks alike, and nothing changes on disk or in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    HyperResumeError,
    StateNotPlainError,
)
from st.rank_side.observing import RANKS, contents, own_state, same_on_all_ranks

pytestmark = pytest.mark.mpi(min_size=4)
ROOT, STEP = "checkpoints", 2


def rank_file(directory: Path, rank: int) -> Path:
    return directory / "extra_state" / f"extra_state_rank_{rank}.pt"


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def another_save(directory: Path) -> Path:
    return directory.parents[1] / "again" / directory.name


# name: (what rank 0 does to the directory, error, part of its message)
DAMAGE: dict[str, tuple[Callable[[Path], object], type[HyperResumeError], str]] = {
    "extra_state of rank 2 missing": (
        lambda d: rank_file(d, 2).unlink(),
        CheckpointNotFoundError,
        "extra_state_rank_2.pt: it is missing",
    ),
    "extra_state of rank 3 cut short": (lambda d: cut_short(rank_file(d, 3)), CheckpointMismatchError, "rank_3"),
    "extra_state of rank 1 is rank 2's": (
        lambda d: shutil.copy(rank_file(d, 2), rank_file(d, 1)),
        CheckpointMismatchError,
        "it has the content of extra_state/extra_state_rank_2.pt",
    ),
    "extra_state of rank 1 of another save": (
        lambda d: shutil.copy(rank_file(another_save(d), 1), rank_file(d, 1)),
        CheckpointMismatchError,
        "it is a part of another save: global_step_2",
    ),
    "shard of rank 1 missing": (lambda d: (d / "__1_0.distcp").unlink(), CheckpointNotFoundError, "__1_0.distcp"),
    "metadata empty": (lambda d: (d / ".metadata").write_bytes(b""), CheckpointMismatchError, ".metadata"),
    "manifest of another save": (
        lambda d: shutil.copy(another_save(d) / "manifest.json", d / "manifest.json"),
        CheckpointMismatchError,
        "not as it was written",
    ),
    "directory gone": (shutil.rmtree, CheckpointNotFoundError, "global_step_2"),
}


def saved(folder: Path) -> Path:
    """A step directory that all ranks wrote, and next to it a second save of the same state."""
    for root in ("again", ROOT):
        path = folder / root / f"global_step_{STEP}"
        DistributedCheckpointer().save(str(path), own_state(STEP), global_step=STEP)
    return folder / ROOT / f"global_step_{STEP}"


def zeros() -> dict[str, Any]:
    """Live tensors of all ranks' entries."""
    return {"model": {f"w{rank}": torch.zeros(1000) for rank in range(RANKS)}}


def are_zero(state: dict[str, Any]) -> bool:
    return all(not state["model"][f"w{rank}"].any() for rank in range(RANKS))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_on_all_ranks_alike(shared_folder: Path, damage: str) -> None:
    change, error, message = DAMAGE[damage]
    directory = saved(shared_folder)
    if dist.get_rank() == 0:
        change(directory)
    dist.barrier()
    before, live = contents(shared_folder), zeros()
    with pytest.raises(error) as caught:
        DistributedCheckpointer().load(str(directory), live, extra_state_skeleton={"value": None})
    assert type(caught.value) is error
    assert message in str(caught.value)
    assert same_on_all_ranks(str(caught.value))
    assert are_zero(live)
    assert contents(shared_folder) == before


@pytest.mark.parametrize("culprit", range(RANKS))
def test_a_model_that_differs_on_one_rank_is_refused_on_all(shared_folder: Path, culprit: int) -> None:
    directory, live = saved(shared_folder), zeros()
    if dist.get_rank() == culprit:
        live["model"]["head"] = torch.zeros(2)
    before = contents(shared_folder)
    with pytest.raises(CheckpointMismatchError, match=r"model\.head") as caught:
        DistributedCheckpointer().load(str(directory), live, extra_state_skeleton={"value": None})
    assert f"[rank {culprit}]" in str(caught.value)
    assert same_on_all_ranks(str(caught.value))
    assert are_zero(live)
    assert contents(shared_folder) == before


@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("culprit", range(RANKS))
def test_a_state_that_one_rank_cant_save_is_refused_on_all(shared_folder: Path, culprit: int, save_async: bool) -> None:
    saved(shared_folder)
    before, state = contents(shared_folder), own_state(3)
    dist.barrier()
    if dist.get_rank() == culprit:
        state["extra_state"]["schedule"] = lambda step: step
    with pytest.raises(StateNotPlainError, match=r"extra_state\.schedule") as caught:
        DistributedCheckpointer().save(
            str(shared_folder / ROOT / "global_step_3"), state, global_step=3, save_async=save_async
        )
    assert f"[rank {culprit}]" in str(caught.value)
    assert same_on_all_ranks(str(caught.value))
    assert contents(shared_folder) == before


def test_a_root_that_cant_be_written_is_refused_on_all_ranks_alike(shared_folder: Path) -> None:
    if dist.get_rank() == 0:
        (shared_folder / "a file").write_text("x")
    dist.barrier()
    before = contents(shared_folder)
    with pytest.raises(CheckpointSaveError) as caught:
        DistributedCheckpointer().save(str(shared_folder / "a file" / "global_step_1"), own_state(1), global_step=1)
    assert same_on_all_ranks(str(caught.value))
    assert contents(shared_folder) == before

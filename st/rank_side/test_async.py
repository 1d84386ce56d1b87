"""Saves in the background, seen by each rank."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.errors import CheckpointSaveError
from st.rank_side.observing import RANKS, contents, is_whole, own_state, pointed_step, same_on_all_ranks

pytestmark = pytest.mark.mpi(min_size=4)
NUMBERS = 1_000_000  # large enough for the write to outlast what follows the call


def test_what_lands_is_every_ranks_state_at_the_call(shared_folder: Path) -> None:
    rank, path = dist.get_rank(), str(shared_folder / "global_step_3")
    checkpointer = DistributedCheckpointer()
    state = own_state(3, NUMBERS)
    checkpointer.save(path, state, global_step=3, save_async=True)
    state["model"][f"w{rank}"].fill_(-1)
    state["extra_state"]["value"] = -1
    checkpointer.maybe_wait_for_async_save()
    loaded: dict[str, Any] = {"model": {f"w{other}": torch.zeros(NUMBERS) for other in range(RANKS)}}
    extra = checkpointer.load(path, loaded, extra_state_skeleton={"value": None})
    for other in range(RANKS):
        assert torch.equal(loaded["model"][f"w{other}"], torch.full((NUMBERS,), 300.0 + other))
    assert extra["value"] == 3000 + rank


def test_training_goes_on_while_a_save_is_in_flight(shared_folder: Path) -> None:
    checkpointer = DistributedCheckpointer()
    for step in range(1, 4):
        path = shared_folder / f"global_step_{step}"
        checkpointer.save(str(path), own_state(step, NUMBERS), global_step=step, save_async=True)
        for repeat in range(10):
            total = torch.tensor(float(dist.get_rank() + repeat))
            dist.all_reduce(total)
            assert total.item() == 6.0 + 4 * repeat
        if step > 1:
            # The next save waits for the one in flight, on every rank.
            assert is_whole(shared_folder / f"global_step_{step - 1}")
    checkpointer.maybe_wait_for_async_save()
    assert pointed_step(shared_folder) == 3
    assert is_whole(shared_folder / "global_step_3")


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_failure_in_the_background_of_one_rank_is_raised_on_all_and_nothing_is_published(
    shared_folder: Path, culprit: int
) -> None:
    checkpointer = DistributedCheckpointer()
    checkpointer.save(str(shared_folder / "global_step_1"), own_state(1), global_step=1)
    before = contents(shared_folder)
    dist.barrier()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == culprit:
        # Its shard is larger than any file that this rank may write; the failure comes in the thread.
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        checkpointer.save(str(shared_folder / "global_step_2"), own_state(2, NUMBERS), global_step=2, save_async=True)
        with pytest.raises(CheckpointSaveError) as caught:
            checkpointer.maybe_wait_for_async_save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "the checkpoint was not saved" in str(caught.value)
    assert f"rank {culprit}" in str(caught.value)
    assert same_on_all_ranks(str(caught.value))
    dist.barrier()
    assert contents(shared_folder) == before
    dist.barrier()
    checkpointer.save(str(shared_folder / "global_step_3"), own_state(3, NUMBERS), global_step=3, save_async=True)
    checkpointer.maybe_wait_for_async_save()
    assert pointed_step(shared_folder) == 3, "a failure must not spoil later saves"

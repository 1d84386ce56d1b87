"""No rank sees the pointer before all shards are there; after ``save`` every rank sees pointer and whole directory."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from hyper_resume.checkpoint import DistributedCheckpointer
from st.rank_side.observing import (
    POINTER,
    RANKS,
    before_each_change,
    contents,
    is_whole,
    own_state,
    pointed_step,
    same_on_all_ranks,
)

pytestmark = pytest.mark.mpi(min_size=4)


def wait_for(files: list[Path]) -> None:
    """Until all are there and hold something; the test's own limit ends it otherwise."""
    while not all(file.is_file() and file.stat().st_size > 0 for file in files):
        time.sleep(0.001)


@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("slowest", range(RANKS))
def test_nothing_is_published_while_any_rank_still_writes(shared_folder: Path, slowest: int, save_async: bool) -> None:
    checkpointer = DistributedCheckpointer()
    checkpointer.save(str(shared_folder / "global_step_1"), own_state(1), global_step=1)
    target = shared_folder / "global_step_2"
    seen: list[tuple[int | None, bool]] = []

    def look(event: str, path: str) -> None:
        file = Path(path)
        if event != "open" or file.suffix not in (".distcp", ".pt"):
            return
        if dist.get_rank() == slowest and file.name == f"__{slowest}_0.distcp":
            # The last to write its shard by construction: the others' shards are there before it opens its own.
            wait_for([file.with_name(f"__{rank}_0.distcp") for rank in range(RANKS) if rank != slowest])
        seen.append((pointed_step(shared_folder), target.exists()))

    with before_each_change(shared_folder, look):
        checkpointer.save(str(target), own_state(2), global_step=2, save_async=save_async)
        checkpointer.maybe_wait_for_async_save()
    # Its own training state and its own shard.
    assert seen == [(1, False), (1, False)]
    assert pointed_step(shared_folder) == 2
    assert is_whole(target)


def test_when_the_pointer_moves_every_file_has_its_final_content(shared_folder: Path) -> None:
    target = shared_folder / "global_step_3"
    at_commit: list[dict[str, str]] = []
    at_pointer: list[dict[str, str]] = []

    def look(event: str, path: str) -> None:
        if event == "os.rename" and path == str(target):
            (staged,) = (shared_folder / ".staging").glob("global_step_3.*")
            assert pointed_step(shared_folder) is None
            at_commit.append(contents(staged))
        elif event == "os.rename" and path == str(shared_folder / POINTER):
            at_pointer.append(contents(target))

    with before_each_change(shared_folder, look):
        DistributedCheckpointer().save(str(target), own_state(3), global_step=3)
    final = contents(target)
    assert is_whole(target)
    # Rank 0 publishes, alone and once.
    assert (at_commit, at_pointer) == (([final], [final]) if dist.get_rank() == 0 else ([], []))


@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
def test_when_save_returns_every_rank_sees_the_pointer_and_the_whole_directory(
    shared_folder: Path, save_async: bool
) -> None:
    checkpointer = DistributedCheckpointer()
    for step in (1, 2, 10):
        target = shared_folder / f"global_step_{step}"
        checkpointer.save(str(target), own_state(step), global_step=step, save_async=save_async)
        checkpointer.maybe_wait_for_async_save()
        # At once and without asking the others.
        found = (pointed_step(shared_folder), is_whole(target), list((shared_folder / ".staging").iterdir()))
        assert found == (step, True, [])
        assert checkpointer.find_latest_checkpoint(str(shared_folder)) == str(target)


def test_a_reader_beside_the_saves_only_ever_sees_a_pointer_to_a_whole_directory(shared_folder: Path) -> None:
    steps = range(1, 7)
    seen = {step: threading.Event() for step in steps}
    torn: list[int] = []
    ended = threading.Event()

    def read() -> None:
        # It looks a thousand times a second. Without a pause four readers leave the savers none of two cores.
        while not ended.wait(0.001):
            step = pointed_step(shared_folder)
            if step is not None:
                if not is_whole(shared_folder / f"global_step_{step}"):
                    torn.append(step)
                seen[step].set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        checkpointer = DistributedCheckpointer()
        for step in steps:
            checkpointer.save(str(shared_folder / f"global_step_{step}"), own_state(step), global_step=step)
            seen[step].wait()
    finally:
        ended.set()
        reader.join()
    assert torn == []
    assert all(event.is_set() for event in seen.values())


def test_a_step_that_is_saved_again_is_replaced_whole_on_every_rank(shared_folder: Path) -> None:
    target = shared_folder / "global_step_5"
    checkpointer = DistributedCheckpointer()
    checkpointer.save(str(target), own_state(5), global_step=5)
    first = contents(target)
    dist.barrier()
    checkpointer.save(str(target), own_state(6), global_step=5)
    second = contents(target)
    assert is_whole(target)
    # What the index says follows from the layout alone, which is the same.
    files = [name for name, digest in first.items() if digest != "folder" and name != "index.json"]
    assert [name for name in files if first[name] == second[name]] == []
    assert same_on_all_ranks(second)

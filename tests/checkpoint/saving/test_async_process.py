"""Saves in a process of their own: the same promises, also when that process dies."""

from __future__ import annotations

import functools
import logging
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.errors import CheckpointSaveError
from tests.checkpoint.directories import latest
from tests.checkpoint.payloads import same, training_state
from tests.ranks import run_ranks

# One worker, because all scenarios of one world size run in the same ranks, one after the other: each saving process takes
# seconds to start.
pytestmark = [pytest.mark.xdist_group("async-process"), pytest.mark.timeout(300)]

# Starting one process a rank takes seconds, and more on a busy machine.
SECONDS = 150.0


def by_process(**options: Any) -> DistributedCheckpointer:
    # Without it the processes look for each other under the machine's name.
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    return DistributedCheckpointer(async_mode="process", **options)


def saver() -> int:
    """The pid of this rank's saving process."""
    process = _async_process_executor._CHECKPOINT_PROCESS
    assert process is not None
    pid = process._save_process.pid
    assert pid is not None
    return pid


def own(value: float, numbers: int = 1000) -> dict[str, Any]:
    """A weight of this rank and one of all; a training state."""
    rank = dist.get_rank()
    model = {f"w{rank}": torch.full((numbers,), value + rank), "all": torch.full((3,), value)}
    return {"model": model, "extra_state": training_state(int(value))}


def loaded(path: str, numbers: int = 1000) -> dict[str, Any]:
    rank = dist.get_rank()
    parts: dict[str, Any] = {"model": {f"w{rank}": torch.zeros(numbers), "all": torch.zeros(3)}}
    extra = DistributedCheckpointer().load(path, parts, extra_state_skeleton={"train_dataloader": None})
    return {"model": parts["model"], "position": extra["train_dataloader"]["batches_consumed"]}


def _state_at_the_call(folder: str) -> list[bool]:
    checkpointer, results = by_process(extra_state_per_rank=False), []
    for step in (1, 2):
        state, expected = own(float(step)), own(float(step))
        checkpointer.save(f"{folder}/global_step_{step}", state, global_step=step, save_async=True)
        for tensor in state["model"].values():
            tensor.fill_(-1)
        state["extra_state"]["train_dataloader"]["batches_consumed"] = -1
        checkpointer.maybe_wait_for_async_save()
        found = loaded(f"{folder}/global_step_{step}")
        results.append(same(found["model"], expected["model"]))
        results.append(found["position"] == 5 + dist.get_rank())
    return [*results, os.getpid() != saver()]


def errors_of(checkpointer: DistributedCheckpointer, path: str, step: int, state: dict[str, Any]) -> list[Any]:
    """What the call and the wait after it raise."""
    found: list[Any] = []
    actions: list[Callable[[], None]] = [
        lambda: checkpointer.save(path, state, global_step=step, save_async=True),
        checkpointer.maybe_wait_for_async_save,
    ]
    for action in actions:
        try:
            action()
            found.append(None)
        except Exception as error:  # noqa: BLE001  which errors come when is what is looked at
            found.append(error)
    return found


def _killed_in_the_middle(folder: str, victim: int) -> dict[str, Any]:
    """The victim's saving process is stopped, so no other can get past the plan; then it is killed there."""
    checkpointer = by_process()
    first = errors_of(checkpointer, f"{folder}/global_step_1", 1, own(1.0))
    dead, is_victim = saver(), dist.get_rank() == victim
    if is_victim:
        os.kill(dead, signal.SIGSTOP)
    dist.barrier()
    checkpointer.save(f"{folder}/global_step_2", own(2.0), global_step=2, save_async=True)
    dist.barrier()
    started = time.monotonic()
    if is_victim:
        os.kill(dead, signal.SIGKILL)
    error: BaseException | None = None
    try:
        checkpointer.maybe_wait_for_async_save()
    except Exception as caught:  # noqa: BLE001  the error is what is looked at
        error = caught
    seconds = time.monotonic() - started
    dist.barrier()
    between = checkpointer.find_latest_checkpoint(folder)
    # The next save gets a process of its own, and works.
    last = errors_of(checkpointer, f"{folder}/global_step_3", 3, own(3.0))
    return {
        "first": first,
        "error": error,
        "seconds": seconds,
        "between": between,
        "last": last,
        "anew": saver() != dead,
        "value": loaded(f"{folder}/global_step_3")["model"]["all"].tolist(),
        "before": loaded(f"{folder}/global_step_1")["model"]["all"].tolist(),
    }


def _killed_while_it_writes(folder: str) -> tuple[Any, bool, list[str]]:
    """Killed when its shard is there and not yet whole."""
    numbers = 60_000_000
    checkpointer = by_process()
    checkpointer.save(f"{folder}/global_step_1", own(1.0), global_step=1, save_async=True)
    checkpointer.maybe_wait_for_async_save()
    checkpointer.save(f"{folder}/global_step_2", own(2.0, numbers), global_step=2, save_async=True)
    (staging,) = Path(folder).glob(".staging/global_step_2.*")
    deadline = time.monotonic() + 60
    while not (staging / "__0_0.distcp").exists() and time.monotonic() < deadline:
        pass
    os.kill(saver(), signal.SIGSTOP)
    was_in_the_middle = (staging / "__0_0.distcp").exists() and not (staging / ".metadata").exists()
    os.kill(saver(), signal.SIGKILL)
    try:
        checkpointer.maybe_wait_for_async_save()
    except CheckpointSaveError as error:
        return error, was_in_the_middle, sorted(path.name for path in Path(folder).iterdir())
    return None, was_in_the_middle, []


def _fails_in_the_process(folder: str) -> list[Any]:
    """Rank 1's saving process may write no file above 100 kB."""
    checkpointer = by_process()
    found = errors_of(checkpointer, f"{folder}/global_step_1", 1, own(1.0))
    if dist.get_rank() == 1:
        resource.prlimit(saver(), resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    dist.barrier()
    checkpointer.save(f"{folder}/global_step_2", own(2.0, 100_000), global_step=2, save_async=True)
    # Not waited for: the next save hears of it.
    found += errors_of(checkpointer, f"{folder}/global_step_3", 3, own(3.0))
    found += errors_of(checkpointer, f"{folder}/global_step_4", 4, own(4.0, 100_000))
    return found


def _killed_while_idle(folder: str, victim: int) -> dict[str, Any]:
    """The victim's saving process dies between two saves: of another program's, or the system's, lack of memory."""
    checkpointer = by_process()
    found = errors_of(checkpointer, f"{folder}/global_step_1", 1, own(1.0))
    dead = saver()
    if dist.get_rank() == victim:
        os.kill(dead, signal.SIGKILL)
        process = _async_process_executor._CHECKPOINT_PROCESS
        assert process is not None
        process._save_process.join(20)
    dist.barrier()
    found += errors_of(checkpointer, f"{folder}/global_step_2", 2, own(2.0))
    value = loaded(f"{folder}/global_step_2")["model"]["all"].tolist()
    return {"errors": found, "anew": saver() != dead, "value": value}


def _all_scenarios(folder: str) -> dict[str, Any]:
    """Every scenario of this world size, each in a root of its own; what one kills the next starts anew."""
    results: dict[str, Any] = {"state": _state_at_the_call(f"{folder}/state")}
    if dist.get_world_size() == 1:
        results["half-written"] = _killed_while_it_writes(f"{folder}/half-written")
    else:
        results["failing"] = _fails_in_the_process(f"{folder}/failing")
    results["idle"] = _killed_while_idle(f"{folder}/idle", dist.get_world_size() - 1)
    for victim in reversed(range(dist.get_world_size())):
        results[f"killed-{victim}"] = _killed_in_the_middle(f"{folder}/killed-{victim}", victim)
    return results


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What one scenario came to: its root, and the results by rank."""

    root: Path
    results: list[Any]


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Scenario]:
    """Give a scenario by its number of ranks and its name."""

    @functools.cache
    def all_of(ranks: int) -> tuple[Path, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("scenarios")
        return folder, run_ranks(_all_scenarios, ranks, str(folder), timeout_seconds=SECONDS)

    def of(ranks: int, name: str) -> Scenario:
        folder, results = all_of(ranks)
        return Scenario(root=folder / name, results=[result[name] for result in results])

    return of


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_lands_is_the_state_at_the_call(scenario: Callable[[int, str], Scenario], ranks: int) -> None:
    found = scenario(ranks, "state")
    assert found.results == [[True] * 5] * ranks
    assert latest(found.root) == found.root / "global_step_2"
    assert list((found.root / ".staging").iterdir()) == []


@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 0), (2, 1)])
def test_a_saving_process_that_is_killed_fails_the_save_on_every_rank_and_spoils_nothing(
    scenario: Callable[[int, str], Scenario], ranks: int, victim: int
) -> None:
    found = scenario(ranks, f"killed-{victim}")
    for result in found.results:
        assert result["first"] == [None, None]
        assert isinstance(result["error"], CheckpointSaveError), result["error"]
        assert result["seconds"] < 20
        assert result["between"] == str(found.root / "global_step_1")
        assert result["last"] == [None, None]
        assert result["anew"]
        assert (result["before"], result["value"]) == ([1.0] * 3, [3.0] * 3)
    assert len({str(result["error"]) for result in found.results}) == 1
    assert not (found.root / "global_step_2").exists()
    assert list((found.root / ".staging").iterdir()) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_saving_process_that_dies_idle_is_replaced_on_every_rank_and_the_next_save_is_made(
    scenario: Callable[[int, str], Scenario], ranks: int
) -> None:
    found = scenario(ranks, "idle")
    assert found.results == [{"errors": [None] * 4, "anew": True, "value": [2.0] * 3}] * ranks
    assert latest(found.root) == found.root / "global_step_2"


def test_a_half_written_shard_of_a_killed_process_is_cleared_away(scenario: Callable[[int, str], Scenario]) -> None:
    found = scenario(1, "half-written")
    ((error, was_in_the_middle, names),) = found.results
    assert was_in_the_middle, "the fault must have fired while the shard was written"
    assert isinstance(error, CheckpointSaveError)
    assert names == [".staging", ".writer.lock", "global_step_1", "latest_checkpoint_iteration.txt"]
    assert list((found.root / ".staging").iterdir()) == []


def test_a_failure_in_the_process_is_heard_of_at_the_next_save_on_every_rank(
    scenario: Callable[[int, str], Scenario],
) -> None:
    found = scenario(2, "failing")
    for result in found.results:
        kinds = [type(error) for error in result]
        nothing = type(None)
        assert kinds == [nothing, nothing, CheckpointSaveError, nothing, nothing, nothing], result
        assert "global_step_2" in str(result[2])
        assert "rank 1" in str(result[2])
    assert str(found.results[0][2]) == str(found.results[1][2])
    assert sorted(path.name for path in found.root.glob("global_step_*")) == ["global_step_1", "global_step_4"]


def test_without_a_process_group_a_thread_saves_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = DistributedCheckpointer(async_mode="process")
    with caplog.at_level(logging.WARNING):
        checkpointer.save(
            str(tmp_path / "global_step_1"), {"model": {"w": torch.ones(2)}}, global_step=1, save_async=True
        )
        checkpointer.maybe_wait_for_async_save()
    assert "async_mode process needs a process group" in caplog.text
    assert latest(tmp_path) == tmp_path / "global_step_1"

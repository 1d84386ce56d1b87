"""Saves in the background: what lands is the state at the call, and a failure is heard of."""

from __future__ import annotations

import os
import random
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.errors import CheckpointSaveError
from tests.checkpoint.directories import listing
from tests.checkpoint.payloads import payload, restore, same, tiny, training_state
from tests.ranks import run_ranks

# Big enough for the write to outlast what follows the call.
NUMBERS = 4_000_000


def big(value: float) -> torch.Tensor:
    return torch.full((NUMBERS,), value)


@pytest.mark.parametrize("per_rank", [True, False], ids=["per-rank", "embedded"])
def test_what_lands_is_the_state_at_the_call(tmp_path: Path, per_rank: bool) -> None:
    weight, moment, step = big(1.0), big(2.0), torch.tensor(5.0)
    lr = torch.tensor(0.25)
    group: dict[str, Any] = {"lr": lr, "betas": [0.9, 0.99], "params": ["w"]}
    extra = training_state(5)
    expected_extra = training_state(5)
    checkpointer = DistributedCheckpointer(extra_state_per_rank=per_rank)
    state: dict[str, Any] = {
        "model": {"w": weight},
        "optimizer": {"0": {"state": {"w": {"exp_avg": moment, "step": step}}, "param_groups": (group,)}},
        "extra_state": extra,
    }
    checkpointer.save(str(tmp_path / "global_step_5"), state, global_step=5, save_async=True)
    weight.fill_(-1)
    moment.fill_(-1)
    step.fill_(-1)
    lr.fill_(-1)
    group["betas"][0] = -1
    group["added"] = -1
    extra["lr_scheduler"][0]["last_epoch"] = -1
    extra["lr_scheduler"][0]["_last_lr"].append(-1)
    extra["train_dataloader"]["batches_consumed"] = -1
    extra["stateful"]["average"]["weight"].fill_(-1)
    extra["rng_state"]["torch_cpu"].zero_()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    del state["model"]["w"]

    loaded: dict[str, Any] = {
        "model": {"w": big(0.0)},
        "optimizer": {"0": {"state": {"w": {"exp_avg": big(0.0), "step": torch.tensor(0.0)}}, "param_groups": None}},
    }
    read = checkpointer.load(str(tmp_path / "global_step_5"), loaded, extra_state_skeleton=dict.fromkeys(extra))
    assert same(loaded["model"]["w"], big(1.0))
    assert same(loaded["optimizer"]["0"]["state"]["w"], {"exp_avg": big(2.0), "step": torch.tensor(5.0)})
    assert same(
        loaded["optimizer"]["0"]["param_groups"],
        ({"lr": torch.tensor(0.25), "betas": [0.9, 0.99], "params": ["w"]},),
    )
    assert same({name: read[name] for name in extra}, expected_extra)


def test_the_next_save_waits_for_the_one_in_flight(tmp_path: Path) -> None:
    checkpointer = DistributedCheckpointer()
    for step in (1, 2, 3):
        checkpointer.save(
            str(tmp_path / f"global_step_{step}"), {"model": {"w": big(float(step))}}, global_step=step, save_async=True
        )
        for earlier in range(1, step):
            assert (tmp_path / f"global_step_{earlier}" / ".metadata").is_file()
    checkpointer.maybe_wait_for_async_save()
    for step in (1, 2, 3):
        parts = {"model": {"w": big(0.0)}}
        checkpointer.load(str(tmp_path / f"global_step_{step}"), parts)
        assert same(parts["model"]["w"], big(float(step)))
    assert (tmp_path / "latest_checkpoint_iteration.txt").read_text() == "3\n"


def test_only_one_save_is_ever_under_way(tmp_path: Path) -> None:
    checkpointer = DistributedCheckpointer()
    for step in range(1, 5):
        checkpointer.save(
            str(tmp_path / f"global_step_{step}"), {"model": {"w": big(float(step))}}, global_step=step, save_async=True
        )
        assert len(list((tmp_path / ".staging").iterdir())) <= 1
    checkpointer.maybe_wait_for_async_save()
    assert list((tmp_path / ".staging").iterdir()) == []


def test_looking_for_the_latest_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    checkpointer = DistributedCheckpointer()
    checkpointer.save(str(tmp_path / "global_step_1"), {"model": {"w": big(1.0)}}, global_step=1)
    checkpointer.save(str(tmp_path / "global_step_2"), {"model": {"w": big(2.0)}}, global_step=2, save_async=True)
    assert checkpointer.find_latest_checkpoint(str(tmp_path)) == str(tmp_path / "global_step_2")


def test_waiting_without_a_save_returns_at_once() -> None:
    DistributedCheckpointer().maybe_wait_for_async_save()


def test_a_second_checkpointer_leaves_the_save_in_flight_of_the_first_alone(tmp_path: Path) -> None:
    first, second = DistributedCheckpointer(), DistributedCheckpointer()
    first.save(str(tmp_path / "global_step_1"), {"model": {"w": big(1.0)}}, global_step=1, save_async=True)
    for save_async in (False, True):
        with pytest.raises(CheckpointSaveError, match="two saves into one checkpoint_dir at a time"):
            second.save(
                str(tmp_path / "global_step_2"), {"model": {"w": torch.ones(1)}}, global_step=2, save_async=save_async
            )
    # Another root is nobody else's business.
    second.save(str(tmp_path / "other" / "global_step_2"), {"model": {"w": torch.ones(1)}}, global_step=2)
    first.maybe_wait_for_async_save()
    second.save(str(tmp_path / "global_step_2"), {"model": {"w": torch.ones(1)}}, global_step=2)
    for step in (1, 2):
        assert (tmp_path / f"global_step_{step}" / ".metadata").is_file()
    assert list((tmp_path / ".staging").iterdir()) == []


def test_a_pointer_that_cant_be_moved_is_reported_by_the_wait(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpoint_iteration.txt").mkdir()
    checkpointer = DistributedCheckpointer()
    checkpointer.save(str(tmp_path / "global_step_1"), {"model": {"w": torch.ones(1)}}, global_step=1, save_async=True)
    with pytest.raises(CheckpointSaveError, match="committed, but the pointer could not be moved"):
        checkpointer.maybe_wait_for_async_save()
    assert checkpointer.find_latest_checkpoint(str(tmp_path)) == str(tmp_path / "global_step_1")


def test_the_load_after_a_background_failure_raises_it_once(tmp_path: Path) -> None:
    checkpointer = DistributedCheckpointer()
    checkpointer.save(str(tmp_path / "global_step_1"), {"model": {"w": torch.ones(1)}}, global_step=1)
    pointer = tmp_path / "latest_checkpoint_iteration.txt"
    pointer.unlink()
    pointer.mkdir()
    checkpointer.save(str(tmp_path / "global_step_2"), {"model": {"w": torch.ones(1)}}, global_step=2, save_async=True)
    with pytest.raises(CheckpointSaveError):
        checkpointer.load(str(tmp_path / "global_step_1"), {})
    checkpointer.load(str(tmp_path / "global_step_1"), {})


def _fail_in_the_background(folder: str) -> dict[str, Any]:
    """Rank 1 may write no file above 100 kB, so its shard fails in the thread, after the call has returned."""
    rank = dist.get_rank()
    checkpointer = DistributedCheckpointer()
    checkpointer.save(f"{folder}/global_step_1", payload(tiny(1), step=1), global_step=1)
    dist.barrier()
    before = listing(Path(folder))
    dist.barrier()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    # A name of its own on each rank, so that each rank writes one.
    state = {"model": {f"w{rank}": torch.full((100_000,), float(rank))}, "extra_state": training_state(2)}
    errors: list[BaseException | None] = []
    attempts: list[Callable[[], None]] = [
        lambda: checkpointer.save(f"{folder}/global_step_2", state, global_step=2, save_async=True),
        lambda: checkpointer.save(f"{folder}/global_step_3", payload(tiny(1), step=3), global_step=3, save_async=True),
        lambda: checkpointer.save(f"{folder}/global_step_4", state, global_step=4, save_async=True),
        checkpointer.maybe_wait_for_async_save,
        checkpointer.maybe_wait_for_async_save,
        # The same failure while the call runs.
        lambda: checkpointer.save(f"{folder}/global_step_5", state, global_step=5),
    ]
    for attempt in attempts:
        try:
            attempt()
            errors.append(None)
        except Exception as error:  # noqa: BLE001  which errors come when is what is looked at
            errors.append(error)
    dist.barrier()
    unchanged = listing(Path(folder)) == before
    latest = checkpointer.find_latest_checkpoint(folder)
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    checkpointer.save(f"{folder}/global_step_6", state, global_step=6, save_async=True)
    after = checkpointer.find_latest_checkpoint(folder)
    return {"errors": errors, "unchanged": unchanged, "latest": latest, "after": after}


def test_a_background_failure_reaches_every_rank_at_the_next_save_or_wait_and_publishes_nothing(tmp_path: Path) -> None:
    results = run_ranks(_fail_in_the_background, 2, str(tmp_path))
    for result in results:
        kinds = [type(error) for error in result["errors"]]
        nothing = type(None)
        expected = [nothing, CheckpointSaveError, nothing, CheckpointSaveError, nothing, CheckpointSaveError]
        assert kinds == expected, result["errors"]
        assert "global_step_2" in str(result["errors"][1])
        assert "rank 1" in str(result["errors"][1])
        assert "if a write failed: disk space, permissions" in str(result["errors"][1])
        assert "global_step_4" in str(result["errors"][3])
        assert result["unchanged"]
        assert result["latest"] == str(tmp_path / "global_step_1")
        assert result["after"] == str(tmp_path / "global_step_6"), "a failure must not spoil later saves"
    assert [str(error) for error in results[0]["errors"]] == [str(error) for error in results[1]["errors"]]
    assert list((tmp_path / ".staging").iterdir()) == []


def _interleave_with_training(folder: str) -> tuple[float, str | None]:
    """Collectives of training, of the save in the background and of a look-up at the same time."""
    checkpointer = DistributedCheckpointer()
    total = torch.zeros(())
    found = None
    for step in range(1, 4):
        state = {"model": {"w": big(float(step))}, "extra_state": training_state(step)}
        checkpointer.save(f"{folder}/global_step_{step}", state, global_step=step, save_async=True)
        for _ in range(20):
            value = torch.tensor(float(dist.get_rank() + 1))
            dist.all_reduce(value)
            total += value
        found = checkpointer.find_latest_checkpoint(folder)
        described = checkpointer.describe(f"{folder}/global_step_{step}")["model.w"]
        assert described is not None
        assert described.shape == (NUMBERS,)
    return total.item(), found


def test_collectives_of_training_and_of_a_save_in_flight_do_not_meet(tmp_path: Path) -> None:
    results = run_ranks(_interleave_with_training, 2, str(tmp_path))
    assert results == [(180.0, str(tmp_path / "global_step_3"))] * 2


PROGRAM = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from hyper_resume.checkpoint import DistributedCheckpointer
folder, port = sys.argv[1:]
store = dist.TCPStore("127.0.0.1", int(port), 2, os.environ["RANK"] == "0", timedelta(seconds=30))
dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
state = {"model": {"w" + os.environ["RANK"]: torch.full((4_000_000,), 3.0)}, "extra_state": {"epoch": 2}}
checkpointer = DistributedCheckpointer()
checkpointer.save(folder + "/global_step_7", state, global_step=7, save_async=True)
raise SystemError("training breaks off")
"""


def test_a_process_that_ends_right_after_the_call_completes_the_save(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path), str(port)],
            env={**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    # Not only 1: torch itself aborts now and then when a process ends without destroying its group.
    assert all(process.returncode for process in processes), errors
    assert all("training breaks off" in error for error in errors), errors
    parts = {"model": {"w0": big(0.0), "w1": big(0.0)}}
    checkpointer = DistributedCheckpointer()
    assert checkpointer.find_latest_checkpoint(str(tmp_path)) == str(tmp_path / "global_step_7")
    extra = checkpointer.load(str(tmp_path / "global_step_7"), parts, extra_state_skeleton={"epoch": None})
    assert same(parts["model"], {"w0": big(3.0), "w1": big(3.0)})
    assert extra["epoch"] == 2


def test_a_model_can_be_restored_right_after_an_asynchronous_save(tmp_path: Path) -> None:
    checkpointer = DistributedCheckpointer()
    checkpointer.save(str(tmp_path / "global_step_1"), payload(tiny(1), step=1), global_step=1, save_async=True)
    assert restore(checkpointer, str(tmp_path / "global_step_1"), tiny(2))["global_step"] == 1

"""Staged, written, durable: what is true on the disk when each is said, and that a failure is said too."""

from __future__ import annotations

import logging
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.base import SaveEvent
from hyper_resume.checkpoint.history.retention import Retention
from hyper_resume.errors import CheckpointSaveError
from tests.checkpoint.single_value import save, state, steps, value_of
from tests.ranks import run_ranks

MODES = pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])


class Witness:
    """Notes each event and what is on the disk at that moment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[SaveEvent] = []
        self.seen: list[dict[str, Any]] = []

    def __call__(self, event: SaveEvent) -> None:
        self.events.append(event)
        pointer = self.root / "latest_checkpoint_iteration.txt"
        self.seen.append(
            {
                "published": Path(event.path).is_dir(),
                "staged whole": bool(list(self.root.glob(".staging/*/manifest.json"))),
                "pointer": pointer.read_text().strip() if pointer.exists() else None,
                "steps": steps(self.root),
                "main thread": threading.current_thread() is threading.main_thread(),
            }
        )

    @property
    def states(self) -> list[str]:
        return [event.state for event in self.events]


@MODES
def test_every_state_is_true_when_it_is_said(tmp_path: Path, save_async: bool) -> None:
    save(tmp_path, 1, 1.0)
    witness, checkpointer = Witness(tmp_path), DistributedCheckpointer(retention=Retention(keep_last=1))
    checkpointer.add_listener(witness)
    save(tmp_path, 2, 2.0, by=checkpointer, save_async=save_async)
    assert witness.states == ["staged", "written", "durable"]
    staged, written, durable = witness.seen
    assert staged["main thread"]
    assert (staged["published"], staged["pointer"]) == (False, "1")
    assert (written["published"], written["staged whole"], written["pointer"]) == (False, True, "1")
    # Whoever is told may count on LATEST; nothing is deleted yet.
    assert (durable["published"], durable["staged whole"], durable["pointer"]) == (True, False, "2")
    assert [moment["steps"] for moment in witness.seen] == [[1], [1], [1, 2]]
    assert steps(tmp_path) == [2]
    assert written["main thread"] == durable["main thread"] == (not save_async)
    for event in witness.events:
        assert (event.global_step, event.path) == (2, str(tmp_path / "global_step_2"))
        assert datetime.fromisoformat(event.at).utcoffset() is not None
    seconds = [event.seconds for event in witness.events]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    times = [datetime.fromisoformat(event.at) for event in witness.events]
    assert times == sorted(times)


def test_the_time_counts_from_the_call_and_holds_the_wait_for_the_save_before(tmp_path: Path) -> None:
    witness, checkpointer = Witness(tmp_path), DistributedCheckpointer()
    checkpointer.add_listener(witness)
    release = threading.Event()

    def hold(event: SaveEvent) -> None:
        if (event.state, event.global_step) == ("durable", 1):
            release.wait(30)

    checkpointer.add_listener(hold)
    checkpointer.save(str(tmp_path / "global_step_1"), state(1.0), global_step=1, save_async=True)
    threading.Timer(0.3, release.set).start()
    save(tmp_path, 2, 2.0, by=checkpointer)
    staged = next(event for event in witness.events if (event.state, event.global_step) == ("staged", 2))
    ended = next(event for event in witness.events if (event.state, event.global_step) == ("durable", 1))
    between = (datetime.fromisoformat(staged.at) - datetime.fromisoformat(ended.at)).total_seconds()
    assert staged.seconds >= 0.9 * (between - 0.001) >= 0.2, "the wait must be long enough to be seen"


def _events(folder: str, save_async: bool) -> tuple[list[str], list[str]]:
    witness, checkpointer = Witness(Path(folder)), DistributedCheckpointer()
    checkpointer.add_listener(witness)
    lines = _Lines()
    logging.getLogger("hyper_resume").addHandler(lines)
    logging.getLogger("hyper_resume").setLevel(logging.INFO)
    for step in (1, 2):
        save(Path(folder), step, float(step), by=checkpointer, save_async=save_async)
    return witness.states, [line for line in lines.lines if line.startswith("Checkpoint ")]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@MODES
def test_every_rank_hears_all_of_it_and_rank_zero_logs_it(tmp_path: Path, save_async: bool) -> None:
    results = run_ranks(_events, 2, str(tmp_path), save_async)
    for states, _ in results:
        assert states == ["staged", "written", "durable"] * 2
    lines = results[0][1]
    assert [line.split(", seconds=")[0] for line in lines] == [
        f"Checkpoint {state}: global_step={step}" for step in (1, 2) for state in ("staged", "written", "durable")
    ]
    assert results[1][1] == []


@MODES
def test_a_listener_that_fails_is_logged_and_the_save_goes_on(
    tmp_path: Path, save_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: SaveEvent) -> None:
        raise RuntimeError("no network")

    witness, checkpointer = Witness(tmp_path), DistributedCheckpointer()
    checkpointer.add_listener(broken)
    checkpointer.add_listener(witness)
    save(tmp_path, 1, 1.0, by=checkpointer, save_async=save_async)
    assert witness.states == ["staged", "written", "durable"]
    assert caplog.text.count("a listener failed on the event") == 3
    assert value_of(tmp_path / "global_step_1") == 1.0


def _fail(folder: str, save_async: bool) -> tuple[list[str], str]:
    """Rank 1 can't create its shard, because its name is taken."""
    witness, checkpointer = Witness(Path(folder)), DistributedCheckpointer()
    checkpointer.add_listener(_Obstacle())
    checkpointer.add_listener(witness)
    try:
        checkpointer.save(f"{folder}/global_step_1", _own(dist.get_rank()), global_step=1, save_async=save_async)
        checkpointer.maybe_wait_for_async_save()
    except CheckpointSaveError as error:
        return witness.states, str(error)
    raise AssertionError("the save must fail")


def _own(rank: int) -> dict[str, Any]:
    return {"model": {f"w{rank}": state(1.0)["model"]["w"]}}


class _Obstacle:
    """On ``staged`` of a synchronous save: takes the name of rank 1's shard."""

    def __call__(self, event: SaveEvent) -> None:
        if event.state == "staged" and dist.get_rank() == 1:
            (staging,) = Path(event.path).parent.glob(".staging/global_step_1.*")
            (staging / "__1_0.distcp").touch()


def test_a_failed_save_is_said_to_have_failed_on_every_rank_and_nothing_further(tmp_path: Path) -> None:
    results = run_ranks(_fail, 2, str(tmp_path), False)
    for states, error in results:
        assert states == ["staged", "failed"]
        assert "FileExistsError" in error
        assert "rank 1" in error
    assert results[0][1] == results[1][1]
    assert not (tmp_path / "global_step_1").exists()
    assert list((tmp_path / ".staging").iterdir()) == []


def test_a_save_whose_pointer_stays_behind_is_never_said_to_be_durable(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpoint_iteration.txt").mkdir()
    witness, checkpointer = Witness(tmp_path), DistributedCheckpointer()
    checkpointer.add_listener(lambda event: witness.events.append(event))
    with pytest.raises(CheckpointSaveError, match="committed, but the pointer could not be moved"):
        save(tmp_path, 1, 1.0, by=checkpointer)
    assert witness.states == ["staged", "written", "failed"]
    assert value_of(tmp_path / "global_step_1") == 1.0

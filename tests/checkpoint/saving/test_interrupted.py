"""Ctrl-C at any moment of a save, and a rank that dies in one: events, message and disk agree, and the next save works."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.base import SaveEvent
from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.disk.operations import FileOperations, OutputFile
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.history.retention import Retention
from hyper_resume.checkpoint.pointed import PointedCheckpointer
from hyper_resume.errors import CheckpointSaveError
from tests.checkpoint.directories import latest
from tests.checkpoint.single_value import manifest_content, save, state, value_of
from tests.ranks import RankFailure, run_ranks

OLD, NEW = 2.0, 22.0


class _Interrupted(FileOperations):
    """A real SIGINT before one of the operations of a save, and again before another one, if asked for."""

    def __init__(self, *fatal: int, can_exchange: bool = True) -> None:
        self.fatal = fatal
        self.can_exchange = can_exchange
        self.count = 0

    def tick(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.count += 1
            if self.count in self.fatal:
                signal.raise_signal(signal.SIGINT)

    def make_directory(self, path: Path) -> None:
        self.tick()
        super().make_directory(path)

    def create(self, path: Path) -> OutputFile:
        self.tick()
        return _File(super().create(path), self)

    def rename(self, source: Path, target: Path) -> None:
        self.tick()
        super().rename(source, target)
        self.tick()

    def exchange(self, one: Path, other: Path) -> bool:
        self.tick()
        done = self.can_exchange and super().exchange(one, other)
        self.tick()
        return done

    def remove(self, path: Path) -> None:
        self.tick()
        super().remove(path)

    def remove_directory(self, path: Path) -> None:
        self.tick()
        super().remove_directory(path)

    def sync_directory(self, path: Path) -> None:
        self.tick()
        super().sync_directory(path)


class _File(OutputFile):
    def __init__(self, file: OutputFile, ticking: _Interrupted) -> None:
        super().__init__(os.dup(file._descriptor), file.path)
        file.close()
        self._ticking = ticking

    def sync(self) -> None:
        self._ticking.tick()
        super().sync()


def _assert_one_story(root: Path, states: list[str], step: int, *, had_old: bool) -> None:
    """What the events say is what is on disk, and the save is there as a whole or not at all."""
    ends = [one for one in states if one in ("durable", "failed")]
    assert len(ends) == 1, states
    directory = root / f"global_step_{step}"
    value = value_of(directory) if directory.exists() else None
    assert value in ({OLD, NEW} if had_old else {None, NEW})
    if ends == ["durable"]:
        assert value == NEW
        assert latest(root) == directory
        assert layout.read_pointer(root) == (step, "")
    elif not had_old:
        assert latest(root) in (root / "global_step_2", directory)


@pytest.mark.parametrize(
    ("step", "can_exchange"), [(3, True), (2, True), (2, False)], ids=["new step", "same step", "two renames"]
)
def test_a_save_that_is_interrupted_before_any_operation_is_an_interrupt_and_spoils_nothing(
    tmp_path: Path, step: int, can_exchange: bool
) -> None:
    endings = set()
    for fatal in range(1, 100):
        root = tmp_path / str(fatal)
        checkpointer, states = DistributedCheckpointer(retention=Retention(keep_last=3)), []
        for earlier, value in ((1, 1.0), (2, OLD)):
            save(root, earlier, value, by=checkpointer)
        checkpointer.add_listener(lambda event, states=states: states.append(event.state))  # type: ignore[misc]
        with operations.use(_Interrupted(fatal, can_exchange=can_exchange)) as ticking:
            assert isinstance(ticking, _Interrupted)
            raised = _interrupted_save(root, step, checkpointer)
        if ticking.count < fatal:
            assert raised == ""
            break
        assert raised == "KeyboardInterrupt"
        if states:
            _assert_one_story(root, states, step, had_old=step == 2)
            endings.add(states[-1])
        saved = save(root, 4, 4.0, by=checkpointer)
        assert value_of(saved) == 4.0
        assert latest(root) == saved
        assert value_of(save(root, 5, 5.0)) == 5.0, "nor does it keep another checkpointer out"
        lineage = dict(manifest_content(saved)["ancestors"])
        directory = root / f"global_step_{step}"
        assert lineage.get(step) == (manifest_content(directory)["attempt"] if directory.exists() else None)
    assert ticking.count < fatal, "every operation was interrupted once"
    assert endings == {"durable", "failed"}


def _interrupted_save(root: Path, step: int, checkpointer: DistributedCheckpointer) -> str:
    try:
        save(root, step, NEW, by=checkpointer)
    except BaseException as error:  # noqa: BLE001  which one it is, is compared
        return type(error).__name__
    return ""


def test_a_second_interrupt_while_the_first_is_cleaned_up_keeps_no_later_save_out(tmp_path: Path) -> None:
    checkpointer = DistributedCheckpointer()
    for again in range(6, 12):
        root = tmp_path / str(again)
        save(root, 1, 1.0, by=checkpointer)
        with operations.use(_Interrupted(5, again)):
            assert _interrupted_save(root, 2, checkpointer) == "KeyboardInterrupt"
        assert value_of(save(root, 3, 3.0, by=checkpointer)) == 3.0


class _Held(FileOperations):
    """The disk stands still until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def create(self, path: Path) -> OutputFile:
        if threading.current_thread() is not threading.main_thread():
            assert self.let_go.wait(60)
        return super().create(path)


@pytest.mark.parametrize("wrap", [lambda one: one, PointedCheckpointer], ids=["own", "pointed"])
def test_an_interrupted_wait_leaves_the_save_in_flight_and_the_next_save_waits_for_it(
    tmp_path: Path, wrap: Callable[[DistributedCheckpointer], Any]
) -> None:
    checkpointer = wrap(DistributedCheckpointer())
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with operations.use(_Held()) as held:
            assert isinstance(held, _Held)
            content = {"model": {"w": torch.full((8,), 1.0)}}
            checkpointer.save(str(tmp_path / "global_step_1"), content, global_step=1, save_async=True)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.maybe_wait_for_async_save()
            held.let_go.set()
            checkpointer.save(str(tmp_path / "global_step_2"), content, global_step=2)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (tmp_path / "global_step_1" / "manifest.json").is_file()
    assert latest(tmp_path) == tmp_path / "global_step_2"


# ---- a rank that dies


class _Dies:
    """The process ends without a word at an event."""

    def __init__(self, state: str) -> None:
        self.state = state

    def __call__(self, event: SaveEvent) -> None:
        if event.state == self.state:
            os._exit(9)


class _DiesAtThePointer(FileOperations):
    """The process ends right after it has moved the pointer."""

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if target.name == layout.POINTER_NAME:
            os._exit(9)


def _lose_a_rank(folder: str, victim: int, moment: str, save_async: bool) -> tuple[list[str], str]:
    states: list[str] = []
    root = Path(folder)
    save(root, 1, 1.0)
    dist.barrier()
    checkpointer = DistributedCheckpointer()
    checkpointer.add_listener(lambda event: states.append(event.state))
    if dist.get_rank() == victim:
        if moment == "pointer":
            operations._current = _DiesAtThePointer()
        else:
            checkpointer.add_listener(_Dies(moment))
    try:
        checkpointer.save(str(root / "global_step_2"), state(NEW), global_step=2, save_async=save_async)
        checkpointer.maybe_wait_for_async_save()
    except CheckpointSaveError as error:
        return states, str(error)
    return states, ""


@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
def test_a_save_that_was_committed_before_a_rank_died_is_told_as_committed(tmp_path: Path, save_async: bool) -> None:
    first, victim = run_ranks(_lose_a_rank, 2, str(tmp_path), 1, "written", save_async, expect_errors=True)
    assert isinstance(victim, RankFailure)
    states, message = first
    assert states == ["staged", "written", "durable"]
    assert "the checkpoint is committed and durable, but" in message
    assert latest(tmp_path) == tmp_path / "global_step_2"
    assert value_of(tmp_path / "global_step_2") == NEW


def test_a_rank_that_outlives_rank_0_after_the_pointer_moved_says_that_the_save_is_durable(tmp_path: Path) -> None:
    victim, other = run_ranks(_lose_a_rank, 2, str(tmp_path), 0, "pointer", False, expect_errors=True)
    assert isinstance(victim, RankFailure)
    states, message = other
    assert states == ["staged", "written", "durable"]
    assert "the checkpoint is committed and durable, but" in message
    assert latest(tmp_path) == tmp_path / "global_step_2"


def test_a_rank_that_outlives_rank_0_before_the_commit_does_not_say_what_it_cant_know(tmp_path: Path) -> None:
    victim, other = run_ranks(_lose_a_rank, 2, str(tmp_path), 0, "written", False, expect_errors=True)
    assert isinstance(victim, RankFailure)
    states, message = other
    assert states == ["staged", "written", "failed"]
    assert "may or may not be committed: this rank lost contact with rank 0" in message
    assert latest(tmp_path) == tmp_path / "global_step_1"

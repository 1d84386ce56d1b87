"""A job that is asked to stop: real signals to one rank, to all, twice, at awkward moments; then it goes on bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hyper_resume.checkpoint.base import SaveEvent
from hyper_resume.errors import CheckpointSaveError, PreemptedError
from hyper_resume.trainer.callbacks import Callback, CheckpointerCallback, PreemptionCallback
from tests.ranks import run_ranks
from tests.trainer.tiny_training import MakeCallback, Record, make_trainer, records_of, run_config, saved_steps, train

pytestmark = pytest.mark.xdist_group("preemption")

RANKS = 4
STEPS = 14  # two epochs of 7
EPOCH_END = 7


@dataclass(frozen=True, kw_only=True)
class Leg:
    """How one training ended on one rank, and what was on disk then."""

    records: list[Record]
    error: str
    saved: list[int]
    handler_is_back: bool


def _leg(folder: Path, callbacks: Sequence[MakeCallback] = (), **checkpoint: Any) -> Leg:
    config = run_config(folder, training={"num_train_epochs": 2}, **{"save_epochs": 0, **checkpoint})
    trainer = make_trainer(config, callbacks=callbacks)
    before = signal.getsignal(signal.SIGTERM)
    error = ""
    try:
        trainer.train()
    except PreemptedError as caught:
        error = str(caught)
    return Leg(
        records=records_of(trainer),
        error=error,
        saved=saved_steps(folder),
        handler_is_back=signal.getsignal(signal.SIGTERM) is before,
    )


def _strike(step: int, ranks: Sequence[int], *, times: int = 1, hook: str = "on_step_end") -> MakeCallback:
    """A callback that sends this process a real SIGTERM in ``hook`` after ``step``, on some ranks."""

    class Strike(Callback):
        def _act(self, state: Any = None, **kwargs: Any) -> None:
            if self.trainer.state.global_step == step and _rank() in ranks:
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGTERM)

    setattr(Strike, hook, Strike._act)
    return Strike


def _strike_while_saving(ranks: Sequence[int]) -> MakeCallback:
    """A callback that signals this process in the middle of every save."""

    class StrikeWhileSaving(Callback):
        def on_train_begin(self, state: Any = None, **kwargs: Any) -> None:
            def strike(event: SaveEvent) -> None:
                if event.state == "staged" and _rank() in ranks:
                    os.kill(os.getpid(), signal.SIGTERM)

            _checkpointer(self.trainer).checkpointer.add_listener(strike)

    return StrikeWhileSaving


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _checkpointer(trainer: Any) -> CheckpointerCallback:
    return next(callback for callback in trainer.callbacks if isinstance(callback, CheckpointerCallback))


# ---- four ranks

EVERYONE = tuple(range(RANKS))
CASES: dict[str, tuple[int, Callable[[], list[MakeCallback]], dict[str, Any]]] = {
    "one-rank": (3, lambda: [_strike(3, [2])], {}),
    "all-ranks": (4, lambda: [_strike(4, EVERYONE)], {}),
    "twice-in-a-row": (3, lambda: [_strike(3, [1], times=2)], {}),
    "again-while-it-saves": (3, lambda: [_strike(3, [0]), _strike_while_saving(EVERYONE)], {}),
    "at-an-epochs-last-step": (EPOCH_END, lambda: [_strike(EPOCH_END, [3])], {}),
    "in-an-epochs-end": (EPOCH_END + 1, lambda: [_strike(EPOCH_END, [3], hook="on_epoch_end")], {}),
    "at-a-step-that-is-saved": (4, lambda: [_strike(4, [1])], {"save_steps": 2}),
    "with-a-save-in-flight": (4, lambda: [_strike(4, [1])], {"save_steps": 2, "is_async": True}),
    "embedded-layout": (5, lambda: [_strike(5, [1])], {"save_extra_state_per_rank": False}),
}


def _all_cases(folder: Path) -> dict[str, tuple[Leg, Leg]]:
    """Every rank: each case, then its resume to the end."""
    legs = {"straight": (_leg(folder / "none", save_ckpt=False),) * 2}
    for name, (_, callbacks, checkpoint) in CASES.items():
        cut = _leg(folder / name, callbacks(), **checkpoint)
        legs[name] = (cut, _leg(folder / name, **{**checkpoint, "restore_from": "LATEST"}))
    # What comes too late, and what comes just in time.
    late = _leg(folder / "late", [_strike(STEPS, [1], hook="on_train_end")])
    last = _leg(folder / "last", [_strike(STEPS, [1])])
    legs["ends"] = (late, last)
    return legs


@pytest.fixture(scope="module")
def legs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Leg, Leg]]]:
    return run_ranks(_all_cases, RANKS, tmp_path_factory.mktemp("preemption"), timeout_seconds=200)


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_save_at_the_same_step_edge_and_leave(legs: list[dict[str, tuple[Leg, Leg]]], case: str) -> None:
    step = CASES[case][0]
    for rank in legs:
        cut, _ = rank[case]
        assert [record.global_step for record in cut.records] == list(range(1, step + 1))
        assert cut.saved[-1] == step
        assert f"preempted by SIGTERM after global_step {step} of {STEPS}, which is saved" in cut.error
        assert f"global_step_{step}" in cut.error
        assert "checkpoint.restore_from=LATEST" in cut.error
        assert cut.handler_is_back
    assert len({rank[case][0].error for rank in legs}) == 1


@pytest.mark.parametrize("case", CASES)
def test_a_preempted_run_goes_on_bit_for_bit_on_every_rank(legs: list[dict[str, tuple[Leg, Leg]]], case: str) -> None:
    step = CASES[case][0]
    for rank in legs:
        straight, _ = rank["straight"]
        cut, resumed = rank[case]
        assert len(straight.records) == STEPS
        assert cut.records == straight.records[:step]
        assert resumed.records == straight.records[step:]
        assert resumed.error == ""


def test_the_message_names_the_ranks_that_were_asked(legs: list[dict[str, tuple[Leg, Leg]]]) -> None:
    assert "received by rank 2 (SIGTERM);" in legs[0]["one-rank"][0].error
    everyone = ", ".join(f"rank {rank} (SIGTERM)" for rank in EVERYONE)
    assert f"received by {everyone};" in legs[0]["all-ranks"][0].error


def test_a_signal_after_the_last_edge_changes_nothing(legs: list[dict[str, tuple[Leg, Leg]]]) -> None:
    for rank in legs:
        late, _ = rank["ends"]
        assert late.error == ""
        assert late.records == rank["straight"][0].records
        assert late.saved == [STEPS]
        assert late.handler_is_back


def test_a_signal_at_the_last_edge_saves_at_once_and_the_training_ends_as_planned(
    legs: list[dict[str, tuple[Leg, Leg]]],
) -> None:
    for rank in legs:
        _, last = rank["ends"]
        assert last.error == ""
        assert last.records == rank["straight"][0].records
        assert last.saved == [STEPS]


# ---- a signal of another process, at no particular moment


def _struck_by_a_peer(folder: Path) -> Leg:
    """Every rank: rank 0 signals the last one, which is in, or next to, a collective of a callback at that moment."""
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())

    class Strike(Callback):
        def on_step_end(self, state: Any = None, **kwargs: Any) -> None:
            if self.trainer.state.global_step == 2 and _rank() == 0:
                os.kill(pids[-1], signal.SIGTERM)
            dist.barrier()

    return _leg(folder, [Strike])


def test_a_signal_from_another_process_reaches_all_ranks(tmp_path: Path) -> None:
    legs = run_ranks(_struck_by_a_peer, 2, tmp_path)
    (step,) = {len(leg.records) for leg in legs}
    # The kernel may deliver it a moment after the edge.
    assert step in (2, 3)
    assert all(leg.saved == [step] for leg in legs)
    assert all("received by rank 1 (SIGTERM)" in leg.error for leg in legs)


# ---- one process


def test_a_preempted_run_goes_on_bit_for_bit_without_a_process_group(tmp_path: Path) -> None:
    straight = train(run_config(tmp_path / "none", save_ckpt=False))
    with pytest.raises(PreemptedError, match=r"after global_step 3 of 7.*received by rank 0 \(SIGTERM\)"):
        train(run_config(tmp_path), callbacks=[_strike(3, [0])])
    assert train(run_config(tmp_path, restore_from="LATEST")) == straight[3:]


def test_another_signal_can_be_asked_for_and_sigterm_then_keeps_its_meaning(tmp_path: Path) -> None:
    handlers: list[Any] = []

    class Look(Callback):
        def on_step_end(self, state: Any = None, **kwargs: Any) -> None:
            handlers.append((signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)))
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(PreemptedError, match="preempted by SIGUSR1 after global_step 1 of 7"):
        train(run_config(tmp_path, preemption_signals=("SIGUSR1",)), callbacks=[Look])
    assert handlers[0][0] is before
    assert callable(handlers[0][1])
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.parametrize("options", [{"save_ckpt": False}, {"preemption_signals": ()}], ids=["no-saves", "no-signals"])
def test_nothing_is_watched_where_nothing_is_saved_or_asked_for(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = make_trainer(run_config(tmp_path, **options))
    assert not any(isinstance(callback, PreemptionCallback) for callback in trainer.callbacks)


def test_handlers_are_put_back_when_training_breaks_off(tmp_path: Path) -> None:
    def fail(trainer: Any) -> None:
        assert signal.getsignal(signal.SIGTERM) is not before
        raise ZeroDivisionError

    class Fails(Callback):
        def on_step_end(self, state: Any = None, **kwargs: Any) -> None:
            fail(self.trainer)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError):
        train(run_config(tmp_path), callbacks=[Fails])
    assert signal.getsignal(signal.SIGTERM) is before


def test_training_in_another_thread_leaves_the_handlers_alone(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Look(Callback):
        def on_step_end(self, state: Any = None, **kwargs: Any) -> None:
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=train, args=(run_config(tmp_path),), kwargs={"callbacks": [Look]})
    thread.start()
    thread.join()
    assert seen == [before] * 7


def test_a_failed_save_in_flight_is_made_up_for_before_leaving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class BreakTheSave(Callback):
        """Takes the staging directory of step 2 away while its save is in flight, which then fails."""

        def on_train_begin(self, state: Any = None, **kwargs: Any) -> None:
            gate = self.gate = threading.Event()

            def hold(event: SaveEvent) -> None:
                if event.state == "written" and event.global_step == 2:
                    gate.wait(timeout=60)
                    for staging in (tmp_path / ".staging").glob("global_step_2.*"):
                        staging.rename(tmp_path / ".moved")

            _checkpointer(self.trainer).checkpointer.add_listener(hold)

    class Go(Callback):
        def on_step_end(self, state: Any = None, **kwargs: Any) -> None:
            if self.trainer.state.global_step == 3:
                next(c for c in self.trainer.callbacks if isinstance(c, BreakTheSave)).gate.set()
                os.kill(os.getpid(), signal.SIGTERM)

    config = run_config(tmp_path, save_steps=2, is_async=True)
    with pytest.raises(PreemptedError, match="after global_step 3 of 7"):
        train(config, callbacks=[BreakTheSave, Go])
    assert "the save in flight failed; saving again" in caplog.messages
    assert saved_steps(tmp_path) == [3]
    straight = train(run_config(tmp_path / "none", save_ckpt=False))
    assert train(run_config(tmp_path, restore_from="LATEST")) == straight[3:]


def test_a_save_that_fails_before_leaving_is_the_error_and_not_a_preemption(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    config = run_config(folder)

    def block(trainer: Any) -> None:
        shutil.rmtree(folder)
        folder.write_text("in the way")
        os.kill(os.getpid(), signal.SIGTERM)

    class Block(Callback):
        def on_step_end(self, state: Any = None, **kwargs: Any) -> None:
            block(self.trainer)

    with pytest.raises(CheckpointSaveError):
        train(config, callbacks=[Block])

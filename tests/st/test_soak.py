"""The soak: its draw depends on the seed only, lost steps are counted, and it fails when it has to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import st.soak
from conformance.records.evidence import LegEvidence
from conformance.records.results import KillRecord, LegRecord, RankEnd, ResultRecord, read_results
from conformance.records.trajectory import Trajectory, TrajectoryRecord
from st.attempts import Attempt, AttemptRunner, Reference, Training, ViolationError
from st.soak import SAVE_STEPS, WORKLOADS, SurvivingSteps, draw
from tests.conformance.evidence_made import leg
from tests.conformance.trajectories import trajectory
from tests.st.conftest import Done

# One worker: these runs share a warm server.
# A soak is twenty starts of ranks; two of them at once on two cores take more than the usual limit.
pytestmark = [pytest.mark.xdist_group("st-warm"), pytest.mark.timeout(300)]

OPERATIONS = (35, 26, 25, 24)
NO_TRAINER: Any = None
CHECKOUT = Path(__file__).resolve().parents[2]


def test_a_seed_draws_the_same_kills_again_and_more_kills_only_add_to_them() -> None:
    assert draw(50, 7, 4, OPERATIONS) == draw(50, 7, 4, OPERATIONS)
    assert draw(90, 7, 4, OPERATIONS)[:50] == draw(50, 7, 4, OPERATIONS)
    assert draw(50, 7, 4, OPERATIONS) != draw(50, 8, 4, OPERATIONS)


@pytest.mark.parametrize("seed", range(20))
def test_every_drawn_kill_has_a_place_where_it_can_strike(seed: int) -> None:
    step = 0
    for kill in draw(200, seed, 5, OPERATIONS):
        fault = kill.fault
        if fault.moment == "during_load":
            # Two whole save intervals back there is a checkpoint, whatever was killed in between.
            assert step >= 2 * SAVE_STEPS
            continue
        assert fault.after_step > step
        step = fault.after_step
        if fault.moment in ("before_commit", "before_pointer", "file_operation"):
            assert step % SAVE_STEPS == 0
        if fault.moment == "after_epoch":
            assert step % 5 == 0
        if fault.moment == "file_operation":
            assert fault.rank is not None
            assert fault.operation is not None
            assert 1 <= fault.operation <= OPERATIONS[fault.rank]


def test_a_hundred_kills_meet_every_moment_every_rank_and_both_signals() -> None:
    faults = [kill.fault for kill in draw(100, 1, 4, OPERATIONS)]
    assert {fault.moment for fault in faults} == {
        "after_step", "after_epoch", "before_save", "before_commit", "before_pointer", "file_operation", "during_load",
    }  # fmt: skip
    assert {fault.rank for fault in faults if fault.moment == "file_operation"} == {0, 1, 2, 3}
    assert {fault.kind for fault in faults} == {"kill"}
    assert any(fault.victims != "all" for fault in faults)


def attempt(restored: int, last: int) -> Attempt:
    ends = (RankEnd(exit_code=0, signal=None),) * 2
    record = LegRecord(
        key="k", leg="resumed", folder="f", launcher="warm", argv=(), until_step=None, restore_from=None, checkpoint_dir="c",
        sabotage=None, shared=False, agents=(), ranks=ends, first_steps=(), last_steps=(), fault=None, timed_out=False,
        trouble=None, started_at="", seconds=0.0,
    )  # fmt: skip
    evidence = LegEvidence(record=record, folder=Path("f"))
    return Attempt(evidence=evidence, restored=restored, last_step=last)


def trained(first: int, last: int, *, shift: int = 0) -> Trajectory:
    """Steps of two ranks that share a sample: four samples an epoch, one a step."""
    records = tuple(
        TrajectoryRecord(
            rank=0, global_step=step, epoch=(step - 1) // 4, batch_index=0, loss=1.0, lr=1.0, group_lrs=(1.0,),
            grad_norm=None, sample_ids=((step - 1 + shift) % 4,), seconds=0.0, digests=None,
        )
        for step in range(first, last + 1)
    )  # fmt: skip
    return Trajectory(records={0: records, 1: records})


TINY = WORKLOADS["tiny"].__class__(title="t", given={}, steps_per_epoch=4, samples=4, copies=2)


def test_what_was_trained_again_counts_once() -> None:
    survivors = SurvivingSteps()
    survivors.add(attempt(0, 6), trained(1, 6))
    survivors.add(attempt(3, 8), trained(4, 8))
    assert survivors.problems(TINY, 8) == []


def test_a_step_that_is_missing_is_seen() -> None:
    survivors = SurvivingSteps()
    survivors.add(attempt(0, 4), trained(1, 4))
    survivors.add(attempt(5, 8), trained(6, 8))
    assert "rank 0: the surviving steps are not 1..8 each once" in survivors.problems(TINY, 8)


def test_a_sample_that_comes_twice_is_seen() -> None:
    survivors = SurvivingSteps()
    survivors.add(attempt(0, 6), trained(1, 6))
    survivors.add(attempt(6, 8), trained(7, 8, shift=1))
    assert survivors.problems(TINY, 8) == ["epoch 1: not each of 4 samples once for 2 ranks"]


@pytest.fixture
def soak(st_command: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    # Two sharded ranks: on a mesh of four each life costs four times as much, most of it what torch does once a process.
    tiny = WORKLOADS["tiny"]
    given = {**tiny.given, "world_size": 2, "parallel": "fsdp"}
    monkeypatch.setattr(st.soak, "WORKLOADS", {**WORKLOADS, "tiny": replace(tiny, given=given, copies=1)})
    return lambda *words: st_command("soak", "--workload", "tiny", "--results", str(tmp_path / "run"), *words)


def test_a_training_that_is_killed_four_times_ends_where_the_uninterrupted_one_ends(
    tmp_path: Path, soak: Callable[..., Done]
) -> None:
    done = soak("--kills", "4", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills" in done.stdout
    assert "ends bit for bit where the uninterrupted run ends" in done.stdout
    results = read_results(tmp_path / "run")
    assert [kill.number for kill in results.of(KillRecord)] == [1, 2, 3, 4]
    assert results.footer.accepted
    assert all(kill.lost_steps is not None and kill.lost_steps <= SAVE_STEPS for kill in results.of(KillRecord))


def test_a_divergence_that_the_certificate_denies_is_a_false_exact_and_counted_as_one(
    tmp_path: Path, soak: Callable[..., Done]
) -> None:
    done = soak("--kills", "2", "--sabotage", "seed-changed-after-resume")
    assert done.returncode == 1
    told = "FALSE_EXACT: resumed at 3, differs at step 4, rank 0, bucket train_dataloader (samples)"
    assert told in done.stdout, done.stdout
    assert "and its certificate says: model exact, optimizer exact" in done.stdout
    results = read_results(tmp_path / "run")
    (kill,) = results.of(KillRecord)
    (result,) = results.of(ResultRecord)
    assert (kill.outcome, result.outcome, result.blamed) == ("false_exact", "false_exact", "train_dataloader")


def resumed(folder: Path, rng: str) -> LegEvidence:
    """Steps 4 to 6 after a restore at 3, with another stream in step 5; the certificate says this of the streams."""
    message = f"Restore certificate of x:\n  model            exact (saved = loaded = live)\n  rng_state        {rng}"
    events = [[{"kind": "log", "level": "INFO", "message": message}], []]

    def change(record: dict[str, Any], rank: int) -> None:
        if record["global_step"] == 5:
            record["digests"]["rng"]["python"] = "elsewhere"

    return leg(folder, events=events, steps=range(4, 7), ends=[0, 0], change=change)


@pytest.mark.parametrize(("rng", "outcome"), [("exact (saved = live)", "false_exact"), ("degraded (another)", "fail")])
def test_a_divergence_is_false_only_under_a_certificate_that_denies_it(tmp_path: Path, rng: str, outcome: str) -> None:
    training = Training(given={}, until_step=12, save_steps=3)
    reference = Reference(trajectory=trajectory(range(1, 13)))
    runner = AttemptRunner(training, reference, tmp_path, tmp_path, NO_TRAINER, NO_TRAINER)
    with pytest.raises(ViolationError, match="differs at step 5, rank 0, bucket rng_state") as caught:
        runner._compare(resumed(tmp_path, rng), 3)
    assert caught.value.outcome == outcome
    assert caught.value.divergence is not None
    assert ("its certificate says: model exact, rng_state exact" in str(caught.value)) == (outcome == "false_exact")


def test_a_life_that_stops_before_its_end_is_red_although_it_ends_well_and_every_step_is_right(tmp_path: Path) -> None:
    training = Training(given={}, until_step=12, save_steps=3)
    reference = Reference(trajectory=trained(1, 12))
    runner = AttemptRunner(training, reference, tmp_path, tmp_path, NO_TRAINER, NO_TRAINER)
    runner._require_steps(attempt(5, 12).record, 12)
    with pytest.raises(ViolationError, match=r"the last step that all of its ranks trained is 5; expected 12"):
        runner._require_steps(attempt(5, 5).record, 5)


def test_no_kill_at_all_is_a_usage_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "st", "soak", "--results", str(tmp_path / "run"), "--kills", "0"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2, "python -m st soak: error: argument --kills: 1 or more",
    )  # fmt: skip

"""The outcome for trainers and adapters that are broken on purpose: exactly one each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.matrix.case import Case
from conformance.records.results import LegRecord
from tests.conformance.stand_in import StandInAdapter, case_of, result_of, run


def test_a_right_trainer_passes_and_every_check_says_what_it_saw(tmp_path: Path) -> None:
    result = result_of(tmp_path, "")
    assert (result.outcome, result.reason, result.blamed) == ("pass", "", None)
    assert [(check.check, check.status) for check in result.checks] == [
        ("fault_fired", "passed"),
        ("resumed_at", "passed"),
        ("trajectory_equals", "passed"),
    ]
    assert result.checks[0].observed == "SIGKILL"


def test_a_forgotten_stream_fails_with_the_first_step_and_the_bucket(tmp_path: Path) -> None:
    result = result_of(tmp_path, "forgets-rng")
    assert (result.outcome, result.blamed) == ("fail", "rng_state")
    divergence = result.checks[-1].divergence
    assert divergence is not None
    assert (divergence.step, divergence.rank, divergence.column) == (6, 0, "rng.python")
    assert result.reproduce == "python -m conformance run --case Z1 --keep"


def test_a_leg_that_hangs_is_killed_at_its_limit_and_fails(tmp_path: Path) -> None:
    result = result_of(tmp_path, "hangs-after-resume", case_of(limit_seconds=1))
    assert result.outcome == "fail"
    assert result.reason == "ends_as_scripted: expected leg resumed: it ends; found it hung and was killed after 1 s"


def test_a_reference_that_hangs_proves_nothing(tmp_path: Path) -> None:
    result = result_of(tmp_path, "hangs", case_of(limit_seconds=1))
    assert (result.outcome, result.reason) == ("error", "reference leg reference: hung; SIGABRT")


def test_a_wrong_exit_code_fails_though_all_records_are_right(tmp_path: Path) -> None:
    script = [{"leg": "saving", "until_step": 6}]
    expect = [{"check": "saved_steps", "leg": "saving", "steps": [5]}]
    result = result_of(tmp_path, "wrong-exit", case_of(script=script, expect=expect))
    assert result.outcome == "fail"
    assert result.reason == "ends_as_scripted: expected leg saving: exit code 0; found exit code 3"


def test_a_leg_that_dies_of_another_signal_fails(tmp_path: Path) -> None:
    script = [{"leg": "saving", "until_step": 6}]
    expect = [{"check": "varies", "leg": "saving", "column": "loss"}]
    result = result_of(tmp_path, "segfaults", case_of(script=script, expect=expect))
    assert (result.outcome, result.checks[0].observed) == ("fail", "SIGSEGV")


@pytest.mark.parametrize(
    ("defect", "reason"),
    [
        ("says-nothing", "events_rank_0.jsonl: rank 0 recorded no event"),
        ("never-starts", "rank 0 never reported that it started"),
        ("gives-up", "the stand-in gives up"),
        ("garbage-events", "events_rank_0.jsonl:1: no event"),
        ("adapter-raises", "the adapter can't read the trainer's output: ValueError: no such format"),
    ],
)
def test_a_leg_that_is_no_evidence_is_an_error(tmp_path: Path, defect: str, reason: str) -> None:
    result = result_of(tmp_path, defect)
    assert result.outcome == "error"
    assert reason in result.reason
    assert result.checks == ()


def test_garbage_in_the_records_is_an_error_that_names_file_and_line(tmp_path: Path) -> None:
    script = [{"leg": "saving", "until_step": 6}]
    expect = [{"check": "varies", "leg": "saving", "column": "loss"}]
    result = result_of(tmp_path, "garbage-records", case_of(script=script, expect=expect))
    assert result.outcome == "error"
    assert "trajectory_rank_0.jsonl:7: missing keys" in result.reason


def test_a_reference_that_does_not_repeat_itself_can_judge_nothing(tmp_path: Path) -> None:
    result = result_of(tmp_path, "not-reproducible")
    assert result.outcome == "error"
    assert result.reason.startswith("trajectory_equals: reference not reproducible: Divergence(step=1, rank=0")


def test_a_fault_that_does_not_fire_is_an_error(tmp_path: Path) -> None:
    result = result_of(tmp_path, "ignores-fault")
    assert (result.outcome, result.reason) == (
        "error",
        "the fault of leg interrupted did not fire: it ended by itself before that",
    )


def alone() -> Case:
    """Rank 1 of two is killed alone after step 3."""
    fault = {"kind": "kill", "after_step": 3, "victims": "rank-1"}
    script = [{"leg": "interrupted", "until_step": 6, "fault": fault}]
    expect = [{"check": "fault_fired", "leg": "interrupted"}]
    return case_of(given={"world_size": 2}, script=script, expect=expect)


def test_who_is_spared_has_to_end_with_an_error(tmp_path: Path) -> None:
    assert result_of(tmp_path / "fails", "fails-when-spared", alone()).outcome == "pass"
    result = result_of(tmp_path / "goes-on", "", alone())
    assert (result.outcome, result.reason) == (
        "fail",
        "ends_as_scripted: expected leg interrupted: every victim dies of SIGKILL, and the others end with an error; "
        "found rank 0: exit code 0",
    )


def test_a_process_that_a_leg_leaves_behind_is_an_error(tmp_path: Path) -> None:
    script = [{"leg": "saving", "until_step": 6}]
    expect = [{"check": "varies", "leg": "saving", "column": "loss"}]
    result = result_of(tmp_path, "has-a-child", case_of(script=script, expect=expect))
    assert result.outcome == "error"
    assert "were left behind; they are killed now" in result.reason


def test_a_column_that_never_varies_is_an_error_and_not_a_pass(tmp_path: Path) -> None:
    result = result_of(tmp_path, "constant-lr")
    assert result.outcome == "error"
    assert "the reference's lr is constant over steps 6..10 on rank 0" in result.reason


def test_a_disk_fault_that_finds_nothing_is_an_error(tmp_path: Path) -> None:
    script = [{"leg": "saving", "until_step": 6}, {"fault": "remove_metadata", "step": 10}]
    expect = [{"check": "saved_steps", "leg": "saving", "steps": [5]}]
    result = result_of(tmp_path, "", case_of(script=script, expect=expect))
    assert result.reason == "the fault remove_metadata did not fire: global_step_10/.metadata does not exist"


def test_a_sabotage_that_does_not_fire_is_an_error_and_never_caught(tmp_path: Path) -> None:
    result = result_of(tmp_path, "forgets-rng", sabotage="unmet")
    assert (result.outcome, result.reason) == ("error", "the sabotage unmet did not fire")


def test_a_sabotage_that_fires_is_judged_and_never_reaches_the_reference(tmp_path: Path) -> None:
    done = run(tmp_path, StandInAdapter(), case_of(), sabotage="met")
    assert done.result.outcome == "pass"
    assert done.result.reproduce.endswith("--case Z1 --sabotage met --keep")
    sabotaged = {record.leg: record.sabotage for record in done.records if isinstance(record, LegRecord)}
    assert sabotaged == {"reference": None, "interrupted": "met", "resumed": "met"}


def test_what_the_trainer_lacks_makes_the_case_unsupported_and_starts_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, StandInAdapter(lacks=("trajectory.rng", "fault.pause")), case_of())
    assert done.result.outcome == "unsupported"
    assert done.result.reason == "the trainer lacks: fault.pause, trajectory.rng"
    assert not (tmp_path / "Z1").exists()


def test_a_device_that_is_not_there_makes_the_case_unsupported(tmp_path: Path) -> None:
    result = result_of(tmp_path, "", case_of(given={"device": "npu"}))
    assert (result.outcome, result.reason) == ("unsupported", "the trainer lacks: device npu")


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, StandInAdapter(argv=("/no/such/program",)), case_of())
    assert done.result.outcome == "error"
    assert "FileNotFoundError" in done.result.reason


@pytest.mark.parametrize(
    ("known_fail", "defect", "outcome"),
    [("R01", "forgets-rng", "known_fail"), ("R01", "", "unexpected_pass"), ("R01", "ignores-fault", "error")],
)
def test_a_known_failure_that_passes_is_itself_told(tmp_path: Path, known_fail: str, defect: str, outcome: str) -> None:
    assert result_of(tmp_path, defect, case_of(known_fail=known_fail)).outcome == outcome


@pytest.mark.parametrize("defect", ["", "forgets-rng"])
def test_a_note_is_observed_and_not_judged(tmp_path: Path, defect: str) -> None:
    assert result_of(tmp_path, defect, case_of(level="note")).outcome == "note"


def test_no_job_holds_anything_of_what_is_expected(tmp_path: Path) -> None:
    case = case_of(title="a telltale title", why="a telltale reason")
    run(tmp_path, StandInAdapter(), case)
    jobs = list(tmp_path.rglob("job.json"))
    assert len(jobs) == 4  # two references, interrupted, resumed
    known = {"task", "leg", "checkpoint_dir", "world_size", "given", "until_step", "restore_from", "fault"}
    for job in jobs:
        text = job.read_text()
        assert set(json.loads(text)) == known | {"sabotage", "edit", "step", "nodes"}
        for word in ("expect", "telltale", "trajectory_equals", "resumed_at", "sabotages", case.id):
            assert word not in text


def test_a_reference_is_run_twice_once_and_for_all(tmp_path: Path) -> None:
    from conformance.running.runner import Runner
    from tests.conformance.stand_in import launcher_in

    with launcher_in(tmp_path) as hosts:
        runner = Runner(StandInAdapter(), tmp_path)
        first = runner.run_case(case_of(), hosts)
        second = runner.run_case(case_of(), hosts, repeat=1)
    assert (first.result.outcome, second.result.outcome) == ("pass", "pass")
    assert len(list((tmp_path / "references").rglob("job.json"))) == 2
    kinds = [[type(record).__name__ for record in done.records].count("CalibrationRecord") for done in (first, second)]
    assert kinds == [1, 0]

"""Every check passes on right evidence, fails on wrong evidence with the bucket to blame, and says when it can't judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.check import CHECKS, run_check
from conformance.evidence import Evidence
from conformance.results import BLAMES
from tests.conformance.evidence_made import evidence, killed, leg

ERROR = {
    "kind": "error",
    "class": "CheckpointNotFoundError",
    "bases": ["HyperResumeError", "FileNotFoundError", "OSError"],
    "message": "no training state in it",
}


def status(of: Evidence, check: str, **parameters: Any) -> tuple[str, str | None]:
    typed = CHECKS.parameters(check, parameters, "here")
    record = run_check(check, typed, of)
    return record.status, record.blames


def saved(step: int, **buckets: Any) -> dict[str, Any]:
    return {"kind": "saved", "global_step": step, "epoch": 0, "buckets": buckets}


def state(kind: str, step: int = 0, **buckets: Any) -> dict[str, Any]:
    return {"kind": kind, "global_step": step, "epoch": 0, "start_epoch": 1, "start_step": 3, "buckets": buckets}


@pytest.mark.parametrize(
    ("ends", "reached", "signal", "expected"),
    [
        (["SIGKILL", "SIGKILL"], (0, 1), "SIGKILL", "passed"),
        (["SIGKILL", 0], (0, 1), "SIGKILL", "failed"),
        (["SIGTERM", "SIGTERM"], (0, 1), "SIGKILL", "failed"),
        (["SIGKILL", "SIGKILL"], (0,), "SIGKILL", "error"),
        ([1, 1], (0, 1), None, "passed"),
        ([1, 0], (0, 1), None, "failed"),
    ],
)
def test_fault_fired(tmp_path: Path, ends: Any, reached: Any, signal: Any, expected: str) -> None:
    found = leg(tmp_path, "interrupted", ends=ends, fault=killed(8, reached))
    assert status(evidence(found), "fault_fired", leg="interrupted", signal=signal)[0] == expected


def test_a_fault_that_was_never_asked_for_is_an_error(tmp_path: Path) -> None:
    assert status(evidence(leg(tmp_path)), "fault_fired", leg="resumed") == ("error", None)


@pytest.mark.parametrize(
    ("changes", "events", "expected"),
    [
        ({}, [[ERROR]], "passed"),
        ({"error": "CheckpointNotFoundError"}, [[ERROR]], "passed"),
        ({"error": "RuntimeError"}, [[ERROR]], "failed"),
        ({"contains": ["extra_state"]}, [[ERROR]], "failed"),
        ({"within_seconds": 0.05}, [[ERROR]], "failed"),
        ({}, [[ERROR], []], "failed"),
        ({}, [[]], "failed"),
    ],
)
def test_fails_with(tmp_path: Path, changes: Any, events: Any, expected: str) -> None:
    parameters = {"error": "FileNotFoundError", "contains": ["no training state"], **changes}
    found = leg(tmp_path, events=events, ends=[1] * len(events))
    assert status(evidence(found), "fails_with", leg="resumed", **parameters)[0] == expected


def test_an_error_with_exit_code_0_does_not_pass(tmp_path: Path) -> None:
    found = leg(tmp_path, events=[[ERROR]], ends=[0])
    assert status(evidence(found), "fails_with", leg="resumed", error="OSError") == ("failed", "storage")


@pytest.mark.parametrize(
    ("ends", "code", "expected"),
    [
        ([0], 0, "passed"),
        ([1], 0, "failed"),
        ([1], "nonzero", "passed"),
        ([0, 1], "nonzero", "failed"),
        (["SIGKILL"], 0, "failed"),
    ],
)
def test_exits(tmp_path: Path, ends: Any, code: Any, expected: str) -> None:
    assert status(evidence(leg(tmp_path, ends=ends)), "exits", leg="resumed", code=code)[0] == expected


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"contains": "skip"}, "passed"),
        ({"contains": "skip", "count": 2}, "passed"),
        ({"contains": "skip", "count": 1}, "failed"),
        ({"contains": "skip", "level": "WARNING", "count": 1}, "passed"),
        ({"contains": "absent"}, "failed"),
        ({"contains": "absent", "count": 0}, "passed"),
    ],
)
def test_logs(tmp_path: Path, parameters: Any, expected: str) -> None:
    lines = [{"kind": "log", "level": level, "message": "skip it"} for level in ("INFO", "WARNING")]
    assert status(evidence(leg(tmp_path, events=[lines])), "logs", leg="resumed", **parameters)[0] == expected


def test_warns_counts_warnings_only(tmp_path: Path) -> None:
    found = evidence(leg(tmp_path, events=[[{"kind": "log", "level": "INFO", "message": "skip"}]]))
    assert status(found, "warns", leg="resumed", contains="skip") == ("failed", "policy")


def test_callback_registered(tmp_path: Path) -> None:
    found = evidence(leg(tmp_path, events=[[{"kind": "callbacks", "names": ["CheckpointerCallback"]}]]))
    assert status(found, "callback_registered", leg="resumed", registered=True)[0] == "passed"
    assert status(found, "callback_registered", leg="resumed", registered=False) == ("failed", "policy")


def test_ends_at_and_value_is(tmp_path: Path) -> None:
    told = [{"kind": "value", "name": "reads", "value": 7}, {"kind": "end", "global_step": 10, "epoch": 1}]
    found = evidence(leg(tmp_path, events=[told]))
    assert status(found, "ends_at", leg="resumed", global_step=10, epoch=1)[0] == "passed"
    assert status(found, "ends_at", leg="resumed", global_step=9) == ("failed", "progress")
    assert status(found, "value_is", leg="resumed", name="reads", equals=7)[0] == "passed"
    assert status(found, "value_is", leg="resumed", name="reads", equals=8)[0] == "failed"
    assert status(found, "value_is", leg="resumed", name="writes", equals=8)[0] == "error"


@pytest.mark.parametrize(
    ("told", "steps", "expected"),
    [
        ([2, 4], [2, 4], ("passed", None)),
        ([2, 4, 4], [2, 4], ("failed", "policy")),
        ([2], [2, 4], ("failed", "policy")),
        ([2, 6], [2, 6], ("failed", "storage")),
    ],
)
def test_saved_steps(tmp_path: Path, told: list[int], steps: list[int], expected: Any) -> None:
    files = {f"checkpoints/global_step_{step}/.metadata": "x" for step in (2, 4)}
    files["checkpoints/global_step_6/.metadata"] = ""
    found = evidence(leg(tmp_path, events=[[saved(step) for step in told]], after=files))
    assert status(found, "saved_steps", leg="resumed", steps=steps) == expected


def test_disk_steps_takes_exact_names_and_whole_directories_only(tmp_path: Path) -> None:
    names = ["global_step_2", "global_step_10", "global_step_10_old", "my_global_step_4", ".staging/global_step_6.ab"]
    files = {f"checkpoints/{name}/.metadata": "x" for name in names}
    found = evidence(leg(tmp_path, after=files))
    assert status(found, "disk_steps", leg="resumed", steps=[10, 2])[0] == "passed"
    assert status(found, "disk_steps", leg="resumed", steps=[2]) == ("failed", "storage")


def test_pointer_is(tmp_path: Path) -> None:
    found = leg(tmp_path, after={"checkpoints/latest_checkpoint_iteration.txt": "4"})
    (found.folder / "pointer_after.txt").write_text("4\n")
    assert status(evidence(found), "pointer_is", leg="resumed", step=4)[0] == "passed"
    assert status(evidence(found), "pointer_is", leg="resumed", step=None) == ("failed", "storage")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"a": "1"}, {"a": "1"}, "passed"),
        ({"a": "1"}, {"a": "2"}, "failed"),
        ({"a": "1"}, {}, "failed"),
        ({}, {"a": ""}, "failed"),
    ],
)
def test_nothing_changed_on_disk(tmp_path: Path, before: Any, after: Any, expected: str) -> None:
    found = evidence(leg(tmp_path, before=before, after=after))
    assert status(found, "nothing_changed_on_disk", leg="resumed")[0] == expected
    assert status(found, "not_saved_again", leg="resumed")[0] == expected


def test_not_saved_again_sees_a_save_that_changed_nothing(tmp_path: Path) -> None:
    found = evidence(leg(tmp_path, events=[[saved(4)]]))
    assert status(found, "not_saved_again", leg="resumed") == ("failed", "policy")


def test_on_disk(tmp_path: Path) -> None:
    found = evidence(leg(tmp_path, after={"checkpoints/global_step_2/extra_state/extra_state_rank_0.pt": "x"}))
    pattern = "global_step_2/extra_state/*_rank_0.pt"
    assert status(found, "on_disk", leg="resumed", paths=[pattern])[0] == "passed"
    assert status(found, "on_disk", leg="resumed", absent=[pattern]) == ("failed", "storage")
    assert status(found, "on_disk", leg="resumed", paths=["global_step_4/*"])[0] == "failed"
    assert status(found, "on_disk", leg="resumed")[0] == "error"


def test_buckets_on_disk(tmp_path: Path) -> None:
    found = evidence(leg(tmp_path), looks={"2": {"model": {"hidden.weight": "float32[8,8]"}}})
    assert status(found, "buckets_on_disk", look="2", present=["model/hidden.*"], absent=["optimizer"])[0] == "passed"
    assert status(found, "buckets_on_disk", look="2", present=["optimizer"]) == ("failed", "optimizer")
    assert status(found, "buckets_on_disk", look="2", absent=["model/hidden.weight"]) == ("failed", "model")
    assert status(found, "buckets_on_disk", look="2")[0] == "error"


def test_resumed_at(tmp_path: Path) -> None:
    found = evidence(leg(tmp_path, events=[[state("restored", 5)]], steps=range(6, 9)))
    assert status(found, "resumed_at", leg="resumed", global_step=5)[0] == "passed"
    assert status(found, "resumed_at", leg="resumed", global_step=4) == ("failed", "progress")


def test_resumed_at_sees_records_that_do_not_follow_and_a_rank_that_did_not_restore(tmp_path: Path) -> None:
    late = leg(tmp_path, "resumed", events=[[state("restored", 5)]], steps=range(7, 9))
    lone = leg(tmp_path, "resumed-lone", events=[[state("restored", 5)], []], ends=[0, 0])
    none = leg(tmp_path, "resumed-none", events=[[ERROR]], ends=[1])
    found = evidence(late, lone, none)
    assert [status(found, "resumed_at", leg=name, global_step=5) for name in found.legs] == [
        ("failed", "progress"),
        ("failed", "progress"),
        ("failed", "storage"),
    ]


def test_starts_at_and_not_restored(tmp_path: Path) -> None:
    found = evidence(
        leg(tmp_path, events=[[state("restored", 8), state("begin", 8)]]),
        leg(tmp_path, "saving", events=[[state("begin", 0)]]),
    )
    assert status(found, "starts_at", leg="resumed", start_epoch=1, start_step=3, global_step=8)[0] == "passed"
    assert status(found, "starts_at", leg="resumed", start_epoch=1, start_step=4) == ("failed", "progress")
    assert status(found, "starts_at", leg="resumed", start_epoch=1, start_step=3, global_step=7)[0] == "failed"
    assert status(found, "not_restored", leg="saving")[0] == "passed"
    assert status(found, "not_restored", leg="resumed") == ("failed", "storage")


MOMENTS = {"0.state.w.exp_avg": "float32[2] aa", "0.state.w.step": "float32[] bb"}


def restored_as(folder: Path, moments: dict[str, str], built: dict[str, str] | None = None) -> Evidence:
    return evidence(
        leg(folder, "saving", events=[[saved(4, optimizer=MOMENTS)]]),
        leg(folder, events=[[state("built", optimizer=built or {}), state("restored", 4, optimizer=moments)]]),
    )


@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        (MOMENTS, ("passed", None)),
        ({**MOMENTS, "0.state.w.exp_avg": "float32[2] cc"}, ("failed", "optimizer")),
        ({"0.state.w.exp_avg": "float32[2] aa"}, ("failed", "optimizer")),
        ({**MOMENTS, "0.state.v.step": "float32[] bb"}, ("failed", "optimizer")),
    ],
)
def test_bucket_equals(tmp_path: Path, moments: Any, expected: Any) -> None:
    found = restored_as(tmp_path, moments)
    assert status(found, "bucket_equals", leg="resumed", saved_by="saving", step=4, buckets=["optimizer"]) == expected


@pytest.mark.parametrize(
    ("changes", "built"),
    [
        ({}, MOMENTS),
        ({"step": 6}, {}),
        ({"nonzero": ["*.exp_avg_sq"]}, {}),
        ({"entries": "*.v.*"}, {}),
        ({"at": "end"}, {}),
        ({"buckets": ["stateful"], "may_be_as_built": ["stateful"]}, {}),
    ],
)
def test_bucket_equals_can_not_judge_what_could_not_have_failed(tmp_path: Path, changes: Any, built: Any) -> None:
    parameters = {"saved_by": "saving", "step": 4, "buckets": ["optimizer"], **changes}
    assert status(restored_as(tmp_path, MOMENTS, built), "bucket_equals", leg="resumed", **parameters)[0] == "error"


def test_moments_that_were_zero_when_saved_prove_nothing(tmp_path: Path) -> None:
    zeros = {"0.state.w.exp_avg": "float32[2] aa zero"}
    found = evidence(
        leg(tmp_path, "saving", events=[[saved(4, optimizer=zeros)]]),
        leg(tmp_path, events=[[state("built", optimizer={}), state("restored", 4, optimizer=zeros)]]),
    )
    parameters = {"saved_by": "saving", "step": 4, "buckets": ["optimizer"]}
    assert status(found, "bucket_equals", leg="resumed", **parameters)[0] == "passed"
    assert status(found, "bucket_equals", leg="resumed", nonzero=["*.exp_avg"], **parameters)[0] == "error"


def test_bucket_differs_and_bucket_as_built(tmp_path: Path) -> None:
    fresh, other = {"w": "float32[2] 00"}, {"w": "float32[2] 11"}
    told = [state("built", model=fresh), state("restored", 4, model=fresh), state("begin", 4, model=fresh)]
    found = evidence(leg(tmp_path, "saving", events=[[saved(4, model=other)]]), leg(tmp_path, events=[told]))
    parameters = {"saved_by": "saving", "step": 4, "buckets": ["model"]}
    assert status(found, "bucket_differs", leg="resumed", **parameters)[0] == "passed"
    assert status(found, "bucket_as_built", leg="resumed", buckets=["model"])[0] == "passed"
    told = [state("built", model=fresh), state("restored", 4, model=other), state("begin", 4, model=other)]
    found = evidence(
        leg(tmp_path / "b", "saving", events=[[saved(4, model=other)]]), leg(tmp_path / "b", events=[told])
    )
    assert status(found, "bucket_differs", leg="resumed", **parameters) == ("failed", "model")
    assert status(found, "bucket_as_built", leg="resumed", buckets=["model"]) == ("failed", "model")
    assert status(found, "bucket_as_built", leg="resumed", buckets=["stateful"])[0] == "error"


def test_dtype_kept_looks_at_types_and_shapes_only(tmp_path: Path) -> None:
    parameters = {"leg": "resumed", "saved_by": "saving", "step": 4}
    other = {"0.state.w.exp_avg": "float32[2] zz", "0.state.w.step": "float32[] yy"}
    assert status(restored_as(tmp_path / "a", other), "dtype_kept", **parameters)[0] == "passed"
    wider = {**MOMENTS, "0.state.w.exp_avg": "float64[2] aa"}
    found = restored_as(tmp_path / "b", wider)
    assert status(found, "dtype_kept", **parameters) == ("failed", "optimizer")
    assert status(found, "dtype_kept", dtype="bfloat16", **parameters)[0] == "error"


def test_trajectory_equals_names_step_rank_and_bucket(tmp_path: Path) -> None:
    def change(record: dict[str, Any], rank: int) -> None:
        if record["global_step"] == 8 and rank == 1:
            record["digests"]["rng"]["numpy"] = "other"

    found = evidence(
        leg(tmp_path, "reference", steps=range(1, 11), ends=[0, 0]),
        leg(tmp_path, steps=range(6, 11), ends=[0, 0]),
        leg(tmp_path, "resumed-wrong", steps=range(6, 11), ends=[0, 0], change=change),
    )
    parameters = {"against": "reference", "steps": [6, 10]}
    assert status(found, "trajectory_equals", leg="resumed", **parameters) == ("passed", None)
    typed = CHECKS.parameters("trajectory_equals", {"leg": "resumed-wrong", **parameters}, "here")
    record = run_check("trajectory_equals", typed, found)
    assert record.blames == "rng_state"
    assert record.divergence is not None
    assert (record.divergence.step, record.divergence.rank, record.divergence.column) == (8, 1, "rng.numpy")
    columns = {"columns": ["samples", "loss"]}
    assert status(found, "trajectory_equals", leg="resumed-wrong", **parameters, **columns)[0] == "passed"


@pytest.mark.parametrize("changes", [{"steps": [5, 10]}, {"columns": ["extras"]}, {"columns": []}])
def test_trajectory_equals_can_not_judge_without_records(tmp_path: Path, changes: Any) -> None:
    found = evidence(leg(tmp_path, "reference", steps=range(1, 11)), leg(tmp_path, steps=range(6, 11)))
    parameters = {"leg": "resumed", "against": "reference", "steps": [6, 10], **changes}
    assert status(found, "trajectory_equals", **parameters)[0] == "error"


def test_exact_is_judged_only_against_a_calibrated_reference(tmp_path: Path) -> None:
    legs = [leg(tmp_path, "reference", steps=range(1, 11)), leg(tmp_path, steps=range(6, 11))]
    found = evidence(*legs, calibrated=False)
    parameters = {"leg": "resumed", "against": "reference", "steps": [6, 10]}
    assert status(found, "trajectory_equals", **parameters)[0] == "error"
    numbers = {"columns": ["loss", "lr"], "tolerance": 1e-6}
    assert status(found, "trajectory_equals", **parameters, **numbers)[0] == "passed"
    assert status(found, "trajectory_equals", **parameters, tolerance=1e-6)[0] == "error"


def test_a_tolerance_is_relative(tmp_path: Path) -> None:
    def change(record: dict[str, Any], rank: int) -> None:
        record["loss"] *= 1.0 + 1e-4

    found = evidence(leg(tmp_path, "reference", steps=range(1, 11)), leg(tmp_path, steps=range(6, 11), change=change))
    parameters = {"leg": "resumed", "against": "reference", "steps": [6, 10], "columns": ["loss"]}
    assert status(found, "trajectory_equals", tolerance=2e-4, **parameters)[0] == "passed"
    assert status(found, "trajectory_equals", tolerance=5e-5, **parameters) == ("failed", "model")
    assert status(found, "trajectory_equals", tolerance="calibrated", **parameters)[0] == "failed"


def test_varies(tmp_path: Path) -> None:
    found = evidence(leg(tmp_path, steps=range(1, 4)))
    assert status(found, "varies", leg="resumed", column="loss", at_least=3)[0] == "passed"
    assert status(found, "varies", leg="resumed", column="loss", at_least=4)[0] == "failed"


def with_ids(by_step: dict[int, list[int]]) -> Any:
    def change(record: dict[str, Any], rank: int) -> None:
        record["sample_ids"] = by_step[record["global_step"]]

    return change


def test_data_order_joins_legs_and_a_later_one_counts(tmp_path: Path) -> None:
    first = leg(tmp_path, "interrupted", steps=range(1, 4), change=with_ids({1: [0, 1], 2: [2, 3], 3: [9, 9]}))
    second = leg(tmp_path, steps=range(3, 4), change=with_ids({3: [4, 5]}))
    found = evidence(first, second)
    parameters = {"legs": ["interrupted", "resumed"], "epochs": [0]}
    assert status(found, "data_order", samples=6, **parameters)[0] == "passed"
    assert status(found, "data_order", samples=7, **parameters) == ("failed", "train_dataloader")
    assert status(found, "data_order", samples=7, complete=False, **parameters)[0] == "passed"
    assert status(found, "data_order", samples=6, legs=["interrupted"], epochs=[0])[0] == "failed"
    assert status(found, "data_order", samples=6, legs=["interrupted"], epochs=[3])[0] == "failed"
    silent = evidence(leg(tmp_path, "resumed-again"))
    assert status(silent, "data_order", samples=6, legs=["resumed-again"], epochs=[0])[0] == "error"


def test_lr_continues(tmp_path: Path) -> None:
    def restart(record: dict[str, Any], rank: int) -> None:
        record["group_lrs"] = [1e-4, 2e-4]

    found = evidence(
        leg(tmp_path, "reference", steps=range(1, 11)),
        leg(tmp_path, steps=range(6, 11)),
        leg(tmp_path, "resumed-anew", steps=range(6, 11), change=restart),
        leg(tmp_path, "reference-constant", steps=range(1, 11), change=restart),
    )
    assert status(found, "lr_continues", leg="resumed", against="reference")[0] == "passed"
    assert status(found, "lr_continues", leg="resumed-anew", against="reference") == ("failed", "lr_scheduler")
    assert status(found, "lr_continues", leg="resumed-anew", against="reference-constant")[0] == "error"


def test_a_leg_that_was_not_run_and_a_check_that_throws_are_errors(tmp_path: Path) -> None:
    broken = leg(tmp_path, events=[[{"kind": "end"}]])
    assert status(evidence(broken), "ends_at", leg="resumed", global_step=1)[0] == "error"
    assert status(evidence(), "exits", leg="resumed")[0] == "error"


def test_every_check_has_a_sentence_and_a_test() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for name, entry in CHECKS.entries.items():
        assert entry.summary.endswith((".", ":")), name
        assert f'"{name}"' in text, f"no test of {name}"
    assert len(set(BLAMES)) == len(BLAMES)

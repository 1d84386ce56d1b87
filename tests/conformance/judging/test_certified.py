"""A certificate that says exact where training diverges is an outcome of its own, and nothing else is that outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.judging.certified import certified_checks
from conformance.matrix.case import Case, parse_case
from conformance.records.evidence import Evidence, LegEvidence
from tests.conformance.evidence_made import evidence, leg
from tests.conformance.stand_in import case_of, result_of

BUCKETS = ("model", "optimizer", "progress", "lr_scheduler", "train_dataloader", "rng_state")
EXACT = dict.fromkeys(BUCKETS, "exact (saved = loaded = live)")
NOTHING = {"stateful": "absent (neither the checkpoint nor this trainer has any)"}
# Checks that hold whatever was restored.
BLIND = [{"check": "fault_fired", "leg": "interrupted"}, {"check": "resumed_at", "leg": "resumed", "global_step": 5}]


# ---- the outcome ----------------------------------------------------------------------------------------------------


def test_a_false_certificate_is_found_where_all_checks_of_the_case_pass(tmp_path: Path) -> None:
    result = result_of(tmp_path, "certifies-falsely", case_of(expect=BLIND))
    assert (result.outcome, result.blamed) == ("false_exact", "rng_state")
    assert [(check.check, check.status) for check in result.checks] == [
        ("fault_fired", "passed"),
        ("resumed_at", "passed"),
        ("certified_exact", "failed"),
    ]
    divergence = result.checks[-1].divergence
    assert divergence is not None
    assert (divergence.step, divergence.rank, divergence.column) == (6, 0, "rng.python")
    assert "rng_state exact" in result.reason


@pytest.mark.parametrize("options", [{"known_fail": "R01"}, {"level": "note"}, {}])
def test_neither_a_level_nor_a_known_failure_nor_a_failed_check_hides_it(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    assert result_of(tmp_path, "certifies-falsely", case_of(**options)).outcome == "false_exact"


@pytest.mark.parametrize(
    ("defect", "outcome", "compared"),
    [("certifies", "pass", ["passed"]), ("certifies-honestly", "pass", ["passed"]), ("forgets-rng", "pass", [])],
)
def test_a_certificate_that_is_right_or_says_so_or_is_not_there_is_no_false_one(
    tmp_path: Path, defect: str, outcome: str, compared: list[str]
) -> None:
    result = result_of(tmp_path, defect, case_of(expect=BLIND))
    assert result.outcome == outcome
    assert [check.status for check in result.checks if check.check == "certified_exact"] == compared


# ---- what is compared -----------------------------------------------------------------------------------------------


def case(*, given: dict[str, Any] | None = None, between: list[dict[str, Any]] | None = None, **legs: Any) -> Case:
    """Save at step 2, resume there, train to step 4; ``legs`` are differences of single legs' ``given``."""
    script = [
        {"leg": "reference", "until_step": 4},
        {"leg": "saving", "until_step": 2},
        *(between or []),
        {"leg": "resumed", "until_step": 4, "restore_from": "LATEST"},
    ]
    for step in script:
        if step.get("leg") in legs:
            step["given"] = legs[step["leg"]]
    raw = {"id": "Z1", "title": "it resumes", "spec": "none", "why": "harm", "given": given or {}, "script": script}
    return parse_case({**raw, "expect": [{"check": "exits", "leg": "resumed", "code": 0}]}, file="made-up")


def saving(folder: Path, change: Any = None) -> LegEvidence:
    saved = {"kind": "saved", "global_step": 2, "epoch": 0, "directory": "global_step_2", "buckets": {}}
    return leg(folder, "saving", steps=range(1, 3), events=[[saved]], change=change)


def resumed(folder: Path, verdicts: dict[str, str], change: Any = None, steps: range = range(3, 5)) -> LegEvidence:
    text = "".join(f"\n  {bucket:<17}{verdict}" for bucket, verdict in verdicts.items())
    path = "checkpoints/global_step_2"
    log = {"kind": "log", "level": "INFO", "message": f"Restore certificate of {path}:{text}"}
    restored = {"kind": "restored", "global_step": 2, "epoch": 0, "path": path, "lrs": [], "buckets": {}}
    return leg(folder, steps=steps, events=[[log, restored]], change=change)


def made(folder: Path, verdicts: dict[str, str], change: Any = None, *, saver_change: Any = None) -> Evidence:
    reference = leg(folder, "reference", steps=range(1, 5))
    return evidence(reference, saving(folder, saver_change), resumed(folder, verdicts, change))


def at(step: int, key: str, value: Any) -> Any:
    """A change of one column of one step; ``rng``, ``model`` and ``optimizer`` are digests."""

    def change(item: dict[str, Any], rank: int) -> None:
        if item["global_step"] == step:
            place = item["digests"] if key in ("rng", "model", "optimizer") else item
            place[key] = value

    return change


def found(case: Case, of: Evidence) -> list[tuple[str, str | None, str | None]]:
    """(status, column, bucket) of each leg that was compared."""
    return [
        (record.status, record.divergence.column if record.divergence else None, record.blames)
        for record in certified_checks(case, of)
    ]


COLUMNS = [
    ("samples", "sample_ids", [90], "samples", "train_dataloader"),
    ("lr", "lr", 9.0, "lr", "lr_scheduler"),
    ("rng", "rng", {"python": "ff"}, "rng.python", "rng_state"),
    ("loss", "loss", 9.0, "loss", "model"),
    ("grad_norm", "grad_norm", 9.0, "grad_norm", "model"),
    ("optimizer", "optimizer", "ff", "optimizer", "optimizer"),
    ("model", "model", "ff", "model", "model"),
]


@pytest.mark.parametrize("step", [3, 4])
@pytest.mark.parametrize(("key", "value", "column", "bucket"), [row[1:] for row in COLUMNS])
def test_each_column_of_each_step_is_compared(
    tmp_path: Path, step: int, key: str, value: Any, column: str, bucket: str
) -> None:
    of = made(tmp_path, {**EXACT, **NOTHING}, at(step, key, value))
    ((status, first, blamed),) = found(case(), of)
    assert (status, blamed) == ("failed", bucket)
    assert first is not None
    assert first.startswith(column.partition(".")[0])


def test_a_run_that_goes_on_alike_passes(tmp_path: Path) -> None:
    assert found(case(), made(tmp_path, {**EXACT, **NOTHING})) == [("passed", None, None)]


@pytest.mark.parametrize(
    ("bucket", "explained"),
    [
        ("model", {"loss", "grad_norm", "optimizer", "model"}),
        ("optimizer", {"lr", "optimizer", "model"}),
        ("lr_scheduler", {"lr", "optimizer", "model"}),
        ("rng_state", {"samples", "rng", "loss", "grad_norm", "optimizer", "model"}),
        ("train_dataloader", {row[0] for row in COLUMNS}),
        ("stateful", {row[0] for row in COLUMNS}),
    ],
)
@pytest.mark.parametrize(("name", "key", "value"), [row[:3] for row in COLUMNS])
def test_a_bucket_that_is_not_exact_explains_what_it_can_change_in_the_first_step(
    tmp_path: Path, bucket: str, explained: set[str], name: str, key: str, value: Any
) -> None:
    of = made(tmp_path, {**EXACT, **NOTHING, bucket: "degraded (another one)"}, at(3, key, value))
    ((status, _, _),) = found(case(), of)
    assert status == ("passed" if name in explained else "failed")


@pytest.mark.parametrize(
    "words",
    [
        "degraded (a reason)",
        "absent (not asked for)",
        "absent (the checkpoint holds none)",
        "exact (overridden: model.dropout.p: 0.25 -> 0.5)",
    ],
)
def test_from_the_second_step_on_any_bucket_that_is_not_exact_explains_everything(tmp_path: Path, words: str) -> None:
    of = made(tmp_path, {**EXACT, **NOTHING, "model": words}, lambda item, rank: item.update(loss=9.0))
    assert found(case(), of) == [("passed", None, None)]


def test_a_bucket_is_as_exact_as_on_its_worst_rank(tmp_path: Path) -> None:
    both = {**EXACT, "rng_state": "exact (saved = live) on rank 0\n  rng_state        degraded (fresh) on rank 1"}
    assert found(case(), made(tmp_path, both, at(3, "rng", {"python": "ff"}))) == [("passed", None, None)]


def test_a_run_that_goes_on_at_another_step_than_was_saved_is_a_false_progress(tmp_path: Path) -> None:
    reference = leg(tmp_path, "reference", steps=range(1, 5))
    late = resumed(tmp_path, EXACT, steps=range(4, 5))
    assert found(case(), evidence(reference, saving(tmp_path), late)) == [("failed", "global_step", "progress")]


def test_another_lr_that_the_certificate_does_not_mention_is_a_false_exact(tmp_path: Path) -> None:
    changed = case(resumed={"optimizer": {"kind": "adamw", "lr": 0.5}})
    of = made(tmp_path, EXACT, lambda item, rank: item.update(lr=0.5))
    assert found(changed, of) == [("failed", "lr", "lr_scheduler")]


# ---- what is not ----------------------------------------------------------------------------------------------------

FOREIGN_RUNS = [
    case(saving={"seed": 7}),
    case(reference={"data": {"batch_size": 2}}),
    case(resumed={"optimizer": {"kind": "adamw", "groups": "reversed"}}),
    case(resumed={"world_size": 2}),
    case(between=[{"fault": "edit_extra_state", "step": 2, "path": "rng_state.python", "value": 1}]),
]


@pytest.mark.parametrize("of_another_run", FOREIGN_RUNS)
def test_legs_that_are_another_run_are_not_compared(tmp_path: Path, of_another_run: Case) -> None:
    assert found(of_another_run, made(tmp_path, EXACT, at(3, "loss", 9.0))) == []


@pytest.mark.parametrize(
    "same_run",
    [
        case(saving={"checkpoint": {"save_steps": 1}, "folder": "other", "hold_saves": 1}),
        case(between=[{"fault": "make_foreign", "step": 2}]),
        case(between=[{"fault": "flip_byte", "path": "global_step_2/*", "offset": 1}]),
    ],
)
def test_where_and_when_it_is_saved_and_damage_that_must_be_detected_make_no_other_run(
    tmp_path: Path, same_run: Case
) -> None:
    assert found(same_run, made(tmp_path, EXACT, at(3, "loss", 9.0))) == [("failed", "loss", "model")]


def test_what_was_saved_must_be_the_state_of_the_reference(tmp_path: Path) -> None:
    of = made(tmp_path, EXACT, at(3, "loss", 9.0), saver_change=at(2, "model", "ff"))
    assert found(case(), of) == []


def beyond(folder: Path, change: Any = None, *, of_saver: Any = None, calibrated: bool = True) -> Evidence:
    """The leg that saved step 2 was elsewhere than the reference, and trained on to step 4 itself."""

    def elsewhere(item: dict[str, Any], rank: int) -> None:
        item["loss"] += 1.0
        if of_saver:
            of_saver(item, rank)

    def resumed_there(item: dict[str, Any], rank: int) -> None:
        item["loss"] += 1.0
        if change:
            change(item, rank)

    saved = {"kind": "saved", "global_step": 2, "epoch": 0, "directory": "global_step_2", "buckets": {}}
    saver = leg(folder, "saving", steps=range(1, 5), events=[[saved]], change=elsewhere)
    reference = leg(folder, "reference", steps=range(1, 5))
    return evidence(reference, saver, resumed(folder, EXACT, resumed_there), calibrated=calibrated)


def test_what_the_leg_that_saved_trained_after_its_save_is_the_uninterrupted_run(tmp_path: Path) -> None:
    (record,) = certified_checks(case(), beyond(tmp_path))
    assert (record.status, record.parameters) == ("passed", {"leg": "resumed", "against": "saving"})


@pytest.mark.parametrize(("key", "value", "column", "bucket"), [row[1:] for row in COLUMNS])
def test_a_leg_that_differs_from_the_one_that_saved_is_a_false_exact(
    tmp_path: Path, key: str, value: Any, column: str, bucket: str
) -> None:
    ((status, first, blamed),) = found(case(), beyond(tmp_path, at(3, key, value)))
    assert (status, blamed) == ("failed", bucket)
    assert first is not None
    assert first.startswith(column.partition(".")[0])


def test_the_leg_that_saved_shows_nothing_where_no_such_training_is_known_to_repeat(tmp_path: Path) -> None:
    different = at(3, "loss", 9.0)
    assert found(case(), beyond(tmp_path / "one", different, calibrated=False)) == []
    assert found(case(saving={"seed": 7}), beyond(tmp_path / "two", different)) == []


def test_a_reference_at_the_saved_step_is_preferred_to_the_leg_that_saved(tmp_path: Path) -> None:
    saved = {"kind": "saved", "global_step": 2, "epoch": 0, "directory": "global_step_2", "buckets": {}}
    saver = leg(tmp_path, "saving", steps=range(1, 5), events=[[saved]], change=at(3, "loss", 9.0))
    reference = leg(tmp_path, "reference", steps=range(1, 5))
    assert found(case(), evidence(reference, saver, resumed(tmp_path, EXACT))) == [("passed", None, None)]


def test_a_reference_that_does_not_repeat_shows_nothing(tmp_path: Path) -> None:
    legs = made(tmp_path, EXACT, at(3, "loss", 9.0)).legs.values()
    assert found(case(), evidence(*legs, calibrated=False)) == []


def test_a_leg_that_trained_nothing_is_not_compared(tmp_path: Path) -> None:
    none = evidence(
        leg(tmp_path, "reference", steps=range(1, 5)), saving(tmp_path), resumed(tmp_path, EXACT, steps=range(0))
    )
    assert found(case(), none) == []

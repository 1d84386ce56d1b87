"""Checks on steps against a reference: each passes on right evidence, fails on wrong evidence, and is an error on none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.checks import CHECKS, run_check
from tests.conformance.evidence_made import evidence, leg, status


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

"""Checks on restored buckets: each passes on right evidence, fails on wrong evidence, and is an error on none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.records.evidence import Evidence
from tests.conformance.evidence_made import ERROR, evidence, leg, saved, state, status


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


def test_bucket_as_built_looks_at_what_a_refusal_left_on_every_rank(tmp_path: Path) -> None:
    built, moved = {"w": "float32[2] aa"}, {"w": "float32[2] bb"}

    def told(*of_ranks: dict[str, str], kind: str = "refused") -> list[list[dict[str, Any]]]:
        return [[state("built", model=built), state(kind, model=found)] for found in of_ranks]

    found = evidence(
        leg(tmp_path, "untouched", events=told(built, built), ends=[1, 1]),
        leg(tmp_path, "half", events=told(built, moved), ends=[1, 1]),
        leg(tmp_path, "went-on", events=told(built, built, kind="begin"), ends=[0, 0]),
        leg(tmp_path, "silent", events=[[state("built", model=built)]] * 2, ends=[1, 1]),
    )
    assert [
        status(found, "bucket_as_built", leg=name, buckets=["model"], at="refused")
        for name in ("untouched", "half", "went-on", "silent")
    ] == [("passed", None), ("failed", "model"), ("failed", "storage"), ("error", None)]

"""Checks on saves and the disk: each passes on right evidence, fails on wrong evidence, and is an error on none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.evidence_made import evidence, leg, saved, status


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


def test_not_saved_again_leaves_out_the_lock_and_the_certificates(tmp_path: Path) -> None:
    step = {"checkpoints/global_step_2/.metadata": "x"}
    own = {
        "checkpoints/.writer.lock": "another",
        "checkpoints/certificates": "",
        "checkpoints/certificates/a.json": "{}",
    }
    found = evidence(leg(tmp_path, before={**step, "checkpoints/.writer.lock": "one"}, after={**step, **own}))
    assert status(found, "not_saved_again", leg="resumed")[0] == "passed"
    assert status(found, "nothing_changed_on_disk", leg="resumed")[0] == "failed"


def operations(*done: str) -> list[list[dict[str, Any]]]:
    parts = [one.partition(" ") for one in done]
    return [[{"kind": "operation", "save": 4, "number": 1, "what": what, "where": where} for what, _, where in parts]]


@pytest.mark.parametrize(
    ("done", "expected"),
    [
        (("write a", "fsync a", "rename b", "fsync ."), "passed"),
        (("fsync .", "write a", "write a", "fsync a", "fsync x", "rename b", "fsync .", "fsync ."), "passed"),
        (("write a", "fsync a", "write a", "rename b", "fsync ."), "failed"),
        (("write a", "rename b", "fsync a", "fsync ."), "failed"),
        (("write a", "fsync a", "fsync .", "rename b"), "failed"),
        (("fsync a", "rename b", "fsync ."), "failed"),
        (("write a", "fsync a", "rename b", "fsync .", "write a"), "failed"),
    ],
)
def test_operations_in_order(tmp_path: Path, done: tuple[str, ...], expected: str) -> None:
    found = evidence(leg(tmp_path, events=operations(*done)))
    order = ["write a", "fsync a", "rename ?", "fsync ."]
    assert status(found, "operations_in_order", leg="resumed", save=4, order=order)[0] == expected


def test_operations_in_order_can_not_judge_a_save_of_which_nothing_was_told(tmp_path: Path) -> None:
    found = evidence(leg(tmp_path, events=operations("write a", "fsync a")))
    assert status(found, "operations_in_order", leg="resumed", save=6, order=["write a", "fsync a"])[0] == "error"
    assert status(found, "operations_in_order", leg="resumed", save=4, order=["write a"])[0] == "error"

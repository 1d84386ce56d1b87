"""The checks on order, on evidence whose right outcome is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.evidence_made import evidence, leg, status


def with_ids(first: int) -> Any:
    """Steps 1 to 2 in epoch 0, two samples each: first, first+1, first+2, first+3."""

    def change(record: dict[str, Any], rank: int) -> None:
        start = first + 2 * (record["global_step"] - 1)
        record["sample_ids"] = [start, start + 1]

    return change


def saved(step: int) -> dict[str, Any]:
    return {"kind": "saved", "global_step": step, "epoch": 0, "buckets": {}}


def committed(step: int, how: str = "beside training") -> dict[str, Any]:
    return {"kind": "value", "name": f"committed_{step}", "value": how}


END = {"kind": "end", "global_step": 4, "epoch": 0}


@pytest.mark.parametrize(
    ("step", "ids", "expected"),
    [
        (2, [2, 3], ("passed", None)),
        (2, [3, 2], ("failed", "train_dataloader")),
        (9, [2, 3], ("failed", "train_dataloader")),
    ],
)
def test_sample_ids_are(tmp_path: Path, step: int, ids: list[int], expected: Any) -> None:
    found = evidence(leg(tmp_path, steps=range(1, 3), change=with_ids(0)))
    assert status(found, "sample_ids_are", leg="resumed", step=step, ids=ids) == expected


@pytest.mark.parametrize(
    ("second", "samples", "repeated", "expected"),
    [
        (4, 8, 0, ("passed", None)),
        (3, 7, 1, ("passed", None)),
        (3, 7, 0, ("failed", "train_dataloader")),
        (4, 9, 0, ("failed", "train_dataloader")),
    ],
)
def test_shares_cover(tmp_path: Path, second: int, samples: int, repeated: int, expected: Any) -> None:
    legs = [
        leg(tmp_path, "saving-a", steps=range(1, 3), change=with_ids(0)),
        leg(tmp_path, "saving-b", steps=range(1, 3), change=with_ids(second)),
    ]
    shares = [["saving-a"], ["saving-b"]]
    found = status(evidence(*legs), "shares_cover", shares=shares, samples=samples, epochs=[0], repeated=repeated)
    assert found == expected


def test_trains_steps(tmp_path: Path) -> None:
    found = evidence(leg(tmp_path, steps=range(5, 8)))
    assert status(found, "trains_steps", leg="resumed", steps=[5, 6, 7]) == ("passed", None)
    assert status(found, "trains_steps", leg="resumed", steps=[5, 6]) == ("failed", "progress")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([saved(2), committed(2), saved(4), committed(4), END], "passed"),
        ([saved(2), saved(4), committed(2), committed(4), END], "failed"),  # the second did not wait
        ([saved(2), committed(2), saved(4), END, committed(4)], "failed"),  # the end did not wait
        ([saved(2), committed(2, "while training stood still"), saved(4), committed(4), END], "failed"),
        ([saved(2), committed(2), saved(4), END], "failed"),  # never finished
        ([saved(2), saved(4), END], "error"),  # nothing was held back
    ],
)
def test_saves_in_background(tmp_path: Path, events: list[dict[str, Any]], expected: str) -> None:
    found = evidence(leg(tmp_path, events=[events]))
    assert status(found, "saves_in_background", leg="resumed", steps=[2, 4])[0] == expected

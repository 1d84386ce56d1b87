"""The check on shared samples and random streams, on evidence whose right outcome is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.evidence_made import evidence, leg, status

PAIRS = [[0, 1], [2, 3]]
ALONE = [[0], [1], [2], [3]]


def in_pairs(record: dict[str, Any], rank: int) -> None:
    """Ranks 0 and 1 have the same samples and streams, ranks 2 and 3 others."""
    pair, step = rank // 2, record["global_step"]
    record["sample_ids"] = [4 * step + 2 * pair, 4 * step + 2 * pair + 1]
    for name in ("torch_cpu", "python", "numpy"):
        record["digests"]["rng"][name] = f"{name}-{pair}-{step}"


def with_a_common_sample(record: dict[str, Any], rank: int) -> None:
    """As in pairs, but step 2 of the second pair has a sample of the first's."""
    in_pairs(record, rank)
    if rank >= 2 and record["global_step"] == 2:
        record["sample_ids"][1] = 8


def with_a_common_stream(record: dict[str, Any], rank: int) -> None:
    """As in pairs, but all ranks draw from one NumPy stream."""
    in_pairs(record, rank)
    record["digests"]["rng"]["numpy"] = f"numpy-{record['global_step']}"


def with_a_stray(record: dict[str, Any], rank: int) -> None:
    """As in pairs, but rank 3 goes its own way in step 3."""
    in_pairs(record, rank)
    if rank == 3 and record["global_step"] == 3:
        record["sample_ids"] = [900, 901]
        record["digests"]["rng"]["python"] = "elsewhere"


@pytest.mark.parametrize(
    ("change", "column", "groups", "expected"),
    [
        (in_pairs, "samples", PAIRS, ("passed", None)),
        (in_pairs, "rng", PAIRS, ("passed", None)),
        (in_pairs, "samples", ALONE, ("failed", "train_dataloader")),
        (in_pairs, "rng", ALONE, ("failed", "rng_state")),
        (with_a_common_sample, "samples", PAIRS, ("failed", "train_dataloader")),
        (with_a_common_sample, "rng", PAIRS, ("passed", None)),
        (with_a_common_stream, "rng", PAIRS, ("failed", "rng_state")),
        (with_a_stray, "samples", PAIRS, ("failed", "train_dataloader")),
        (with_a_stray, "rng", PAIRS, ("failed", "rng_state")),
        (in_pairs, "rng", [[0, 1], [2]], ("error", None)),  # a rank is in no group
        (in_pairs, "rng", [[0, 1], [1, 2, 3]], ("error", None)),  # one is in two
    ],
)
def test_ranks_share_within_their_group_only(
    tmp_path: Path, change: Any, column: str, groups: Any, expected: Any
) -> None:
    found = evidence(leg(tmp_path, steps=range(1, 4), ends=[0, 0, 0, 0], change=change))
    assert status(found, "ranks_share", leg="resumed", column=column, groups=groups) == expected


def test_a_single_rank_shows_nothing(tmp_path: Path) -> None:
    found = evidence(leg(tmp_path, steps=range(1, 4)))
    assert status(found, "ranks_share", leg="resumed", column="rng", groups=[[0]]) == ("error", None)


def test_records_without_digests_show_nothing_of_streams(tmp_path: Path) -> None:
    def without(record: dict[str, Any], rank: int) -> None:
        in_pairs(record, rank)
        del record["digests"]

    found = evidence(leg(tmp_path, steps=range(1, 4), ends=[0, 0, 0, 0], change=without))
    assert status(found, "ranks_share", leg="resumed", column="rng", groups=PAIRS) == ("error", None)
    assert status(found, "ranks_share", leg="resumed", column="samples", groups=PAIRS) == ("passed", None)


# ---- copies ---------------------------------------------------------------------------------------------------------


def of_pairs(*, stray: bool = False) -> list[list[dict[str, Any]]]:
    """By rank, the events of two saves and the end: one weight that a pair copies, one that each rank has a part of."""
    events = []
    for rank in range(4):
        states = []
        for step in (2, 4, 6):
            copied = f"float32[2] {step}{rank // 2}{'f' if stray and rank == 3 and step == 4 else '0'}"
            buckets = {"model": {"norm.weight": copied, "hidden.weight": f"float32[4] {step}{rank}"}}
            kind = "end" if step == 6 else "saved"
            states.append({"kind": kind, "global_step": step, "epoch": 0, "buckets": buckets})
        events.append(states)
    return events


@pytest.mark.parametrize(
    ("stray", "groups", "entries", "expected"),
    [
        (False, PAIRS, "norm.*", ("passed", None)),
        (True, PAIRS, "norm.*", ("failed", "model")),
        (False, PAIRS, "hidden.*", ("failed", "model")),
        (False, PAIRS, "none.*", ("error", None)),
        (False, [[0, 2], [1, 3]], "norm.*", ("error", None)),  # two groups hold the same
    ],
)
def test_copies_are_compared_within_their_group_at_every_save(
    tmp_path: Path, stray: bool, groups: Any, entries: str, expected: Any
) -> None:
    found = evidence(leg(tmp_path, ends=[0, 0, 0, 0], events=of_pairs(stray=stray)))
    assert status(found, "copies_agree", leg="resumed", groups=groups, entries=entries) == expected

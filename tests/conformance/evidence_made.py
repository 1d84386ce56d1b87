"""Hand-written evidence, for checks whose right outcome is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.checks import CHECKS, run_check
from conformance.records.evidence import Evidence, LegEvidence
from conformance.records.results import AskedFault, CalibrationRecord, LegRecord, LookRecord, RankEnd
from tests.conformance.trajectories import line, write_rank_file

ERROR = {
    "kind": "error",
    "class": "CheckpointNotFoundError",
    "bases": ["HyperResumeError", "FileNotFoundError", "OSError"],
    "message": "no training state in it",
}
CALIBRATION = CalibrationRecord(
    signature="s", folders=("a", "b"), steps=10, equal=True, divergence=None, spread={}, problem=None
)


def leg(
    folder: Path,
    name: str = "resumed",
    *,
    events: list[list[dict[str, Any]]] | None = None,
    steps: range | None = None,
    ends: list[int | str | None] | None = None,
    agents: Sequence[int | str] = (),
    before: dict[str, str] | None = None,
    after: dict[str, str] | None = None,
    change: Any = None,
    **record: Any,
) -> LegEvidence:
    """A leg with these events by rank, records of ``steps``, ends of its ranks and of what started them (exit codes or
    signals), and files before and after."""
    ends = ends if ends is not None else [0]
    own = folder / name
    own.mkdir(parents=True)
    for rank in range(len(ends)):
        told = (events or [[]] * len(ends))[rank]
        lines = [json.dumps({"at": 0.1, **event}) for event in [{"kind": "start"}, *told]]
        (own / f"events_rank_{rank}.jsonl").write_text("".join(f"{text}\n" for text in lines))
        if steps is not None:
            records = [line(rank, step) for step in steps]
            for item in records:
                if change:
                    change(item, rank)
            write_rank_file(own, rank, records)
    for file, listing in (("disk_before.json", before or {}), ("disk_after.json", after or {})):
        (own / file).write_text(json.dumps({path: [len(text), text, 1] for path, text in listing.items()}))
    values: dict[str, Any] = {
        "key": "Z1",
        "leg": name,
        "folder": name,
        "launcher": "warm",
        "argv": (),
        "until_step": 10,
        "restore_from": None,
        "checkpoint_dir": "checkpoints",
        "sabotage": None,
        "shared": False,
        "agents": tuple(map(_rank_end, agents)),
        "ranks": tuple(map(_rank_end, ends)),
        "first_steps": (steps[0] if steps else None,) * len(ends),
        "last_steps": (steps[-1] if steps else None,) * len(ends),
        "fault": None,
        "timed_out": False,
        "trouble": None,
        "started_at": "2026-01-01T00:00:00.000+00:00",
        "seconds": 1.0,
        **record,
    }
    return LegEvidence(record=LegRecord(**values), folder=own)


def evidence(*legs: LegEvidence, looks: dict[str, Any] | None = None, calibrated: bool = True) -> Evidence:
    return Evidence(
        legs={item.record.leg: item for item in legs},
        faults=(),
        looks={
            name: LookRecord(key="Z1", name=name, step=2, found=found, problem=None)
            for name, found in (looks or {}).items()
        },
        calibrations={item.record.leg: CALIBRATION for item in legs} if calibrated else {},
    )


def _rank_end(end: int | str | None) -> RankEnd:
    return RankEnd(exit_code=end if isinstance(end, int) else None, signal=end if isinstance(end, str) else None)


def killed(
    step: int,
    reached_by: tuple[int, ...] = (0, 1),
    *,
    awaited: tuple[int, ...] = (0, 1),
    struck: tuple[int, ...] = (0, 1),
    victims: str = "all",
) -> AskedFault:
    """A kill after ``step`` in a leg of two ranks."""
    return AskedFault(
        kind="kill",
        after_step=step,
        moment="after_step",
        rank=None,
        operation=None,
        victims=victims,
        awaited=awaited,
        struck=struck,
        reached_by=reached_by,
    )


def status(of: Evidence, check: str, **parameters: Any) -> tuple[str, str | None]:
    """The status of a check and its bucket."""
    typed = CHECKS.parameters(check, parameters, "here")
    record = run_check(check, typed, of)
    return record.status, record.blames


def saved(step: int, **buckets: Any) -> dict[str, Any]:
    return {"kind": "saved", "global_step": step, "epoch": 0, "buckets": buckets}


def state(kind: str, step: int = 0, **buckets: Any) -> dict[str, Any]:
    return {"kind": kind, "global_step": step, "epoch": 0, "start_epoch": 1, "start_step": 3, "buckets": buckets}

"""The records of a run as pandas frames, one row per fact. Everything that the outputs count or draw is taken from here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from conformance.records.results import KillRecord, LegRecord, ResultRecord, SabotageRecord
from conformance.records.trajectory import TrajectoryRecord
from reports.reading.read import Part, Run, plain

METRICS = ("loss", "lr", "grad_norm")
_STEP_FIELDS = ("rank", "global_step", "epoch", "batch_index", *METRICS, "seconds", "sample_ids")
_STEP_COLUMNS = ("part", "folder", "rank", "step", "epoch", "batch_index", *METRICS, "seconds", "sample_ids")


@dataclass(frozen=True, kw_only=True)
class Frames:
    """All records of a run.

    results: one row per result (the fields of the record, and ``part``, ``platform``, ``judged``).
    legs: one row per leg and case (``part`` and the fields of the record); a shared reference has a row for each case.
    steps: one row per finished step, rank and leg folder; ``step`` is the global step. Floats are those of the records.
    sabotages, kills: one row per record, with ``part``.
    """

    results: pd.DataFrame
    legs: pd.DataFrame
    steps: pd.DataFrame
    sabotages: pd.DataFrame
    kills: pd.DataFrame


def make_frames(run: Run) -> Frames:
    """Put a run's records into frames, in the order of parts and records."""
    results = [_result_row(part, result) for part in run.parts for result in part.results.of(ResultRecord)]
    return Frames(
        results=pd.DataFrame(results, columns=None if results else ["part", "platform", "judged", "outcome", "case"]),
        legs=pd.DataFrame(
            [{"part": part.name, **plain(leg)} for part in run.parts for leg in part.results.of(LegRecord)]
        ),
        steps=_steps(run),
        sabotages=pd.DataFrame(
            [{"part": part.name, **plain(one)} for part in run.parts for one in part.results.of(SabotageRecord)]
        ),
        kills=pd.DataFrame([row for part in run.parts for row in kill_rows(part)]),
    )


def kill_rows(part: Part) -> Iterator[dict[str, Any]]:
    """The kills of soaks and sweeps."""
    for record in part.results.of(KillRecord):
        yield {"part": part.name, **plain(record)}


def _result_row(part: Part, result: ResultRecord) -> dict[str, Any]:
    row = {"part": part.name, "platform": part.results.header.platform, "judged": part.is_judged(result)}
    return {**row, **plain(result)}


def _steps(run: Run) -> pd.DataFrame:
    columns: dict[str, list[Any]] = {name: [] for name in _STEP_COLUMNS}
    for part in run.parts:
        for folder, trajectory in part.trajectories.items():
            for rank in trajectory.ranks:
                records = trajectory.records[rank]
                columns["part"] += [part.name] * len(records)
                columns["folder"] += [folder] * len(records)
                _extend(columns, records)
    frame = pd.DataFrame(columns)
    for name in METRICS:
        frame[name] = frame[name].astype("float64")  # None, where a trainer measures no gradient norm, becomes NaN
    for name in ("part", "folder"):
        frame[name] = frame[name].astype("category")
    return frame


def _extend(columns: dict[str, list[Any]], records: tuple[TrajectoryRecord, ...]) -> None:
    for field, column in zip(_STEP_FIELDS, _STEP_COLUMNS[2:], strict=True):
        columns[column] += [getattr(record, field) for record in records]

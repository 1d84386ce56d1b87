"""The trend over earlier runs: one line per run in ``history.jsonl``, and what changed since, in words."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.plain_data import serial
from conformance.records.trajectory import RecordError
from reports.contents.document import Report, as_json
from reports.contents.text import Text, say

# The lines are the same since the first version of the report, so its history is read on.
SCHEMA = "hyper_resume.history/1"
_SHOWN = 30


@dataclass(frozen=True, kw_only=True)
class HistoryLine:
    """One run: ``digest`` is of its whole report, so that the same report is never counted twice."""

    schema: str
    digest: str
    run: str
    started_at: str
    commit: str | None
    state: str
    outcomes: Mapping[str, str]

    def is_same_run(self, other: HistoryLine) -> bool:
        """True for a line of the same records, also where another version of this package made the report of them."""
        if self.digest == other.digest:
            return True
        own, others = ((line.run, line.started_at, line.commit, line.outcomes) for line in (self, other))
        return own == others


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A case whose outcome changed since the run before. ``flaky``: at the same commit."""

    name: str
    text: Text
    flaky: bool
    strip: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Trend:
    """The runs, oldest first, this one last, and what changed in the last step."""

    runs: tuple[HistoryLine, ...]
    flips: tuple[Flip, ...]


def line_of(report: Report) -> HistoryLine:
    """The line of a report."""
    commits = dict.fromkeys(part.facts["commit"] for part in report.parts if "commit" in part.facts)
    return HistoryLine(
        schema=SCHEMA,
        digest=hashlib.sha256(as_json(report).encode()).hexdigest()[:32],
        run=" + ".join(part.run_id for part in report.parts),
        started_at=min(part.started_at for part in report.parts),
        commit=", ".join(commits) or None,
        state=report.verdict.state,
        outcomes={f"{case.platform}/{case.key}": case.outcome for case in report.cases},
    )


def read_history(path: Path) -> tuple[HistoryLine, ...]:
    """Read the runs so far; a file that is not there yet holds none.

    Raises:
        RecordError: a line is malformed.
    """
    if not path.exists():
        return ()
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found.append(serial.build(HistoryLine, json.loads(line), f"{path}:{number}"))
        except (ValueError, serial.SerialError) as error:
            raise RecordError(f"{path}:{number}: no line of a history: {error}") from error
    return tuple(found)


def with_run(history: Sequence[HistoryLine], line: HistoryLine) -> tuple[HistoryLine, ...]:
    """The history up to and with this run; when an old run is built again, later runs are left out."""
    before = itertools.takewhile(lambda one: not one.is_same_run(line), history)
    return (*before, line)


def append_run(path: Path, line: HistoryLine) -> None:
    """Add a run to the file, once."""
    if any(one.is_same_run(line) for one in read_history(path)):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(serial.to_plain(line), ensure_ascii=False) + "\n")


def make_trend(runs: Sequence[HistoryLine]) -> Trend:
    """What changed from the run before the last to the last, case by case."""
    flips = []
    if len(runs) > 1:
        before, now = runs[-2], runs[-1]
        same_commit = before.commit is not None and before.commit == now.commit
        for name in sorted({*before.outcomes, *now.outcomes}):
            old, new = before.outcomes.get(name), now.outcomes.get(name)
            if old != new:
                flips.append(_flip(name, old, new, same_commit, runs))
    return Trend(runs=tuple(runs[-_SHOWN:]), flips=tuple(flips))


def _flip(name: str, old: str | None, new: str | None, same_commit: bool, runs: Sequence[HistoryLine]) -> Flip:
    values: dict[str, Any] = {"name": name, "old": old, "new": new}
    if old is None:
        text = say("{name} is new: {new}", "{name} 为新增：{new}", **values)
    elif new is None:
        text = say("{name} was {old} and is gone", "{name} 原为 {old}，本次没有", **values)
    else:
        text = say("{name} was {old}, is {new}", "{name} 由 {old} 变为 {new}", **values)
    flaky = same_commit and old is not None and new is not None
    if flaky:
        text = say("{text}, at the same commit: flaky", "{text}，提交未变：不稳定", text=text)
    strip = tuple(run.outcomes.get(name, "missing") for run in runs[-_SHOWN:])
    return Flip(name=name, text=text, flaky=flaky, strip=strip)

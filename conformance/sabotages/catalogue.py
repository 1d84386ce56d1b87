"""The catalogue of sabotages (``sabotages.yaml``), its lint, and the outcome of installing each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.matrix.case import Case
from conformance.plain_data import serial
from conformance.plain_data.suggestions import hint
from conformance.plain_data.yaml_lines import load_yaml
from conformance.records.results import BLAMES, ResultRecord, SabotageRecord

SABOTAGES_FILE = Path(__file__).parents[1] / "sabotages.yaml"
# A case catches a defect by its own checks, or by the comparison of each certificate with the training after it.
_CAUGHT = ("fail", "false_exact")
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, kw_only=True)
class SabotageEntry:
    """A defect: its harm, the rows of known bugs where it was seen, the cases that must ALL fail, the bucket to report."""

    id: str
    title: str
    harm: str
    seen: tuple[str, ...]
    cases: tuple[str, ...]
    bucket: str


def load_sabotages(path: Path = SABOTAGES_FILE) -> tuple[SabotageEntry, ...]:
    """Read and lint the sabotages.

    Raises:
        SerialError: malformed, an id twice, no case, or an unknown bucket.
    """
    entries: list[SabotageEntry] = []
    for item in load_yaml(path):
        where = f"{path.name}:{getattr(item, 'line', 1)}"
        entry = serial.build(SabotageEntry, item, where)
        if not _ID.fullmatch(entry.id) or any(entry.id == other.id for other in entries):
            raise serial.SerialError(f"{where}: {entry.id!r}: lower-case words joined by -, once")
        if not entry.cases or not entry.harm.strip():
            raise serial.SerialError(f"{where}: {entry.id}: it needs harm and at least one case")
        if entry.bucket not in BLAMES:
            raise serial.SerialError(f"{where}: {entry.id}: bucket is one of {', '.join(BLAMES)}")
        entries.append(entry)
    return tuple(entries)


def require_known(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise when one of ``names`` is no sabotage of ``known``.

    Raises:
        SerialError: with the nearest known name.
    """
    known = set(known)
    for name in names:
        if name not in known:
            raise serial.SerialError(f"no sabotage is called {name!r}; {hint(name, known)}")


def lint_sabotages(entries: Sequence[SabotageEntry], cases: Sequence[Case]) -> list[str]:
    """Mismatches of cases and sabotages: each must name the other, and each must exist."""
    problems = []
    ids = {case.id: case for case in cases}
    names = {entry.id: entry for entry in entries}
    for entry in entries:
        for case_id in entry.cases:
            if case_id not in ids:
                problems.append(f"sabotage {entry.id}: there is no case {case_id}")
            elif entry.id not in ids[case_id].sabotages:
                problems.append(f"sabotage {entry.id}: case {case_id} does not name it")
    for case in cases:
        if not case.sabotages and case.level != "note":
            problems.append(f"case {case.id}: no sabotage shows that it would notice anything")
        for name in case.sabotages:
            if name not in names:
                problems.append(f"case {case.id}: there is no sabotage {name}")
            elif case.id not in names[name].cases:
                problems.append(f"case {case.id}: sabotage {name} does not name it")
    return problems


def judge_sabotage(entry: SabotageEntry, results: Mapping[str, ResultRecord]) -> SabotageRecord:
    """Caught if every case that it names fails; ``right_bucket`` if one of these reports its bucket first."""
    outcomes = {case_id: results[case_id].outcome for case_id in entry.cases}
    red = [results[case_id] for case_id in entry.cases if results[case_id].outcome in _CAUGHT]
    missed = [case_id for case_id, outcome in outcomes.items() if outcome not in _CAUGHT]
    caught = not missed
    blamed = [result.blamed for result in red if result.blamed]
    right = entry.bucket in blamed
    by = next((check.check for result in red for check in result.checks if check.status == "failed"), None)
    reason = "; ".join(f"{case_id}: {outcomes[case_id]} {results[case_id].reason}".strip() for case_id in missed)
    return SabotageRecord(
        id=entry.id,
        title=entry.title,
        caught=caught,
        outcomes=outcomes,
        caught_by=by,
        expected_bucket=entry.bucket,
        blamed_bucket=entry.bucket if right else (blamed[0] if blamed else None),
        right_bucket=right,
        reason=reason,
    )


def sabotage_table(records: Iterable[SabotageRecord], *, clean: int, false_alarms: Sequence[str]) -> str:
    """The table that ``python -m conformance sabotage`` prints."""
    records = list(records)
    width = max((len(record.id) for record in records), default=8)
    lines = [f"{'sabotage':{width}}  caught  bucket (expected)                   by"]
    for record in records:
        blamed = record.blamed_bucket or "-"
        bucket = blamed if record.right_bucket else f"{blamed} ({record.expected_bucket})"
        lines.append(
            f"{record.id:{width}}  {'yes' if record.caught else 'NO':6}  {bucket:35} {record.caught_by or '-'}"
            + (f"  {record.reason}" if record.reason else "")
        )
    caught = [record for record in records if record.caught]
    right = [record for record in caught if record.right_bucket]
    lines += [
        "",
        f"caught / expected:     {len(caught)} / {len(records)}",
        f"right bucket / caught: {len(right)} / {len(caught)}",
        f"false alarms:          {len(false_alarms)} in {clean} clean runs"
        + (f": {', '.join(false_alarms[:5])}" if false_alarms else ""),
    ]
    return "\n".join(lines)

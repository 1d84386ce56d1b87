"""The report as data, with everything that the page, JUnit and the summary say; ``results.json`` is its plain form.

The HTML is rendered from this report and from the frames of the same records, so no two of the outputs can disagree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from conformance.plain_data import serial
from conformance.records.comparison import Divergence
from conformance.records.results import CheckRecord
from conformance.records.trajectory import RecordError
from conformance.storage.records import Storage
from reports.contents.text import Text
from reports.reading.costs import CostRun

SCHEMA = "hyper_resume.report/6"
SCHEMA_FILE = Path(__file__).parents[1] / "schema" / "report.schema.json"

# `passed` is of a selection: all that was run passed; whether that was all is not judged.
State = Literal["accepted", "passed", "refused", "incomplete"]
# The states of a cell, the best first. A cell of several cases has the worst of theirs. `missing`: required, without a result.
CELL_STATES = (
    "pass", "note", "missing", "skipped", "unsupported", "error", "known_fail", "unexpected_pass", "fail", "false_exact"
)  # fmt: skip
# Why a cell is no judgement of the trainer: a closed list.
REASONS = (
    "needs-npu",
    "needs-gpu",
    "not-run",
    "lacks-ability",
    "skipped",
    "known-defect",
    "harness-error",
    "sabotaged",
)


@dataclass(frozen=True, kw_only=True)
class PartEntry:
    """One results folder and its provenance, as far as its header holds it; ``missing`` names what the header does not hold."""

    name: str
    run_id: str
    schema: str
    suite: str
    platform: str
    adapter: str
    versions: Mapping[str, str]
    system: str
    machine: Mapping[str, str]
    command: str
    started_at: str
    seconds: float
    accepted: bool
    counts: Mapping[str, int]
    facts: Mapping[str, str]
    missing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that keeps the run from being accepted. ``anchor`` is the id of its place on the page, if it has one.

    ``divergence`` is the first value that shows it, where there is one.
    """

    kind: str
    weight: Literal["refused", "incomplete"]
    subject: str
    text: Text
    anchor: str | None
    divergence: Divergence | None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The state, one sentence that explains it, and every finding, the worst first."""

    state: State
    sentence: Text
    findings: tuple[Finding, ...]
    counts: Mapping[str, int]
    required: int
    required_passed: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One id on one platform. ``state`` None: not required there. ``anchors`` lead to the cases behind it."""

    platform: str
    state: str | None
    reason: str | None
    passed: int
    total: int
    anchors: tuple[str, ...]
    lacking: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One id of the matrix with its cells, in the order of the platforms."""

    id: str
    group: str
    title: Text
    in_specification: bool
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class DoneEntry:
    """One acceptance criterion of the specification with its evidence."""

    id: str
    text: Text
    state: Literal["met", "not_met", "not_run"]
    evidence: Text
    anchors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch of the steps that count (named by their checkpoint directory), compared with the reference.

    ``duplicated`` came more often than in the reference, ``skipped`` less often; ``out_of_order_at`` is the place of the first
    id that differs from the reference.
    """

    history: str
    epoch: int
    rank: int
    seen: int
    expected: int | None
    duplicated: tuple[int, ...]
    skipped: tuple[int, ...]
    out_of_order_at: int | None


@dataclass(frozen=True, kw_only=True)
class Resume:
    """One interruption and the resume after it. ``lost_steps`` is the recovery point (RPO), ``seconds`` the time (RTO).

    ``measured`` says which time: ``outage`` is from the kill until the first step is ready to run; ``restart`` is only from the
    start of the new process, for records that do not hold when that was.
    """

    interrupted: str
    resumed: str
    killed_after: int | None
    resumed_at: int | None
    lost_steps: int | None
    seconds: float | None
    measured: Literal["outage", "restart"]


@dataclass(frozen=True, kw_only=True)
class BucketCell:
    """One bucket on one rank: what was restored, compared with what was saved."""

    bucket: str
    rank: int
    state: Literal["exact", "differs", "absent", "no_counterpart"]
    entries: int
    different: tuple[tuple[str, str, str], ...]


Question = Literal["came_back", "complete", "same_thing", "still_there"]
QUESTIONS: tuple[Question, ...] = ("came_back", "complete", "same_thing", "still_there")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Whether one of the four holds for a bucket; ``declared``: not, as the run was told to. Reasons in the trainer's words."""

    state: Literal["holds", "broken", "declared", "not_asked"]
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FourAnswers:
    """The rule of four for one bucket: what was saved came back; all that moves was saved; the run is made of the same things;
    at the first forward pass the bucket still was what was restored.
    """

    bucket: str
    came_back: Answer
    complete: Answer
    same_thing: Answer
    still_there: Answer


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What one restore did, by bucket and rank, and the trainer's warnings during it.

    ``four`` is what the trainer's own certificate says; empty where it logged none. ``compared_with`` are the uninterrupted
    legs that the training after it was compared with.
    """

    leg: str
    step: int | None
    cells: tuple[BucketCell, ...]
    warnings: tuple[str, ...]
    four: tuple[FourAnswers, ...]
    compared_with: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LegEntry:
    """One leg as the page shows it."""

    leg: str
    role: str
    folder: str
    launcher: str
    ends: str
    restore_from: str | None
    first_step: int | None
    last_step: int | None
    until_step: int | None
    ranks: int
    fault: str | None
    trouble: str | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What one leg's program ran with, after all overrides: (field, value, source), sources in the program's own words.

    Of a later leg of the same case only what differs from the leg that ``base`` names.
    """

    leg: str
    base: str | None
    rows: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, kw_only=True)
class CaseEntry:
    """One judged case: its outcome with everything that leads to the cause."""

    anchor: str
    part: str
    suite: str
    platform: str
    key: str
    case: str
    title: Text
    level: str
    spec: str
    why: str
    outcome: str
    reason: str
    blamed: str | None
    sabotage: str | None
    repeat: int
    reproduce: str
    seconds: float
    layout: str
    given: tuple[tuple[str, str, str], ...]
    configurations: tuple[Configuration, ...]
    checks: tuple[CheckRecord, ...]
    divergence: Divergence | None
    legs: tuple[LegEntry, ...]
    damage: tuple[str, ...]
    reference: str | None
    resumes: tuple[Resume, ...]
    certificates: tuple[Certificate, ...]
    epochs: tuple[Epoch, ...]


@dataclass(frozen=True, kw_only=True)
class SabotageEntry:
    """One defect that was put in on purpose: was it noticed, and attributed to the right bucket?"""

    part: str
    id: str
    title: str
    caught: bool
    caught_by: str | None
    expected_bucket: str
    blamed_bucket: str | None
    right_bucket: bool
    cases: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class KillEntry:
    """One kill of a soak, or one point of a crash sweep; ``divergence`` is the first value that differs from the reference."""

    anchor: str
    part: str
    key: str
    number: int
    mode: str
    moment: str
    step: int | None
    rank: int | None
    operation: int | None
    what: str | None
    victims: str
    last_step: int | None
    resumed_at: int | None
    lost_steps: int | None
    outcome: str
    reason: str
    divergence: Divergence | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole report."""

    schema: str
    title: str
    profile: str
    is_acceptance: bool
    platforms: tuple[str, ...]
    verdict: Verdict
    parts: tuple[PartEntry, ...]
    rows: tuple[Row, ...]
    done: tuple[DoneEntry, ...]
    focus: tuple[str, ...]
    cases: tuple[CaseEntry, ...]
    sabotages: tuple[SabotageEntry, ...]
    kills: tuple[KillEntry, ...]
    storage: Storage
    costs: tuple[CostRun, ...]
    calibrations: Mapping[str, int]
    not_tested: tuple[Text, ...]


def as_json(report: Report) -> str:
    """The report as ``results.json``; floats read back to the same bits."""
    return json.dumps(serial.to_plain(report), ensure_ascii=False, indent=1) + "\n"


def parse_json(text: str, where: str) -> Report:
    """Read a ``results.json``.

    Raises:
        RecordError: it is of another schema, or malformed.
    """
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise RecordError(f"{where}: no report of schema {SCHEMA}")
        return serial.build(Report, data, where)
    except (ValueError, serial.SerialError) as error:
        raise RecordError(f"{where}: {error}") from error


def report_schema() -> dict[str, Any]:
    """The JSON Schema of ``results.json``; ``schema/report.schema.json`` holds it."""
    definitions: dict[str, Any] = {}
    top = serial.json_schema(Report, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "results.json of an acceptance report",
        "description": SCHEMA,
        **top,
        "$defs": definitions,
    }

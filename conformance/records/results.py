"""``results.jsonl``: what a run did and found, one JSON line per record. Writer and strict reader.

A file without a footer is no report. Numbers are not rounded. Folders are relative to the run's, so no path of a machine is
recorded.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from conformance.plain_data import serial
from conformance.records.comparison import Divergence
from conformance.records.trajectory import RecordError

SCHEMA = "hyper_resume.results/3"
# Schema 2 has the same records; it lacks the outcome `false_exact`.
_READ = (SCHEMA, "hyper_resume.results/2")
FILE_NAME = "results.jsonl"
SCHEMA_FILE = Path(__file__).parents[1] / "schema" / "results.schema.json"

Outcome = Literal[
    "pass", "false_exact", "fail", "error", "unsupported", "skipped", "known_fail", "unexpected_pass", "note"
]
OUTCOMES: tuple[str, ...] = (
    "pass",
    "false_exact",
    "fail",
    "error",
    "unsupported",
    "skipped",
    "known_fail",
    "unexpected_pass",
    "note",
)
BUCKETS = ("model", "optimizer", "progress", "lr_scheduler", "train_dataloader", "rng_state")
# What a failure may be attributed to: a bucket, other stateful objects, storage, the policy (when to save), the configuration.
BLAMES = (*BUCKETS, "stateful", "storage", "policy", "config")


@dataclass(frozen=True, kw_only=True)
class HeaderRecord:
    """The run: which suite judged which trainer, on which machine and versions.

    ``suite`` is the kind of run (``conformance``, ``st``, ``soak``, ``sweep``), ``required`` what the platform required of it.
    ``source`` is the commit of the checkout, with ``+`` when files differ from it; ``packages_digest`` is of all that is
    installed; ``environment`` holds the variables that may change a result.
    """

    schema: str
    run_id: str
    suite: str
    platform: str
    required: tuple[str, ...]
    adapter: str
    versions: Mapping[str, str]
    system: str
    machine: Mapping[str, str]
    packages_digest: str
    environment: Mapping[str, str]
    source: str
    argv: tuple[str, ...]
    started_at: str


@dataclass(frozen=True, kw_only=True)
class CaseRecord:
    """A case, whole, as it was run. ``key`` names this run of it: id, then ``@sabotage`` or ``#repeat``."""

    key: str
    case: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CalibrationRecord:
    """Two reference legs of one signature: whether they are equal bit for bit, and how far apart they are if not.

    ``spread`` is the largest relative difference per column. ``problem`` is the reason where they could not be compared.
    """

    signature: str
    folders: tuple[str, ...]
    steps: int
    equal: bool
    divergence: Divergence | None
    spread: Mapping[str, float]
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank's process ended: an exit code, or the name of a signal."""

    exit_code: int | None
    signal: str | None


@dataclass(frozen=True, kw_only=True)
class AskedFault:
    """The fault of a leg, and which ranks paused (or raised) at its moment.

    ``awaited`` are the ranks that had to; ``struck`` are the ranks that it ended. ``rank`` and ``operation`` place a
    ``file_operation``; where the case gives a name, ``operation`` is the number that it had, None if it never came.
    """

    kind: Literal["kill", "terminate", "raise"]
    after_step: int
    moment: str
    rank: int | None
    operation: int | None
    victims: str
    awaited: tuple[int, ...]
    struck: tuple[int, ...]
    reached_by: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LegRecord:
    """One leg as it ran. ``folder`` is relative to the run's; steps are by rank, None where a rank finished none.

    ``launcher`` started its ranks; ``agents`` is how the launcher processes ended (torchrun: one per node).
    """

    key: str
    leg: str
    folder: str
    launcher: str
    argv: tuple[str, ...]
    until_step: int | None
    restore_from: str | None
    checkpoint_dir: str
    sabotage: str | None
    shared: bool
    agents: tuple[RankEnd, ...]
    ranks: tuple[RankEnd, ...]
    first_steps: tuple[int | None, ...]
    last_steps: tuple[int | None, ...]
    fault: AskedFault | None
    timed_out: bool
    trouble: str | None
    started_at: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FaultRecord:
    """Damage done to the disk between two legs: ``asked`` for and ``observed``."""

    key: str
    place: int
    asked: Mapping[str, Any]
    fired: bool
    observed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LookRecord:
    """What a step directory held: bucket -> entry -> description."""

    key: str
    name: str
    step: int
    found: Mapping[str, Mapping[str, str]]
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class CheckRecord:
    """One check's outcome. ``blames`` is the bucket that a failure is attributed to."""

    check: str
    parameters: Mapping[str, Any]
    status: Literal["passed", "failed", "error"]
    expected: str
    observed: str
    divergence: Divergence | None
    blames: str | None


@dataclass(frozen=True, kw_only=True)
class ResultRecord:
    """The outcome of one case. ``blamed`` is the bucket of its first failed check; ``reproduce`` runs it again."""

    key: str
    case: str
    title: str
    level: str
    outcome: Outcome
    reason: str
    blamed: str | None
    checks: tuple[CheckRecord, ...]
    sabotage: str | None
    repeat: int
    reproduce: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class KillRecord:
    """One kill of many: of a soak, or a point of a crash sweep. ``key`` is that of the soak's or sweep's result.

    ``what`` is the file operation in words; ``last_step`` the last step that all ranks had finished; ``resumed_at`` what the
    next leg restored (0: nothing), ``lost_steps`` the difference; ``divergence`` is the first value of
    the next leg (for the last kill: of the killed leg) that differs from the reference.
    """

    key: str
    number: int
    mode: str
    moment: str
    step: int
    rank: int | None
    operation: int | None
    what: str | None
    victims: str
    last_step: int | None
    resumed_at: int | None
    lost_steps: int | None
    outcome: Outcome
    reason: str
    divergence: Divergence | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SabotageRecord:
    """Whether the suite caught a defect that was put in on purpose. ``outcomes`` is by case."""

    id: str
    title: str
    caught: bool
    outcomes: Mapping[str, str]
    caught_by: str | None
    expected_bucket: str
    blamed_bucket: str | None
    right_bucket: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class FooterRecord:
    """The end of the report. ``accepted`` needs every required id with a pass, and every sabotage that ran caught."""

    counts: Mapping[str, int]
    accepted: bool
    reasons: tuple[str, ...]
    seconds: float


Record: TypeAlias = (
    "HeaderRecord | CaseRecord | CalibrationRecord | LegRecord | FaultRecord | LookRecord | ResultRecord"
    " | KillRecord | SabotageRecord | FooterRecord"
)
KINDS: Mapping[str, type[Any]] = types.MappingProxyType(
    {
        "header": HeaderRecord,
        "case": CaseRecord,
        "calibration": CalibrationRecord,
        "leg": LegRecord,
        "fault": FaultRecord,
        "look": LookRecord,
        "result": ResultRecord,
        "kill": KillRecord,
        "sabotage": SabotageRecord,
        "footer": FooterRecord,
    }
)
_NAMES = {kind: name for name, kind in KINDS.items()}
R = TypeVar("R")


def as_line(record: Record) -> str:
    """One record as one line of ``results.jsonl``, with its newline."""
    data = {"record": _NAMES[type(record)], **serial.to_plain(record)}
    return json.dumps(data, ensure_ascii=False) + "\n"


class ResultsWriter:
    """Appends records; each call is one write, so a reader never sees half a block."""

    def __init__(self, folder: Path) -> None:
        """Start ``results.jsonl`` in ``folder``, which is made; one that is there already is an error."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / FILE_NAME).open("x", encoding="utf-8")

    def write(self, records: Iterable[Record]) -> None:
        """Append ``records`` together."""
        self._file.write("".join(as_line(record) for record in records))
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        self._file.close()


@dataclass(frozen=True, kw_only=True)
class Results:
    """A whole ``results.jsonl``: a header, a footer, and what lies between."""

    header: HeaderRecord
    footer: FooterRecord
    records: tuple[Record, ...]

    def of(self, kind: type[R], key: str | None = None) -> tuple[R, ...]:
        """The records of one kind, in order; with ``key`` those of one case's run."""
        found = (record for record in self.records if isinstance(record, kind))
        return tuple(record for record in found if key is None or getattr(record, "key", None) == key)


def read_results(folder: Path) -> Results:
    """Read a run's ``results.jsonl``.

    Raises:
        RecordError: it is missing, has no header first or no footer last, or a line is malformed.
    """
    path = folder / FILE_NAME
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as error:
        raise RecordError(f"{path}: missing; this is no results folder") from error
    if lines.pop() != "":
        raise RecordError(f"{path}: the last line is torn, so this is no report")
    _require_schema(lines[0] if lines else "", path)
    records = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    if not records or not isinstance(records[0], HeaderRecord):
        raise RecordError(f"{path}: the first record is no header")
    if not isinstance(records[-1], FooterRecord):
        raise RecordError(f"{path}: no footer, so the run did not come to its end and this is no report")
    return Results(header=records[0], footer=records[-1], records=tuple(records[1:-1]))


def _require_schema(line: str, path: Path) -> None:
    """Refuse another schema version before its fields are read, which may differ."""
    try:
        schema = json.loads(line).get("schema", SCHEMA)
    except (ValueError, AttributeError):
        return
    if schema not in _READ:
        raise RecordError(f"{path}: schema is {schema!r}, this version reads {SCHEMA!r}; run it again")


def _parse(line: str, where: str) -> Record:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise RecordError(f"{where}: not JSON: {error}") from error
    name = data.pop("record", None) if isinstance(data, dict) else None
    if not isinstance(name, str) or name not in KINDS:
        raise RecordError(f"{where}: no record is called {name!r}")
    try:
        record: Record = serial.build(KINDS[name], data, f"{where}: {name}")
    except serial.SerialError as error:
        raise RecordError(str(error)) from error
    return record


def results_schema() -> dict[str, Any]:
    """The JSON Schema of one line of ``results.jsonl``; ``schema/results.schema.json`` holds it."""
    return serial.schema_of_lines(KINDS, title="one line of results.jsonl", description=SCHEMA)

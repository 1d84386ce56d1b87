"""``records.jsonl``: what a run measured. One header, then records, one footer; without the footer it is no report.

Everything that the table and the page show is here, so that both can be made again from the file alone.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from benchmarks.protocol import Quantity, Relation, Role
from conformance.plain_data import serial

SCHEMA = "hyper_resume.benchmark/1"
FILE_NAME = "records.jsonl"
SCHEMA_FILE = Path(__file__).parents[1] / "schema" / "benchmark.schema.json"

Status = Literal["met", "not met", "not measured", "no goal"]


class RecordsError(ValueError):
    """A file of records can't be read, or is no whole report; the message names the place."""


@dataclass(frozen=True, kw_only=True)
class HeaderRecord:
    """What was asked for, and where the numbers come from.

    ``benchmarks`` is name -> title, in the order of the run; ``threads`` torch's number of threads within an operation.
    """

    schema: str
    run_id: str
    smoke: bool
    benchmarks: Mapping[str, str]
    sizes_gb: tuple[float, ...]
    repeat: int
    worlds: tuple[int, ...]
    ranks: tuple[int, ...]
    versions: Mapping[str, str]
    system: str
    machine: Mapping[str, str]
    threads: int
    packages_digest: str
    environment: Mapping[str, str]
    source: str
    argv: tuple[str, ...]
    started_at: str


@dataclass(frozen=True, kw_only=True)
class MeasurementRecord:
    """One contender at one point of one benchmark.

    Attributes:
        payload_bytes: of one process.
        seconds: one a round, in order; with several ranks, of the last rank.
        settled_seconds: from the same start until nothing was left running; empty where a call leaves nothing.
        disk_bytes: lengths of the files that it wrote.
        peak_bytes: see :mod:`benchmarks.measuring.memory`; from a process of its own. None where it was not weighed.
        checked: its result was compared, bit for bit where it restores something, outside of the timing.
        place: on the point's axis.
    """

    benchmark: str
    point: str
    axis: str
    place: float
    contender: str
    role: Role
    note: str
    payload_bytes: int
    seconds: tuple[float, ...]
    settled_seconds: tuple[float, ...]
    disk_bytes: int | None
    peak_bytes: int | None
    checked: bool


@dataclass(frozen=True, kw_only=True)
class FigureRecord:
    """A ratio, ``above`` over ``below``, with the spread over the rounds; None where ``reason`` says that there is none."""

    benchmark: str
    point: str
    text: str
    quantity: Quantity
    above: tuple[str, ...]
    below: str
    median: float | None
    least: float | None
    most: float | None
    lower_quartile: float | None
    upper_quartile: float | None
    samples: int
    relation: Relation | None
    bound: float | None
    status: Status
    reason: str


@dataclass(frozen=True, kw_only=True)
class GrowthRecord:
    """``median seconds = a * place ** exponent`` over the points of one axis, by least squares of the logarithms."""

    benchmark: str
    contender: str
    axis: str
    points: tuple[str, ...]
    exponent: float


@dataclass(frozen=True, kw_only=True)
class AbsenceRecord:
    """A contender, or a point (``contender`` None), that was not measured, and why."""

    benchmark: str
    point: str
    contender: str | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """A point that broke off. ``reason`` is the end of what its process said."""

    benchmark: str
    point: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class FooterRecord:
    """The end. ``counts``: points, failures, and goals by status."""

    counts: Mapping[str, int]
    seconds: float


Record: TypeAlias = (
    "HeaderRecord | MeasurementRecord | FigureRecord | GrowthRecord | AbsenceRecord | FailureRecord | FooterRecord"
)
KINDS: Mapping[str, type[Any]] = types.MappingProxyType(
    {
        "header": HeaderRecord,
        "measurement": MeasurementRecord,
        "figure": FigureRecord,
        "growth": GrowthRecord,
        "absence": AbsenceRecord,
        "failure": FailureRecord,
        "footer": FooterRecord,
    }
)
_NAMES = {kind: name for name, kind in KINDS.items()}
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Report:
    """A whole file: a header, a footer, and what lies between."""

    header: HeaderRecord
    footer: FooterRecord
    records: tuple[Record, ...]

    def of(self, kind: type[R]) -> tuple[R, ...]:
        """The records of one kind, in order."""
        return tuple(record for record in self.records if isinstance(record, kind))


class RecordsWriter:
    """Appends records to a new file and keeps them; each call is one write."""

    def __init__(self, folder: Path, header: HeaderRecord) -> None:
        """Start ``records.jsonl`` in ``folder``, which is made.

        Raises:
            FileExistsError: there is one already.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME
        self._file = self.path.open("x", encoding="utf-8")
        self._header = header
        self._records: list[Record] = []
        self._put([header])

    def write(self, records: Iterable[Record]) -> None:
        """Append ``records`` together."""
        found = list(records)
        self._records += found
        self._put(found)

    def finish(self, footer: FooterRecord) -> Report:
        """End the file and return all of it."""
        self._put([footer])
        self._file.close()
        return Report(header=self._header, footer=footer, records=tuple(self._records))

    def _put(self, records: Iterable[Record]) -> None:
        self._file.write("".join(as_line(record) for record in records))
        self._file.flush()


def as_line(record: Record) -> str:
    """One record as one line, with its newline."""
    data = {"record": _NAMES[type(record)], **serial.to_plain(record)}
    return json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n"


def read_records(path: Path) -> Report:
    """Read a whole file.

    Raises:
        RecordsError: it is missing, of another schema, has no header first or no footer last, or a line is malformed.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise RecordsError(f"{path}: can't be read: {error}") from error
    if lines.pop() != "":
        raise RecordsError(f"{path}: the last line is torn, so this is no report")
    records = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    if not records or not isinstance(records[0], HeaderRecord):
        raise RecordsError(f"{path}: the first record is no header")
    if not isinstance(records[-1], FooterRecord):
        raise RecordsError(f"{path}: no footer, so the run did not come to its end and this is no report")
    return Report(header=records[0], footer=records[-1], records=tuple(records[1:-1]))


def _parse(line: str, where: str) -> Record:
    try:
        data = json.loads(line)
        name = data.pop("record", None) if isinstance(data, dict) else None
        if not isinstance(name, str) or name not in KINDS:
            raise RecordsError(f"{where}: no record is called {name!r}")
        if name == "header" and data.get("schema") != SCHEMA:
            raise RecordsError(f"{where}: is of schema {data.get('schema')!r}, this reads {SCHEMA} only")
        record: Record = serial.build(KINDS[name], data, f"{where}: {name}")
    except (ValueError, TypeError) as error:
        if isinstance(error, RecordsError):
            raise
        raise RecordsError(f"{where}: {error}") from error
    return record


def records_schema() -> dict[str, Any]:
    """The JSON Schema of one line; ``schema/benchmark.schema.json`` holds it."""
    schema = serial.schema_of_lines(KINDS, title=f"one line of {FILE_NAME}", description=SCHEMA)
    schema["$defs"]["HeaderRecord"]["properties"]["schema"] = {"const": SCHEMA}
    return schema

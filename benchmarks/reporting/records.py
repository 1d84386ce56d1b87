"""``records.jsonl``: the records of a run. A header, the records, and a footer; a file without footer is not a report.

The table and the page are made from this file alone.
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
    """A file of records can't be read, or is incomplete; the message names the place."""


@dataclass(frozen=True, kw_only=True)
class HeaderRecord:
    """The options of the run, and where its numbers come from.

    ``benchmarks`` maps names to titles, in the order of the run; ``threads`` is torch's number of intra-op threads.
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
        payload_bytes: per process.
        seconds: one value per round, in order; with several ranks, that of the slowest.
        settled_seconds: from the same start to the end of the background work; empty where a call has none.
        disk_bytes: total length of the files that it wrote.
        peak_bytes: see :mod:`benchmarks.measuring.memory`; from a separate process. None where it was not measured.
        checked: its result was verified outside of the timing, bit for bit where it restores something.
        place: position of the point on its axis.
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
    """The ratio ``above`` / ``below`` with its spread over the rounds; None where there is none, for the ``reason`` given."""

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
    """A contender that was not measured, or a whole point (``contender`` None), with the reason."""

    benchmark: str
    point: str
    contender: str | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """A point whose process failed. ``reason`` is the end of its output."""

    benchmark: str
    point: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class FooterRecord:
    """The end of the run. ``counts``: points, failures, and goals by status."""

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
    """A complete file: header, footer, and the records between them."""

    header: HeaderRecord
    footer: FooterRecord
    records: tuple[Record, ...]

    def of(self, kind: type[R]) -> tuple[R, ...]:
        """Return the records of one kind, in order."""
        return tuple(record for record in self.records if isinstance(record, kind))


class RecordsWriter:
    """Appends records to a new file and keeps them. Each call is one write."""

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
        """Append ``records`` in one write."""
        found = list(records)
        self._records += found
        self._put(found)

    def finish(self, footer: FooterRecord) -> Report:
        """Write the footer, and return the whole report."""
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

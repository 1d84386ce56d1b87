"""``results.jsonl`` of an older schema: fields that were added later get the values that held then."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.plain_data import serial
from conformance.records.results import FILE_NAME, KINDS, SCHEMA, FooterRecord, HeaderRecord, Results, read_results
from conformance.records.trajectory import RecordError

OLD_SCHEMA = "hyper_resume.results/1"
# In schema 1 every leg was forked by the matrix's own server, every fault struck every rank that waited for it, and no
# record said when a leg began, which commit was checked out, on what machine, or what was required.
_ADDED: Mapping[str, Mapping[str, Any]] = {
    "header": {
        "suite": "",
        "required": [],
        "machine": {},
        "packages_digest": "",
        "environment": {},
        "source": "",
    },
    "leg": {"launcher": "warm", "agents": [], "started_at": ""},
}
_ADDED_TO_FAULT: Mapping[str, Any] = {"rank": None, "operation": None, "victims": "all"}


def read_any_results(folder: Path) -> Results:
    """Read a run's ``results.jsonl``, of this schema or of the one before.

    Raises:
        RecordError: see :func:`conformance.records.results.read_results`.
    """
    path = folder / FILE_NAME
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else [""]
    if SCHEMA == OLD_SCHEMA or _schema(lines[0]) != OLD_SCHEMA:
        return read_results(folder)
    if lines.pop() != "":
        raise RecordError(f"{path}: the last line is torn, so this is no report")
    records = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    header, footer = records[0], records[-1]
    if not isinstance(header, HeaderRecord) or not isinstance(footer, FooterRecord):
        raise RecordError(f"{path}: no footer, so the run did not come to its end and this is no report")
    return Results(header=header, footer=footer, records=tuple(records[1:-1]))


def _schema(line: str) -> Any:
    try:
        return json.loads(line).get("schema")
    except (ValueError, AttributeError):
        return None


def _parse(line: str, where: str) -> Any:
    try:
        data = json.loads(line)
        name = data.pop("record")
        kind = KINDS[name]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise RecordError(f"{where}: no record: {error!r}") from error
    known = {field.name for field in dataclasses.fields(kind)}
    data = {**{key: item for key, item in _ADDED.get(name, {}).items() if key in known}, **data}
    if name == "leg" and isinstance(data.get("fault"), dict):
        reached = data["fault"].get("reached_by")
        data["fault"] = {**_ADDED_TO_FAULT, "awaited": reached, "struck": reached, **data["fault"]}
    try:
        return serial.build(kind, data, f"{where}: {name}")
    except serial.SerialError as error:
        raise RecordError(str(error)) from error

"""The file of records: its schema, its writer and its strict reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.reporting.records import (
    FILE_NAME,
    KINDS,
    SCHEMA_FILE,
    RecordsError,
    RecordsWriter,
    as_line,
    read_records,
    records_schema,
)
from tests.benchmarks.made import header, measurement, whole_report
from tests.benchmarks.schema import complaints


def written(folder: Path) -> Path:
    report = whole_report()
    writer = RecordsWriter(folder, report.header)
    writer.write(report.records)
    writer.finish(report.footer)
    return folder / FILE_NAME


def test_the_shipped_schema_is_that_of_the_records() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == records_schema()


def test_a_record_of_every_kind_is_valid_against_the_shipped_schema(tmp_path: Path) -> None:
    schema = json.loads(SCHEMA_FILE.read_text())
    lines = [json.loads(line) for line in written(tmp_path).read_text().splitlines()]
    assert {line["record"] for line in lines} == set(KINDS)
    for line in lines:
        assert complaints(line, schema, schema) == []


@pytest.mark.parametrize("change", [{"seconds": ["1"]}, {"role": "winner"}, {"extra": 1}, {"contender": None}])
def test_the_schema_refuses_a_record_that_is_not_as_it_says(change: dict[str, object]) -> None:
    schema = json.loads(SCHEMA_FILE.read_text())
    line = {**json.loads(as_line(measurement("a", (1.0,)))), **change}
    assert complaints(line, schema, schema) != []


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    assert read_records(written(tmp_path)) == whole_report()


def test_a_folder_that_has_records_gets_no_second_run(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(FileExistsError):
        RecordsWriter(tmp_path, header())


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text[:-1], "torn"),
        (lambda text: text[: text.rstrip().rfind("\n") + 1], "no footer"),
        (lambda text: text[text.index("\n") + 1 :], "no header"),
        (lambda text: text.replace("benchmark/1", "benchmark/2"), "of schema"),
        (lambda text: text.replace('"record": "growth"', '"record": "shrinkage"'), "no record is called"),
        (lambda text: text.replace('"samples": 5', '"samples": "5"'), "samples"),
    ],
)
def test_a_file_that_is_no_whole_report_is_refused(tmp_path: Path, damage: object, told: str) -> None:
    path = written(tmp_path)
    assert callable(damage)
    path.write_text(damage(path.read_text()))
    with pytest.raises(RecordsError, match=told):
        read_records(path)


def test_a_missing_file_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="can't be read"):
        read_records(tmp_path / "nothing.jsonl")

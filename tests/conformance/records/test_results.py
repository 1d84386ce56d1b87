"""The records of a run can be read back, match the schema, and give the same outcome when they are judged again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from conformance.judging.recheck import recheck
from conformance.matrix.case import Case
from conformance.records.results import (
    SCHEMA_FILE,
    CalibrationRecord,
    FaultRecord,
    LegRecord,
    ResultRecord,
    ResultsWriter,
    as_line,
    read_results,
    results_schema,
)
from conformance.records.trajectory import RecordError
from conformance.running.session import Session, Work
from tests.conformance.stand_in import StandInAdapter, case_of

CASES = (
    case_of(),
    case_of(
        id="Z2",
        title="a damaged save is passed over",
        script=[
            {"leg": "saving", "until_step": 10},
            {"fault": "write_pointer", "text": "5"},
            {"leg": "resumed", "until_step": 7, "restore_from": "LATEST"},
        ],
        expect=[
            {"check": "resumed_at", "leg": "resumed", "global_step": 5},
            {"check": "pointer_is", "leg": "resumed", "step": 5},
        ],
    ),
)


def session(folder: Path, defect: str = "", cases: tuple[Case, ...] = CASES, repeats: int = 1) -> Session:
    reported: list[tuple[ResultRecord, int, int]] = []

    def on_result(result: ResultRecord, number: int, total: int) -> None:
        reported.append((result, number, total))

    with Session(StandInAdapter(defect), folder, argv=["run"], on_result=on_result) as made:
        made.run([Work(case=case, repeat=repeat) for repeat in range(repeats) for case in cases])
        made.finish()
    total = repeats * len(cases)
    assert reported == [(result, number, total) for number, result in enumerate(made.results, start=1)]
    return made


def test_a_run_is_read_back_whole(tmp_path: Path) -> None:
    made = session(tmp_path / "run")
    results = read_results(tmp_path / "run")
    assert results.of(ResultRecord) == tuple(made.results)
    assert results.footer.accepted
    assert results.footer.counts["pass"] == 2
    assert [leg.leg for leg in results.of(LegRecord, "Z1")] == ["reference", "interrupted", "resumed"]
    assert [(item.fired, item.observed) for item in results.of(FaultRecord)] == [
        (True, ("wrote checkpoints/latest_checkpoint_iteration.txt",))
    ]
    (calibration,) = results.of(CalibrationRecord)
    assert (calibration.equal, calibration.steps, calibration.spread) == (
        True,
        10,
        {"loss": 0.0, "lr": 0.0, "grad_norm": 0.0},
    )


@pytest.mark.parametrize("defect", ["", "forgets-rng", "wrong-exit", "not-reproducible"])
def test_a_run_that_is_judged_again_comes_to_the_same(tmp_path: Path, defect: str) -> None:
    made = session(tmp_path, defect)
    again = recheck(tmp_path)
    assert [(item.now, item.blamed_now) for item in again] == [(item.outcome, item.blamed) for item in made.results]
    assert all(item.agrees for item in again)


def test_a_record_that_was_tampered_with_is_judged_differently(tmp_path: Path) -> None:
    session(tmp_path)
    (trajectory,) = (tmp_path / "Z1" / "legs" / "resumed").glob("trajectory_rank_0.jsonl")
    lines = trajectory.read_text().splitlines()
    record = json.loads(lines[2])
    lines[2] = json.dumps({**record, "loss": record["loss"] + 1e-9})
    trajectory.write_text("\n".join(lines) + "\n")
    first, second = recheck(tmp_path)
    assert (first.then, first.now, first.blamed_now) == ("pass", "fail", "model")
    assert second.agrees


def test_two_runs_write_the_same_records_but_for_times(tmp_path: Path) -> None:
    texts = []
    for name in ("one", "two"):
        session(tmp_path / name)
        text = (tmp_path / name / "results.jsonl").read_text()
        text = re.sub(r'"(seconds|started_at|run_id)": ("[^"]*"|[0-9.e-]+)', r'"\1": 0', text)
        texts.append(text)
    assert texts[0] == texts[1]
    assert str(tmp_path) not in texts[0]


def test_records_stand_in_the_order_of_the_cases_whoever_ends_first(tmp_path: Path) -> None:
    made = session(tmp_path, repeats=3)
    assert [result.key for result in made.results] == ["Z1", "Z2", "Z1#1", "Z2#1", "Z1#2", "Z2#2"]
    assert [result.key for result in read_results(tmp_path).of(ResultRecord)] == [item.key for item in made.results]


def test_a_run_that_is_red_or_empty_is_not_accepted(tmp_path: Path) -> None:
    session(tmp_path / "red", "forgets-rng")
    assert not read_results(tmp_path / "red").footer.accepted
    session(tmp_path / "empty", cases=())
    assert read_results(tmp_path / "empty").footer.reasons == ("nothing was run",)


def test_a_file_without_a_footer_or_with_a_torn_line_is_no_report(tmp_path: Path) -> None:
    session(tmp_path)
    path = tmp_path / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(RecordError, match="no footer"):
        read_results(tmp_path)
    path.write_text("".join(lines)[:-5])
    with pytest.raises(RecordError, match="torn"):
        read_results(tmp_path)
    path.write_text("".join(lines[1:]))
    with pytest.raises(RecordError, match="no header"):
        read_results(tmp_path)


def test_a_report_of_the_version_before_is_refused_by_its_name(tmp_path: Path) -> None:
    # Its legs lack fields of this version; the error names the schema version, not the first missing field.
    header = {"record": "header", "schema": "hyper_resume.results/1", "run_id": "old", "platform": "all"}
    (tmp_path / "results.jsonl").write_text(f'{json.dumps(header)}\n{{"record": "leg", "key": "A6"}}\n')
    with pytest.raises(RecordError) as caught:
        read_results(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'results.jsonl'}: schema is 'hyper_resume.results/1', this version reads 'hyper_resume.results/3'; "
        "run it again"
    )


def test_a_report_of_schema_2_is_read_and_judged_again(tmp_path: Path) -> None:
    session(tmp_path)
    path = tmp_path / "results.jsonl"
    *lines, last = path.read_text().replace("hyper_resume.results/3", "hyper_resume.results/2").splitlines()
    footer = json.loads(last)
    del footer["counts"]["false_exact"]  # the outcome that schema 3 adds
    path.write_text("\n".join([*lines, json.dumps(footer)]) + "\n")
    assert read_results(tmp_path).header.schema == "hyper_resume.results/2"
    assert [item.agrees for item in recheck(tmp_path)] == [True, True]


def test_an_unknown_key_in_a_record_is_refused_with_its_line(tmp_path: Path) -> None:
    session(tmp_path)
    path = tmp_path / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = lines[1].replace('"key":', '"keys":', 1)
    path.write_text("".join(lines))
    with pytest.raises(RecordError, match=r"results\.jsonl:2: case: unknown key 'keys'"):
        read_results(tmp_path)


def test_results_are_never_written_over(tmp_path: Path) -> None:
    ResultsWriter(tmp_path).close()
    with pytest.raises(FileExistsError):
        ResultsWriter(tmp_path)


def test_the_shipped_schema_is_that_of_the_records() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == results_schema()


def test_every_written_line_is_valid_under_the_schema(tmp_path: Path) -> None:
    session(tmp_path, "forgets-rng")
    schema = json.loads(SCHEMA_FILE.read_text())
    results = read_results(tmp_path)
    for record in (results.header, *results.records, results.footer):
        line = json.loads(as_line(record))
        assert [error for error in (fits(line, option, schema) for option in schema["anyOf"]) if not error]
        line["strange"] = 1
        assert all(fits(line, option, schema) for option in schema["anyOf"])


def fits(value: Any, rule: dict[str, Any], schema: dict[str, Any]) -> str:
    """The first violation of ``rule`` by ``value``; implements the few keywords that the schema uses."""
    if "$ref" in rule:
        return fits(value, schema["$defs"][rule["$ref"].rpartition("/")[2]], schema)
    if "anyOf" in rule:
        found = [fits(value, option, schema) for option in rule["anyOf"]]
        return "" if "" in found else found[0]
    if "const" in rule or "enum" in rule:
        return "" if value in rule.get("enum", [rule.get("const")]) else f"{value!r} is not allowed"
    types: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    if "type" in rule and not isinstance(value, types[rule["type"]]):
        return f"{value!r} is no {rule['type']}"
    if rule.get("type") == "array":
        return next((problem for item in value if (problem := fits(item, rule["items"], schema))), "")
    if rule.get("type") == "object":
        known = rule.get("properties", {})
        extra = rule.get("additionalProperties", True)
        if extra is False and set(value) != set(rule["required"]):
            return f"keys {sorted(set(value) ^ set(rule['required']))}"
        rules = {key: known.get(key, extra if isinstance(extra, dict) else {}) for key in value}
        return next((problem for key in value if (problem := fits(value[key], rules[key], schema))), "")
    return ""

"""The command from end to end: real processes, real files, the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import exit_code, main
from benchmarks.reporting.records import (
    SCHEMA_FILE,
    AbsenceRecord,
    FailureRecord,
    FigureRecord,
    MeasurementRecord,
    Report,
    read_records,
)
from tests.benchmarks.made import report
from tests.benchmarks.schema import complaints

# One worker for all of it: what its fixtures make takes seconds.
pytestmark = pytest.mark.xdist_group("bench-command")

TOYS = "tests.benchmarks.toys"


def run(folder: Path, *arguments: str) -> int:
    return main(["run", "--smoke", "--results", str(folder), *arguments])


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp("smoke")
    return run(folder, "--only", "ranks", "--sizes", "0.002", "--ranks", "2", "--repeat", "2"), folder


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path, Report]:
    folder = tmp_path_factory.mktemp("broken")
    code = run(folder, "--only", f"{TOYS}.raises,{TOYS}.lazy_load,{TOYS}.unable", "--repeat", "1")
    return code, folder, read_records(folder / "records.jsonl")


def test_a_smoke_run_ends_well(smoke: tuple[int, Path]) -> None:
    assert smoke[0] == 0


def test_a_smoke_run_writes_records_that_the_schema_accepts(smoke: tuple[int, Path]) -> None:
    schema = json.loads(SCHEMA_FILE.read_text())
    lines = (smoke[1] / "records.jsonl").read_text().splitlines()
    assert len(lines) > 10
    for line in lines:
        assert complaints(json.loads(line), schema, schema) == []


def test_a_smoke_run_measures_every_contender_in_every_round(smoke: tuple[int, Path]) -> None:
    measured = read_records(smoke[1] / "records.jsonl").of(MeasurementRecord)
    assert len({record.contender for record in measured}) == len(measured) == 6
    assert {len(record.seconds) for record in measured} == {2}
    assert all(record.checked for record in measured if record.role != "limit")


def test_two_ranks_share_the_payload_and_are_compared_with_stock(smoke: tuple[int, Path]) -> None:
    found = read_records(smoke[1] / "records.jsonl")
    assert all(record.payload_bytes == pytest.approx(1e6, rel=0.03) for record in found.of(MeasurementRecord))
    figures = found.of(FigureRecord)
    assert [figure.above for figure in figures][:2] == [("dcp.save",), ("dcp.load",)]
    assert all(figure.median and figure.samples == 2 for figure in figures)


def test_a_smoke_run_leaves_records_and_page_and_nothing_else(smoke: tuple[int, Path]) -> None:
    assert sorted(path.name for path in smoke[1].iterdir()) == ["records.jsonl", "report.html"]


def test_the_page_is_made_again_from_the_records_alone(smoke: tuple[int, Path], tmp_path: Path) -> None:
    assert main(["report", str(smoke[1] / "records.jsonl"), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_bytes() == (smoke[1] / "report.html").read_bytes()


def test_a_benchmark_that_raises_turns_the_run_red_and_says_so(broken: tuple[int, Path, Report]) -> None:
    code, folder, found = broken
    assert code == 1
    failures = {failure.benchmark: failure.reason for failure in found.of(FailureRecord)}
    assert "this contender was made to break" in failures[f"{TOYS}.raises"]
    assert "this contender was made to break" in (folder / "report.html").read_text()
    assert found.footer.counts["failures"] == 2


def test_a_load_that_restores_nothing_fails_and_gives_no_figure(broken: tuple[int, Path, Report]) -> None:
    _, _, found = broken
    failures = {failure.benchmark: failure.reason for failure in found.of(FailureRecord)}
    assert "was not restored as it was saved" in failures[f"{TOYS}.lazy_load"]
    assert not [record for record in found.of(FigureRecord) if record.benchmark.endswith("lazy_load")]


def test_the_benchmarks_after_a_failed_one_still_run(broken: tuple[int, Path, Report]) -> None:
    _, _, found = broken
    assert [record.contender for record in found.of(MeasurementRecord)] == ["quick"]


def test_a_contender_is_weighed_in_a_process_of_its_own(broken: tuple[int, Path, Report]) -> None:
    _, _, found = broken
    (record,) = found.of(MeasurementRecord)
    # The bytes and their copy, 16 MiB each, in a process that never loaded torch.
    assert record.peak_bytes == pytest.approx(2 * (1 << 24), rel=0.1)


def test_what_can_not_be_measured_here_is_absent_with_its_reason(broken: tuple[int, Path, Report]) -> None:
    _, _, found = broken
    reasons = {(record.point, record.contender): record.reason for record in found.of(AbsenceRecord)}
    assert reasons == {
        ("huge", None): "needs more memory than there is",
        ("small", "another"): "another is not installed",
    }


@pytest.mark.parametrize("count", ["not met", "not measured"])
def test_a_missed_goal_fails_the_run_only_where_goals_are_required(count: str) -> None:
    missed = report(counts={count: 1})
    assert exit_code(missed, require_goals=False) == 0
    assert exit_code(missed, require_goals=True) == 1


def test_a_failure_fails_the_run_and_met_goals_do_not() -> None:
    assert exit_code(report(counts={"failures": 1, "met": 3}), require_goals=False) == 1
    assert exit_code(report(counts={"met": 3}), require_goals=True) == 0


def test_a_wrong_question_is_refused_before_anything_is_measured(
    smoke: tuple[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "new", "--only", "saves") == 2
    assert "known: save, load" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert run(smoke[1], "--only", "save") == 2
    assert main(["report", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "page.html")]) == 2


def test_the_list_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert (
        " ".join(names)
        == "save load small async digests callback ranks planning nothing-when-off trajectory data-resume"
    )

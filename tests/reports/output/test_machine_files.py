"""The files that machines read agree with the records and with each other, and are the same bytes for the same records."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from conformance.records.trajectory import RecordError
from reports.__main__ import main
from reports.contents.document import SCHEMA_FILE, as_json, parse_json, report_schema
from reports.judging.acceptance import load_acceptance, load_platforms, matches
from reports.judging.assemble import assemble
from reports.judging.history import append_run, line_of, make_trend, read_history, with_run
from reports.judging.matrix import make_done
from reports.output.machine_files import make_files
from reports.reading.read import read_run
from reports.reading.unit_tests import UNIT_TESTS_NAME
from tests.reports.formulas import loss, samples
from tests.reports.run_folder import RunFolder, every_id, refused_run, system_ids, whole_run

FILES = {"index.html", "results.json", "junit.xml", "metrics.csv", "samples.csv", "summary.md", "SHA256SUMS"}


def files_of(*folders: Path) -> dict[str, str]:
    return make_files(assemble(read_run(list(folders))))


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return files_of(refused_run(tmp_path_factory.mktemp("refused") / "run").finish())


def test_the_same_records_give_the_same_bytes_wherever_they_lie(tmp_path: Path, refused: dict[str, str]) -> None:
    folder = refused_run(tmp_path / "elsewhere" / "run").finish()
    shutil.copytree(folder, tmp_path / "copy")
    assert files_of(tmp_path / "copy") == refused
    for text in refused.values():
        assert str(tmp_path) not in text


def test_the_checksums_are_those_of_the_files_on_disk(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.resumed_case("C9")
    assert main(["build", str(folder.finish()), "-o", str(tmp_path / "out")]) == 3
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    lines = (tmp_path / "out" / "SHA256SUMS").read_text().splitlines()
    assert {name: digest for digest, name in (line.split("  ") for line in lines)} == {
        name: hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() for name in FILES - {"SHA256SUMS"}
    }


@pytest.mark.parametrize(("outcome", "code"), [("pass", 0), ("fail", 1), ("skipped", 3)])
def test_the_exit_code_is_that_of_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: str, code: int
) -> None:
    run = whole_run(tmp_path / "run", leave_out=["A6"])
    run.case("A6", outcome)
    assert main(["build", str(run.finish())]) == code
    assert (tmp_path / "run" / "report" / "index.html").exists()
    assert capsys.readouterr().out.startswith({0: "ACCEPTED", 1: "REFUSED", 3: "INCOMPLETE"}[code])


def test_the_json_reads_back_to_the_same_report(refused: dict[str, str]) -> None:
    report = parse_json(refused["results.json"], "results.json")
    assert as_json(report) == refused["results.json"]
    assert report.verdict.state == "refused"


def test_the_shipped_schema_is_that_of_the_report() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == report_schema()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"schema": "hyper_resume.report/99"}', '{"schema": "hyper_resume.report/1"}']
)
def test_a_json_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(RecordError, match=r"results\.json"):
        parse_json(text, "results.json")


def suites(files: dict[str, str]) -> dict[str, ElementTree.Element]:
    root = ElementTree.fromstring(files["junit.xml"])
    return {str(suite.get("name")): suite for suite in root}


def test_junit_has_one_test_case_a_case_and_its_counts_are_right(refused: dict[str, str]) -> None:
    root = ElementTree.fromstring(refused["junit.xml"])
    assert (root.get("tests"), root.get("failures")) == (str(len(list(root.iter("testcase")))), "2")
    suite = suites(refused)["run-1"]
    assert suite.get("tests") == str(len(every_id() + system_ids())) == str(len(suite.findall("testcase")))
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("1", "0", "0")
    (failed,) = [test for test in suite.findall("testcase") if test.find("failure") is not None]
    assert str(failed.get("name")).startswith("D1: ")
    properties = {item.get("name"): item.get("value") for item in failed.iter("property")}
    assert properties["divergence"] == "step 6, rank 2, rng_state (rng.torch_cpu)"
    assert properties["layout"] == "4 ranks, FSDP2"
    assert properties["reproduce"] == "python -m conformance run --case D1 --keep"


def test_junit_is_red_for_a_run_that_only_left_something_out(tmp_path: Path) -> None:
    files = files_of(whole_run(tmp_path / "run", leave_out=["A6"]).finish())
    required = suites(files)["required"]
    assert (required.get("failures"), required.get("errors")) == ("0", "1")
    skipped = {(test.get("classname"), test.get("name")) for test in required if test.find("skipped") is not None}
    assert ("required.cpu-inline", "conformance:A6") in skipped
    assert ("required.npu8", "conformance:D2") in skipped


def test_junit_of_an_accepted_run_is_green(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run")
    run.sabotage("seen", "A6")
    found = suites(files_of(run.finish()))
    assert {(suite.get("failures"), suite.get("errors")) for suite in found.values()} == {("0", "0")}
    assert [test.get("name") for test in found["sabotages"].findall("testcase")] == ["seen: seen is put in"]


HOSTILE = "<script>alert('x')</script>\x00\x1b[31m & \"quotes\" ]]> | `tick` \ud7ff"


def test_hostile_names_and_messages_are_text_everywhere(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.case("A6", "fail", title=HOSTILE, reason=HOSTILE)
    files = files_of(run.finish())
    page = files["index.html"]
    assert "<script>alert" not in page
    assert page.count("<script") == 2
    assert page.count("&lt;script&gt;alert") >= 3
    ElementTree.fromstring(files["junit.xml"])
    assert "<script>" not in files["summary.md"]
    assert json.loads(files["results.json"])["cases"][0]["title"]["en"] == HOSTILE


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_metrics_read_back_to_the_same_bits(refused: dict[str, str]) -> None:
    found = [row for row in rows(refused["metrics.csv"]) if row["leg"] == "D1/legs/reference" and row["rank"] == "3"]
    losses = {int(row["step"]): (row["value"], row["hex"]) for row in found if row["name"] == "loss"}
    assert {step: float(value) for step, (value, _) in losses.items()} == {step: loss(step, 3) for step in range(1, 13)}
    assert {step: float.fromhex(bits) for step, (_, bits) in losses.items()} == {
        step: loss(step, 3) for step in range(1, 13)
    }


def test_samples_are_listed_step_by_step_in_order(refused: dict[str, str]) -> None:
    found = [row for row in rows(refused["samples.csv"]) if row["leg"] == "D1/legs/resumed" and row["rank"] == "1"]
    assert [int(row["step"]) for row in found] == list(range(6, 13))
    assert [list(map(int, row["sample_ids"].split())) for row in found] == [samples(step, 1) for step in range(6, 13)]


def test_names_with_commas_and_quotes_stay_one_field(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", run_id='a,"b"\nc')
    run.resumed_case("C9")
    assert {row["part"] for row in rows(files_of(run.finish())["metrics.csv"])} == {'a,"b"\nc'}


def test_the_summary_says_the_verdict_first_and_how_to_run_what_failed(refused: dict[str, str]) -> None:
    lines = refused["summary.md"].splitlines()
    assert lines[0] == "# REFUSED: hyper\\_resume"
    assert "step 6" in lines[2]
    assert "python -m conformance run --case D1 --keep" in lines


JUNIT = '<testsuites><testsuite tests="9" failures="{}" errors="0" skipped="1"/></testsuites>'


@pytest.mark.parametrize(
    ("unit_tests", "state"), [(None, "not_run"), (JUNIT.format(0), "met"), (JUNIT.format(1), "not_met")]
)
def test_the_first_line_of_the_definition_of_done_needs_the_unit_tests(
    tmp_path: Path, unit_tests: str | None, state: str
) -> None:
    folder = whole_run(tmp_path / "run").finish()
    if unit_tests is not None:
        (folder / UNIT_TESTS_NAME).write_text(unit_tests)
    done = {one.id: one for one in assemble(read_run([folder])).report.done}
    # Both of these need the unit tests; NPUs are needed by three.
    assert {done.pop("9.5.1").state, done.pop("9.4.1").state} == {state}
    assert "stand-in" in done["9.5.2"].evidence.en
    assert {name for name, one in done.items() if one.state != "met"} == {"8.2.E", "9.5.2", "9.5.3"}
    assert {done[name].state for name in ("8.2.E", "9.5.2", "9.5.3")} == {"not_run"}


def test_every_criterion_is_in_a_chapter_and_each_of_its_ids_is_required_where_it_is_asked_for() -> None:
    acceptance = load_acceptance()
    platforms = {one.id: one for one in load_platforms(acceptance, {})}
    assert [rule.id for rule in acceptance.done if rule.chapter not in acceptance.chapters] == []
    counts = Counter(rule.chapter for rule in acceptance.done)
    assert counts == {"8.2": 5, "8.3": 8, "9.1": 7, "9.2": 4, "9.3": 9, "9.4": 2, "9.5": 5}
    for rule in acceptance.done:
        required = {name: [case_id for _, case_id in platforms[name].required] for name in rule.platforms}
        for pattern in rule.needs:
            assert any(matches(one, pattern) for ids in required.values() for one in ids), (rule.id, pattern)
        for name, ids in required.items():
            assert any(matches(one, pattern) for one in ids for pattern in rule.needs), (rule.id, name)


def test_results_of_two_trainers_do_not_meet_the_line_of_the_old_stack(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        run = RunFolder(tmp_path / "all" / name, run_id=name)
        run.lines[0]["adapter"] = name
        run.case("A6")
        run.finish()
    states = {}
    for folder in (tmp_path / "all" / "mine", tmp_path / "all"):
        (line,) = [one for one in assemble(read_run([folder])).report.done if one.id == "9.5.5"]
        states[line.evidence.en] = line.state
    assert states == {"all results are of mine": "met", "all results are of mine, other": "not_met"}


def test_every_class_of_cases_has_a_title() -> None:
    assert {name[0] for name in every_id() + system_ids()} <= set(load_acceptance().classes)


@pytest.mark.parametrize(
    ("text", "state"), [("# Where a resume begins\n", "met"), (" \n", "not_met"), (None, "not_met")]
)
def test_the_last_line_of_the_definition_of_done_needs_its_document(
    tmp_path: Path, text: str | None, state: str
) -> None:
    report = assemble(read_run([whole_run(tmp_path / "run").finish()])).report
    acceptance = load_acceptance()
    platforms = load_platforms(acceptance, {})
    (tmp_path / "docs").mkdir()
    if text is not None:
        (tmp_path / "docs" / "resume-semantics.md").write_text(text)
    done = make_done(acceptance.done, platforms, report.cases, None, {"mine"}, checkout=tmp_path)
    (last,) = [one for one in done if one.id == "9.5.4"]
    assert (last.id, last.state) == ("9.5.4", state)
    shown = "docs/resume-semantics.md is there" if state == "met" else "docs/resume-semantics.md is missing"
    assert last.evidence.en.endswith(shown)


def test_an_npu_run_meets_the_lines_that_need_one(tmp_path: Path) -> None:
    whole_run(tmp_path / "all" / "cpu").finish()
    run = RunFolder(tmp_path / "all" / "npu4", platform="npu4", run_id="npu")
    run.resumed_case("D1", ranks=4)
    for name in every_id():
        if name.partition(".")[0] in ("A4", "A5", "D1") and name != "D1":
            run.case(name)
    run.case("A6", "fail", reason="no error")
    run.system_cases("A4", "A5", "A6", "D1")
    run.finish()
    done = {one.id: one.state for one in assemble(read_run([tmp_path / "all"])).report.done}
    assert (done["9.5.2"], done["9.5.3"]) == ("met", "not_met")


def test_a_cell_says_its_worst_case_counts_and_why_it_is_open(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run", leave_out=["A4.weights-only", "A8.neither"])
    run.case("A8.neither", "fail", reason="x")
    report = assemble(read_run([run.finish()])).report
    cells = {(row.id, cell.platform): cell for row in report.rows for cell in row.cells}
    assert (cells["A4", "cpu-inline"].state, cells["A4", "cpu-inline"].lacking) == (
        "missing",
        ("conformance:A4.weights-only",),
    )
    assert cells["A8", "cpu-inline"].state == "fail"
    assert cells["A8", "cpu-inline"].anchors[0] == "case-conformance-all-A8.neither"
    assert cells["A8", "cpu-inline"].passed == cells["A8", "cpu-inline"].total - 1
    assert cells["C7", "cpu-inline"].state is None
    assert (cells["D1", "npu4"].state, cells["D1", "npu4"].reason) == ("missing", "needs-npu")
    assert (cells["A6", "cuda1"].state, cells["A6", "cuda1"].reason) == ("missing", "needs-gpu")
    ids = [row.id for row in report.rows if row.in_specification]
    assert ids == [
        f"{letter}{n}" for letter, most in (("A", 10), ("B", 7), ("C", 11), ("D", 5)) for n in range(1, most + 1)
    ]


def report_with(folder: Path, **outcomes: str) -> Any:
    run = RunFolder(folder, run_id=folder.name)
    for name, outcome in outcomes.items():
        run.case(name, outcome)
    return assemble(read_run([run.finish()])).report


def test_the_trend_says_in_words_what_changed_since_the_run_before(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    first = line_of(report_with(tmp_path / "first", A6="pass", B1="pass", B6="pass"))
    second = line_of(report_with(tmp_path / "second", A6="fail", B1="pass", C3="pass"))
    for line in (first, second, second):
        append_run(path, line)
    runs = read_history(path)
    assert [run.run for run in runs] == ["first", "second"]
    flips = {flip.name: flip for flip in make_trend(runs).flips}
    assert {name: flip.text.en for name, flip in flips.items()} == {
        "all/A6": "all/A6 was pass, is fail",
        "all/B6": "all/B6 was pass and is gone",
        "all/C3": "all/C3 is new: pass",
    }
    assert flips["all/A6"].strip == ("pass", "fail")


def test_an_outcome_that_changes_at_one_commit_is_called_flaky(tmp_path: Path) -> None:
    lines = [line_of(report_with(tmp_path / name, A6=outcome)) for name, outcome in (("a", "pass"), ("b", "fail"))]
    same = [type(line)(**{**vars(line), "commit": "abc"}) for line in lines]
    (flip,) = make_trend(same).flips
    assert flip.flaky
    assert "flaky" in flip.text.en


def test_a_line_that_an_older_version_wrote_is_read_and_its_run_is_not_counted_twice(tmp_path: Path) -> None:
    """The report of the same records had another form, and so another digest."""
    path = tmp_path / "history.jsonl"
    old = {
        "schema": "hyper_resume.history/1", "digest": "0123456789abcdef0123456789abcdef", "run": "a",
        "started_at": "2026-03-01T10:00:00+00:00", "commit": None, "state": "incomplete", "outcomes": {"all/A6": "pass"},
    }  # fmt: skip
    path.write_text(json.dumps(old) + "\n")
    (line,) = read_history(path)
    again, other = (line_of(report_with(tmp_path / name, A6="pass")) for name in ("a", "b"))
    assert again.digest != line.digest
    for one in (again, other):
        append_run(path, one)
    assert [run.run for run in read_history(path)] == ["a", "b"]
    assert [run.digest for run in with_run(read_history(path), again)] == [again.digest]


def test_an_old_run_built_again_does_not_see_what_came_after_it(tmp_path: Path) -> None:
    lines = [line_of(report_with(tmp_path / name, A6="pass")) for name in ("a", "b", "c")]
    assert [run.run for run in with_run(lines, lines[1])] == ["a", "b"]


def test_the_same_run_with_the_same_history_gives_the_same_page(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    for name in ("a", "b"):
        run = RunFolder(tmp_path / name, run_id=name)
        run.case("A6")
        run.finish()
    pages = []
    for name in ("a", "b", "b", "a"):
        main(["build", str(tmp_path / name), "--history", str(history)])
        pages.append((tmp_path / name / "report" / "index.html").read_bytes())
    assert pages[1] == pages[2]
    assert pages[0] == pages[3]
    assert len(history.read_text().splitlines()) == 2


def test_a_broken_history_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(tmp_path / "run")
    run.case("A6")
    run.finish()
    (tmp_path / "history.jsonl").write_text('{"run": 1}\n')
    assert main(["build", str(tmp_path / "run"), "--history", str(tmp_path / "history.jsonl")]) == 2
    assert "history.jsonl:1" in capsys.readouterr().err
    assert not (tmp_path / "run" / "report").exists()

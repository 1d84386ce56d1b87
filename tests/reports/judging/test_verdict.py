"""Accepted only when everything that is required is there and passes; the worst finding comes first; unknown is never green."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.records.trajectory import RecordError
from reports.contents.document import Report
from reports.judging.assemble import ReportError, assemble
from reports.output.page import render
from reports.reading.read import read_run
from tests.reports.html import Page
from tests.reports.run_folder import WRONG_STREAM, RunFolder, every_id, refused_run, system_ids, whole_run


def report_of(*folders: Path, profile: str = "accept") -> Report:
    return assemble(read_run(list(folders)), profile=profile).report


def kinds(report: Report) -> list[str]:
    return [finding.kind for finding in report.verdict.findings]


def test_a_run_with_every_required_pass_is_accepted(tmp_path: Path) -> None:
    report = report_of(whole_run(tmp_path / "run").finish())
    assert report.verdict.state == "accepted"
    assert report.verdict.findings == ()
    assert report.verdict.required == report.verdict.required_passed > 200
    assert report.verdict.counts["pass"] == len(every_id() + system_ids())


def test_one_failed_case_refuses_the_run_and_the_sentence_names_step_rank_and_bucket(tmp_path: Path) -> None:
    report = report_of(refused_run(tmp_path / "run").finish())
    assert report.verdict.state == "refused"
    assert report.verdict.sentence.en == (
        f"1 of {len(every_id() + system_ids())} cases failed. "
        "D1: after a resume rank 2 differs from the uninterrupted run in the random streams, first at step 6 (rng.torch_cpu)."
    )
    assert "rank 2" in report.verdict.sentence.zh
    assert "第 6 步" in report.verdict.sentence.zh
    assert report.verdict.findings[0].anchor == report.focus[0] == "case-conformance-all-D1"


@pytest.mark.parametrize("missing", ["A4.weights-only", "C7", "M3.file-of-another-rank", "W1"])
def test_a_required_case_without_a_result_leaves_the_run_incomplete(tmp_path: Path, missing: str) -> None:
    names = [name for name in every_id() if name == missing or name.startswith(missing + ".")]
    report = report_of(whole_run(tmp_path / "run", leave_out=names).finish())
    assert report.verdict.state == "incomplete"
    assert kinds(report) == ["missing"]
    assert missing.partition(".")[0] in report.verdict.sentence.en


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        ("false_exact", "refused"),
        ("fail", "refused"),
        ("unexpected_pass", "refused"),
        ("known_fail", "refused"),
        ("error", "incomplete"),
        ("unsupported", "incomplete"),
        ("skipped", "incomplete"),
    ],
)
def test_anything_but_a_pass_keeps_a_run_from_being_accepted(tmp_path: Path, outcome: str, state: str) -> None:
    run = whole_run(tmp_path / "run", leave_out=["A6"])
    run.case("A6", outcome, reason="because")
    report = report_of(run.finish(accepted=True))
    assert report.verdict.state == state
    assert kinds(report) == [outcome]
    assert "because" in report.verdict.sentence.en


def test_a_failure_outweighs_what_is_missing_and_what_was_not_judged(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.case("A1.missing-path", "error", reason="the harness broke")
    run.case("B1", "fail", reason="it saved twice")
    report = report_of(run.finish())
    assert report.verdict.state == "refused"
    assert kinds(report)[:2] == ["fail", "error"]
    assert set(kinds(report)[2:]) == {"missing"}


def test_a_divergence_comes_before_a_failure_without_one(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.case("A6", "fail", reason="no error")
    run.resumed_case("C9", outcome="fail", divergence={**WRONG_STREAM, "rank": 0})
    assert report_of(run.finish()).verdict.findings[0].subject == "C9"


def test_a_false_certificate_comes_before_every_failure_and_is_counted_in_the_header(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", suite="conformance")
    run.resumed_case("C9", outcome="fail", divergence={**WRONG_STREAM, "rank": 0})
    run.case("Z4", "false_exact", reason="rng_state is certified as exact")
    assembled = assemble(read_run([run.finish()]), profile="selection")
    first = assembled.report.verdict.findings[0]
    assert (first.kind, first.subject, first.weight) == ("false_exact", "Z4", "refused")
    assert "rng_state is certified as exact" in first.text.en
    assert "FALSE EXACT 1" in Page(render(assembled)).text


def test_the_header_says_that_no_certificate_was_false(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", suite="conformance")
    run.case("Z4")
    assert "FALSE EXACT 0" in Page(render(assemble(read_run([run.finish()]), profile="selection"))).text


def test_a_sabotage_that_was_not_noticed_refuses_the_run(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run")
    run.sabotage("seen", "A6")
    run.sabotage("unseen", "B1", caught=False)
    report = report_of(run.finish())
    assert report.verdict.state == "refused"
    assert kinds(report) == ["sabotage_missed"]
    assert "unseen" in report.verdict.sentence.en


def test_red_cases_that_a_sabotage_record_sums_up_count_for_nothing_else(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run")
    run.sabotage("seen", "A6")
    report = report_of(run.finish())
    assert report.verdict.state == "accepted"
    assert report.verdict.counts["fail"] == 0
    assert [one.id for one in report.sabotages] == ["seen"]


def test_a_run_under_a_sabotage_of_its_own_never_counts_as_a_pass(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    for name in every_id():
        run.case(name, sabotage="rng-not-restored")
    run.system_cases()
    report = report_of(run.finish())
    assert report.verdict.state == "incomplete"
    assert "sabotaged" in kinds(report)


def test_the_nightly_profile_is_incomplete_without_sabotages(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run").finish()
    assert report_of(folder).verdict.state == "accepted"
    assert kinds(report_of(folder, profile="nightly")) == ["no_sabotages"]


def test_the_npu_profile_is_not_met_by_a_cpu_run(tmp_path: Path) -> None:
    report = report_of(whole_run(tmp_path / "run").finish(), profile="npu")
    assert report.verdict.state == "incomplete"
    assert report.verdict.required_passed == 0


def test_an_unknown_profile_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"'banana'.*accept, nightly, npu, selection"):
        report_of(whole_run(tmp_path / "run").finish(), profile="banana")


@pytest.mark.parametrize("problem", [None, "the second leg hung"])
def test_a_reference_that_does_not_agree_with_itself_leaves_the_run_incomplete(
    tmp_path: Path, problem: str | None
) -> None:
    run = whole_run(tmp_path / "run")
    run.calibration(equal=False, problem=problem)
    report = report_of(run.finish())
    assert report.verdict.state == "incomplete"
    assert kinds(report) == ["calibration"]


def test_repeats_that_disagree_are_named(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run")
    run.case("A6", "fail", reason="sometimes", repeat=1)
    assert {"fail", "flaky"} <= set(kinds(report_of(run.finish())))


def test_a_footer_that_says_no_is_believed(tmp_path: Path) -> None:
    report = report_of(
        whole_run(tmp_path / "run").finish(accepted=False, reasons=["Z9: required, and there is no such case"])
    )
    assert report.verdict.state == "refused"
    assert "Z9" in report.verdict.sentence.en


def test_several_folders_make_one_run(tmp_path: Path) -> None:
    names = every_id() + system_ids()
    first = whole_run(tmp_path / "all" / "conformance", leave_out=["D1", "D2"])
    first.finish()
    assert report_of(tmp_path / "all").verdict.state == "incomplete"
    second = RunFolder(tmp_path / "all" / "st" / "cpu4", platform="cpu4", run_id="run-2")
    second.resumed_case("D1", ranks=4)
    second.case("D2")
    second.finish()
    report = report_of(tmp_path / "all")
    assert report.verdict.state == "accepted"
    assert [part.name for part in report.parts] == ["conformance", "st/cpu4"]
    assert len(report.cases) == len(names)


def test_what_a_platform_requires_is_what_its_run_was_asked_for(tmp_path: Path) -> None:
    whole_run(tmp_path / "all" / "conformance").finish()
    run = RunFolder(
        tmp_path / "all" / "st", suite="st", platform="cpu4", run_id="run-2", required=["D1", "S99", "D*.four"]
    )
    for name in ("D1", "D2.four"):
        run.case(name, suite="st")
    run.finish()
    report = report_of(tmp_path / "all")
    assert report.verdict.state == "incomplete"
    lacking = {row.id: cell.lacking for row in report.rows for cell in row.cells if cell.platform == "cpu4"}
    assert {name: found for name, found in lacking.items() if found} == {"S99": ("st:S99",)}
    (shown,) = [one.en for one in report.not_tested if "not yet when the run was made" in one.en]
    assert "S1," in shown
    assert " D1" not in shown


def test_a_run_for_several_ids_of_one_suite_says_nothing_of_the_other(tmp_path: Path) -> None:
    """D1 is an id of the matrix and of the system tests; the header says whose result it is."""
    run = RunFolder(tmp_path / "run", suite="st", platform="cpu4", required=["D1"])
    run.case("D1", suite="st")
    report = report_of(run.finish())
    (cell,) = [cell for row in report.rows if row.id == "D1" for cell in row.cells if cell.platform == "cpu4"]
    assert cell.state == "missing"
    assert cell.passed == 1
    assert "conformance:D1" in cell.lacking
    assert "st:D1" not in cell.lacking


@pytest.mark.parametrize(
    ("other", "kinds_found"), [("0123456789ab", []), ("0123456789ab+", []), ("fedcba987654", ["commits"])]
)
def test_parts_of_different_commits_are_no_one_run(tmp_path: Path, other: str, kinds_found: list[str]) -> None:
    whole_run(tmp_path / "all" / "run").finish()
    for name, source in (("a", "0123456789ab"), ("b", other)):
        run = RunFolder(tmp_path / "all" / name, suite="soak", platform="cpu4", run_id=name, source=source)
        run.soak(f"soak.{name}", [{}])
        run.finish()
    report = report_of(tmp_path / "all")
    assert kinds(report) == kinds_found
    assert report.verdict.state == ("incomplete" if kinds_found else "accepted")
    assert report_of(tmp_path / "all", profile="selection").verdict.state == "passed"


def test_clean_controls_of_a_sabotage_run_are_not_listed_twice(tmp_path: Path) -> None:
    whole_run(tmp_path / "all" / "conformance").finish()
    run = RunFolder(tmp_path / "all" / "sabotage", run_id="run-2")
    run.case("A6")
    run.sabotage("seen", "A6")
    run.finish()
    report = report_of(tmp_path / "all")
    assert len(report.cases) == len(every_id() + system_ids())
    assert report.verdict.state == "accepted"


def test_a_control_that_fails_is_listed_and_refuses_the_run(tmp_path: Path) -> None:
    whole_run(tmp_path / "all" / "conformance").finish()
    run = RunFolder(tmp_path / "all" / "sabotage", run_id="run-2")
    run.case("A6", "fail", reason="false alarm")
    run.sabotage("seen", "A6")
    run.finish()
    report = report_of(tmp_path / "all")
    assert report.verdict.state == "refused"
    assert "false alarm" in report.verdict.sentence.en


JUNIT = '<testsuites><testsuite tests="9" failures="{}" errors="{}" skipped="0"/></testsuites>'


@pytest.mark.parametrize("name", ["unit-tests.xml", "rank_side.xml"])
@pytest.mark.parametrize(("counts", "state"), [((0, 0), "accepted"), ((1, 0), "refused"), ((0, 2), "refused")])
def test_failing_tests_in_the_results_folder_refuse_the_run(
    tmp_path: Path, name: str, counts: tuple[int, int], state: str
) -> None:
    folder = whole_run(tmp_path / "run").finish()
    (folder / name).write_text(JUNIT.format(*counts))
    verdict = report_of(folder).verdict
    assert verdict.state == state
    assert [one.text.en for one in verdict.findings] == (
        [] if state == "accepted" else [f"{name}: of 9 tests {sum(counts)} failed and 0 were skipped."]
    )


STORAGE: dict[str, Any] = {
    "schema": "hyper_resume.storage/2",
    "parts": [{"name": "crash", "status": "run", "seconds": 1.5, "reason": ""}],
    "crash_states": [
        {
            "scenario": "next_save", "model": "posix", "crash_points": 12, "states": 90, "distinct": 31, "loaded": 20,
            "violations": {"O2": 0}, "baseline": 12, "baseline_distinct": 40,
        }
    ],
    "power_cuts": [{"scenario": "next_save", "file_system": "ext4", "trials": 9, "violations": {"O1": 0}}],
    "corruption": [
        {
            "kind": "bit flip", "tried": 50, "refused": 50, "fell_back": 0, "loaded_silently": 0, "touched_live_state": 0,
            "baseline": 50,
        }
    ],
    "operation_errors": [
        {
            "scenario": "save", "error": "EIO", "persistent": True, "runs": 4, "survived": 1,
            "violations": {"published all the same": 0},
        }
    ],
    "hostile": [{"kind": "pickle", "tried": 7, "refused": 7, "harmless": 0, "violations": {"code run": 0}}],
    "mutants": [
        {"id": "m1", "title": "no fsync", "killed_by": "crash"},
        {"id": "m2", "title": "one fsync of two", "killed_by": None, "explanation": "the other one covers it"},
    ],
    "benchmarks": [{"name": "save", "unit": "s", "value": 1.5, "samples": 9, "peer": "plain DCP", "baseline": 1.75}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("crash_states", "violations"), {"O2": 1}),
        (("power_cuts", "violations"), {"O1": 1}),
        (("corruption", "loaded_silently"), 1),
        (("corruption", "touched_live_state"), 1),
        (("operation_errors", "violations"), {"published all the same": 1}),
        (("hostile", "violations"), {"code run": 1}),
        (("mutants", "killed_by"), None),
    ],
)
def test_storage_records_are_shown_and_their_violations_refuse_the_run(
    tmp_path: Path, path: tuple[str, str], value: object
) -> None:
    folder = whole_run(tmp_path / "run").finish()
    (folder / "storage.json").write_text(json.dumps(STORAGE))
    report = report_of(folder)
    assert report.verdict.state == "accepted"
    assert report.storage.benchmarks[0].baseline == 1.75
    broken = json.loads(json.dumps(STORAGE))
    broken[path[0]][0][path[1]] = value
    (folder / "storage.json").write_text(json.dumps(broken))
    assert report_of(folder).verdict.state == "refused"


def test_a_storage_proof_that_broke_off_leaves_the_run_incomplete(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run").finish()
    (folder / "crash").mkdir()
    part = {"name": "hostile", "status": "missing", "seconds": 0.0, "reason": "no module named so"}
    (folder / "crash" / "storage.json").write_text(json.dumps(STORAGE | {"parts": [part]}))
    verdict = report_of(folder).verdict
    assert verdict.state == "incomplete"
    assert "hostile" in verdict.findings[0].text.en


def test_storage_records_of_the_first_schema_are_refused_by_name(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run").finish()
    (folder / "storage.json").write_text(json.dumps(STORAGE | {"schema": "hyper_resume.storage/1"}))
    with pytest.raises(RecordError, match=r"storage/1.*storage/2.*run the proofs again"):
        report_of(folder)

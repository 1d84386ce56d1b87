"""A run of chosen cases: it says what passed and never that anything is accepted; nothing is missing that was not asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from reports.__main__ import main
from reports.comparing.compare import compare, text_of
from reports.judging.assemble import Assembled, assemble
from reports.output.machine_files import make_junit, make_summary
from reports.output.page import render
from reports.reading.read import read_run
from tests.reports.html import Page
from tests.reports.run_folder import RunFolder, system_ids, wrong_stream

DIFFERENCE = {
    "step": 6,
    "rank": 2,
    "bucket": "rng_state",
    "column": "rng.torch_cpu",
    "reference": "cc000602",
    "resumed": "cc000600",
}


def demo(folder: Path, **resumed: Any) -> RunFolder:
    """What the demo leaves: one system test and nothing else."""
    run = RunFolder(folder, suite="st", platform="cpu4", required=["D1", "D2.four"])
    run.resumed_case("D1", ranks=4, **resumed)
    return run


def selection(run: RunFolder) -> Assembled:
    return assemble(read_run([run.finish()]), profile="selection")


def red(junit: str) -> list[str]:
    root = ElementTree.fromstring(junit)
    return [str(test.get("name")) for test in root.iter("testcase") if len(test) and test[-1].tag != "properties"]


def test_a_selection_that_passes_is_passed_and_not_accepted(tmp_path: Path) -> None:
    made = selection(demo(tmp_path / "run"))
    verdict = made.report.verdict
    assert (verdict.state, verdict.findings) == ("passed", ())
    assert verdict.sentence.en == "All that was run passes: 1 case. This was a selection and is no acceptance."
    assert verdict.sentence.zh == "所运行的内容全部通过：1 个用例。这只是所选内容，不构成验收。"
    assert not made.report.is_acceptance


def test_its_page_speaks_of_what_was_run_alone(tmp_path: Path) -> None:
    page = Page(render(selection(demo(tmp_path / "run"))))
    words = page.text.partition("Skip to the report ")[2]
    assert words.startswith("Report of chosen cases")
    assert words.index("PASSED") < words.index("This was a selection and is no acceptance.") < words.index("Timeline")
    assert "ACCEPTED" not in words
    assert "not run" not in words
    ids = {value for _, name, value in page.attributes if name == "id"}
    assert {"matrix", "details", "provenance", "not_tested", "cases"} <= ids
    assert not {"done", "sabotages", "kills", "storage", "trend"} & ids
    assert {link.removeprefix("#") for link in page.values("a", "href")} <= ids


def test_its_matrix_has_the_rows_and_platforms_that_were_run(tmp_path: Path) -> None:
    report = selection(demo(tmp_path / "run")).report
    assert [(row.id, [(cell.platform, cell.state, cell.total) for cell in row.cells]) for row in report.rows] == [
        ("D1", [("cpu4", "pass", 1)])
    ]
    assert (report.platforms, report.done) == (("cpu4",), ())


def test_nothing_in_its_junit_is_red_or_skipped_for_what_was_not_asked(tmp_path: Path) -> None:
    report = selection(demo(tmp_path / "run")).report
    junit = make_junit(report)
    assert red(junit) == []
    names = [test.get("name") for test in ElementTree.fromstring(junit).iter("testcase")]
    assert names == ["D1: D1 goes on", "all that was run passes"]
    summary = make_summary(report)
    assert summary.startswith("# PASSED: ")
    assert "9.5" not in summary
    assert "Required" not in summary


@pytest.mark.parametrize(
    ("outcome", "state", "code"),
    [
        ("pass", "passed", 0),
        ("false_exact", "refused", 1),
        ("fail", "refused", 1),
        ("known_fail", "refused", 1),
        ("unexpected_pass", "refused", 1),
        ("error", "incomplete", 3),
        ("unsupported", "incomplete", 3),
        ("skipped", "incomplete", 3),
    ],
)
def test_what_is_red_or_open_is_reported_as_in_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: str, state: str, code: int
) -> None:
    run = demo(tmp_path / "run")
    run.case("A6", outcome, suite="st", reason="because")
    folder = run.finish()
    assert main(["build", str(folder), "--profile", "selection"]) == code
    assert capsys.readouterr().out.startswith(state.upper())
    shown = json.loads((folder / "report" / "results.json").read_text())
    assert (shown["verdict"]["state"], shown["profile"]) == (state, "selection")
    assert bool(red((folder / "report" / "junit.xml").read_text())) == (outcome != "pass")


def test_a_divergence_is_on_the_first_screen_of_a_selection_too(tmp_path: Path) -> None:
    run = demo(tmp_path / "run", change=wrong_stream, outcome="fail", divergence=DIFFERENCE)
    text = Page(render(selection(run))).text
    assert text.index("REFUSED") < text.index("case D1 step 6 rank 2 bucket rng_state")


def test_a_hunt_with_one_sabotage_passes_when_that_is_caught(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", suite="conformance")
    run.case("A6")
    run.sabotage("seen", "A6")
    verdict = selection(run).report.verdict
    assert verdict.sentence.en.startswith("All that was run passes: 1 case, 1 sabotage.")


def test_a_sabotage_that_was_not_caught_refuses_a_selection(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", suite="conformance")
    run.case("A6")
    run.sabotage("unseen", "A6", caught=False)
    assert selection(run).report.verdict.state == "refused"


def test_a_soak_alone_passes_with_its_kills_counted(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", suite="soak", platform="cpu4")
    run.soak("soak.demo", [{}, {}, {}])
    report = selection(run).report
    assert report.verdict.state == "passed"
    assert "1 case, 3 kills" in report.verdict.sentence.en
    assert "3 次中断" in report.verdict.sentence.zh


@pytest.mark.parametrize("outcome", [None, "note"])
def test_a_run_of_nothing_that_passes_is_incomplete(tmp_path: Path, outcome: str | None) -> None:
    run = RunFolder(tmp_path / "run", suite="st", platform="cpu4")
    if outcome is not None:
        run.case("A6", outcome, suite="st")
    made = selection(run)
    assert made.report.verdict.state == "incomplete"
    assert made.report.verdict.sentence.en == "Nothing was run that passes."
    assert red(make_junit(made.report)) == ["all that was run passes"]


def test_an_empty_part_keeps_a_run_from_passing(tmp_path: Path) -> None:
    demo(tmp_path / "all" / "st").finish()
    run = RunFolder(tmp_path / "all" / "soak", suite="soak", platform="cpu4", run_id="soak")
    run.finish(accepted=False, reasons=["nothing was run"])
    verdict = assemble(read_run([tmp_path / "all"]), profile="selection").report.verdict
    assert (verdict.state, verdict.sentence.en) == ("incomplete", "soak: nothing was run")


def test_a_case_under_a_sabotage_that_passes_proves_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", suite="st", platform="cpu4")
    run.case("A6", sabotage="rng-not-restored", suite="st")
    run.finish(accepted=False, reasons=["nothing was run without a sabotage"])
    verdict = assemble(read_run([run.folder]), profile="selection").report.verdict
    assert (verdict.state, [one.kind for one in verdict.findings]) == ("incomplete", ["sabotaged"])


def test_two_selections_are_compared_as_selections_unless_another_profile_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [selection(demo(tmp_path / name)) for name in ("before", "after")]
    assert text_of(compare(*made)).startswith("before: run-1 (cpu4), profile selection: passed\n")
    sides = [str(tmp_path / "before"), str(tmp_path / "after")]
    assert main(["compare", *sides]) == 0
    assert "after:  run-1 (cpu4), profile selection: passed" in capsys.readouterr().out
    assert main(["compare", *sides, "--profile", "accept"]) == 0
    assert "after:  run-1 (cpu4), profile accept: incomplete" in capsys.readouterr().out


def test_a_comparison_takes_the_profile_that_each_report_was_built_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, profile in (("before", "nightly"), ("after", "npu")):
        assert main(["build", str(demo(tmp_path / name).finish()), "--profile", profile]) == 3
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 0
    assert re.findall(r"profile (\w+): incomplete", capsys.readouterr().out) == ["nightly", "npu"]
    for text in ("{", "[]", '{"profile": 3}', '{"profile": "banana"}'):
        (tmp_path / "after" / "report" / "results.json").write_text(text)
        assert main(["compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 0
        assert re.findall(r"profile (\w+):", capsys.readouterr().out) == ["nightly", "selection"]


def test_the_profile_of_a_run_is_the_strictest_that_has_results_everywhere(tmp_path: Path) -> None:
    """Without a report the records decide."""
    folders: dict[str, Path] = {}
    for name, platforms in (("accept", ("all",)), ("npu", ("npu4", "npu8")), ("selection", ("npu4",))):
        for platform in platforms:
            run = RunFolder(tmp_path / name / platform, platform=platform, run_id=platform)
            for case in ("A6", "C7", "D1", "D2"):
                run.case(case)
            for case in system_ids():
                run.case(case, suite="st")
            run.finish()
        folders[name] = tmp_path / name
    for name, folder in folders.items():
        assert assemble(read_run([folder]), profile=None).report.profile == name
    run = RunFolder(tmp_path / "accept" / "sabotage", run_id="sabotage")
    run.sabotage("seen", "A6")
    run.finish()
    assert assemble(read_run([tmp_path / "accept"]), profile=None).report.profile == "nightly"


@pytest.mark.parametrize("words", [[], ["somewhere"], ["proof", "somewhere"]])
def test_a_command_line_without_a_verb_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: python -m reports" in capsys.readouterr().err

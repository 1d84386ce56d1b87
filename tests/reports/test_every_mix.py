"""Every profile over every mix of records: the report is made, its counts agree, and its links lead somewhere."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from reports.contents.document import parse_json
from reports.judging.acceptance import load_acceptance
from reports.judging.assemble import assemble
from reports.output.machine_files import make_files
from reports.reading.read import read_run
from tests.reports.bench_folder import costed
from tests.reports.html import Page
from tests.reports.run_folder import OUTCOMES, RunFolder, every_id, system_ids

PROFILES = sorted(load_acceptance().profiles)
PLATFORMS = ("all", "cpu-inline", "cpu-data", "cpu4", "cuda1", "npu4", "npu8", "of-somebody-else")
IDS = {"conformance": every_id(), "st": system_ids()}
WRONG = ("false_exact", "fail", "known_fail", "unexpected_pass")
STORAGE = {
    "schema": "hyper_resume.storage/2",
    "parts": [{"name": "crash", "status": "run", "seconds": 1.5, "reason": ""}],
    "mutants": [{"id": "m1", "title": "no fsync", "killed_by": "crash"}],
}


@dataclass(frozen=True, kw_only=True)
class OnePart:
    """A results folder: ``cases`` are id -> outcome (number -> outcome of a kill, sabotage -> caught or not)."""

    kind: str
    platform: str
    is_schema_1: bool
    cases: Mapping[str, str]
    has_legs: bool = False

    def write(self, folder: Path) -> None:
        run = RunFolder(
            folder, suite=None if self.is_schema_1 else self.kind, platform=self.platform, run_id=folder.name
        )
        if self.kind in ("soak", "sweep"):
            kills = [{"outcome": outcome, "reason": "because"} for outcome in self.cases.values()]
            red = [outcome for outcome in ("error", "fail") if outcome in self.cases.values()]
            run.soak(f"{self.kind}.tiny", kills, red[-1] if red else "pass", "because" if red else "")
        elif self.kind == "sabotage":
            for name, caught in self.cases.items():
                run.sabotage(name, "A6", caught=caught == "caught")
        else:
            for name, outcome in self.cases.items():
                run.case(name, outcome, reason="because", suite=self.kind)
            if self.has_legs:
                run.resumed_case("Z1", ranks=2)
        run.finish()

    @property
    def results(self) -> list[str]:
        """The outcomes that must be counted."""
        if self.kind in ("soak", "sweep"):
            return ["fail" if "fail" in self.cases.values() else "error" if "error" in self.cases.values() else "pass"]
        if self.kind == "sabotage":
            return []
        return [*self.cases.values(), *(["pass"] if self.has_legs else [])]

    @property
    def is_wrong(self) -> bool:
        return bool(set(self.results) & {*WRONG}) or "missed" in self.cases.values()


@st.composite
def parts(draw: st.DrawFn) -> OnePart:
    kind = draw(st.sampled_from(["conformance", "st", "soak", "sweep", "sabotage"]))
    names: st.SearchStrategy[Any] = st.sampled_from([str(number) for number in range(3)])
    outcomes = st.sampled_from(["pass", "fail", "error"])
    if kind == "sabotage":
        outcomes = st.sampled_from(["caught", "missed"])
    elif kind in IDS:
        names, outcomes = st.sampled_from(IDS[kind]), st.sampled_from(OUTCOMES)
    return OnePart(
        kind=kind,
        platform=draw(st.sampled_from(PLATFORMS)),
        is_schema_1=kind in IDS and draw(st.booleans()),
        cases=draw(st.dictionaries(names, outcomes, max_size=6)),
        has_legs=kind in IDS and draw(st.booleans()),
    )


def matrix_and_system_test() -> list[OnePart]:
    """Rows that one platform requires and only another one ran."""
    matrix = OnePart(kind="conformance", platform="all", is_schema_1=False, cases={"A6": "pass", "D3.resume": "pass"})
    system = OnePart(kind="st", platform="cpu4", is_schema_1=False, cases={"D1": "pass", "C2": "fail"}, has_legs=True)
    return [matrix, system]


@pytest.mark.parametrize("profile", PROFILES)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mix=st.lists(parts(), min_size=1, max_size=4),
    tests=st.sampled_from([None, 0, 1]),
    has_storage=st.booleans(),
    costs=st.sampled_from([None, "done", "broke off"]),
)
@example(mix=matrix_and_system_test(), tests=None, has_storage=False, costs=None)
@example(mix=[*matrix_and_system_test(), *matrix_and_system_test()], tests=1, has_storage=True, costs="done")
def test_any_mix_of_records_makes_a_report_whose_counts_agree(
    profile: str, mix: list[OnePart], tests: int | None, has_storage: bool, costs: str | None
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, part in enumerate(mix):
            part.write(folder / f"{number}-{part.kind}")
        if tests is not None:
            (folder / "unit-tests.xml").write_text(f'<testsuite tests="9" failures="{tests}" errors="0" skipped="1"/>')
        if has_storage:
            (folder / "storage.json").write_text(json.dumps(STORAGE))
        if costs is not None:
            bench = costed(folder / "bench")
            if costs == "broke off":
                bench.failure("because")
            bench.finish()
        made = assemble(read_run([folder]), profile=profile)
        files = make_files(made)
    report, verdict = made.report, made.report.verdict
    expected = Counter(outcome for part in mix for outcome in part.results)
    assert verdict.counts == {name: expected[name] for name in OUTCOMES}
    is_wrong = any(part.is_wrong for part in mix) or tests == 1
    assert (verdict.state == "refused") == is_wrong
    assert parse_json(files["results.json"], "results.json") == report

    # The matrix, the first screen, the summary and JUnit all count alike.
    page = Page(files["index.html"])
    wanted = load_acceptance().profiles[profile].platforms
    cells = [
        cell
        for row in report.rows
        for platform, cell in zip(made.platforms, row.cells, strict=True)
        if platform.id in wanted and platform.requires(row.id)
    ]
    if report.is_acceptance:
        assert sum(cell.total for cell in cells) == verdict.required
        assert sum(cell.passed for cell in cells) == verdict.required_passed
        assert f"{verdict.required_passed} /{verdict.required} required results passed" in both_orders(page.text)
        assert f"pass: {verdict.required_passed} of {verdict.required}." in files["summary.md"]
    suites = {str(suite.get("name")): suite for suite in ElementTree.fromstring(files["junit.xml"])}
    counted = [suites[one.name] for one in report.parts]
    assert sum(int(str(suite.get("tests"))) for suite in counted) == expected.total()
    assert sum(int(str(suite.get("failures"))) for suite in counted) == sum(
        expected[one] for one in ("false_exact", "fail", "unexpected_pass")
    )
    if is_wrong and sum(expected[one] for one in WRONG):
        failed = sum(expected[one] for one in WRONG)
        assert verdict.sentence.en.startswith(f"{failed} of {expected.total()} cases failed")

    ids = [value for _, attribute, value in page.attributes if attribute == "id"]
    assert len(ids) == len(set(ids))
    assert {link.removeprefix("#") for link in page.values("a", "href")} <= set(ids)


def both_orders(text: str) -> str:
    """The text with each figure of the first screen behind its name, and before it."""
    return re.sub(r"(required results passed) (\d+ /\d+)", r"\1 \2 \1", text)

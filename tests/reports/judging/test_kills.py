"""What soaks and sweeps found: a kill that was not survived leads to step, rank and bucket from the first screen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from reports.judging.assemble import Assembled, assemble
from reports.output.machine_files import make_junit
from reports.output.page import render
from reports.reading.read import read_run
from tests.reports.formulas import loss, single
from tests.reports.html import Page
from tests.reports.run_folder import RunFolder

REFERENCE, RESUMED = loss(41, 1), single(loss(41, 1) + 2**-18)
DIFFERENCE = {
    "step": 41,
    "rank": 1,
    "bucket": "optimizer",
    "column": "loss",
    "reference": repr(REFERENCE),
    "resumed": repr(RESUMED),
}
FAILED: dict[str, Any] = {
    "step": 40,
    "what": "SIGKILL to all ranks after step 40",
    "outcome": "fail",
    "reason": "step 41 is not the reference's",
    "divergence": DIFFERENCE,
}


def soaked(folder: Path, *kills: dict[str, Any], outcome: str = "fail", suite: str = "soak") -> Assembled:
    run = RunFolder(folder, suite=suite, platform="cpu4")
    run.soak("soak.demo" if suite == "soak" else "sweep.sync", kills, outcome, "the life up to kill 4: red")
    return assemble(read_run([run.finish()]))


def test_a_failed_soak_leads_to_the_kill_step_rank_and_bucket(tmp_path: Path) -> None:
    made = soaked(tmp_path / "run", {}, {}, FAILED)
    first = made.report.verdict.findings[0]
    assert made.report.verdict.state == "refused"
    assert first.text.en == (
        "soak.demo, kill 3: after a resume rank 1 differs from the uninterrupted run in the optimizer's state, "
        "first at step 41 (loss)."
    )
    assert first.text.zh.startswith("soak.demo 第 3 次中断：恢复后 rank 1 的optimizer 状态")
    assert first.divergence is not None
    assert (first.divergence.step, first.divergence.rank, first.divergence.bucket) == (41, 1, "optimizer")
    html = render(made)
    page = Page(html)
    assert page.text.index("case soak.demo step 41 rank 1 bucket optimizer seen in loss") < page.text.index("Matrix")
    assert page.count("a", "href", "#kill-cpu4-soak.demo-3") == 1
    assert page.count("tr", "id", "kill-cpu4-soak.demo-3") == 1
    assert f"reference {REFERENCE!r} {REFERENCE.hex()}" in page.text
    assert f"resumed {RESUMED!r} {RESUMED.hex()}" in page.text
    assert "float32" in page.text


def test_every_failed_point_of_a_sweep_has_its_values_and_the_first_one_leads(tmp_path: Path) -> None:
    point = {"moment": "file_operation", "rank": 3, "operation": 9, "what": "rename x"}
    made = soaked(
        tmp_path / "run",
        {**point, "outcome": "error", "reason": "the harness broke"},
        {**point, **FAILED},
        {**point, **FAILED, "divergence": {**DIFFERENCE, "step": 42}},
        suite="sweep",
    )
    assert "sweep.sync, kill 2" in made.report.verdict.sentence.en
    page = Page(render(made))
    assert page.count("a", "href", "#kill-cpu4-sweep.sync-2") == 1
    for number in (1, 2, 3):
        assert page.count("tr", "id", f"kill-cpu4-sweep.sync-{number}") == 1
    assert page.text.count(REFERENCE.hex()) == 2
    assert "41 · 1" in page.text
    assert "42 · 1" in page.text


def test_a_failed_kill_whose_soak_says_pass_leads_to_its_values_too(tmp_path: Path) -> None:
    made = soaked(tmp_path / "run", {}, FAILED, outcome="pass")
    assert made.report.verdict.findings[0].kind == "kill_fail"
    assert Page(render(made)).count("a", "href", "#kill-cpu4-soak.demo-2") >= 1


@pytest.mark.parametrize("outcome", ["false_exact", "pass"])
def test_a_kill_under_a_certificate_that_says_exact_is_listed_before_every_other(tmp_path: Path, outcome: str) -> None:
    false = {
        **FAILED,
        "outcome": "false_exact",
        "divergence": {**DIFFERENCE, "step": 44},
        "reason": "certified as exact",
    }
    made = soaked(tmp_path / "run", FAILED, false, outcome=outcome)
    first = made.report.verdict.findings[0]
    assert (first.kind, first.weight) == ("false_exact", "refused")
    assert first.divergence is not None
    assert first.divergence.step == 44
    assert "is certified as exact and trains differently" in first.text.en
    assert "证书称完全一致" in first.text.zh
    assert "2 of 2 kills failed" in made.report.verdict.sentence.en
    page = Page(render(made))
    assert page.count("a", "href", "#kill-cpu4-soak.demo-2") >= 1
    root = ElementTree.fromstring(make_junit(made.report))
    (suite,) = (suite for suite in root if suite.get("name") == "kills")
    assert suite.get("failures") == "2"


def test_a_kill_that_failed_without_a_value_says_why(tmp_path: Path) -> None:
    made = soaked(tmp_path / "run", {**FAILED, "divergence": None, "reason": "5 steps are lost, more than 3"})
    page = Page(render(made))
    assert made.report.verdict.sentence.en == (
        "1 of 1 cases failed, 1 of 1 kills failed. "
        "soak.demo, kill 1 (SIGKILL to all ranks after step 40) fails: 5 steps are lost, more than 3"
    )
    assert page.count("a", "href", "#kill-cpu4-soak.demo-1") == 1
    assert "Show the kill" in page.text
    assert "Show the values" not in page.text


def test_junit_has_each_kill_with_its_place(tmp_path: Path) -> None:
    root = ElementTree.fromstring(make_junit(soaked(tmp_path / "run", {}, FAILED).report))
    (suite,) = (suite for suite in root if suite.get("name") == "kills")
    assert [test.get("name") for test in suite] == [
        "1: SIGKILL to all ranks after step 7",
        "2: SIGKILL to all ranks after step 40",
    ]
    properties = {item.get("name"): item.get("value") for item in suite[1].iter("property")}
    assert properties == {"divergence": "step 41, rank 1, optimizer (loss)"}
    assert suite.get("failures") == "1"


def test_a_thousand_kills_that_were_survived_take_little_room(tmp_path: Path) -> None:
    few, many = (len(render(soaked(tmp_path / str(count), *[{}] * count, outcome="pass"))) for count in (10, 1_010))
    assert (many - few) / 1_000 < 200


@pytest.mark.parametrize(
    ("kills", "expected"), [([{"lost_steps": 2}, {"lost_steps": 3}], "≤ 3"), ([{"lost_steps": 0}], "≤ 0")]
)
def test_the_most_steps_that_any_kill_lost_are_reported(
    tmp_path: Path, kills: list[dict[str, Any]], expected: str
) -> None:
    text = Page(render(soaked(tmp_path / "run", *kills, outcome="pass"))).text
    assert re.search(rf"lost steps \(RPO\) : {expected}", text)

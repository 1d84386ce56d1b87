"""Two runs side by side: outcomes that changed, and where uninterrupted legs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reports.__main__ import main
from reports.comparing.compare import compare, text_of
from reports.comparing.compare_page import render_comparison
from reports.contents.text import load_words
from reports.judging.assemble import assemble
from reports.reading.read import read_run
from tests.reports.formulas import loss, single
from tests.reports.html import Page
from tests.reports.run_folder import RunFolder

TEMPLATES = Path(__file__).parents[3] / "reports" / "templates"


def run_of(folder: Path, outcome: str = "pass", **options: Any) -> RunFolder:
    run = RunFolder(folder, run_id=folder.name, **options)
    run.resumed_case("C9", ranks=2)
    run.case("A6", outcome)
    return run


def shift_reference(folder: Path, step: int, by: float) -> None:
    """The uninterrupted leg of rank 1 has another loss at one step."""
    path = folder / "C9/legs/reference/trajectory_rank_1.jsonl"
    old = f'"loss": {loss(step, 1)!r}'
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, f'"loss": {single(loss(step, 1) + by)!r}'))


def test_equal_runs_have_no_difference(tmp_path: Path) -> None:
    sides = [assemble(read_run([run_of(tmp_path / name).finish()])) for name in ("before", "after")]
    found = compare(*sides)
    assert (found.flips, found.same_outcomes) == ((), 2)
    assert [(row.key, row.first_step) for row in found.legs] == [("C9", None)]
    page = Page(render_comparison(found))
    assert "all are the same to the last bit: 1" in page.text
    words = load_words()
    assert set(page.values("span", "data-w") + page.values("th", "data-w")) - {""} <= set(words)


def test_a_changed_outcome_and_a_changed_training_are_distinguished(tmp_path: Path) -> None:
    before = run_of(tmp_path / "before").finish()
    after = run_of(tmp_path / "after", "fail").finish()
    shift_reference(after, 7, 0.25)
    found = compare(assemble(read_run([before])), assemble(read_run([after])))
    assert [(flip.key, flip.before, flip.after) for flip in found.flips] == [("A6", "pass", "fail")]
    (row,) = found.legs
    assert (row.first_step, row.first) == (7, "loss, rank 1")
    expected = abs(single(loss(7, 1) + 0.25) - loss(7, 1)) / single(loss(7, 1) + 0.25)
    assert row.largest == {"loss": expected, "lr": 0.0, "grad_norm": 0.0}
    assert "A6: pass -> fail" in text_of(found)


def test_a_run_on_another_platform_is_matched_case_by_case(tmp_path: Path) -> None:
    before = run_of(tmp_path / "before", platform="cpu4").finish()
    after = run_of(tmp_path / "after", platform="npu4").finish()
    found = compare(assemble(read_run([before])), assemble(read_run([after])))
    assert found.same_outcomes == 2
    assert (found.before.platforms, found.after.platforms) == ("cpu4", "npu4")


@pytest.mark.parametrize(("outcome", "code"), [("pass", 0), ("fail", 1)])
def test_the_command_prints_writes_a_page_and_says_by_its_exit_code_whether_outcomes_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: str, code: int
) -> None:
    for name, own in (("before", "pass"), ("after", outcome)):
        run_of(tmp_path / name, own).finish()
    page = tmp_path / "pages" / "compare.html"
    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "after"), "-o", str(page)]) == code
    assert "outcomes changed" in capsys.readouterr().out
    text = page.read_text()
    assert f"<script>{(TEMPLATES / 'switches.js').read_text()}</script>" in text
    assert text.count("<script") == 2


def test_broken_records_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path / "before").finish()
    run_of(tmp_path / "after").write()
    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 2
    assert "no footer" in capsys.readouterr().err

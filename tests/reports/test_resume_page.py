"""The page tells the verdict first, shows every leg, needs nothing from outside, and refuses broken records."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.proof_record import Divergence, write_proof
from reports.__main__ import main
from reports.resume_page import build_page
from tests.reports.html import Page
from tests.reports.results_folder import IDENTICAL, failed_folder, loss, results_folder


def test_the_verdict_comes_first_in_words(tmp_path: Path) -> None:
    results_folder(tmp_path)
    page = Page(build_page(tmp_path))
    assert page.text.index("Identical") < page.text.index(IDENTICAL) < page.text.index("Curves")
    assert "was killed and resumed. From its first resumed step on it did exactly what" in page.text


def test_the_page_needs_nothing_from_outside_and_no_script(tmp_path: Path) -> None:
    results_folder(tmp_path)
    text = build_page(tmp_path)
    page = Page(text)
    assert not re.search(r"https?://|url\(|@import", text)
    assert not [item for item in page.attributes if item[0] in ("script", "link", "img", "iframe")]
    assert not [item for item in page.attributes if item[1] in ("src", "href", "onload", "onclick")]


def test_every_leg_has_its_curve_its_own_dash_and_marker_and_its_words(tmp_path: Path) -> None:
    results_folder(tmp_path)
    text = build_page(tmp_path)
    page = Page(text)
    for label, style, words in (
        ("reference", "reference", "wide solid line"),
        ("interrupted", "interrupted", "short dashes, rings"),
        ("resumed", "resumed-a", "long dashes, crosses"),
    ):
        assert f"{label} {words}" in page.text
        # Loss, difference (not for the reference itself), learning rate, and the legend.
        assert page.count("path", "class", f"curve {style}") == (3 if style == "reference" else 4)
    dashes = re.findall(r"\.curve\.\S+ \{[^}]*stroke-dasharray: ([0-9 ]+)", text)
    assert len(set(dashes)) == len(dashes) == 4


def test_every_point_carries_its_exact_value(tmp_path: Path) -> None:
    results_folder(tmp_path)
    text = build_page(tmp_path)
    assert f"<title>reference, step 17: {loss(17)!r}</title>" in text
    assert f"<title>resumed, step 17: {loss(17)!r}</title>" in text
    assert f"<title>interrupted, step 13: {loss(13)!r}</title>" in text
    assert "<title>interrupted, step 14:" not in text
    assert "<title>resumed − reference, step 17: 0.0</title>" in text


def test_the_kill_is_marked_and_lost_steps_are_shaded_and_told(tmp_path: Path) -> None:
    results_folder(tmp_path)
    page = Page(build_page(tmp_path))
    # Once in each of three charts and in the legend.
    assert page.count("path", "class", "mark kill") == 4
    assert page.count("rect", "class", "band") == 4
    assert "once every rank had finished step 13; the newest checkpoint held step 10" in page.text
    assert "so steps 11 to 13 were lost and done again" in page.text


def test_three_kills_are_numbered_and_each_is_told(tmp_path: Path) -> None:
    results_folder(tmp_path, kills=((9, 7), (13, 13), (15, 14)), last=39)
    page = Page(build_page(tmp_path))
    assert page.count("path", "class", "mark kill") == 3 * 3 + 1
    assert "kill 1 kill 2 kill 3" in page.text
    for words in ("so steps 8 to 9 were lost", "so no step was lost", "so step 15 was lost"):
        assert words in page.text


def test_a_difference_is_led_to_from_the_top_with_both_values_and_its_bucket(tmp_path: Path) -> None:
    value = loss(17)
    results_folder(
        tmp_path,
        divergence=Divergence(
            step=17, rank=3, bucket="model", column="loss", reference=repr(value), resumed=repr(value - 1e-7)
        ),
    )
    page = Page(build_page(tmp_path))
    assert page.text.index("Different") < page.text.index("First difference step 17 rank 3") < page.text.index("Curves")
    assert f"reference {value!r} resumed {value - 1e-7!r}" in page.text
    assert f"reference, hexadecimal {value.hex()}" in page.text
    assert page.count("path", "class", "mark parting") == 3
    assert "Loss on rank 3" in page.text
    assert page.text.count("✕ step 17, rank 3") == 1


def test_a_run_that_was_not_judged_says_so_and_never_looks_passed(tmp_path: Path) -> None:
    failed_folder(tmp_path)
    page = Page(build_page(tmp_path))
    assert "Not judged" in page.text
    assert "Identical" not in page.text
    assert "Leg interrupted failed" in page.text
    assert page.count("body", "class", "error") == 1


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    record = results_folder(tmp_path, title="<script>alert(1)</script> & more")
    write_proof(replace(record, config_text="a: '</pre><img src=x>'", overrides=("--a=<b>",)), tmp_path)
    page = Page(build_page(tmp_path))
    assert "<script>alert(1)</script> & more" in page.text
    assert "</pre><img src=x>" in page.text


def test_values_that_are_not_finite_leave_a_gap(tmp_path: Path) -> None:
    results_folder(tmp_path)
    path = tmp_path / "legs" / "2-resumed" / "trajectory_rank_0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[4]["loss"] = float("nan")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = build_page(tmp_path)
    Page(text)
    assert "nan" not in re.sub(r"<title>.*?</title>", "", text).lower().split("</style>")[1]


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    results_folder(tmp_path)
    assert build_page(tmp_path) == build_page(tmp_path)
    assert len(build_page(tmp_path)) < 100_000


def test_the_command_writes_the_page_and_refuses_broken_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results_folder(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert (tmp_path / "index.html").read_text() == build_page(tmp_path)
    assert main([str(tmp_path), "-o", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").exists()
    (tmp_path / "index.html").unlink()
    (tmp_path / "legs" / "2-resumed" / "trajectory_rank_1.jsonl").write_text("no record\n")
    assert main([str(tmp_path)]) == 2
    assert "trajectory_rank_1.jsonl:1: not a JSON record" in capsys.readouterr().err
    assert not (tmp_path / "index.html").exists()

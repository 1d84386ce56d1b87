"""Sabotages match the cases, and can't be disabled unnoticed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.__main__ import _entries, main
from conformance.plain_data.serial import SerialError
from conformance.records.results import ResultRecord, SabotageRecord, read_results
from conformance.running.session import make_footer
from conformance.sabotages.catalogue import (
    SabotageEntry,
    judge_sabotage,
    lint_sabotages,
    load_sabotages,
    sabotage_table,
)
from conformance.sabotages.saboteur import SABOTAGES, SabotageError, Saboteur, install_sabotage, sabotage
from tests.conformance.stand_in import case_of, result_of


def entry(**changes: Any) -> SabotageEntry:
    values: dict[str, Any] = {
        "id": "met",
        "title": "a defect",
        "harm": "some",
        "seen": (),
        "cases": ("Z1",),
        "bucket": "rng_state",
        **changes,
    }
    return SabotageEntry(**values)


def test_a_replaced_function_is_called_instead_and_fires_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", json.dumps)
    told: list[str] = []
    put = Saboteur(lambda: told.append("fired"))
    put.replace("json:dumps", lambda original, value: original([value]))
    assert told == []
    assert (json.dumps(1), json.dumps(2), told) == ("[1]", "[2]", ["fired"])


def test_a_sabotage_may_say_itself_when_it_fires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", json.dumps)
    told: list[str] = []
    put = Saboteur(lambda: told.append("fired"))
    put.replace("json:dumps", lambda original, value: original(value), fires=False)
    json.dumps(1)
    assert told == []
    put.fired()
    assert told == ["fired"]


@pytest.mark.parametrize("target", ["no.such.module:name", "json:no_such_name", "json:JSONEncoder.no_such_method"])
def test_a_target_that_does_not_exist_is_an_error(target: str) -> None:
    with pytest.raises(SabotageError, match="does not exist"):
        Saboteur(lambda: None).replace(target, lambda original: None)


def test_an_unknown_sabotage_is_an_error() -> None:
    with pytest.raises(SabotageError, match="no sabotage is called 'nothing'"):
        install_sabotage("nothing", lambda: None)


def test_an_id_is_used_once() -> None:
    register_once = sabotage("used-by-a-test")
    try:
        register_once(lambda put: None)
        with pytest.raises(ValueError, match="two sabotages are called used-by-a-test"):
            register_once(lambda put: None)
    finally:
        SABOTAGES.pop("used-by-a-test")


def test_cases_and_sabotages_must_name_each_other() -> None:
    case = case_of(sabotages=["met", "unheard-of"])
    problems = lint_sabotages([entry(), entry(id="lonely"), entry(id="stray", cases=("Q1",))], [case])
    assert problems == [
        "sabotage lonely: case Z1 does not name it",
        "sabotage stray: there is no case Q1",
        "case Z1: there is no sabotage unheard-of",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bucket: model", "bucket: weights", "bucket is one of model"),
        ("cases: [A6]", "cases: []", "at least one case"),
        ("id: a", "id: A_b", "lower-case words"),
        ("seen: []", "sen: []", "unknown key 'sen'"),
    ],
)
def test_a_malformed_sabotage_is_refused_with_its_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = "- id: a\n  title: t\n  harm: h\n  seen: []\n  cases: [A6]\n  bucket: model\n"
    path = tmp_path / "sabotages.yaml"
    path.write_text(text)
    assert [item.id for item in load_sabotages(path)] == ["a"]
    path.write_text(text.replace(old, new))
    with pytest.raises(SerialError, match=r"sabotages\.yaml:1") as caught:
        load_sabotages(path)
    assert message in str(caught.value)


def test_only_a_red_case_counts_as_caught_and_the_bucket_must_be_right(tmp_path: Path) -> None:
    red = result_of(tmp_path / "red", "forgets-rng", sabotage="met")
    clean = result_of(tmp_path / "clean", "", sabotage="met")
    silent = result_of(tmp_path / "silent", "forgets-rng", sabotage="unmet")
    caught = judge_sabotage(entry(), {"Z1": red})
    assert (caught.caught, caught.right_bucket, caught.caught_by) == (True, True, "trajectory_equals")
    wrong = judge_sabotage(entry(bucket="optimizer"), {"Z1": red})
    assert (wrong.caught, wrong.right_bucket, wrong.blamed_bucket) == (True, False, "rng_state")
    assert not judge_sabotage(entry(), {"Z1": clean}).caught
    blind = case_of(expect=[{"check": "fault_fired", "leg": "interrupted"}])
    false = judge_sabotage(entry(), {"Z1": result_of(tmp_path / "false", "certifies-falsely", blind, sabotage="met")})
    assert (false.caught, false.right_bucket, false.caught_by) == (True, True, "certified_exact")
    missed = judge_sabotage(entry(), {"Z1": silent})
    assert (missed.caught, missed.reason) == (False, "Z1: error the sabotage unmet did not fire")
    table = sabotage_table([caught, wrong, missed], clean=4, false_alarms=["Z1#3"])
    assert table.splitlines()[-3:] == [
        "caught / expected:     2 / 3",
        "right bucket / caught: 1 / 2",
        "false alarms:          1 in 4 clean runs: Z1#3",
    ]


def test_this_library_is_caught_when_it_forgets_a_stream_and_only_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sabotage", "rng-not-restored", "moments-zeroed", "--results", str(tmp_path / "run")]) == 0
    table = capsys.readouterr().out
    assert "caught / expected:     2 / 2" in table
    assert "right bucket / caught: 2 / 2" in table
    assert "false alarms:          0 in 2 clean runs" in table
    records = read_results(tmp_path / "run").of(SabotageRecord)
    assert [(record.id, record.blamed_bucket) for record in records] == [
        ("rng-not-restored", "rng_state"),
        ("moments-zeroed", "optimizer"),
    ]


def test_the_parts_of_all_sabotages_are_all_of_them_once() -> None:
    ids = [entry.id for entry in load_sabotages()]
    parts = [[entry.id for entry in _entries([], number, 4)] for number in (1, 2, 3, 4)]
    assert sorted(one for part in parts for one in part) == sorted(ids)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_part_is_put_in_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["rng-not-restored", "moments-zeroed", "--part", "2/2"]
    assert main(["sabotage", *chosen, "--results", str(tmp_path / "run")]) == 0
    assert "caught / expected:     1 / 1" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "a/b", "1/0"])
def test_a_part_that_is_none_is_refused(part: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["sabotage", "--part", part])


def test_an_empty_part_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sabotage", "rng-not-restored", "--part", "2/2", "--results", str(tmp_path / "run")]) == 2
    assert "part 2 of 2 is empty: only 1 sabotages or fewer are selected" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_harness_imports_neither_torch_nor_the_library() -> None:
    code = (
        "import sys, conformance.__main__, conformance.adapters.hyper_resume.adapter as a; a.HyperResumeAdapter().describe(); "
        "print(sorted({'torch', 'hyper_resume'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_sabotage_that_is_blamed_on_another_bucket_is_not_accepted() -> None:
    def record(blamed: str) -> SabotageRecord:
        return SabotageRecord(
            id="met", title="a defect", caught=True, outcomes={"Z1": "fail"}, caught_by="check", expected_bucket="rng_state",
            blamed_bucket=blamed, right_bucket=blamed == "rng_state", reason="",
        )  # fmt: skip

    clean = result_made("Z1")
    assert make_footer([clean], [record("rng_state")], [], seconds=1.0).accepted
    wrong = make_footer([clean], [record("model")], [], seconds=1.0)
    assert (wrong.accepted, wrong.reasons) == (False, ("sabotage met was attributed to model, expected rng_state",))


def test_a_run_of_nothing_but_sabotaged_cases_is_not_accepted() -> None:
    footer = make_footer([replace(result_made("Z1"), sabotage="met")], [], [], seconds=1.0)
    assert (footer.accepted, footer.reasons) == (False, ("nothing was run without a sabotage",))


def result_made(case: str) -> ResultRecord:
    return ResultRecord(
        key=case, case=case, title="t", level="must", outcome="pass", reason="", blamed=None, checks=(), sabotage=None,
        repeat=0, reproduce="again", seconds=1.0,
    )  # fmt: skip

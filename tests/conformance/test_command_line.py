"""``python -m conformance`` and ``python -m st`` name cases in the same way, and show how far a run is."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import conformance.__main__ as matrix
import st.__main__ as system_tests
from conformance.running.adapter import ADAPTERS
from st import running
from tests.conformance.stand_in import case_of

TRAINS = {"script": [{"leg": "saving", "until_step": 5}], "expect": [{"check": "exits", "leg": "saving"}]}
IDS = ("S1", "S2", "S2.more", "S10")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[str, ModuleType]:
    """Either command with four small cases on the stand-in trainer, all of them required of cpu4."""
    cases = tmp_path / "cases"
    cases.mkdir()
    made = [dict(case_of(id=name, title=f"case {name} trains", sabotages=[], **TRAINS).raw) for name in IDS]
    (cases / "some.yaml").write_text(yaml.safe_dump(made), encoding="utf-8")
    monkeypatch.setitem(ADAPTERS, "hyper_resume", "tests.conformance.stand_in:StandInAdapter")
    monkeypatch.setattr(running, "SCENARIOS", cases)
    monkeypatch.chdir(tmp_path)
    return request.param, matrix if request.param == "conformance" else system_tests


def call(command: tuple[str, ModuleType], verb: str, *words: str) -> int:
    name, module = command
    options = {"conformance": ["--cases", "cases"], "st": ["--scenarios", "cases"] if verb == "run" else []}[name]
    if verb == "run" and name == "st":
        options += ["--launcher", "warm"]
    return module.main([verb, *words, *options])


BOTH = pytest.mark.parametrize("command", ["conformance", "st"], indirect=True)


@BOTH
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), IDS),
        (("S10",), ("S10",)),
        (("S2",), ("S2", "S2.more")),
        (("S1*",), ("S1", "S10")),
        (("--case", "S10", "--case", "S1"), ("S1", "S10")),
        (("S10", "--case", "S2.*"), ("S2.more", "S10")),
    ],
)
def test_ids_base_ids_and_globs_are_taken_with_and_without_the_option(
    command: tuple[str, ModuleType],
    words: tuple[str, ...],
    expected: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(command, "list", *words) == 0
    assert re.findall(r"^(\S+) +case \S+ trains$", capsys.readouterr().out, re.M) == list(expected)


@BOTH
def test_a_run_prints_one_line_with_its_number_for_each_case_also_into_a_file(
    command: tuple[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(command, "run", "S1", "S2", "--results", "results") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert [line.split()[:3] for line in lines] == [
        ["[1/3]", "pass", "S1"],
        ["[2/3]", "pass", "S2"],
        ["[3/3]", "pass", "S2.more"],
    ]


@BOTH
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("S2.mroe",), "error: no case matches 'S2.mroe'; did you mean S2.more?"),
        (("--case", "QQ7"), "error: no case matches 'QQ7'; the command `list` prints every id"),
        (("--platform", "cpu44"), "error: no platform is called 'cpu44'; did you mean "),
        (("--sabotage", "rng-not-restord"), "error: no sabotage is called 'rng-not-restord'; did you mean rng-not-"),
    ],
)
def test_an_unknown_name_is_refused_before_anything_runs_and_the_nearest_known_one_is_named(
    command: tuple[str, ModuleType], words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(command, "run", *words, "--results", "results") == 2
    assert capsys.readouterr().err.startswith(message)
    assert not Path("results").exists()

"""The nightly definitions call what there is, keep what the next night needs, and name no host."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

CHECKOUT = Path(__file__).parents[2]
CI = CHECKOUT / "docs" / "ci"
PAGE, HISTORY = "results/nightly/report/", "results/history.jsonl"


def load(name: str) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((CI / name).read_text(encoding="utf-8"))
    return found


def test_the_nightly_environment_builds_the_page_where_the_definitions_look_for_it() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(CHECKOUT / "tox.ini")
    nightly = tox["testenv:nightly"]
    last = nightly["commands"].strip().splitlines()[-1]
    assert last.startswith(f"python -m reports build results/nightly --profile nightly --history {HISTORY}")
    # A red night needs its page most.
    assert nightly["ignore_errors"] == "true"


def test_github_runs_the_night_and_keeps_page_and_history_of_a_red_one_too() -> None:
    steps = load("github-nightly.yml")["jobs"]["nightly"]["steps"]
    assert any("tox -e nightly" in step.get("run", "") for step in steps)
    upload = next(step for step in steps if "upload-artifact" in step.get("uses", ""))
    assert upload["if"] == "always()"
    assert {PAGE, HISTORY} <= set(upload["with"]["path"].split())
    restored, saved = (step for step in steps if "actions/cache" in step.get("uses", ""))
    assert restored["with"]["path"] == saved["with"]["path"] == HISTORY
    assert restored["with"]["key"] == saved["with"]["key"]
    assert saved["if"].startswith("always()")
    order = [str(step.get("uses", step.get("run"))) for step in steps]
    assert order.index(restored["uses"]) < next(i for i, text in enumerate(order) if "tox -e nightly" in text)


def test_gitlab_runs_the_night_and_keeps_page_junit_and_history_of_a_red_one_too() -> None:
    job = load("gitlab-nightly.yml")["nightly"]
    assert "tox -e nightly" in job["script"]
    assert job["artifacts"]["when"] == job["cache"]["when"] == "always"
    assert {PAGE, HISTORY} <= set(job["artifacts"]["paths"])
    assert job["artifacts"]["reports"]["junit"] == f"{PAGE}junit.xml"
    assert job["cache"]["paths"] == [HISTORY]


@pytest.mark.parametrize("path", sorted(CI.iterdir()), ids=lambda path: path.name)
def test_no_definition_names_a_host(path: Path) -> None:
    assert not re.search(r"https?://|--index-url|\b[\w-]+\.(?:com|org|net|io)\b", path.read_text(encoding="utf-8"))

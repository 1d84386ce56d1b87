"""What comes with the code: licence, citation, changelog, package metadata and the nightly definitions agree."""

from __future__ import annotations

import hashlib
import re
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION: dict[str, Any] = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
CHANGELOG = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
# Of the text as the Apache Software Foundation publishes it.
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def releases() -> list[tuple[str, str]]:
    """Version and date of the changelog's sections, in order."""
    return re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\S+)$", CHANGELOG, re.M)


def test_the_licence_is_apache_2_to_the_letter_and_all_papers_say_so() -> None:
    assert hashlib.sha256((REPOSITORY / "LICENSE").read_bytes()).hexdigest() == APACHE_2
    assert PROJECT["license-files"] == ["LICENSE"]
    assert PROJECT["license"] == CITATION["license"] == "Apache-2.0"
    assert not [one for one in PROJECT["classifiers"] if one.startswith("License")], "an expression stands alone"


def test_project_citation_and_changelog_are_of_the_same_version_and_day() -> None:
    version, day = releases()[0]
    assert PROJECT["version"] == CITATION["version"] == version
    assert CITATION["date-released"] == day


def test_the_changelog_keeps_its_form() -> None:
    headings = re.findall(r"^## (.*)$", CHANGELOG, re.M)
    assert headings == ["[Unreleased]", *(f"[{version}] - {day}" for version, day in releases())]
    versions = [tuple(map(int, version.split("."))) for version, _ in releases()]
    days = [date.fromisoformat(day) for _, day in releases()]
    assert versions == sorted(set(versions), reverse=True)
    assert days == sorted(days, reverse=True)
    for section in re.split(r"^## ", CHANGELOG, flags=re.M)[1:]:
        kinds = re.findall(r"^### (.*)$", section, re.M)
        assert set(kinds) <= KINDS
        assert len(set(kinds)) == len(kinds), "one list for each kind of change"
        assert all(block.strip() for block in re.split(r"^### .*$", section, flags=re.M)[1:])


def test_all_addresses_of_the_project_have_one_host() -> None:
    hosts = {re.match(r"https://([^/]+)/", address)[1] for address in PROJECT["urls"].values()}
    assert len(hosts) == 1


@pytest.mark.parametrize("name", ["github-nightly.yml", "gitlab-nightly.yml"])
def test_a_nightly_definition_says_how_long_it_takes_and_takes_the_cpu_build_where_an_index_is_set(name: str) -> None:
    text = (REPOSITORY / "docs" / "ci" / name).read_text(encoding="utf-8")
    definition = yaml.safe_load(text)
    assert "# How long it takes: " in text
    if name.startswith("github"):
        assert "vars.TORCH_CPU_INDEX" in definition["jobs"]["nightly"]["env"]["PIP_EXTRA_INDEX_URL"]
    else:
        script = definition["nightly"]["script"]
        assert script.index('export PIP_EXTRA_INDEX_URL="${TORCH_CPU_INDEX:-}"') < script.index("tox -e nightly")

"""README.md is short, its links lead somewhere here and on a package index, and README.zh-CN.md says the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
TEXTS = {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")}
MOST_LINES = 200


def prose(text: str) -> str:
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def targets(text: str) -> list[str]:
    """Where links and images lead, in order."""
    return re.findall(r"\]\((\S+?)\)", prose(text))


@pytest.mark.parametrize("name", TEXTS)
def test_a_readme_is_short_enough_to_be_read(name: str) -> None:
    assert len(TEXTS[name].splitlines()) <= MOST_LINES


def test_both_readmes_have_the_same_code_blocks() -> None:
    english, chinese = (re.findall(r"^```.*?^```$", text, re.M | re.S) for text in TEXTS.values())
    assert english
    assert english == chinese


def test_both_readmes_have_the_same_levels_of_headings_in_the_same_order() -> None:
    english, chinese = (re.findall(r"^(#+) ", prose(text), re.M) for text in TEXTS.values())
    assert len(english) > 5
    assert english == chinese


def test_both_readmes_name_the_same_commands_and_options() -> None:
    english, chinese = (re.findall(r"`([^`\n]+)`", prose(text)) for text in TEXTS.values())
    assert "tox -e nightly" in english
    assert sorted(english) == sorted(chinese)


def test_the_rows_of_both_readmes_have_the_same_figures() -> None:
    """A row's numbers; units and words are translated."""
    rows = [re.findall(r"^\|.*\|$", text, re.M) for text in TEXTS.values()]
    english, chinese = ([re.findall(r"\d[\d,.]*\d|\d", row) for row in found] for found in rows)
    assert len(english) > 15
    assert english == chinese


def test_both_readmes_link_to_the_same_places() -> None:
    english, chinese = (targets(text) for text in TEXTS.values())
    assert (english[0], chinese[0]) == ("README.zh-CN.md", "README.md")
    assert sorted(english[1:]) == sorted(chinese[1:])


@pytest.mark.parametrize("target", sorted(set(targets(TEXTS["README.md"]))))
def test_a_link_leads_to_a_file_and_a_heading_of_this_repository(target: str) -> None:
    path, _, anchor = target.partition("#")
    assert (REPOSITORY / path).is_file()
    headings = re.findall(r"^#+ (.*)$", (REPOSITORY / path).read_text(encoding="utf-8"), re.M) if anchor else []
    assert not anchor or anchor in [re.sub(r"[^\w -]", "", found).lower().replace(" ", "-") for found in headings]


def test_on_a_package_index_every_link_starts_at_the_address_of_the_source() -> None:
    """Applies the rule that the build applies; there a relative link would start at the index."""
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    hook = pyproject["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert hook["fragments"] == [{"path": "README.md"}]
    shown = TEXTS["README.md"]
    for rule in hook["substitutions"]:
        shown = re.sub(rule["pattern"], rule["replacement"], shown)
    source = pyproject["project"]["urls"]["Source"]
    assert source.endswith("/")
    assert targets(shown) == [source + target for target in targets(TEXTS["README.md"])]

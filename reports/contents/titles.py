"""The titles of cases and scenarios in Chinese, by suite and id; the English ones are in the cases themselves."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import yaml

from reports.contents.text import Text, same

_FILE = Path(__file__).with_name("titles.yaml")


@functools.cache
def load_titles(path: Path = _FILE) -> Mapping[str, Mapping[str, str]]:
    """Read ``titles.yaml``: suite -> id -> Chinese title."""
    with path.open(encoding="utf-8") as file:
        found: Mapping[str, Mapping[str, str]] = yaml.load(file, Loader=yaml.CSafeLoader)
    return found


def title_of(suite: str, case: str, english: str) -> Text:
    """The title of a case in both languages; one that has no Chinese title is shown in English."""
    chinese = load_titles().get(suite, {}).get(case)
    return same(english) if chinese is None else Text(en=english, zh=chinese)

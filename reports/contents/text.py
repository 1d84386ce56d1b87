"""A text in the two languages of the page, and the words that the templates take by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

_FILE = Path(__file__).with_name("words.yaml")


@dataclass(frozen=True, kw_only=True)
class Text:
    """The same text in English and in Chinese."""

    en: str
    zh: str


def say(en: str, zh: str, **values: object) -> Text:
    """Both languages with ``{name}`` filled in; of a value that is a Text each language takes its own."""
    return Text(
        en=en.format(**{name: value.en if isinstance(value, Text) else value for name, value in values.items()}),
        zh=zh.format(**{name: value.zh if isinstance(value, Text) else value for name, value in values.items()}),
    )


def same(text: str) -> Text:
    """A text that is the same in both languages: ids, numbers, messages of a trainer."""
    return Text(en=text, zh=text)


def load_words(path: Path = _FILE) -> Mapping[str, Text]:
    """The template's own words, from ``words.yaml``: name -> [English, Chinese]."""
    with path.open(encoding="utf-8") as file:
        raw = yaml.load(file, Loader=yaml.CSafeLoader)
    return {name: Text(en=str(pair[0]), zh=str(pair[1])) for name, pair in raw.items()}

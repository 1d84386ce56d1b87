"""The pages of this checkout, taken apart: code blocks, headings, links, and words in code font."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
READMES = tuple(
    path
    for path in (
        *sorted(ROOT.glob("*.md")),
        *(ROOT / room / "README.md" for room in ("conformance", "st", "benchmarks")),
    )
    if path.is_file()
)
PAGES = (*sorted(DOCS.glob("*.md")), *READMES)

_FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,})(?P<language>[^\s`]*)[^`]*$")
_HEADING = re.compile(r"^#{1,6}\s+(?P<text>.+?)\s*$")
_LINK = re.compile(r"!?\[[^\]\[]*(?:\[[^\]]*\][^\]\[]*)*\]\((?P<target>[^()\s]+)\)")
_WORD = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block; ``line`` is that of its first line of text, from 1."""

    page: Path
    language: str
    text: str
    line: int

    @property
    def where(self) -> str:
        """Page and line, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The page's fenced blocks, in order."""
    return [block for block in _blocks(page) if language in (None, block.language)]


def _blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        number += 1
        if opening is None:
            continue
        indent, start = len(opening["indent"]), number
        while lines[number].strip() != opening["fence"]:
            number += 1
        text = "\n".join(line[indent:] for line in lines[start:number])
        yield Block(page=page, language=opening["language"], text=text, line=start + 1)
        number += 1


def prose(page: Path) -> list[tuple[int, str]]:
    """The page's lines outside of fenced blocks, each with its number."""
    fenced = {
        line for block in blocks(page) for line in range(block.line - 1, block.line + len(block.text.splitlines()) + 1)
    }
    lines = page.read_text(encoding="utf-8").splitlines()
    return [(number, line) for number, line in enumerate(lines, start=1) if number not in fenced]


def links(page: Path) -> list[tuple[int, str]]:
    """The targets of the page's links, each with the number of its line."""
    return [(number, link["target"]) for number, line in prose(page) for link in _LINK.finditer(_WORD.sub("``", line))]


def words(page: Path) -> list[tuple[int, str]]:
    """What stands in code font in the page's prose, each with the number of its line."""
    return [(number, word) for number, line in prose(page) for word in _WORD.findall(line)]


def anchors(page: Path) -> set[str]:
    """The names that a link can give after ``#``, made from the headings as GitHub and MyST make them."""
    found: Counter[str] = Counter()
    names = set()
    for _, line in prose(page):
        heading = _HEADING.match(line)
        if heading is None:
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading["text"]).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        names.add(name if not found[name] else f"{name}-{found[name]}")
        found[name] += 1
    return names

"""A page read back: balanced tags, its text, its attributes."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}
# What a start tag ends before it, where nothing lies between: of HTML's rules those that the page makes use of.
_CELL = ("td", "th")
_ENDS = {
    "td": _CELL,
    "th": _CELL,
    "tr": (*_CELL, "tr"),
    "tbody": (*_CELL, "tr", "thead", "tbody"),
    "li": ("li",),
    "dt": ("dt", "dd"),
    "dd": ("dt", "dd"),
}
_IMPLIED = {*_ENDS, "thead"}


class Page(HTMLParser):
    """Checks that tags are balanced (with the ends that HTML implies), and keeps the visible text and every attribute."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        while self.open and self.open[-1] in _ENDS.get(tag, ()):
            self.open.pop()
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        while self.open[-1] != tag:
            assert self.open.pop() in _IMPLIED
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def count(self, tag: str, name: str, value: str) -> int:
        return self.attributes.count((tag, name, value))

    def values(self, tag: str, name: str) -> list[str]:
        return [value for one, key, value in self.attributes if (one, key) == (tag, name)]

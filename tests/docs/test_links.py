"""What a page links to or names is there: files, headings, modules, attributes and configuration fields."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from pathlib import Path
from typing import get_type_hints

import pytest

from hyper_resume.config import RunConfig
from tests.docs import markdown
from tests.docs.markdown import DOCS, PAGES, ROOT

_HOUSES = ("hyper_resume", "conformance", "st", "reports", "benchmarks", "tests", "docs", "examples")
_MODULES = re.compile(rf"({'|'.join(_HOUSES)})(\.\w+)+")
_FIELD = re.compile(r"\w+(\.\w+)+")
# A file of this checkout: a path into a house, or a bare name with the ending of a source file.
_PATH = re.compile(rf"(\.\./)*(({'|'.join(_HOUSES)}|\.ci)/[\w./-]*|[\w./-]+\.(py|md|yaml|yml|toml|ini|sh|cff|j2))")
# What a page names and this checkout does not hold: files that the reader or a command writes, and files of the code base that
# the specification describes.
_ELSEWHERE = {
    *("plain.py", "train.py", "compare.py", "summary.md"),
    *("hyper_models/trainer/base.py", "components/data/dataloader.py", "dcp_checkpointer.py", "config.py"),
    *("checkpoint_callback.py", "examples/training_demo/train.yaml"),
    *("tests/hyper_models/trainer/test_checkpoint_callback.py", "tests/components/test_dataloader.py"),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for number, target in markdown.links(page):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            broken.append(f"line {number}: {target}: there is no such file")
        elif anchor and anchor not in markdown.anchors(file):
            broken.append(f"line {number}: {target}: no heading makes this anchor")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_in_code_font_is_there(page: Path) -> None:
    missing = [
        f"line {number}: {word}"
        for number, word in markdown.words(page)
        if _PATH.fullmatch(word) and word not in _ELSEWHERE and not _is_there(word, page)
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_and_field_in_code_font_is_there(page: Path) -> None:
    missing = []
    for number, word in markdown.words(page):
        name = re.split(r"[(=:]", word)[0].removeprefix("--")
        if _MODULES.fullmatch(name) and not _PATH.fullmatch(name) and not _imports(name):
            missing.append(f"line {number}: {word}: no such module or attribute")
        elif (
            _FIELD.fullmatch(name) and "(" not in word and name.partition(".")[0] in _fields() and name not in _fields()
        ):
            missing.append(f"line {number}: {word}: no such configuration field")
    assert not missing, "\n".join(missing)


def test_every_page_is_in_the_table_of_contents() -> None:
    index = next(block for block in markdown.blocks(DOCS / "index.md", "{toctree}") if "tutorial" in block.text)
    named = {name for block in markdown.blocks(DOCS / "index.md", "{toctree}") for name in block.text.split()}
    assert index.page == DOCS / "index.md"
    assert {page.stem for page in DOCS.glob("*.md")} - {"index"} <= named


def _is_there(word: str, page: Path) -> bool:
    """True for a path from the checkout's root or the page's folder, and for a name that some file has."""
    if any((folder / word).exists() for folder in (ROOT, page.parent)):
        return True
    return any(f"/{file}".endswith(f"/{word}") for file in _tracked())


@functools.cache
def _tracked() -> tuple[str, ...]:
    listed = [path for house in _HOUSES for path in (ROOT / house).rglob("*") if path.is_file()]
    return tuple(str(path.relative_to(ROOT)) for path in (*listed, *ROOT.glob("*")))


def _imports(name: str) -> bool:
    """True where ``name`` is a module, or what attributes lead to from one."""
    module, _, attributes = name, "", []
    while module:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
            continue
        for attribute in attributes:
            fields = getattr(found, "__dataclass_fields__", {})
            if not hasattr(found, attribute) and attribute not in fields:
                return False
            found = getattr(found, attribute, None)
        return True
    return False


@functools.cache
def _fields() -> frozenset[str]:
    """Every dotted path of the configuration, blocks included."""

    def walk(kind: type, path: str) -> set[str]:
        found = set()
        for name, hint in get_type_hints(kind).items():
            dotted = f"{path}.{name}".lstrip(".")
            found |= {dotted} | (walk(hint, dotted) if dataclasses.is_dataclass(hint) else set())
        return found

    return frozenset(walk(RunConfig, ""))

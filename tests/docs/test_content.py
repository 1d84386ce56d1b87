"""The pages are complete: words of the code in the glossary, errors in the troubleshooting page, ids in the acceptor's page."""

from __future__ import annotations

import importlib.util
import inspect
import re
from types import ModuleType
from typing import get_args

import pytest

from conformance.matrix.case import load_cases
from conformance.records.results import BLAMES, OUTCOMES
from conformance.storage.proofs import PROOFS
from hyper_resume import errors
from hyper_resume.state.certificate import BUCKETS, Verdict
from tests.docs import markdown
from tests.docs.markdown import DOCS, ROOT, blocks

# Chapter 8.2 of the specification.
SPECIFIED = [
    f"{letter}{number}" for letter, most in {"A": 10, "B": 7, "C": 11, "D": 5}.items() for number in range(1, most + 1)
]
CASE_ID = re.compile(r"\b[A-Z]\d+(?:\.[a-z][a-z0-9-]*)?\b")


def _entries(page: str) -> set[str]:
    """The words in code font that begin a row of a table."""
    rows = [line for _, line in markdown.prose(DOCS / page) if line.startswith("| `")]
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_the_glossary_has_every_bucket_outcome_verdict_and_leg() -> None:
    legs = {"reference", "saving", "interrupted", "resumed"}
    used = {step.role for case in load_cases() for step in case.legs}
    assert used == legs
    assert {*BUCKETS, *BLAMES, *OUTCOMES, *get_args(Verdict), *legs} <= _entries("glossary.md")


def _is_error(kind: object) -> bool:
    return inspect.isclass(kind) and issubclass(kind, Exception)


@pytest.mark.parametrize("name", sorted(name for name, kind in vars(errors).items() if _is_error(kind)))
def test_every_error_class_is_explained(name: str) -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert name in sections
    if name != "HyperResumeError":
        assert "**Meaning.**" in sections[name]
        assert "**What to do.**" in sections[name]
        assert "```text" in sections[name]


def test_messages_that_no_block_prints_stand_in_the_code() -> None:
    code = " ".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8")) for path in (ROOT / "hyper_resume").rglob("*.py")
    )
    found = blocks(DOCS / "troubleshooting.md")
    quoted = [
        block
        for before, block in zip([None, *found], found, strict=False)
        if block.language == "text" and (before is None or before.language != "python")
    ]
    assert quoted
    for block in quoted:
        for piece in re.split(r"\[\.\.\.\]|; (?:where|expected|found|what to do): ", block.text):
            assert piece.strip() in code, f"{block.where}: {piece}"


def test_the_storage_proofs_are_defined_where_they_are_named() -> None:
    page = (DOCS / "guarantees.md").read_text(encoding="utf-8")
    defined = set(re.findall(r"^\| (T\d) \|", page, re.MULTILINE))
    assert set(re.findall(r"\bT\d\b", page)) == defined
    assert {proof.tier.upper() for proof in PROOFS} <= defined


def test_the_acceptors_page_names_every_specified_id_and_the_files_that_hold_it() -> None:
    page = (DOCS / "acceptor.md").read_text(encoding="utf-8")
    table = page.partition("## Chapter 8.2")[2].partition("## Chapter 8.3")[0]
    files = {
        case: f"conformance/cases/{file.name}"
        for file in (ROOT / "conformance" / "cases").glob("*.yaml")
        for case in re.findall(r"^- id: (\S+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    named = {}
    for row in re.findall(r"^\| ([A-D]\d.*?) \| (.*?) \|$", table, re.MULTILINE):
        for one in CASE_ID.findall(row[0]):
            named[one] = set(re.findall(r"`(conformance/cases/[^`]+)`", row[1]))
    assert sorted(named) == sorted(SPECIFIED)
    for one, listed in named.items():
        assert {file for case, file in files.items() if case.partition(".")[0] == one} <= listed, one


def test_every_case_that_the_acceptors_page_names_exists() -> None:
    known = {case.id for folder in ("conformance/cases", "st/scenarios") for case in load_cases(ROOT / folder)}
    known |= {case.partition(".")[0] for case in known}
    tables = "\n".join(line for _, line in markdown.prose(DOCS / "acceptor.md") if line.startswith("|"))
    named = set(CASE_ID.findall(re.sub(r"`[^`]*/[^`]*`", "", tables)))
    assert len(named) > len(SPECIFIED)
    assert named <= known


def test_generated_parts_are_up_to_date() -> None:
    outdated = [page.name for page, (now, wanted) in _generate().pages().items() if now != wanted]
    assert not outdated, f"run python docs/generate.py: {', '.join(outdated)}"
    assert set(_generate().pages()) == {DOCS / "configuration.md", DOCS / "architecture.md"}


def _generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

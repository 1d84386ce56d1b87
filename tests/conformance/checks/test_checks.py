"""Rules for all checks: one that can't judge is an error; each has a docstring and a test."""

from __future__ import annotations

from pathlib import Path

from conformance.checks import CHECKS
from conformance.records.results import BLAMES
from tests.conformance.evidence_made import evidence, leg, status


def test_a_leg_that_was_not_run_and_a_check_that_throws_are_errors(tmp_path: Path) -> None:
    broken = leg(tmp_path, events=[[{"kind": "end"}]])
    assert status(evidence(broken), "ends_at", leg="resumed", global_step=1)[0] == "error"
    assert status(evidence(), "exits", leg="resumed")[0] == "error"


def test_every_check_has_a_sentence_and_a_test() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for name, entry in CHECKS.entries.items():
        assert entry.summary.endswith((".", ":")), name
        assert f'"{name}"' in text, f"no test of {name}"
    assert len(set(BLAMES)) == len(BLAMES)

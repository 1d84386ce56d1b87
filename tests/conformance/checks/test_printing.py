"""The checks on log lines and the terminal, on evidence whose right outcome is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.records.evidence import LegEvidence
from tests.conformance.evidence_made import evidence, leg, status

# As tqdm writes it: every state goes back to the start of the line.
SCREEN = (
    "warming up\n"
    "\rTraining:  60%|██████    | 15/25 [00:00<?, ?it/s]"
    "\rTraining:  60%|██████    | 15/25 [00:00<?, ?it/s, loss=6.90772, lr=3.09e-05]"
    "\rTraining: 100%|██████████| 25/25 [00:02<00:00,  4.1it/s, loss=6.90778, lr=0]\n"
)


def logged(*messages: str) -> list[list[dict[str, Any]]]:
    return [[{"kind": "log", "level": "INFO", "logger": "l", "message": text} for text in messages]]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["first", "second: dir=/a/global_step_2, x=1"], "passed"),
        (["first", "second: dir=.../global_step_2, ..."], "passed"),
        (["second: ...", "first"], "failed"),  # the other way round
        (["first", "first"], "failed"),  # once is not twice
        (["fir"], "failed"),  # a whole line, not a part
        (["second: dir=.../global_step_2"], "failed"),  # not to its end
        (["second: dir=.../global.step_2, ..."], "failed"),  # a dot is a dot
        ([], "error"),
    ],
)
def test_log_lines_are_whole_and_in_order(tmp_path: Path, lines: list[str], expected: str) -> None:
    found = evidence(leg(tmp_path, events=logged("first", "between", "second: dir=/a/global_step_2, x=1")))
    assert status(found, "logs_in_order", leg="resumed", lines=lines)[0] == expected


def test_another_ranks_lines_do_not_count(tmp_path: Path) -> None:
    found = evidence(leg(tmp_path, events=[*logged("mine"), *logged("theirs")], ends=[0, 0]))
    assert status(found, "logs_in_order", leg="resumed", lines=["theirs"]) == ("failed", "policy")
    assert status(found, "logs_in_order", leg="resumed", lines=["theirs"], rank=1) == ("passed", None)


def with_a_screen(folder: Path) -> LegEvidence:
    made = leg(folder)
    (made.folder / "log_rank_0.txt").write_text(SCREEN, encoding="utf-8")
    return made


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Training:  60%|██████    | 15/25 ... loss=6.90772, lr=3.09e-05", ("passed", None)),
        ("Training: 100%|██████████| 25/25 ... lr=0]", ("passed", None)),
        ("15/25 ... lr=0", ("failed", "policy")),  # of two states of the bar
        ("lr=1e-04", ("failed", "policy")),
        ("15.25", ("failed", "policy")),
    ],
)
def test_what_the_terminal_showed(tmp_path: Path, line: str, expected: Any) -> None:
    assert status(evidence(with_a_screen(tmp_path)), "prints", leg="resumed", line=line) == expected


def test_a_leg_without_output_shows_nothing(tmp_path: Path) -> None:
    assert status(evidence(leg(tmp_path)), "prints", leg="resumed", line="x") == ("error", None)

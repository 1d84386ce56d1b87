"""Checks on log lines in their order, and on the terminal.

Expected lines are written as in the specification (3.4): ``...`` stands for any text.
"""

from __future__ import annotations

import re

from conformance.checks.outcome import CHECKS, CheckOutcome, verdict
from conformance.records.evidence import Evidence, EvidenceError, rank_log

_ANYTHING = "..."
# A progress bar goes back to the start of its line instead of beginning another.
_LINE_END = re.compile(r"[\r\n]+")


@CHECKS.register(needs=("events.log",))
def logs_in_order(evidence: Evidence, *, leg: str, lines: tuple[str, ...], rank: int = 0) -> CheckOutcome:
    """These whole log lines come in this order; other lines may be between them. ``...`` stands for any text."""
    if not lines:
        raise EvidenceError("no line is given, so the check could not have failed")
    found = [event.data["message"] for event in evidence.leg(leg).events("log", rank)]
    place = 0
    for wanted in lines:
        pattern = _pattern(wanted)
        hit = next((at for at in range(place, len(found)) if pattern.fullmatch(found[at])), None)
        if hit is None:
            before = f"behind {found[place - 1]!r}" if place else "from the start"
            observed = f"{before}: {found[place : place + 4]}"
            return verdict(False, expected=f"{wanted!r} {before}", observed=observed, blames="policy")
        place = hit + 1
    return verdict(True, expected=f"{len(lines)} lines in this order", observed="so it is", blames=None)


@CHECKS.register()
def prints(evidence: Evidence, *, leg: str, line: str, rank: int = 0) -> CheckOutcome:
    """The rank's terminal showed this text, also if only until the next carriage return. ``...`` stands for any text.

    It may be a part of a line.
    """
    path = rank_log(evidence.leg(leg).folder, rank)
    if not path.is_file():
        raise EvidenceError(f"leg {leg}: there is no {path.name}")
    shown = [text for text in _LINE_END.split(path.read_text(encoding="utf-8", errors="replace")) if text.strip()]
    pattern = _pattern(line)
    return verdict(
        any(pattern.search(text) for text in shown),
        expected=f"{line!r} on the terminal of rank {rank}",
        observed=f"{len(shown)} lines, the last {shown[-2:]}",
        blames="policy",
    )


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in text.split(_ANYTHING)))

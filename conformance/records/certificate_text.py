"""The restore certificate as rank 0 logs it: which line says what of which bucket."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from conformance.records.evidence import Event

_TITLE = "Restore certificate of "
_LINE = re.compile(r"\s+(\w+)\s+(exact|degraded|absent)\b(?: (\(.*\)))?(?: on (ranks? [\d, ]+))?")


@dataclass(frozen=True, kw_only=True)
class CertifiedBucket:
    """One line: a bucket, its verdict, the text in parentheses behind it, and its ranks (``rank 1``; "" for all)."""

    bucket: str
    verdict: str
    text: str
    ranks: str


def certificate_lines(events: Iterable[Event]) -> list[str]:
    """Return the lines under the title of the last certificate of rank 0; none without a certificate."""
    logs = [event.data["message"] for event in events if event.kind == "log" and event.rank == 0]
    certificates = [message for message in logs if message.startswith(_TITLE)]
    return certificates[-1].splitlines()[1:] if certificates else []


def certified_lines(events: Iterable[Event]) -> list[CertifiedBucket]:
    """Return what each of these lines says; a line of another form is left out."""
    found = [_LINE.fullmatch(line) for line in certificate_lines(events)]
    return [
        CertifiedBucket(bucket=one[1], verdict=one[2], text=(one[3] or "()")[1:-1], ranks=one[4] or "")
        for one in found
        if one is not None
    ]

"""The rule of four of a restore, bucket by bucket, from the certificate that the trainer logged.

A bucket is exact when it came back, is complete, belongs to the same run, and was still there at the first forward pass. The
certificate gives reasons in words; each reason answers one of the four questions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from conformance.records.certificate_text import CertifiedBucket, certified_lines
from conformance.records.evidence import Event
from conformance.records.results import CheckRecord
from reports.contents.document import QUESTIONS, Answer, CaseEntry, Certificate, FourAnswers, Question
from reports.reading.redact import redact

# The words of a reason by which its question is known. One that has none of them continues the reason before it; a first one
# means that its bucket did not come back.
_WORDS: Mapping[Question, re.Pattern[str]] = {
    "complete": re.compile(r"^moves and is not saved: "),
    "still_there": re.compile(
        r"^the random streams moved between the restore and\b|\bdraws from the \w+ stream\b|^the \w+ stream is drawn from by\b"
        r"|\b(?:before|at) the first (?:batch|forward pass|step)\b"
    ),
    "same_thing": re.compile(
        r"^[\w.*-]+: .+ -> |^the data(?: loader)? has changed since the checkpoint\b"
        r"|^the (?:number of ranks|mesh) changed\b|^this is the training state of rank\b|\bmore differences of this kind$"
        r"|\bwhich this (?:trainer|model) does not have\b|\bthat this model does not have\b|\bof no known bucket\b"
        r"|^the checkpoint holds (?:\d+|the) (?:lr schedulers|optimizers)\b|\bby their position\b|^no saved parameter group\b"
        r"|^the saved state of lr scheduler \d+ lacks\b|^global_step \d+ at \d+ steps per epoch\b"
    ),
    "came_back": re.compile(
        r"\bdiffers from what was (?:read|saved)$|^the checkpoint holds no\b|\bstarts fresh$"
        r"|\breplayed from its start$|^no device stream was saved\b|\blocal parts come back\b"
    ),
}
_OVERRIDDEN = "overridden: "
# Neither side has any: there is nothing to ask.
_NOTHING_THERE = "neither "


def four_answers(events: Iterable[Event], leg: str, checks: Sequence[CheckRecord]) -> tuple[FourAnswers, ...]:
    """Return the answers for each bucket of a leg's certificate, in its order; none without a certificate.

    Args:
        events: of the leg.
        leg: its name.
        checks: of its case; a failed comparison with the uninterrupted run means that its bucket was not still there.
    """
    found: dict[str, dict[Question, Answer]] = {}
    for line in certified_lines(events):
        if line.verdict == "absent" and line.text.startswith(_NOTHING_THERE):
            continue
        own = found.setdefault(line.bucket, dict.fromkeys(QUESTIONS, Answer(state="holds", reasons=())))
        for question, answer in _of_line(line).items():
            before = own[question]
            # One bucket may have a line for each group of ranks.
            own[question] = Answer(state=answer.state, reasons=(*before.reasons, *answer.reasons))
    for check in checks:
        if check.check == "certified_exact" and check.status == "failed" and check.parameters.get("leg") == leg:
            own = found.setdefault(
                check.blames or "progress", dict.fromkeys(QUESTIONS, Answer(state="holds", reasons=()))
            )
            reasons = (*own["still_there"].reasons, redact(check.observed))
            own["still_there"] = Answer(state="broken", reasons=reasons)
    return tuple(FourAnswers(bucket=bucket, **answers) for bucket, answers in found.items())


@dataclass(frozen=True, kw_only=True)
class FourSummary:
    """How the certificates of a report answer.

    Attributes:
        total: restores with a certificate.
        hold: those by which all four hold for every bucket that was asked for; a declared difference is none.
        broken: question -> certificates by which it does not hold for some bucket.
        declared: certificates with differences that were declared as wanted.
        not_asked: certificates with buckets that were not restored.
        rows: the certificates by which not all hold, each with the buckets for which a question does not.
    """

    total: int
    hold: int
    broken: Mapping[Question, int]
    declared: int
    not_asked: int
    rows: tuple[tuple[CaseEntry, Certificate, Mapping[Question, tuple[str, ...]]], ...]


def summarise(cases: Iterable[CaseEntry]) -> FourSummary:
    """Count the certificates of ``cases``."""
    found = [(case, one) for case in cases for one in case.certificates if one.four]
    states = [{answer.state for row in one.four for answer in _answers(row).values()} for _, one in found]
    rows = [(case, one, {question: _buckets(one, question) for question in QUESTIONS}) for case, one in found]
    return FourSummary(
        total=len(found),
        hold=len(found) - sum("broken" in one for one in states),
        broken={question: sum(bool(by_question[question]) for _, _, by_question in rows) for question in QUESTIONS},
        declared=sum("declared" in one for one in states),
        not_asked=sum("not_asked" in one for one in states),
        rows=tuple(row for row in rows if any(row[2].values())),
    )


def not_held(certificate: Certificate) -> list[FourAnswers]:
    """Return the buckets for which not all four simply hold."""
    return [row for row in certificate.four if any(answer.state != "holds" for answer in _answers(row).values())]


def _answers(row: FourAnswers) -> dict[Question, Answer]:
    return {question: getattr(row, question) for question in QUESTIONS}


def _buckets(certificate: Certificate, question: Question) -> tuple[str, ...]:
    return tuple(row.bucket for row in certificate.four if _answers(row)[question].state == "broken")


def compared_with(leg: str, checks: Sequence[CheckRecord]) -> tuple[str, ...]:
    """Return the uninterrupted legs that the leg's training was compared with, because of its certificate."""
    return tuple(
        str(check.parameters["against"])
        for check in checks
        if check.check == "certified_exact" and check.parameters.get("leg") == leg
    )


def _of_line(line: CertifiedBucket) -> dict[Question, Answer]:
    """Return the questions that do not simply hold."""
    where = f" ({line.ranks})" if line.ranks else ""
    if line.verdict == "absent":
        reason = f"{redact(line.text)}{where}"
        return {
            question: Answer(state="not_asked", reasons=(reason,) * (question == "came_back")) for question in QUESTIONS
        }
    said, is_declared, declared = line.text.partition(_OVERRIDDEN)
    answers: dict[Question, Answer] = {}
    if is_declared:
        answers["same_thing"] = Answer(state="declared", reasons=(f"{redact(declared)}{where}",))
    if line.verdict == "exact":
        return answers
    for question, reasons in _by_question(said.removesuffix("; ")).items():
        told = tuple(f"{redact(reason)}{where}" for reason in reasons)
        answers[question] = Answer(
            state="broken", reasons=(*told, *(answers[question].reasons if question in answers else ()))
        )
    return answers


def _by_question(text: str) -> dict[Question, list[str]]:
    found: dict[Question, list[str]] = {}
    last: Question | None = None
    for piece in _pieces(text):
        question = next((name for name, words in _WORDS.items() if words.search(piece)), None)
        if question is None and last is not None:
            found[last][-1] += f"; {piece}"
            continue
        last = question or "came_back"
        found.setdefault(last, []).append(piece)
    return found


def _pieces(text: str) -> list[str]:
    """Split at semicolons outside of parentheses."""
    pieces, depth = [""], 0
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth <= 0 and text.startswith("; ", place):
            pieces.append("")
        else:
            pieces[-1] += letter
    return [piece.strip() for piece in pieces if piece.strip()]

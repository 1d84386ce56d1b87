"""Records in, report out: the one place that knows in which order the report's parts are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from conformance.results import CalibrationRecord, HeaderRecord, SabotageRecord
from reports import document
from reports.acceptance import Acceptance, Platform, load_acceptance, load_platforms
from reports.cases import make_cases
from reports.document import CaseEntry, KillEntry, PartEntry, Report, SabotageEntry, Verdict
from reports.frames import Frames, kill_rows, make_frames
from reports.matrix import make_done, make_rows
from reports.read import Part, Run
from reports.scrub import scrub, scrub_command, scrub_environment
from reports.text import Text, say
from reports.verdict import make_verdict

_MOST_FOCUS = 3
# Provenance that a header may hold; a header of schema 1 holds none of it, and the page says so.
HEADER_FACTS = (
    "commit",
    "machine",
    "cores",
    "memory_bytes",
    "file_system",
    "packages_digest",
    "environment",
    "seeds",
)


class ReportError(ValueError):
    """The report that was asked for can't be made; nothing was written."""


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """The report, and the frames and records that it was made from."""

    report: Report
    frames: Frames
    run: Run


def assemble(run: Run, *, profile: str = "accept", title: str | None = None) -> Assembled:
    """Make the report of a run.

    Raises:
        ReportError: no profile has that name.
    """
    acceptance = load_acceptance()
    if profile not in acceptance.profiles:
        raise ReportError(f"no profile is called {profile!r}; known: {', '.join(acceptance.profiles)}")
    platforms = load_platforms(acceptance)
    cases = make_cases(run)
    kills = tuple(_kill(row) for part in run.parts for row in kill_rows(part))
    verdict = make_verdict(run, acceptance.profiles[profile], platforms, cases, kills)
    sabotages = tuple(_sabotage(part, one) for part in run.parts for one in part.results.of(SabotageRecord))
    rows = make_rows(acceptance, platforms, cases)
    report = Report(
        schema=document.SCHEMA,
        title=title or ", ".join(sorted({part.results.header.adapter for part in run.parts})),
        profile=profile,
        platforms=tuple(platform.id for platform in platforms),
        verdict=verdict,
        parts=tuple(_part(part) for part in run.parts),
        rows=rows,
        done=make_done(acceptance.done, platforms, cases, run.unit_tests),
        focus=choose_focus(cases, verdict),
        cases=cases,
        sabotages=sabotages,
        kills=kills,
        storage=run.storage,
        calibrations=_calibrations(run),
        not_tested=_not_tested(acceptance, profile, platforms, sabotages, kills, cases),
    )
    return Assembled(report=report, frames=make_frames(run), run=run)


def choose_focus(cases: Sequence[CaseEntry], verdict: Verdict) -> tuple[str, ...]:
    """The cases that the page opens up: the worst that were found, else the hardest that passed (most ranks, then kills)."""
    by_anchor = {case.anchor: case for case in cases}
    with_legs = [one for one in verdict.findings if one.anchor in by_anchor and by_anchor[str(one.anchor)].legs]
    refusing = [one for one in with_legs if one.weight == "refused"]
    found = [one.anchor for one in refusing or with_legs]
    # One case a cause: two that part at the same bucket show the same thing twice.
    chosen: dict[tuple[Any, ...], str] = {}
    for anchor in found:
        case = by_anchor[str(anchor)]
        cause = (case.divergence.bucket, case.divergence.column) if case.divergence else (case.key,)
        chosen.setdefault(cause, case.anchor)
    if chosen:
        return tuple(chosen.values())[:_MOST_FOCUS]
    best = max(
        (case for case in cases if case.reference and case.resumes),
        key=lambda case: (case.outcome == "pass", max(leg.ranks for leg in case.legs), len(case.resumes)),
        default=None,
    )
    return (best.anchor,) if best else ()


def _part(part: Part) -> PartEntry:
    header, footer = part.results.header, part.results.footer
    facts: dict[str, str] = {}
    for name in HEADER_FACTS:
        value = header_fact(header, name)
        if name == "environment" and value:
            facts |= {f"environment {key}": text for key, text in scrub_environment(value).items()}
        elif name == "commit" and value is not None:
            facts |= {"commit": str(value).removesuffix("+")[:12], "dirty": "yes" if str(value).endswith("+") else "no"}
        elif value is not None:
            facts[name] = scrub(str(value))
    return PartEntry(
        name=part.name,
        run_id=header.run_id,
        schema=header.schema,
        platform=header.platform,
        adapter=header.adapter,
        versions=header.versions,
        system=header.system,
        command=scrub_command(header.argv),
        started_at=header.started_at,
        seconds=footer.seconds,
        accepted=footer.accepted,
        counts=footer.counts,
        facts=facts,
        missing=tuple(name for name in HEADER_FACTS if header_fact(header, name) is None),
    )


def header_fact(header: HeaderRecord, name: str) -> Any:
    """A fact of the header, None where its version has no such field; the commit is called ``source`` there."""
    return getattr(header, "source" if name == "commit" else name, None) or None


def _sabotage(part: Part, one: SabotageRecord) -> SabotageEntry:
    return SabotageEntry(
        part=part.name,
        id=one.id,
        title=one.title,
        caught=one.caught,
        caught_by=one.caught_by,
        expected_bucket=one.expected_bucket,
        blamed_bucket=one.blamed_bucket,
        right_bucket=one.right_bucket,
        cases=tuple(one.outcomes),
        reason=scrub(one.reason),
    )


def _kill(row: Mapping[str, Any]) -> KillEntry:
    known = {field.name for field in fields(KillEntry)}
    values = {name: row.get(name) for name in known}
    values |= {name: scrub(str(row.get(name) or "")) for name in ("reason", "victims", "moment", "mode")}
    return KillEntry(**values)  # type: ignore[arg-type]  # a record of its own strict reader


def _calibrations(run: Run) -> Mapping[str, int]:
    found = [one for part in run.parts for one in part.results.of(CalibrationRecord)]
    counts = Counter("equal" if one.equal else "broken" if one.problem else "different" for one in found)
    return {name: counts.get(name, 0) for name in ("equal", "different", "broken")}


def _not_tested(
    acceptance: Acceptance,
    profile: str,
    platforms: Sequence[Platform],
    sabotages: Sequence[SabotageEntry],
    kills: Sequence[KillEntry],
    cases: Sequence[CaseEntry],
) -> tuple[Text, ...]:
    """What this very run does not show, then what no run of this suite can."""
    found = []
    ran = {case.platform for case in cases}
    for platform in platforms:
        if platform.id not in ran and not ("all" in ran and platform.device == "cpu"):
            found.append(say(
                "{title}: nothing was run there ({count} required cases).", "{title}：本次未运行（必需用例 {count} 个）。",
                title=platform.title, count=len(platform.required),
            ))  # fmt: skip
    if not sabotages:
        found.append(say(
            "Sabotages: none was put in by this run. python -m conformance sabotage shows that every case can fail.",
            "破坏实验：本次未做。python -m conformance sabotage 可证明每个用例都会失败。",
        ))  # fmt: skip
    if not kills:
        found.append(say(
            "Kills at random places and at every file operation (soak, crash sweep): no records of any.",
            "随机时刻与逐个文件操作处的中断（soak、crash sweep）：没有记录。",
        ))  # fmt: skip
    observed = [case.case for case in cases if case.outcome == "note"]
    if observed:
        found.append(say(
            "Only observed, not judged: {names}.", "仅观察、不判定：{names}。", names=", ".join(sorted(set(observed)))
        ))  # fmt: skip
    return (*found, *acceptance.never_tested)

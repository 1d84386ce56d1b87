"""From records to the report: the one place that knows in which order the report's parts are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.records.results import CalibrationRecord, HeaderRecord, KillRecord, SabotageRecord
from reports.contents import document
from reports.contents.document import CaseEntry, KillEntry, PartEntry, Report, SabotageEntry, Verdict
from reports.contents.text import Text, say
from reports.judging.acceptance import Acceptance, Platform, Profile, Recorded, load_acceptance, load_platforms
from reports.judging.cases import anchor_of, make_cases, unique
from reports.judging.matrix import make_done, make_rows, only_run, speaks_for
from reports.judging.verdict import make_verdict
from reports.reading.costs import commit_of, make_costs
from reports.reading.frames import Frames, make_frames
from reports.reading.read import Part, Run
from reports.reading.redact import redact, redact_command, redact_environment
from reports.reading.unit_tests import UNIT_TESTS_NAME

_MOST_FOCUS = 3
_NOT_CHOSEN = say(
    "Whatever was not chosen. Whether everything that is required was run and passes is what the profile accept asks.",
    "未被选中的一切。必需的用例是否全部运行且通过，由 accept 验收范围判定。",
)
# Provenance that a header holds; one of schema 1 holds none of it, and the page says so.
HEADER_FACTS = ("source", "machine", "packages_digest", "environment")


class ReportError(ValueError):
    """The report that was asked for can't be made; nothing was written."""


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """The report, the frames and records that it was made from, and the platforms that are its columns."""

    report: Report
    platforms: tuple[Platform, ...]
    frames: Frames
    run: Run


def assemble(run: Run, *, profile: str | None = "accept", title: str | None = None) -> Assembled:
    """Make the report of a run.

    Args:
        run: its records.
        profile: what must be complete; None for the profile that the run is complete enough for, see :func:`profile_of`.
        title: the heading of the page; default: the trainer's name.

    Raises:
        ReportError: no profile has that name.
    """
    acceptance = load_acceptance()
    if profile is not None and profile not in acceptance.profiles:
        raise ReportError(f"no profile is called {profile!r}; known: {', '.join(acceptance.profiles)}")
    platforms = load_platforms(acceptance, _recorded_requirements(run))
    kills = _kills(run)
    cases = make_cases(run, kills)
    sabotages = tuple(_sabotage(part, one) for part in run.parts for one in part.results.of(SabotageRecord))
    profile = profile or profile_of(acceptance, platforms, cases, has_sabotages=bool(sabotages))
    chosen = acceptance.profiles[profile]
    verdict = make_verdict(run, chosen, platforms, cases, kills)
    if chosen.is_acceptance:
        trainers = {part.results.header.adapter for part in run.parts}
        rows = make_rows(acceptance, platforms, cases)
        done = make_done(acceptance.done, platforms, cases, run.tests.get(UNIT_TESTS_NAME), trainers)
        not_tested = _not_tested(acceptance, platforms, sabotages, kills, cases)
    else:
        platforms, rows = only_run(platforms, make_rows(acceptance, platforms, cases, all_required=False))
        done = ()
        not_tested = (_NOT_CHOSEN, *acceptance.never_tested)
    report = Report(
        schema=document.SCHEMA,
        title=title or ", ".join(sorted({part.results.header.adapter for part in run.parts})),
        profile=profile,
        is_acceptance=chosen.is_acceptance,
        platforms=tuple(platform.id for platform in platforms),
        verdict=verdict,
        parts=tuple(_part(part) for part in run.parts),
        rows=rows,
        done=done,
        focus=choose_focus(cases, verdict),
        cases=cases,
        sabotages=sabotages,
        kills=kills,
        storage=run.storage,
        costs=make_costs(run.costs, {commit_of(part.results.header.source) for part in run.parts} - {""}),
        calibrations=_calibrations(run),
        not_tested=not_tested,
    )
    return Assembled(report=report, platforms=platforms, frames=make_frames(run), run=run)


def profile_of(
    acceptance: Acceptance, platforms: Sequence[Platform], cases: Sequence[CaseEntry], *, has_sabotages: bool
) -> str:
    """The profile that a run was made for, as far as its results show.

    It is the strictest one that has results of every suite on every platform that it requires, and the selection where no
    other one does.
    """

    def has_results(profile: Profile) -> bool:
        wanted = [platform for platform in platforms if platform.id in profile.platforms]
        return all(
            any(case.suite == suite and speaks_for(case, platform) for case in cases)
            for platform in wanted
            for suite in {suite for suite, _ in platform.required}
        )

    known = acceptance.profiles.items()
    fitting = [
        name for name, one in known if one.is_acceptance and has_results(one) and (has_sabotages or not one.sabotages)
    ]
    # One that also requires sabotages is the stricter of two with the same platforms.
    fitting.sort(key=lambda name: acceptance.profiles[name].sabotages, reverse=True)
    return next(iter(fitting), None) or next(name for name, one in known if not one.is_acceptance)


def _recorded_requirements(run: Run) -> Recorded:
    """What was required of the runs by their own records; where several were made for one platform, all of it."""
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for part in run.parts:
        header = part.results.header
        if header.required:
            before = found.get((header.suite, header.platform), ())
            found[header.suite, header.platform] = tuple(dict.fromkeys((*before, *header.required)))
    return found


def choose_focus(cases: Sequence[CaseEntry], verdict: Verdict) -> tuple[str, ...]:
    """The cases that are shown in detail: the worst that were found, or the hardest that passed (most ranks, then kills)."""
    by_anchor = {case.anchor: case for case in cases}
    with_legs = [one for one in verdict.findings if one.anchor in by_anchor and by_anchor[str(one.anchor)].legs]
    refusing = [one for one in with_legs if one.weight == "refused"]
    found = [one.anchor for one in refusing or with_legs]
    # One case for each cause: two that differ first in the same bucket show the same thing.
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
    return PartEntry(
        name=part.name,
        run_id=header.run_id,
        schema=header.schema,
        suite=header.suite,
        platform=header.platform,
        adapter=header.adapter,
        versions=header.versions,
        system=header.system,
        machine={name: redact(text) for name, text in header.machine.items()},
        command=redact_command(header.argv),
        started_at=header.started_at,
        seconds=footer.seconds,
        accepted=footer.accepted,
        counts=footer.counts,
        facts=_facts(header),
        missing=tuple(name for name in HEADER_FACTS if not getattr(header, name)),
    )


def _facts(header: HeaderRecord) -> dict[str, str]:
    facts: dict[str, str] = {}
    if header.source:
        is_dirty = header.source.endswith("+")
        facts |= {"commit": commit_of(header.source), "dirty": "yes" if is_dirty else "no"}
    if header.packages_digest:
        facts["packages_digest"] = header.packages_digest
    return facts | {f"environment {name}": text for name, text in redact_environment(header.environment).items()}


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
        reason=redact(one.reason),
    )


def _kills(run: Run) -> tuple[KillEntry, ...]:
    found = [(part, one) for part in run.parts for one in part.results.of(KillRecord)]
    anchors = [anchor_of("kill", part.results.header.platform, one.key, str(one.number)) for part, one in found]
    return tuple(_kill(part, one, anchor) for (part, one), anchor in zip(found, unique(anchors), strict=True))


def _kill(part: Part, one: KillRecord, anchor: str) -> KillEntry:
    return KillEntry(
        anchor=anchor,
        part=part.name,
        key=one.key,
        number=one.number,
        mode=one.mode,
        moment=one.moment,
        step=one.step,
        rank=one.rank,
        operation=one.operation,
        what=redact(one.what) if one.what else None,
        victims=one.victims,
        last_step=one.last_step,
        resumed_at=one.resumed_at,
        lost_steps=one.lost_steps,
        outcome=one.outcome,
        reason=redact(one.reason),
        divergence=one.divergence,
        seconds=one.seconds,
    )


def _calibrations(run: Run) -> Mapping[str, int]:
    found = [one for part in run.parts for one in part.results.of(CalibrationRecord)]
    counts = Counter("equal" if one.equal else "broken" if one.problem else "different" for one in found)
    return {name: counts.get(name, 0) for name in ("equal", "different", "broken")}


def _not_tested(
    acceptance: Acceptance,
    platforms: Sequence[Platform],
    sabotages: Sequence[SabotageEntry],
    kills: Sequence[KillEntry],
    cases: Sequence[CaseEntry],
) -> tuple[Text, ...]:
    """What this very run does not show, then what no run of this suite can."""
    found = []
    ran = {case.platform for case in cases}
    for platform in platforms:
        if platform.later:
            found.append(say(
                "{title}: required by this checkout, but not yet when the run was made: {names}.",
                "{title}：当前代码要求、但生成该结果时尚未要求的用例：{names}。",
                title=platform.title, names=", ".join(case_id for _, case_id in platform.later),
            ))  # fmt: skip
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

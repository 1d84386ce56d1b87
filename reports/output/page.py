"""The page: one HTML file of the report and its frames, which needs no other file."""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from conformance.records.results import BUCKETS
from reports.contents.document import QUESTIONS, BucketCell, CaseEntry, DoneEntry, Report, Row
from reports.contents.text import Text, load_words
from reports.judging.acceptance import Acceptance, load_acceptance
from reports.judging.assemble import Assembled
from reports.judging.cases import controls, failed_kill
from reports.judging.differences import distance
from reports.judging.history import Trend
from reports.judging.matrix import worst
from reports.judging.rule_of_four import not_held, summarise
from reports.output.case_detail import make_detail
from reports.output.compact import compact
from reports.output.costs_page import STATES, show
from reports.output.series import make_series, pack
from reports.reading.costs import CostRun

_TEMPLATES = Path(__file__).parents[1] / "templates"
_ICONS = {
    "pass": "✓",
    "note": "i",
    "missing": "○",
    "skipped": "–",
    "unsupported": "–",
    "error": "?",
    "known_fail": "!",
    "unexpected_pass": "!",
    "fail": "✕",
    "false_exact": "✕",
}
_UNNAMED = Markup("data-w")
_VERDICT_ICONS = {"accepted": "✓", "passed": "✓", "refused": "✕", "incomplete": "○"}


def render(assembled: Assembled, trend: Trend | None = None) -> str:
    """The page's HTML; the same for the same records (and the same history)."""
    return compact(render_whole(assembled, trend))


def render_whole(assembled: Assembled, trend: Trend | None = None) -> str:
    """The page with every tag and quote in its place."""
    report = assembled.report
    acceptance = load_acceptance()
    words = load_words()
    series = make_series(assembled.frames.steps, report.cases)
    parts = {part.name: part for part in assembled.run.parts}
    by_anchor = {case.anchor: case for case in report.cases}
    details = [
        make_detail(parts[by_anchor[anchor].part], by_anchor[anchor], series, number=number)
        for number, anchor in enumerate(report.focus, start=1)
    ]
    packed = pack(series, report.cases)
    return render_template(
        "acceptance.html.j2",
        scripts=("switches.js", "acceptance.js", "navigation.js"),
        styles=("costs.css",),
        words=words,
        report=report,
        verdict=report.verdict,
        profile=acceptance.profiles[report.profile],
        required=acceptance.profiles[report.profile].platforms,
        platforms=assembled.platforms,
        groups=_groups(acceptance, report.rows),
        beyond=_beyond(acceptance, report.rows),
        totals=_totals(assembled),
        values_at=_values_at(report),
        distance=distance,
        gib=lambda count: f"{int(count) / 2**30:.1f} GiB",
        absent=_absent(assembled, trend),
        buckets=list(BUCKETS),
        configured=_configured(report),
        runs_of=_runs_of,
        questions=list(QUESTIONS),
        four=summarise(report.cases),
        not_held=not_held,
        details=details,
        criteria=_criteria(acceptance, report),
        case_groups=_case_groups(report.cases),
        by_anchor=by_anchor,
        costs=[(run, show(run)) for run in report.costs],
        goals=[goal for run in report.costs if not run.is_smoke for goal in run.goals],
        goal_counts=_goal_counts,
        controls=len(controls(assembled.run)),
        verdict_icon=_VERDICT_ICONS[report.verdict.state],
        commits=_commits(report),
        planted=sorted({case.sabotage for case in report.cases if case.sabotage}),
        trend=trend,
        data=packed,
    )


def render_template(
    template: str,
    *,
    scripts: Sequence[str],
    words: Mapping[str, Text],
    data: Mapping[str, Any],
    styles: Sequence[str] = (),
    **context: Any,
) -> str:
    """A template with style sheet, scripts and words, and the digests by which the page's own policy allows only these.

    ``data`` is what the scripts draw; the words that the page uses are added to it in both languages.
    """
    style, code = (
        "".join((_TEMPLATES / name).read_text(encoding="utf-8") for name in names)
        for names in (("acceptance.css", "charts.css", *styles), scripts)
    )
    named = _named(words)
    # The scripts name words in quotes, and other things too.
    used = set(re.findall(r'"(\w+)"', code)) & set(words)

    def mark(name: str) -> Markup:
        used.add(name)
        return named[name]

    return (
        _environment()
        .get_template(template)
        .render(
            w=lambda name: word_markup(words[name], mark(name)),
            word=lambda name, style: word_markup(words[name], mark(name), style),
            mark=mark,
            # The script knows that every column header is one of the words.
            head_mark=lambda name: "" if mark(name) == _UNNAMED else Markup(" ") + named[name],
            english=lambda name: words[name].en,
            icon=lambda state: _ICONS[state],
            state_word=lambda state: word_markup(words[f"state_{state}"], mark(f"state_{state}")),
            data=lambda: as_script(
                {**data, "words": {name: [words[name].en, words[name].zh] for name in sorted(used)}}
            ),
            style=Markup(style),
            script=Markup(code),
            style_hash=_hash(style),
            script_hash=_hash(code),
            **context,
        )
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["say"] = say_markup
    return environment


def say_markup(text: Text) -> Markup:
    """Both languages, of which the style sheet shows one; a text that is the same in both is written once."""
    if text.en == text.zh:
        return escape(text.en)
    return Markup('<span lang="en">{}</span><span lang="zh">{}</span>').format(text.en, text.zh)


def word_markup(text: Text, mark: Markup, style: str = "") -> Markup:
    """One of the template's own words, in English; the script has the other language, so that the page holds it once."""
    if not style:
        return Markup("<span {}>{}</span>").format(mark, text.en)
    return Markup('<span class="{}" {}>{}</span>').format(style, mark, text.en)


def _named(words: Mapping[str, Text]) -> dict[str, Markup]:
    """The attribute that marks an element as one of the words: with its name only where the English text is ambiguous."""
    chinese: dict[str, set[str]] = {}
    for text in words.values():
        chinese.setdefault(text.en, set()).add(text.zh)
    return {
        name: _UNNAMED if len(chinese[text.en]) == 1 else Markup('data-w="{}"').format(name)
        for name, text in words.items()
    }


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _commits(report: Report) -> list[tuple[str, bool]]:
    """The commits that the parts were made of, each once, and whether files differed from it."""
    found: dict[str, bool] = {}
    for part in report.parts:
        if "commit" in part.facts:
            commit = part.facts["commit"]
            found[commit] = found.get(commit, False) or part.facts.get("dirty") == "yes"
    return list(found.items())


def as_script(data: Any) -> Markup:
    """JSON that can't end the element that contains it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    # Half of a surrogate pair has no UTF-8, but JSON has a word for it.
    text = text.encode("utf-8", "backslashreplace").decode()
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _groups(acceptance: Acceptance, rows: Sequence[Row]) -> list[tuple[str, Text, list[Row]]]:
    """The specification's rows by class."""
    named = [row for row in rows if row.in_specification]
    groups = [(key, acceptance.classes[key], [row for row in named if row.group == key]) for key in "ABCD"]
    return [group for group in groups if group[2]]


def _beyond(acceptance: Acceptance, rows: Sequence[Row]) -> list[tuple[str, Text, list[Row]]]:
    """The other classes, then what belongs to none."""
    others = [row for row in rows if not row.in_specification]
    found = [(key, title, [row for row in others if row.group == key]) for key, title in acceptance.classes.items()]
    found.append(("", Text(en="System tests", zh="系统测试"), [row for row in others if not row.group]))
    return [group for group in found if group[2]]


def _criteria(acceptance: Acceptance, report: Report) -> list[tuple[str, Text, list[DoneEntry]]]:
    """The acceptance criteria by chapter of the specification."""
    chapter_of = {rule.id: rule.chapter for rule in acceptance.done}
    return [
        (chapter, title, [one for one in report.done if chapter_of[one.id] == chapter])
        for chapter, title in acceptance.chapters.items()
    ]


def _absent(assembled: Assembled, trend: Trend | None) -> frozenset[str]:
    """The sections that a selection has nothing for. The page of an acceptance has all, also empty ones, which say so."""
    report, storage = assembled.report, assembled.report.storage
    if report.is_acceptance:
        return frozenset()
    there = {
        "matrix": report.rows,
        "done": report.done,
        "details": report.focus,
        "sabotages": report.sabotages,
        "rule_of_four": any(one.four for case in report.cases for one in case.certificates),
        "kills": report.kills,
        "storage": storage,
        "costs": report.costs or storage.benchmarks,
        "trend": trend,
    }
    return frozenset(name for name, found in there.items() if not found)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A leg's configuration as the page shows it: only what differs from leg ``base``, or from the case ``like``."""

    leg: str
    base: str | None
    like: str | None
    rows: Sequence[tuple[str, str, str]]


def _configured(report: Report) -> dict[str, list[Shown]]:
    """What each case shows of its configurations: the first one is whole (of a case in detail), others show differences."""
    cases = sorted(
        (case for case in report.cases if case.configurations), key=lambda case: case.anchor not in report.focus
    )
    shown: dict[str, list[Shown]] = {}
    for case in cases:
        first, *later = case.configurations
        known = set(cases[0].configurations[0].rows) if case is not cases[0] else set()
        own = Shown(
            leg=first.leg,
            base=None,
            like=cases[0].anchor if known else None,
            rows=[row for row in first.rows if row not in known],
        )
        shown[case.anchor] = [own, *(Shown(leg=one.leg, base=one.base, like=None, rows=one.rows) for one in later)]
    return shown


def _runs_of(cells: Sequence[BucketCell], bucket: str, ranks: Sequence[int]) -> list[tuple[BucketCell | None, int]]:
    """A bucket's cells by rank, each with the number of ranks in a row that have the same; None: there is no cell."""
    by_rank = {cell.rank: cell for cell in cells if cell.bucket == bucket}

    def shown(rank: int) -> tuple[Any, ...]:
        cell = by_rank.get(rank)
        return (cell.state, cell.entries, len(cell.different)) if cell else ()

    groups = [list(own) for _, own in itertools.groupby(ranks, key=shown)]
    return [(by_rank.get(own[0]), len(own)) for own in groups]


def _values_at(report: Report) -> str | None:
    """The anchor of the values, or of the kill, that the first finding is about; None where it is about neither."""
    first = next(iter(report.verdict.findings), None)
    if first is None:
        return None
    if first.divergence is not None and first.anchor in report.focus:
        return f"divergence-{report.focus.index(first.anchor) + 1}"
    case = next((case for case in report.cases if case.anchor == first.anchor), None)
    kill = failed_kill(report.kills, case.part, case.case) if case else None
    if kill is not None:
        return kill.anchor
    return first.anchor if first.divergence is not None or first.kind.startswith("kill") else None


def _totals(assembled: Assembled) -> list[dict[str, Any]]:
    """Class E: what each platform requires, and how much of it passed."""
    totals = []
    for place, platform in enumerate(assembled.platforms):
        # A soak is in the matrix without being required, so it is not in the sum. In a selection a required id that was not
        # run has a cell without a state.
        cells = [row.cells[place] for row in assembled.report.rows if platform.requires(row.id)]
        states = [cell.state for cell in cells if cell.state is not None]
        state = worst(states) if states else None
        totals.append(
            {
                "platform": platform.id,
                "passed": sum(cell.passed for cell in cells),
                "total": sum(cell.total for cell in cells),
                "state": state,
                "reason": next((cell.reason for cell in cells if cell.state == state), None),
            }
        )
    return totals


def _goal_counts(run: CostRun) -> list[tuple[str, int]]:
    """How many goals came to each state that there is, by the state's pill."""
    counts = Counter(STATES[goal.status] for goal in run.goals)
    return [(state, counts[state]) for state in STATES.values() if counts[state]]


def _case_groups(cases: Sequence[CaseEntry]) -> list[tuple[str, list[CaseEntry]]]:
    groups: dict[str, list[CaseEntry]] = {}
    for case in cases:
        groups.setdefault(case.case[0] if case.case[0].isupper() else "", []).append(case)
    return list(groups.items())

"""The page: one HTML file from the report and its frames, with everything that it needs inside."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from reports.acceptance import Acceptance, load_acceptance
from reports.assemble import Assembled
from reports.cases import controls, failed_kill
from reports.depth import make_depth
from reports.differences import distance
from reports.document import CaseEntry, Report, Row
from reports.history import Trend
from reports.matrix import worst
from reports.series import make_series, pack
from reports.text import Text, load_words

_TEMPLATES = Path(__file__).with_name("templates")
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
}
_VERDICT_ICONS = {"accepted": "✓", "passed": "✓", "refused": "✕", "incomplete": "○"}


def render(assembled: Assembled, trend: Trend | None = None) -> str:
    """The page's HTML; the same for the same records (and the same history)."""
    report = assembled.report
    acceptance = load_acceptance()
    words = load_words()
    series = make_series(assembled.frames.steps, report.cases)
    parts = {part.name: part for part in assembled.run.parts}
    by_anchor = {case.anchor: case for case in report.cases}
    depths = [
        make_depth(parts[by_anchor[anchor].part], by_anchor[anchor], series, number=number)
        for number, anchor in enumerate(report.focus, start=1)
    ]
    data = {
        **pack(series, report.cases),
        "words": {name: [text.en, text.zh] for name, text in words.items()},
    }
    return render_template(
        "acceptance.html.j2",
        script="acceptance.js",
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
        depths=depths,
        case_groups=_case_groups(report.cases),
        by_anchor=by_anchor,
        controls=len(controls(assembled.run)),
        verdict_icon=_VERDICT_ICONS[report.verdict.state],
        drawn=frozenset(data["cases"]),
        commits=_commits(report),
        planted=sorted({case.sabotage for case in report.cases if case.sabotage}),
        trend=trend,
        data=_as_script(data),
    )


def render_template(
    template: str, *, script: str | None = None, words: Mapping[str, Text] | None = None, **context: Any
) -> str:
    """A template with the style sheet, its script, and the digests by which the page's own policy lets just these in."""
    style = "".join((_TEMPLATES / name).read_text(encoding="utf-8") for name in ("acceptance.css", "charts.css"))
    code = (_TEMPLATES / script).read_text(encoding="utf-8") if script else ""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    own = words or {}
    environment.filters["say"] = say_markup
    environment.globals.update(
        w=lambda name: word_markup(name, own[name]),
        icon=lambda state: _ICONS[state],
        state_word=lambda state: word_markup(f"state_{state}", own[f"state_{state}"]),
    )
    return environment.get_template(template).render(
        style=Markup(style), script=Markup(code), style_hash=_hash(style), script_hash=_hash(code), **context
    )


def say_markup(text: Text) -> Markup:
    """Both languages, of which the style sheet shows one; a text that is the same in both stands alone."""
    if text.en == text.zh:
        return escape(text.en)
    return Markup('<span lang="en">{}</span><span lang="zh">{}</span>').format(text.en, text.zh)


def word_markup(name: str, text: Text) -> Markup:
    """One of the template's own words, in English; the script has the other language, so it stands once on the page."""
    return Markup('<span data-w="{}">{}</span>').format(name, text.en)


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


def _as_script(data: Any) -> Markup:
    """JSON that can't end the element which it stands in."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
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


def _absent(assembled: Assembled, trend: Trend | None) -> frozenset[str]:
    """The sections that a selection has nothing for. The page of an acceptance has all: that nothing is there is told."""
    report, storage = assembled.report, assembled.report.storage
    if report.is_acceptance:
        return frozenset()
    there = {
        "matrix": report.rows,
        "done": report.done,
        "sabotages": report.sabotages,
        "kills": report.kills,
        "storage": storage.crash_states or storage.corruption or storage.mutants or storage.benchmarks,
        "trend": trend,
    }
    return frozenset(name for name, found in there.items() if not found)


def _values_at(report: Report) -> str | None:
    """Where on the page the values stand that the first finding speaks of."""
    first = next(iter(report.verdict.findings), None)
    if first is None or first.divergence is None:
        return None
    if first.anchor in report.focus:
        return f"divergence-{report.focus.index(first.anchor) + 1}"
    case = next((case for case in report.cases if case.anchor == first.anchor), None)
    kill = failed_kill(report.kills, case.part, case.case) if case else None
    return kill.anchor if kill else first.anchor


def _totals(assembled: Assembled) -> list[dict[str, Any]]:
    """Class E: what each platform requires, and how much of it passed."""
    totals = []
    for place, platform in enumerate(assembled.platforms):
        # What was run there though nobody asked for it (a soak) is in the matrix, but no part of the sum.
        cells = [row.cells[place] for row in assembled.report.rows if platform.requires(row.id)]
        state = worst([str(cell.state) for cell in cells]) if cells else None
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


def _case_groups(cases: Sequence[CaseEntry]) -> list[tuple[str, list[CaseEntry]]]:
    groups: dict[str, list[CaseEntry]] = {}
    for case in cases:
        groups.setdefault(case.case[0] if case.case[0].isupper() else "", []).append(case)
    return list(groups.items())

"""The matrix of ids and platforms, and the acceptance criteria of the specification."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reports.contents.document import CELL_STATES, CaseEntry, Cell, DoneEntry, Row
from reports.contents.text import Text, same, say
from reports.judging.acceptance import CHECKOUT, Acceptance, DoneRule, Platform, base_of, matches, sort_key
from reports.reading.unit_tests import UnitTests

_NEEDS_DEVICE = {"npu": "needs-npu", "cuda": "needs-gpu"}
_REASON_OF = {
    "unsupported": "lacks-ability",
    "skipped": "skipped",
    "known_fail": "known-defect",
    "error": "harness-error",
}


def make_rows(
    acceptance: Acceptance, platforms: Sequence[Platform], cases: Sequence[CaseEntry], *, all_required: bool = True
) -> tuple[Row, ...]:
    """Every id of the specification, run or not, then every other that is required or was run, by class.

    Without ``all_required`` a cell counts only what was run.
    """
    ids = {*acceptance.rows, *(base_of(name) for platform in platforms for _, name in platform.required)}
    ids |= {base_of(case.case) for case in cases}
    rows = []
    for name in sorted(ids, key=lambda name: (name not in acceptance.rows, sort_key(name))):
        own = [case for case in cases if base_of(case.case) == name]
        # The matrix comes before the system tests: each of its titles names one thing.
        own.sort(key=lambda case: case.suite)
        rows.append(
            Row(
                id=name,
                group=name[0] if name[0] in acceptance.classes else "",
                title=acceptance.rows.get(name) or _title(name, own),
                in_specification=name in acceptance.rows,
                cells=tuple(_cell(name, platform, own, all_required) for platform in platforms),
            )
        )
    return tuple(rows)


def only_run(platforms: Sequence[Platform], rows: Sequence[Row]) -> tuple[tuple[Platform, ...], tuple[Row, ...]]:
    """The rows in which something was run, and the columns with any of it."""
    used = {cell.platform for row in rows for cell in row.cells if cell.state is not None}
    kept = [row for row in rows if any(cell.state is not None for cell in row.cells)]
    return (
        tuple(platform for platform in platforms if platform.id in used),
        tuple(replace(row, cells=tuple(cell for cell in row.cells if cell.platform in used)) for row in kept),
    )


def speaks_for(case: CaseEntry, platform: Platform) -> bool:
    """True when a case's result counts on the platform: a run of all cases, on a CPU, counts on every CPU platform."""
    return case.platform == platform.id or (case.platform == "all" and platform.device == "cpu")


def required_states(platform: Platform, cases: Sequence[CaseEntry]) -> Mapping[tuple[str, str], str]:
    """Each required id of the platform -> the worst outcome that was recorded for it there, or ``missing``."""
    found: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        if speaks_for(case, platform):
            found.setdefault((case.suite, case.case), []).append(case.outcome)
    return {name: worst(found.get(name, ["missing"])) for name in platform.required}


def worst(states: Sequence[str]) -> str:
    """The worst of some states, of which there must be one."""
    return max(states, key=CELL_STATES.index)


def _title(name: str, cases: Sequence[CaseEntry]) -> Text:
    """The title of an id that is not in the specification: that of the case with this very id, or of its first sub-case."""
    titles = [case.title for case in cases if case.case == name] or [case.title for case in cases]
    return titles[0] if titles else same("")


def _cell(name: str, platform: Platform, cases: Sequence[CaseEntry], all_required: bool) -> Cell:
    required = platform.requires(name)
    own = [case for case in cases if speaks_for(case, platform)]
    if required:
        own = [case for case in own if (case.suite, case.case) in required]
    else:
        # What was run on this very platform without being required is still shown.
        own = [case for case in own if case.platform == platform.id]
    outcomes: dict[tuple[str, str], list[str]] = {}
    for case in own:
        outcomes.setdefault((case.suite, case.case), []).append(case.outcome)
    lacking = [one for one in required if one not in outcomes] if all_required else []
    # An id with several results counts once, with its worst one.
    states = [worst(found) for found in outcomes.values()] + ["missing"] * len(lacking)
    state = worst(states) if states else None
    return Cell(
        platform=platform.id,
        state=state,
        reason=_reason(state, platform, own),
        passed=sum(one in ("pass", "note") for one in states),
        total=len(states),
        anchors=tuple(case.anchor for case in sorted(own, key=lambda case: -CELL_STATES.index(case.outcome))),
        lacking=tuple(f"{suite}:{case_id}" for suite, case_id in lacking),
    )


def _reason(state: str | None, platform: Platform, cases: Sequence[CaseEntry]) -> str | None:
    if state == "missing":
        return _NEEDS_DEVICE.get(platform.device, "not-run") if not cases else "not-run"
    if state == "pass" and any(case.sabotage for case in cases):
        return "sabotaged"
    return _REASON_OF.get(state or "")


# ---- acceptance criteria ----------------------------------------------------------------------------------------------


def make_done(
    rules: Sequence[DoneRule],
    platforms: Sequence[Platform],
    cases: Sequence[CaseEntry],
    unit_tests: UnitTests | None,
    trainers: Collection[str],
    checkout: Path = CHECKOUT,
) -> tuple[DoneEntry, ...]:
    """Each acceptance criterion: met, not met, or not run on its platforms, with what shows it.

    Args:
        rules: the criteria.
        platforms: all platforms, with what each requires.
        cases: all judged cases; those under a sabotage show nothing here.
        unit_tests: counts of the unit tests, where there is a record of them.
        trainers: the names of the trainers that the results are of.
        checkout: the folder of the documents.
    """
    by_id = {platform.id: platform for platform in platforms}
    clean = [case for case in cases if case.sabotage is None]
    return tuple(_done(rule, by_id, clean, unit_tests, sorted(trainers), checkout) for rule in rules)


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """What the results of one platform show of some required ids."""

    platform: Platform
    total: int
    passed: int
    failed: tuple[CaseEntry, ...]
    cases: tuple[CaseEntry, ...]

    @property
    def is_complete(self) -> bool:
        return self.passed == self.total > 0

    @property
    def words(self) -> Text:
        return say("{platform}: {passed} of {total} pass", "{platform}：{total} 项中 {passed} 项通过",
                   platform=self.platform.title, passed=self.passed, total=self.total)  # fmt: skip


def _show(needs: Sequence[str], platform: Platform, cases: Sequence[CaseEntry]) -> _Shown:
    wanted = {one for one in platform.required if any(matches(one[1], pattern) for pattern in needs)}
    own = [case for case in cases if speaks_for(case, platform) and (case.suite, case.case) in wanted]
    failed = [case for case in own if case.outcome not in ("pass", "note")]
    good = {(case.suite, case.case) for case in own} - {(case.suite, case.case) for case in failed}
    return _Shown(platform=platform, total=len(wanted), passed=len(good), failed=tuple(failed), cases=tuple(own))


def _done(
    rule: DoneRule,
    platforms: Mapping[str, Platform],
    cases: Sequence[CaseEntry],
    unit_tests: UnitTests | None,
    trainers: Sequence[str],
    checkout: Path,
) -> DoneEntry:
    shown = [_show(rule.needs, platforms[name], cases) for name in rule.platforms]
    evidence = [one.words for one in shown]
    # Each condition is met (True), not met (False), or not known (None).
    conditions = [False if one.failed else True if one.is_complete else None for one in shown]
    if rule.unit_tests:
        evidence.append(say("unit tests: {counts}", "UT：{counts}", counts=_counts(unit_tests)))
        conditions.append(unit_tests.good if unit_tests is not None else None)
    if rule.stand_in is not None and None in conditions and False not in conditions:
        there = _show(rule.needs, platforms[rule.stand_in], cases)
        evidence.append(say("stand-in {there}", "替代平台 {there}", there=there.words))
        shown.append(there)
    if rule.document is not None:
        path = checkout / rule.document
        is_there = path.is_file() and bool(path.read_text(encoding="utf-8").strip())
        words = ("{name} is there", "{name} 已具备") if is_there else ("{name} is missing", "缺少 {name}")
        evidence.append(say(*words, name=rule.document))
        conditions.append(is_there)
    if rule.one_trainer:
        names = ", ".join(trainers)
        evidence.append(say("all results are of {names}", "全部结果来自 {names}", names=names))
        conditions.append(len(trainers) == 1)
    own = [case for one in shown for case in one.failed] or [case for one in shown for case in one.cases]
    return DoneEntry(
        id=rule.id,
        text=rule.text,
        state="not_met" if False in conditions else "not_run" if None in conditions else "met",
        evidence=Text(en="; ".join(one.en for one in evidence), zh="；".join(one.zh for one in evidence)),
        anchors=tuple(dict.fromkeys(case.anchor for case in own))[:12],
    )


def _counts(unit_tests: UnitTests | None) -> Text:
    if unit_tests is None:
        return say("the results folder has no record of them", "结果目录中没有其记录")
    return say(
        "{tests} run, {bad} failed, {skipped} skipped", "共 {tests} 项，失败 {bad}，跳过 {skipped}",
        tests=unit_tests.tests, bad=unit_tests.failures + unit_tests.errors, skipped=unit_tests.skipped,
    )  # fmt: skip

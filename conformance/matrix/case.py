"""Cases as data: reading, validating and selecting them.

A case file is a YAML list. Every key is from a closed list: ``given`` from :mod:`conformance.matrix.given`, disk faults from
:mod:`conformance.matrix.faults`, checks from :mod:`conformance.checks`. An unknown one is refused with file and line.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from conformance.checks import CHECKS
from conformance.matrix import given as given_words
from conformance.matrix.disk_changes import name_problem
from conformance.matrix.faults import FAULTS
from conformance.matrix.given import Given
from conformance.matrix.script import Expectation, FaultStep, LegStep, LookStep, Step
from conformance.plain_data import serial
from conformance.plain_data.suggestions import hint
from conformance.plain_data.yaml_lines import load_yaml

CASES_FOLDER = Path(__file__).parents[1] / "cases"
RETIRED_NAME = "retired.txt"
CLASSES = "ABCDFGHIJKLMNOPQRSTUVWXYZ"  # E of the specification is the platforms, see platforms.yaml

_ID = re.compile(rf"[{CLASSES}][1-9][0-9]*(\.[a-z0-9]+(-[a-z0-9]+)*)?")
_LEG = re.compile(r"(reference|saving|interrupted|resumed)(-[a-z0-9]+)*")
_BUG = re.compile(r"R[0-9]{2,3}")
_NOT_PRESENT_TENSE = re.compile(
    r"\b(should|shall|will|would|must|test(s|ed)? that|(verif|ensure|check)\w* that)\b", re.I
)
_TITLE_LENGTH = 100


class CaseError(ValueError):
    """A case file is invalid; the message names file, line and case."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the matrix. ``raw`` is the case as it was written, ``where`` its file and line.

    ``launcher`` starts its legs, where there is a choice (``st``): ``torchrun``, or ``warm`` (forked from a process that has
    imported torch).
    """

    id: str
    title: str
    level: Literal["must", "should", "note"]
    spec: str
    why: str
    bugs: tuple[str, ...]
    sabotages: tuple[str, ...]
    needs: tuple[str, ...]
    known_fail: str | None
    launcher: Literal["torchrun", "warm"]
    given: Mapping[str, Any]
    script: tuple[Step, ...]
    expect: tuple[Expectation, ...]
    raw: Mapping[str, Any]
    where: str

    @property
    def legs(self) -> tuple[LegStep, ...]:
        """The legs of the script, in order."""
        return tuple(step for step in self.script if isinstance(step, LegStep))

    def leg_given(self, leg: LegStep) -> Given:
        """The complete ``given`` of ``leg``."""
        return given_words.complete(given_words.merge(self.given, leg.given or {}), f"{self.where}: case {self.id}")

    @property
    def world_size(self) -> int:
        """The largest number of processes of any leg."""
        return max(self.leg_given(leg).world_size for leg in self.legs)


@dataclass(frozen=True, kw_only=True)
class _Head:
    """The keys of a case in YAML."""

    id: str
    title: str
    why: str
    script: tuple[Mapping[str, Any], ...]
    expect: tuple[Mapping[str, Any], ...]
    level: Literal["must", "should", "note"] = "must"
    spec: str = ""
    bugs: tuple[str, ...] = ()
    sabotages: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    known_fail: str | None = None
    launcher: Literal["torchrun", "warm"] = "torchrun"
    given: Mapping[str, Any] | None = None


def load_cases(folder: Path = CASES_FOLDER) -> tuple[Case, ...]:
    """Read and lint every ``*.yaml`` of ``folder``; the cases come in the order of their ids.

    Raises:
        CaseError: all problems, one per line; or there is no case.
    """
    cases: list[Case] = []
    problems: list[str] = []
    for path in sorted(folder.glob("*.yaml")):
        try:
            items = load_yaml(path)
        except yaml.YAMLError as error:
            problems.append(f"{path.name}: {error}")
            continue
        if not isinstance(items, list) or not items:
            problems.append(f"{path.name}:1: expected a list of cases")
            continue
        for item in items:
            try:
                cases.append(parse_case(item, file=path.name))
            except CaseError as error:
                problems.append(str(error))
    problems += _lint_together(cases, _retired(folder))
    if problems:
        raise CaseError("\n".join(problems))
    if not cases:
        raise CaseError(f"{folder}: no case here")
    return tuple(sorted(cases, key=lambda case: sort_key(case.id)))


def select(cases: Iterable[Case], patterns: Iterable[str]) -> tuple[Case, ...]:
    """Return the cases that any pattern names: an id, a base id (all its sub-cases), or a glob.

    Raises:
        CaseError: a pattern matches nothing, or nothing is left.
    """
    cases, wanted = tuple(cases), tuple(patterns)
    chosen = [case for case in cases if not wanted or any(matches(case.id, pattern) for pattern in wanted)]
    for pattern in wanted:
        if not any(matches(case.id, pattern) for case in cases):
            ids = {name for case in cases for name in (case.id, case.id.partition(".")[0])}
            otherwise = "the command `list` prints every id"
            raise CaseError(f"no case matches {pattern!r}; {hint(pattern, ids, otherwise=otherwise)}")
    if not chosen:
        raise CaseError("no case is selected")
    return tuple(chosen)


def matches(case_id: str, pattern: str) -> bool:
    """True when ``pattern`` is this id, its part before the dot, or a glob over it."""
    return pattern in (case_id, case_id.partition(".")[0]) or fnmatch.fnmatchcase(case_id, pattern)


def sort_key(case_id: str) -> tuple[str, int, str]:
    """A9 before A10, and a base id before its sub-cases."""
    base, _, rest = case_id.partition(".")
    return base[0], int(base[1:]), rest


def parse_case(item: Any, *, file: str) -> Case:
    """Turn one YAML mapping into a case.

    Raises:
        CaseError: anything about it is wrong.
    """
    where = f"{file}:{getattr(item, 'line', 1)}"
    try:
        head = serial.build(_Head, item, _named(item, where), defaults=True)
        where_named = f"{where}: case {head.id}"
        script = tuple(_step(step, f"{file}:{_line(step, item)}: case {head.id}") for step in head.script)
        expect = tuple(_expectation(row, f"{file}:{_line(row, item)}: case {head.id}") for row in head.expect)
        case = Case(
            **{
                name: getattr(head, name)
                for name in ("id", "title", "level", "spec", "why", "bugs", "known_fail", "launcher")
            },
            sabotages=head.sabotages,
            needs=head.needs,
            given=head.given or {},
            script=script,
            expect=expect,
            raw=item,
            where=where,
        )
        _lint(case, where_named)
    except serial.SerialError as error:
        raise CaseError(str(error)) from error
    return case


def _named(item: Any, where: str) -> str:
    name = item.get("id") if isinstance(item, Mapping) else None
    return f"{where}: case {name}" if name else where


def _line(part: Any, whole: Any) -> int:
    line: int = getattr(part, "line", getattr(whole, "line", 1))
    return line


def _step(raw: Mapping[str, Any], where: str) -> Step:
    if "leg" in raw:
        return serial.build(LegStep, raw, where, defaults=True)
    if "look" in raw:
        number = serial.value(int, raw["look"], f"{where}: look")
        rest = {key: item for key, item in raw.items() if key != "look"}
        if set(rest) - {"name"}:
            raise serial.SerialError(f"{where}: unknown key {min(set(rest) - {'name'})!r}; a look has look and name")
        return LookStep(look=number, name=serial.value(str, rest.get("name", str(number)), f"{where}: name"))
    if "fault" in raw:
        rest = {key: item for key, item in raw.items() if key != "fault"}
        return FaultStep(fault=raw["fault"], parameters=FAULTS.parameters(raw["fault"], rest, where))
    raise serial.SerialError(f"{where}: a step of the script has one of leg, fault, look; found {dict(raw)!r}")


def _expectation(raw: Mapping[str, Any], where: str) -> Expectation:
    if "check" not in raw:
        raise serial.SerialError(f"{where}: an expectation needs 'check'")
    rest = {key: item for key, item in raw.items() if key not in ("check", "blames")}
    blames = serial.value(str | None, raw.get("blames"), f"{where}: blames")
    return Expectation(check=raw["check"], parameters=CHECKS.parameters(raw["check"], rest, where), blames=blames)


def _lint(case: Case, where: str) -> None:
    for problem in (_head_problem(case), *_script_problems(case)):
        if problem:
            raise serial.SerialError(f"{where}: {problem}")


def _head_problem(case: Case) -> str:
    if not _ID.fullmatch(case.id):
        return "the id is a class letter, a number, and perhaps .words-of-lower-case (E is the platforms' letter)"
    if problem := _title_problem(case.title):
        return f"title {case.title!r}: {problem}"
    if not case.why.strip() or not (case.spec.strip() or case.bugs):
        return "it needs why (the harm) and a source: spec or bugs"
    strange = [bug for bug in case.bugs if not _BUG.fullmatch(bug)]
    return f"bugs: {strange[0]!r} is no row of the list of known bugs (R05, R126)" if strange else ""


def _script_problems(case: Case) -> Iterator[str]:
    if not case.expect or not case.legs:
        yield "it needs at least one leg and one expectation"
    names = [leg.leg for leg in case.legs]
    for leg in case.legs:
        if not _LEG.fullmatch(leg.leg) or names.count(leg.leg) > 1:
            yield f"leg {leg.leg!r}: reference, saving, interrupted or resumed (and -more behind it), each once"
        if problem := _leg_problem(case, leg):
            yield f"leg {leg.leg}: {problem}"
    looks = {step.name for step in case.script if isinstance(step, LookStep)}
    for row in case.expect:
        if problem := _reference_problem(row, set(names), looks):
            yield f"check {row.check}: {problem}"


def _title_problem(title: str) -> str:
    if not title.strip() or len(title) > _TITLE_LENGTH or title.endswith("."):
        return f"one to {_TITLE_LENGTH} characters, no full stop at the end"
    found = _NOT_PRESENT_TENSE.search(title)
    return f"say what happens, in the present tense, without {found.group(0)!r}" if found else ""


def _leg_problem(case: Case, leg: LegStep) -> str:
    made_from = case.leg_given(leg)
    if leg.until_step is None and made_from.epochs is None:
        return "it needs until_step, or given.epochs"
    if leg.role == "reference" and (leg.fault or leg.restore_from):
        return "a reference is neither interrupted nor resumed"
    if leg.role == "resumed" and leg.restore_from is None:
        return "a resumed leg says what it restores from"
    if leg.role == "interrupted" and leg.fault is None:
        return "an interrupted leg has a fault"
    if not 1 <= leg.nodes <= made_from.world_size or made_from.world_size % leg.nodes:
        return f"{made_from.world_size} ranks can't be {leg.nodes} nodes of one size"
    return _fault_problem(leg, made_from.world_size) if leg.fault else ""


def _fault_problem(leg: LegStep, world_size: int) -> str:
    fault = leg.fault
    assert fault is not None
    if leg.until_step is not None and fault.after_step > leg.until_step:
        return "its fault lies behind its last step"
    placed = (fault.rank, fault.operation)
    if (fault.moment == "file_operation") != (None not in placed) or placed.count(None) == 1:
        return "its fault: file_operation has rank and operation, no other moment has them"
    problem = name_problem(fault.operation) if isinstance(fault.operation, str) else ""
    if problem or (isinstance(fault.operation, int) and fault.operation < 1):
        return f"its fault: operation {problem or 'is counted from 1'}"
    if fault.rank is not None and not 0 <= fault.rank < world_size:
        return f"its fault: there is no rank {fault.rank}"
    kind, _, number = fault.victims.partition("-")
    known = {"all": 0, "rank": world_size, "node": leg.nodes, "launcher": leg.nodes}
    is_right = fault.victims == "all" or (kind in known and number.isdigit() and int(number) < known[kind])
    if not is_right or (fault.kind == "raise" and fault.victims != "all"):
        return f"its fault: victims {fault.victims!r} are neither all nor one of its ranks or nodes (raise: all)"
    if kind == "launcher" and fault.kind != "terminate":
        return "its fault: a launcher alone is terminated; killed, it takes its ranks along (node-0)"
    return ""


_LEG_PARAMETERS = ("leg", "against", "saved_by", "other")


def _reference_problem(row: Expectation, legs: set[str], looks: set[str]) -> str:
    for key in _LEG_PARAMETERS:
        name = row.parameters.get(key)
        if name is not None and name not in legs:
            return f"{key}: no leg is called {name!r}"
    look = row.parameters.get("look")
    return f"look: no look is called {look!r}" if look is not None and look not in looks else ""


def _lint_together(cases: list[Case], retired: set[str]) -> list[str]:
    problems = []
    ids: dict[str, str] = {}
    titles: dict[str, str] = {}
    for case in cases:
        if case.id in ids:
            problems.append(f"{case.where}: case {case.id}: the id is taken by {ids[case.id]}")
        if case.id in retired:
            problems.append(f"{case.where}: case {case.id}: the id was retired and is never used again")
        if case.title in titles:
            problems.append(f"{case.where}: case {case.id}: the title is that of {titles[case.title]}")
        ids.setdefault(case.id, case.where)
        titles.setdefault(case.title, case.id)
    return problems


def _retired(folder: Path) -> set[str]:
    path = folder / RETIRED_NAME
    if not path.exists():
        return set()
    lines = path.read_text(encoding="utf-8").splitlines()
    return {line.split()[0] for line in lines if line.strip() and not line.startswith("#")}

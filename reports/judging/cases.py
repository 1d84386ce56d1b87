"""From a case's records to its entry in the report."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conformance.plain_data import serial
from conformance.records.comparison import Divergence
from conformance.records.results import CaseRecord, CheckRecord, FaultRecord, LegRecord, RankEnd, ResultRecord
from reports.contents.document import CaseEntry, Configuration, Epoch, KillEntry, LegEntry
from reports.contents.titles import title_of
from reports.judging.acceptance import sort_key, suite_of
from reports.judging.ledger import ledger
from reports.judging.restores import certificates, resumes
from reports.reading.read import Part, Run
from reports.reading.redact import redact

_SAFE = re.compile(r"[^A-Za-z0-9.-]")


@dataclass(frozen=True, kw_only=True)
class _Setting:
    value: Any
    source: str


@dataclass(frozen=True, kw_only=True)
class _ConfigurationEvent:
    """What a ``configuration`` event holds: each field by its dotted name."""

    values: Mapping[str, _Setting]


def make_cases(run: Run, kills: Sequence[KillEntry]) -> tuple[CaseEntry, ...]:
    """Every judged case, by id, then by part; controls (see :func:`controls`) are only counted.

    The divergence of a soak or sweep that failed is that of the first of its ``kills`` that records one.
    """
    left_out = controls(run)
    found = [
        _entry(part, result, failed_kill(kills, part.name, result.case))
        for part in run.parts
        for result in part.results.of(ResultRecord)
        if part.is_judged(result) and (part.name, result.key) not in left_out
    ]
    found.sort(key=lambda entry: (sort_key(entry.case), entry.part, entry.key))
    anchors = unique([anchor_of("case", entry.suite, entry.platform, entry.key) for entry in found])
    return tuple(replace(entry, anchor=anchor) for entry, anchor in zip(found, anchors, strict=True))


def controls(run: Run) -> frozenset[tuple[str, str]]:
    """(part, key) of the clean runs that a run of sabotages is compared with, where another part judged the same case too."""
    judged = {result.case for part in run.parts if not part.summed_up for result in part.results.of(ResultRecord)}
    return frozenset(
        (part.name, result.key)
        for part in run.parts
        if part.summed_up
        for result in part.results.of(ResultRecord)
        if result.sabotage is None and result.outcome == "pass" and result.case in judged
    )


def failed_kill(kills: Sequence[KillEntry], part: str, case: str) -> KillEntry | None:
    """The kill that best explains why a soak or sweep is red: the first of the worst, one with a divergence before others."""
    bad = [kill for kill in kills if (kill.part, kill.key) == (part, case) and kill.outcome not in ("pass", "note")]
    return min(
        bad,
        key=lambda kill: (kill.outcome != "false_exact", kill.divergence is None, kill.outcome != "fail"),
        default=None,
    )


def anchor_of(*words: str) -> str:
    """The id of a place on the page: letters, digits, dots and dashes only.

    It is made of what stays the same from run to run, so that a link to a case works in the next report too.
    """
    return _SAFE.sub("-", "-".join(words))


def unique(anchors: Sequence[str]) -> list[str]:
    """The same anchors, with a number added to each one that is earlier in the list too."""
    taken: set[str] = set()
    found = []
    for anchor in anchors:
        number, name = 1, anchor
        while name in taken:
            number += 1
            name = f"{anchor}-{number}"
        taken.add(name)
        found.append(name)
    return found


def _entry(part: Part, result: ResultRecord, kill: KillEntry | None) -> CaseEntry:
    case = next((record.case for record in part.of(CaseRecord, result.key)), {})
    legs = part.of(LegRecord, result.key)
    own = [leg for leg in legs if _role(leg) != "reference"]
    reference = reference_of(result, legs)
    configured = configurations(part, legs)
    suite = suite_of(part.results.header.suite, result.reproduce)
    return CaseEntry(
        anchor="",  # known when all cases are
        part=part.name,
        suite=suite,
        platform=part.results.header.platform,
        key=result.key,
        case=result.case,
        title=title_of(suite, result.case, result.title),
        level=result.level,
        spec=str(case.get("spec", "")),
        why=str(case.get("why", "")),
        outcome=result.outcome,
        reason=redact(result.reason),
        blamed=result.blamed,
        sabotage=result.sabotage,
        repeat=result.repeat,
        reproduce=redact(result.reproduce),
        seconds=result.seconds,
        layout=_layout(case, configured),
        given=tuple(_given(case)),
        configurations=configured,
        checks=tuple(_redacted(check) for check in result.checks),
        divergence=first_divergence(result) or (kill.divergence if kill else None),
        legs=tuple(_leg(leg) for leg in legs),
        damage=tuple(_damage(fault) for fault in part.of(FaultRecord, result.key)),
        reference=reference.folder if reference else None,
        resumes=resumes(part, own),
        certificates=certificates(part, own, result.checks),
        epochs=_epochs(part, reference, own),
    )


def _epochs(part: Part, reference: LegRecord | None, legs: Sequence[LegRecord]) -> tuple[Epoch, ...]:
    """The sample ledger of each checkpoint directory that some leg went on from."""
    rows: list[Epoch] = []
    expected = part.trajectories.get(reference.folder) if reference else None
    for history in dict.fromkeys(leg.checkpoint_dir for leg in legs if _role(leg) == "resumed"):
        own = [part.trajectories[leg.folder] for leg in legs if leg.checkpoint_dir == history]
        rows += ledger(history, expected, own)
    return tuple(rows)


def first_divergence(result: ResultRecord) -> Divergence | None:
    """The earliest one of the checks that failed."""
    found = [check.divergence for check in result.checks if check.status == "failed" and check.divergence is not None]
    return min(found, key=lambda one: one.step, default=None)


def reference_of(result: ResultRecord, legs: Sequence[LegRecord]) -> LegRecord | None:
    """The leg that the others are compared with: the one that a check names, or the case's reference."""
    names = [str(check.parameters["against"]) for check in result.checks if "against" in check.parameters]
    named = [leg for leg in legs if leg.leg in names]
    return next(iter(named or [leg for leg in legs if _role(leg) == "reference"]), None)


def _role(leg: LegRecord) -> str:
    return leg.leg.partition("-")[0]


def _leg(leg: LegRecord) -> LegEntry:
    firsts, lasts = ([step for step in steps if step is not None] for steps in (leg.first_steps, leg.last_steps))
    fault = leg.fault
    return LegEntry(
        leg=leg.leg,
        role=_role(leg),
        folder=leg.folder,
        launcher=leg.launcher,
        ends=("hung; " if leg.timed_out else "") + _ends(leg.ranks),
        restore_from=redact(leg.restore_from) if leg.restore_from else None,
        first_step=min(firsts, default=None),
        last_step=max(lasts, default=None),
        until_step=leg.until_step,
        ranks=len(leg.ranks),
        fault=f"{fault.kind} {fault.moment} {fault.after_step}" if fault else None,
        trouble=redact(leg.trouble) if leg.trouble else None,
        seconds=leg.seconds,
    )


def _ends(ranks: tuple[RankEnd, ...]) -> str:
    ends = [end.signal or ("not known" if end.exit_code is None else f"exit {end.exit_code}") for end in ranks]
    if len(set(ends)) == 1:
        return ends[0] if len(ends) == 1 else f"{len(ends)} × {ends[0]}"
    return ", ".join(f"rank {rank}: {end}" for rank, end in enumerate(ends))


def _redacted(check: CheckRecord) -> CheckRecord:
    return replace(check, expected=redact(check.expected), observed=redact(check.observed))


def _damage(fault: FaultRecord) -> str:
    asked = ", ".join(f"{key} {value}" for key, value in fault.asked.items())
    return redact(f"{asked}: {'; '.join(fault.observed)}")


def _layout(case: Mapping[str, Any], configured: Sequence[Configuration]) -> str:
    """Ranks and parallel layout in words: as the program reported it, or as the case asks for it."""
    given = case.get("given") or {}
    ranks = int(given.get("world_size", 1))
    if ranks == 1:
        return "1 rank"
    if given.get("config") is not None:
        reported = {name: value for name, value, _ in configured[0].rows} if configured else {}
        tensor = int(reported.get("accelerator.tp_size", 0))
        if tensor < 2:
            return f"{ranks} ranks, {'FSDP2' if tensor else given['config']}"
        return f"{ranks} ranks, TP {tensor} × FSDP2 {ranks // tensor}"
    parallel = str(given.get("parallel", "fsdp"))
    words = {
        "fsdp": "FSDP2",
        "tp2-fsdp": f"TP 2 × FSDP2 {ranks // 2}",
        "fsdp-tp2": f"FSDP2 {ranks // 2} × TP 2",
        "replicated": "replicated",
    }
    return f"{ranks} ranks, {words.get(parallel, parallel)}"


def _given(case: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The configuration that differs from the defaults, and who set it: (field, value, source)."""
    rows = [(name, value, "case") for name, value in _flat(case.get("given") or {}, "")]
    for step in case.get("script") or ():
        if isinstance(step, Mapping) and "leg" in step:
            rows += [(name, value, f"leg {step['leg']}") for name, value in _flat(step.get("given") or {}, "")]
    return rows


def _flat(value: Any, name: str) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [row for key, item in value.items() for row in _flat(item, f"{name}.{key}" if name else str(key))]
    return [(name, redact(f"{name}={value}").partition("=")[2])]


def configurations(part: Part, legs: Sequence[LegRecord]) -> tuple[Configuration, ...]:
    """What the legs' programs ran with, as rank 0 reported it; of a later leg only what the first one had not."""
    found: list[Configuration] = []
    first: dict[str, tuple[str, str, str]] = {}
    for leg in legs:
        events = [one for one in part.events.get(leg.folder, ()) if one.kind == "configuration" and one.rank == 0]
        if not events:
            continue
        values = serial.build(_ConfigurationEvent, events[0].data, f"{part.name}: {leg.folder}: configuration").values
        rows = {name: _setting(name, item) for name, item in values.items()}
        if not first:
            first = rows
            found.append(Configuration(leg=leg.leg, base=None, rows=tuple(rows.values())))
        else:
            new = tuple(row for name, row in rows.items() if row != first.get(name))
            found.append(Configuration(leg=leg.leg, base=found[0].leg, rows=new))
    return tuple(found)


def _setting(name: str, item: _Setting) -> tuple[str, str, str]:
    """One field; a value as JSON writes it, a secret's hidden."""
    text = json.dumps(item.value, ensure_ascii=False)
    return name, redact(f"{name}={text}").partition("=")[2], redact(item.source)

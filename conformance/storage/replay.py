"""Rebuilds one case from its id and judges it again."""

from __future__ import annotations

import importlib
from typing import Any

from conformance.processes import forked_ranks
from conformance.storage.crash_states import enumeration
from conformance.storage.crash_states.oracles import ORACLES, broken
from conformance.storage.crash_states.persistence_models import MODELS, states
from conformance.storage.power_cuts import power_cut
from conformance.storage.tracing import trees
from conformance.storage.tracing.history import TraceError
from conformance.storage.workload.recording import Recording, RecordingError, record
from conformance.storage.workload.scenarios import Loads, quietly

_JOB_SECONDS = 300.0
# What an id begins with -> the module that rebuilds its case. Each is imported when it is needed.
_MODULES = {
    "corruption": "damage.corruption",
    "operation-errors": "failing_operations.operation_errors",
    "hostile": "hostile.fuzz",
}


def replay(case_id: str, *, seed: int = 0, subject: str = "library") -> tuple[str, bool]:
    """Rebuild a case. Returns its description, and whether every promise held.

    ``case_id`` may be followed by the brackets that a report shows.

    Raises:
        ValueError: there is no such case.
    """
    case_id = case_id.split(" [")[0]
    if case_id.startswith(enumeration.ID_PREFIX):
        return _one(_crash_state, (case_id, subject))
    if case_id.startswith(power_cut.ID_PREFIX):
        return _one(_power_cuts, (case_id, subject))
    name = "hostile" if case_id.startswith("hostile-") else case_id.partition(":")[0]
    if name not in _MODULES:
        raise ValueError(f"{case_id}: no case has such an id")
    module: Any = importlib.import_module(f"conformance.storage.{_MODULES[name]}")
    if name == "hostile":
        kind, reader, content = module.replay(case_id, seed)
        return f"{kind}, for the reader of {reader}: {content!r}", True
    found = module.replay(case_id)
    return str(found), not found.violations


def _one(function: Any, job: tuple[str, str]) -> tuple[str, bool]:
    (found,) = forked_ranks.fan_out(function, [job], workers=1, preload=enumeration.PRELOAD)
    if isinstance(found, str):
        raise ValueError(found)
    result: tuple[str, bool] = found
    return result


def _crash_state(job: tuple[str, str]) -> tuple[str, bool] | str:
    case_id, subject_name = job
    try:
        scenario, model, place, choice = case_id.removeprefix(enumeration.ID_PREFIX).split("/", 3)
        order, _, point = place.partition(":")
        if model not in MODELS or not point.isdecimal():
            return f"{case_id}: expected {enumeration.ID_PREFIX}SCENARIO/MODEL/ORDER:POINT/CHOICE"
        subject = enumeration.subject_of(subject_name)
        recording = record(subject, enumeration.scenario_of(subject, scenario))
    except (RecordingError, TraceError, ValueError) as error:
        return str(error)
    ended = forked_ranks.run_alone(
        _judge_one, subject, recording, (model, order, int(point), choice), limit_seconds=_JOB_SECONDS
    )
    if ended.how != "returned":
        return f"{ended.summary}\n{ended.trace}"
    found: tuple[str, bool] | str = ended.value
    return found


def _judge_one(subject: Any, recording: Recording, where: tuple[str, str, int, str]) -> tuple[str, bool] | str:
    model, order, point, choice = where
    found = [
        (place, history)
        for place, history in enumeration.places(recording, model, all_orders=True)
        if (place.order, place.point) == (order, point)
    ]
    matching = [
        (place, history, tree) for place, history in found for _, tree in states(history, point, model, choice.__eq__)
    ]
    if not matching:
        return f"no such state in this trace; it has the orders {', '.join(recording.histories)}"
    place, history, tree = matching[0]
    loads = Loads(subject.load, recording.scenario.tags)
    with quietly(), trees.scratch_folder() as root:
        trees.write_tree(root, tree)
        loads.begin(tree, anew=True)
        verdict = subject.judge(root, loads)
        wrong = broken(verdict, place.promise)
        after = subject.after(root)
    done = [
        f"  rank {one.rank} {one.kind} {one.path}{f' -> {one.target}' if one.target else ''}"
        f"{f' {len(one.data)} bytes' if one.data else ''}"
        for one in history.operations[:point]
    ]
    kept = [f"  {path}/" if tree[path] is None else f"  {path} {len(tree[path] or b'')} bytes" for path in sorted(tree)]
    promise = place.promise
    lines = [
        f"done before the crash ({point} operations, order {order}):", *done,
        f"on the disk afterwards ({model}, {choice}):", *kept,
        f"promised: LATEST is {promise.current}{''.join(f', or {one}' for one in sorted(promise.pending))}",
        f"found: LATEST is {verdict.latest}; complete: {dict(verdict.claims)}",
        *(f"BROKEN {oracle}: {ORACLES[oracle]}" for oracle in sorted(wrong)),
        *([f"BROKEN O10: {after}"] if after else []),
    ]  # fmt: skip
    return "\n".join(lines), not wrong and not after


def _power_cuts(job: tuple[str, str]) -> tuple[str, bool] | str:
    """Run the whole job of the trial again: the kernel does not write at the same moments twice."""
    case_id, subject = job
    parts = case_id.removeprefix(power_cut.ID_PREFIX).split("/")
    if len(parts) != 3 or parts[1] not in power_cut.FLUSHES:
        return f"{case_id}: expected {power_cut.ID_PREFIX}SCENARIO/FLUSHING/NUMBER"
    found = power_cut.examine(power_cut.Job(subject=subject, scenario=parts[0], flushing=parts[1]))
    if found.error or found.skipped:
        return found.error or f"not possible here: {found.skipped}"
    lines = [f"{found.count} trials of {parts[0]}, {parts[1]}"]
    lines += [f"BROKEN {name} [{'+'.join(oracles)}]" for name, oracles in found.broken]
    return "\n".join(lines), not found.broken

"""T7, mutation testing: the library is changed in one place at a time; T1, T2, T3 or T6 must fail.

Each change of :mod:`conformance.storage.mutants.table` is applied in a forked process while that imports the library. Quick
versions of the proofs (probes) are then run, the likeliest first, until one reports something that it does not report for the
unchanged library (the control run). A mutant that no probe detects has survived; the table may explain why that is right.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.processes.forked_ranks import Workers, run_alone, scratch
from conformance.storage.mutants import mutating
from conformance.storage.mutants.table import MUTANTS, Entry
from conformance.storage.records import Mutant

TIER = "mutant"
# A mutant that hangs is detected by this limit.
_PROBE_SECONDS = 900.0
# How many reports may turn out to be reports of the unchanged library too.
_MOST_DOUBTS = 8
_PRELOAD = ("hyper_resume.collective", "hyper_resume.config", "hyper_resume.digest", "hyper_resume.errors")

# Cases of all kinds; a reader gets those of its kinds.
_FEW_HOSTILE = 1100

Notices = Iterator[str]


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What one probe reported for one mutant (id "": the unchanged library)."""

    mutant: str
    probe: str
    noticed: tuple[str, ...]


# ---- the probes ---------------------------------------------------------------------------------------------------------


def _crash(scenario: str) -> Notices:
    """Some of the crash states of one scenario."""
    from conformance.storage.crash_states import enumeration

    options = enumeration.Options(share=0.03, load_anew_every=0, aftermath_every=60, most_aftermaths=3)
    found = enumeration.examine(enumeration.Job(subject="library", scenario=scenario, options=options))
    if found.error:
        yield f"nothing to judge: {found.error.splitlines()[0][:200]}"
    for record in found.records:
        yield from (oracle for oracle, count in record.violations.items() if count)


def _corruption(layout: str) -> Notices:
    """Some flips of every file, and one damage of each kind to each file."""
    from conformance.storage.damage import corruption, damage_kinds, judge

    assert layout in ("per_rank", "embedded")
    with tempfile.TemporaryDirectory(prefix="mutant-", dir=scratch()) as place:
        try:
            judge.build(Path(place), layout)  # type: ignore[arg-type]  # looked at
            judge.check_undamaged(Path(place), layout)  # type: ignore[arg-type]
        except judge.NothingToDamage as error:
            yield f"nothing to damage: {str(error)[:200]}"
            return
        material = judge.material(Path(place), layout)  # type: ignore[arg-type]
        choose = random.Random(0)
        flips = list(damage_kinds.flips(material, 0))
        for file in material.newest:
            of_file = [one for one in flips if one.file == file]
            few = choose.sample(of_file, 4) + damage_kinds.truncations(material, 0, 2 * len(material.newest))[:1]
            yield from _of_verdicts(corruption.examine(Path(place), layout, few, "load", ask_stock=False))  # type: ignore[arg-type]
        many = choose.sample(flips, 600)
        yield from _of_verdicts(corruption.examine(Path(place), layout, many, "digest", ask_stock=False))  # type: ignore[arg-type]
        others = [one for one in damage_kinds.others(material) if one.kind != "zeroed sector"]
        others += damage_kinds.truncations(material, 0, 20)
        for start in range(0, len(others), 25):
            part = others[start : start + 25]
            yield from _of_verdicts(corruption.examine(Path(place), layout, part, "load", ask_stock=False))  # type: ignore[arg-type]


def _of_verdicts(verdicts: Sequence[Any]) -> Notices:
    from conformance.storage.damage.corruption import row_of

    for verdict in verdicts:
        yield from (f"{row_of(verdict)}: {name}" for name in verdict.violations)


# (rank, error, stride) tried of each scenario of T3.
_FEW_ERRORS = ((0, "short write", 3), (0, "short read", 3), (0, "EIO", 3), (1, "EIO", 3), (1, "short write", 1))


def _errors(scenario: str) -> Notices:
    """Failing operations of one scenario (``SCENARIO/OPERATION``: of that kind); each report ends in the id of its run."""
    from conformance.storage.failing_operations import operation_errors as errors
    from conformance.storage.failing_operations import runs

    scenario, _, only = scenario.partition("/")
    few = ((0, "EIO", 1),) if only else _FEW_ERRORS
    with tempfile.TemporaryDirectory(prefix="mutant-", dir=scratch()) as place:
        try:
            template = errors.build(Path(place), next(one for one in runs.SCENARIOS if one.name == scenario))
        except errors.NothingToDo as error:
            yield f"nothing to do: {str(error)[:200]}"
            return
        for rank, error_name, stride in few:
            for first in range(1, stride + 1):
                case = runs.Case(
                    scenario=scenario,
                    rank=rank,
                    error=error_name,
                    persistent=False,
                    stride=stride,
                    first=first,
                    only=only,
                )
                for part in errors.examine_in_parts(template, case, most_hangs=1, runs_of_a_pair=12):
                    yield from (f"{name} [{verdict.id}]" for verdict in part for name in verdict.violations)


def _one_error(case_id: str) -> Notices:
    """One of these runs."""
    from conformance.storage.failing_operations import operation_errors as errors

    verdict = errors.examine_id(case_id)
    yield from (f"{name} [{verdict.id}]" for name in verdict.violations)


def _going_back(_: str) -> Notices:
    """A run that went back from step 30 to 10 and saved 25, whose newest step is then damaged: LATEST means 10 again."""
    import torch

    from hyper_resume.checkpoint import DistributedCheckpointer

    with tempfile.TemporaryDirectory(prefix="mutant-", dir=scratch()) as place:
        root = Path(place)

        def save(checkpointer: DistributedCheckpointer, step: int) -> None:
            state = {"model": {"w": torch.full((3,), float(step))}}
            checkpointer.save(str(root / f"global_step_{step}"), state, global_step=step)

        first, again = DistributedCheckpointer(), DistributedCheckpointer()
        for step in (10, 20, 30):
            save(first, step)
        again.begin_run(str(root), restored_from=str(root / "global_step_10"))
        save(again, 25)
        for step, damaged in ((25, None), (10, 25)):
            if damaged is not None:
                (root / f"global_step_{damaged}" / "__0_0.distcp").write_bytes(b"")
            found = DistributedCheckpointer().find_latest_checkpoint(str(root))
            if found != str(root / f"global_step_{step}"):
                yield f"LATEST is {Path(found or 'nothing').name}, not global_step_{step}"


def _other_runs(_: str) -> Notices:
    """A run that starts anew in a used root, with keep_last=1, and one that goes back: what they did not save stays."""
    import torch

    from hyper_resume.checkpoint import DistributedCheckpointer
    from hyper_resume.checkpoint.history.retention import Retention

    with tempfile.TemporaryDirectory(prefix="mutant-", dir=scratch()) as place:
        root = Path(place)

        def run(steps: Sequence[int], start: int | None, keep_last: int | None = None) -> None:
            checkpointer = DistributedCheckpointer(retention=Retention(keep_last=keep_last))
            checkpointer.begin_run(place, restored_from=None if start is None else f"{place}/global_step_{start}")
            for step in steps:
                state = {"model": {"w": torch.full((3,), float(step))}}
                checkpointer.save(f"{place}/global_step_{step}", state, global_step=step)

        run((10, 20, 30), None)
        run((1, 2), None, keep_last=1)
        run((11, 12), 10, keep_last=1)
        for step in (2, 10, 12, 20, 30):
            if not (root / f"global_step_{step}").is_dir():
                yield f"global_step_{step} was deleted"


def _other_layout(_: str) -> Notices:
    """Three saves by one checkpointer, the second of them of other entries: each is read by stock DCP as what was saved."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load as stock_load

    from hyper_resume.checkpoint import DistributedCheckpointer

    with tempfile.TemporaryDirectory(prefix="mutant-", dir=scratch()) as place:
        checkpointer = DistributedCheckpointer()
        for step, names in ((1, "ab"), (2, "abc"), (3, "abc")):
            saved = {"model": {name: torch.full((step,), float(step)) for name in names}}
            directory = str(Path(place) / f"global_step_{step}")
            checkpointer.save(directory, saved, global_step=step)
            found = {"model": {name: torch.zeros(step) for name in names}}
            try:
                stock_load(found, checkpoint_id=directory, no_dist=True)
            except BaseException as error:  # noqa: BLE001  DCP's own is no Exception
                yield f"stock DCP can't load save {step} ({type(error).__name__})"
                continue
            if not all(torch.equal(found["model"][name], saved["model"][name]) for name in names):
                yield f"save {step} holds something else"


def _hostile(reader: str) -> Notices:
    """Some of the hostile files of T6 for one reader."""
    from conformance.storage.hostile import fuzz
    from conformance.storage.hostile.readers import library_readers

    with tempfile.TemporaryDirectory(prefix="mutant-", dir=scratch()) as place:
        found = fuzz.run(_FEW_HOSTILE, 0, Path(place), readers={reader: library_readers()[reader]})
    yield from (f"{violation.what} [{violation.case_id}]" for violation in found.violations)


def _changed_since(_: str) -> Notices:
    """A shard in which one bit changes after LATEST has verified it: the load that follows is refused, or reads what was saved.

    The tensor is large enough to be a segment of its own, whose digest the verification passes to the load.
    """
    import torch

    from hyper_resume.checkpoint import DistributedCheckpointer
    from hyper_resume.errors import CheckpointMismatchError

    with tempfile.TemporaryDirectory(prefix="mutant-", dir=scratch()) as place:
        saved = torch.arange(50_000, dtype=torch.int32)
        DistributedCheckpointer().save(f"{place}/global_step_1", {"model": {"w": saved.clone()}}, global_step=1)
        checkpointer, live = DistributedCheckpointer(), {"model": {"w": torch.zeros_like(saved)}}
        if checkpointer.find_latest_checkpoint(place) is None:
            yield "LATEST finds nothing"
            return
        shard = Path(place) / "global_step_1" / "__0_0.distcp"
        at = shard.read_bytes().index(saved.numpy().tobytes())
        with shard.open("r+b") as file:
            file.seek(at)
            file.write(b"\1")
        try:
            checkpointer.load(f"{place}/global_step_1", live)
        except CheckpointMismatchError:
            return
        if not torch.equal(live["model"]["w"], saved):
            yield "bytes that changed after they were verified are loaded"


PROBES: Mapping[str, tuple[Callable[[str], Notices], str]] = {
    **{
        f"crash/{name}": (_crash, name)
        for name in ("first_save", "next_save", "resave", "resave_two_renames", "retention", "lineage")
    },
    "lineage/going back": (_going_back, ""),
    "lineage/other runs": (_other_runs, ""),
    "plans/other layout": (_other_layout, ""),
    "verified/changed since": (_changed_since, ""),
    "hostile/index": (_hostile, "index"),
    "hostile/shard": (_hostile, "shard"),
    "corruption/per_rank": (_corruption, "per_rank"),
    "corruption/embedded": (_corruption, "embedded"),
    **{
        f"errors/{name}": (_errors, name)
        for name in (
            "next save",
            "first save",
            "same step again",
            "background save",
            "save under another name",
            "run after a crash",
            "next save/sync",
            "next save/sync_directory",
            "next save/rename",
            "next save/remove",
            "next save/write",
            "load",
            "load/open_read",
            "resume",
        )
    },
}


# ---- one mutant ---------------------------------------------------------------------------------------------------------


def _run_probe(entry: Entry | None, probe: str, known: Sequence[str]) -> ProbeResult:
    """In a process of its own: apply the change, and run one probe until it reports something that is not ``known``."""
    function, argument = PROBES.get(probe, (_one_error, probe))

    def life() -> tuple[str, ...]:
        try:
            mutating.install(None if entry is None else entry.change)
        except mutating.MutationError:
            raise
        except Exception as error:  # noqa: BLE001  a library that can't even be imported is noticed by everybody
            return (f"it can't be imported ({type(error).__name__})",)
        found: list[str] = []
        for notice in function(argument):
            if notice not in found:
                found.append(notice)
            if entry is not None and notice not in known:
                break
        return tuple(found)

    end = run_alone(life, limit_seconds=_PROBE_SECONDS)
    name = "" if entry is None else entry.id
    if end.how == "returned":
        return ProbeResult(mutant=name, probe=probe, noticed=end.value)
    if end.error == "MutationError":
        raise mutating.MutationError(end.message)
    if entry is None:
        raise RuntimeError(f"the control of {probe}: {end.summary}\n{end.trace}")
    return ProbeResult(mutant=name, probe=probe, noticed=(end.summary[:300],))


def examine(entry: Entry, control: Mapping[str, Sequence[str]], probes: Sequence[str] | None = None) -> Mutant:
    """Run probes on one mutant, one after the other, until one detects it.

    Args:
        entry: the mutant.
        control: probe -> what it reports for the unchanged library. For a probe without a control, each report is repeated on
            the unchanged library.
        probes: the probes; by default the entry's own, the likeliest first, and then all others. A mutant with an explanation
            gets its own only.
    """
    for probe in [*entry.probes, *_others(entry)] if probes is None else probes:
        notice = _new_notice(entry, probe, control)
        if notice:
            return Mutant(id=entry.id, title=entry.title, killed_by=f"{probe}: {notice}", explanation=None)
    return Mutant(id=entry.id, title=entry.title, killed_by=None, explanation=entry.explanation or None)


def _others(entry: Entry) -> list[str]:
    others = [probe for probe in PROBES if probe not in entry.probes and probe.count("/") == 1]
    return [] if entry.explanation else others


def _new_notice(entry: Entry, probe: str, control: Mapping[str, Sequence[str]]) -> str:
    """What the probe reports for the mutant and not for the unchanged library; "" for nothing."""
    known = list(control.get(probe, ()))
    for _ in range(_MOST_DOUBTS):
        new = [notice for notice in _run_probe(entry, probe, known).noticed if notice not in known]
        if not new:
            return ""
        case_id = new[0].rpartition(" [")[2].removesuffix("]")
        if (
            probe in control
            or not case_id.startswith("operation-errors:")
            or new[0] not in _run_probe(None, case_id, ()).noticed
        ):
            return new[0]
        known.append(new[0])
    return ""


def problems(entries: Sequence[Entry] = MUTANTS) -> list[str]:
    """Changes that do not match the code, and duplicate ids; empty if all is right."""
    found = []
    for entry in entries:
        try:
            mutating.check(entry.change)
        except mutating.MutationError as error:
            found.append(f"{entry.id}: {error}")
        found += [f"{entry.id}: no probe {probe}" for probe in entry.probes if probe not in PROBES]
    ids = [entry.id for entry in entries]
    return found + [f"{name}: stands twice" for name in sorted({name for name in ids if ids.count(name) > 1})]


def run(*, entries: Sequence[Entry] = MUTANTS, workers: int = 2) -> tuple[Mutant, ...]:
    """Judge every mutant by its own probes, and those that survive these by all others.

    Raises:
        MutationError: the table does not match the code (see :func:`problems`).
        WorkerError: harness trouble.
    """
    wrong = problems(entries)
    if wrong:
        raise mutating.MutationError("; ".join(wrong))
    with Workers(workers, preload=_PRELOAD) as pool:
        control: dict[str, Sequence[str]] = {}
        found: dict[str, Mutant] = {}
        for of_entry in (lambda entry: entry.probes, _others):
            left = [entry for entry in entries if entry.id not in found or found[entry.id].is_missed]
            wanted = {probe for entry in left for probe in of_entry(entry)} - control.keys()
            # T3 has too many runs for a control of all; a run that reports something is repeated on the unchanged library.
            results: list[ProbeResult] = pool.map(
                _control, [one for one in PROBES if one in wanted and PROBES[one][0] is not _errors]
            )
            control |= {one.probe: one.noticed for one in results}
            found |= {one.id: one for one in pool.map(_examine, [(entry, control, of_entry(entry)) for entry in left])}
        return tuple(found[entry.id] for entry in entries)


def _control(probe: str) -> ProbeResult:
    return _run_probe(None, probe, ())


def _examine(job: tuple[Entry, Mapping[str, Sequence[str]], Sequence[str]]) -> Mutant:
    return examine(*job)


def replay(case_id: str) -> Mutant:
    """Judge one mutant again, by ``mutant:ID``.

    Raises:
        ValueError: there is none.
    """
    chosen = [entry for entry in MUTANTS if f"{TIER}:{entry.id}" == case_id]
    if not chosen:
        raise ValueError(f"no such mutant: {case_id}")
    return run(entries=chosen, workers=2)[0]


def score(found: Sequence[Mutant]) -> float:
    """The share of detected mutants, 0 to 1."""
    return sum(one.killed_by is not None for one in found) / len(found) if found else 0.0

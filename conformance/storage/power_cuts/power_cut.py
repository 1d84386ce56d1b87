"""T5: power cuts on a real file system, for the library and for stock DCP.

Two ranks save onto a loop-mounted ext4 image. After each operation the image file is copied: it holds what the kernel has sent
to the device, which is what a power cut would leave. Each copy is mounted, so that ext4 replays its journal, and loaded by the
real loader.

A save ends before the kernel writes anything back by itself. So each scenario is run in three ways: without flushing, with a
flush of the file system after every operation (as a busy machine may do), and after every third.

This tests ext4 on a device that loses and reorders nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.processes import forked_ranks
from conformance.storage.crash_states.enumeration import PRELOAD, scenario_of, subject_of
from conformance.storage.crash_states.oracles import ORACLES, Progress, broken
from conformance.storage.power_cuts import loop_image
from conformance.storage.records import MOST_EXAMPLES, PowerCuts
from conformance.storage.tracing import trees
from conformance.storage.tracing.history import Operation
from conformance.storage.workload.recording import RecordingError, prepare, trace
from conformance.storage.workload.scenarios import DURABLE, Loads, Scenario, Subject, quietly

FLUSHES: Mapping[str, int] = {"left alone": 0, "flushed always": 1, "flushed at times": 3}
LIBRARY_SCENARIOS = ("first_save", "next_save", "resave", "retention")
PEER_SCENARIOS = ("first_save", "next_save", "resave")
FILE_SYSTEM = "ext4, loop-mounted"
ID_PREFIX = "power_cut/"
_JOB_SECONDS = 300.0
_ROOT = "root"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One scenario run once, for a worker; every ``every``-th copy is loaded, and always the last one."""

    subject: str
    scenario: str
    flushing: str
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The outcome of a job: the number of trials, (id, oracles) of those that broke a promise, or the error."""

    job: Job
    count: int = 0
    broken: tuple[tuple[str, tuple[str, ...]], ...] = ()
    skipped: str = ""
    error: str = ""


def run(*, smoke: bool = False, workers: int = 2) -> tuple[PowerCuts, ...]:
    """Run all scenarios. If this machine allows no such image, returns one record with the reason.

    Raises:
        RecordingError: a scenario did not run to its end.
    """
    reason = loop_image.why_not()
    if reason:
        return (_skipped(reason),)
    flushes = ("flushed always",) if smoke else tuple(FLUSHES)
    jobs = [
        Job(subject=subject, scenario=scenario, flushing=flushing, every=4 if smoke else 1)
        for subject, scenarios in (("library", LIBRARY_SCENARIOS), ("stock", PEER_SCENARIOS))
        for scenario in (scenarios[1:3] if smoke else scenarios)
        for flushing in flushes
    ]
    found: list[Trials] = forked_ranks.fan_out(examine, jobs, workers=workers, preload=PRELOAD)
    for one in found:
        if one.skipped:
            return (_skipped(one.skipped),)
        if one.error:
            raise RecordingError(one.error)
    return tuple(
        _record(scenario, found)
        for scenario in LIBRARY_SCENARIOS
        if any(one.job.scenario == scenario and one.job.subject == "library" for one in found)
    )


def _skipped(reason: str) -> PowerCuts:
    return PowerCuts(scenario="all", file_system=FILE_SYSTEM, trials=0, violations={}, skipped=reason)


def _record(scenario: str, found: list[Trials]) -> PowerCuts:
    mine = [one for one in found if one.job.scenario == scenario and one.job.subject == "library"]
    peer = [one for one in found if one.job.scenario == scenario and one.job.subject == "stock"]
    bad = [(name, oracles) for one in mine for name, oracles in one.broken]
    requested = [oracle for oracle in ORACLES if oracle in ("O1", "O2", "O3", "O4")]
    return PowerCuts(
        scenario=scenario,
        file_system=FILE_SYSTEM,
        trials=sum(one.count for one in mine),
        violations={oracle: sum(oracle in oracles for _, oracles in bad) for oracle in requested},
        examples=tuple(f"{name} [{'+'.join(oracles)}]" for name, oracles in bad[:MOST_EXAMPLES]),
        baseline=sum(len(one.broken) for one in peer) if peer else None,
        baseline_trials=sum(one.count for one in peer) if peer else None,
    )


def examine(job: Job) -> Trials:
    """Run one job in a process, and mounts, of its own. To be called in a process without threads."""
    ended = forked_ranks.run_alone(_examine, job, limit_seconds=_JOB_SECONDS)
    if ended.how == "returned":
        result: Trials = ended.value
        return result
    return Trials(job=job, error=f"power cut in {job.scenario}, {job.flushing}: {ended.summary}\n{ended.trace}")


def _examine(job: Job) -> Trials:
    try:
        loop_image.own_mounts()
    except OSError as error:
        return Trials(job=job, skipped=str(error))
    subject = subject_of(job.subject)
    scenario = scenario_of(subject, job.scenario)
    with trees.scratch_folder() as folder:
        try:
            loop_image.make(folder / "image")
            with loop_image.mounted(folder / "image", folder / "probe"):
                pass
        except OSError as error:
            return Trials(job=job, skipped=str(error))
        operations = _live(subject, scenario, folder, FLUSHES[job.flushing])
        result: Trials = _in_own_process(lambda: _judge(subject, scenario, operations, folder, job))
        return result


def _live(subject: Subject, scenario: Scenario, folder: Path, flush_every: int) -> list[Operation]:
    """Run the scenario on the image; after each operation a copy, named by its number, is put into ``folder``."""
    image, at = folder / "image", folder / "mounted"
    with loop_image.mounted(image, at):
        (at / _ROOT).mkdir()
        prepare(scenario, at / _ROOT)
        loop_image.flush(at)

        def on_operation(one: Operation) -> None:
            if not _changes_or_marks(one):
                return
            if flush_every and one.number % flush_every == 0:
                loop_image.flush(at)
            loop_image.copy_image(image, folder / f"{one.number}")

        traces = trace(subject, scenario, at / _ROOT, on_operation)
    return sorted((one for each in traces for one in each.operations), key=lambda one: one.number)


def _judge(subject: Subject, scenario: Scenario, operations: list[Operation], folder: Path, job: Job) -> Trials:
    loads = Loads(subject.load, scenario.tags)
    progress, count = Progress(scenario.current), 0
    bad: list[tuple[str, tuple[str, ...]]] = []
    relevant = [one.number for one in operations if _changes_or_marks(one)]
    inspected = {*relevant[:: job.every], relevant[-1]}
    with quietly():
        for one in operations:
            progress.observe(one)
            if one.number not in inspected:
                continue
            count += 1
            with loop_image.mounted(folder / f"{one.number}", folder / "look") as at:
                loads.begin({}, anew=True)
                wrong = broken(subject.judge(at / _ROOT, loads), progress.promise())
            if wrong:
                bad.append((f"{ID_PREFIX}{scenario.name}/{job.flushing}/{one.number}", tuple(sorted(wrong))))
    return Trials(job=job, count=count, broken=tuple(bad))


def _changes_or_marks(one: Operation) -> bool:
    """True if it changes the disk or gives a promise."""
    return one.kind != "mark" or one.path.startswith(DURABLE)


def _in_own_process(action: Callable[[], Any]) -> Any:
    """Run ``action`` in another process: the one that mounts also forks ranks, so it must not load anything itself."""
    ended = forked_ranks.run_alone(action, limit_seconds=_JOB_SECONDS)
    if ended.how != "returned":
        raise RecordingError(f"{ended.summary}\n{ended.trace}")
    return ended.value

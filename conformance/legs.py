"""One leg's life, from its job to its record: start the ranks, act at the fault, learn how each ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from conformance.adapter import Adapter, Job, write_job
from conformance.evidence import DISK_AFTER, DISK_BEFORE, EvidenceError, read_events, take_listing
from conformance.faults import POINTER_NAME
from conformance.processes import HostError, Hosts, Rank
from conformance.record import RecordError, read_trajectory
from conformance.results import AskedFault, LegRecord, RankEnd

TROUBLE_EXIT = 70  # EX_SOFTWARE: the leg's own code says that it is broken, whatever the trainer does
_DEATH_SECONDS = 10.0
_LOG_NAME = "log.txt"
_SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}


@dataclass(frozen=True, kw_only=True)
class LegPlan:
    """A leg that is to be run. ``folder`` (absolute) is its own, ``run`` the run's, ``disk`` what is listed around it."""

    key: str
    job: Job
    folder: Path
    run: Path
    disk: Path
    limit_seconds: float
    shared: bool = False


@dataclass
class _Life:
    ranks: list[Rank]
    ends: list[RankEnd | None]
    reached: tuple[int, ...] = ()
    timed_out: bool = False
    trouble: str | None = None


def run_leg(plan: LegPlan, adapter: Adapter, hosts: Hosts) -> LegRecord:
    """Run one leg to its end, its fault or its limit, and say what happened. Everything that it started is dead by then."""
    plan.folder.mkdir(parents=True)
    plan.disk.mkdir(parents=True, exist_ok=True)
    write_job(plan.job, plan.folder)
    _store_listing(plan, DISK_BEFORE)
    launch = adapter.launch(plan.job, 0)
    life = _Life(ranks=[], ends=[])
    begun = time.monotonic()
    try:
        for rank in range(plan.job.world_size):
            own = adapter.launch(plan.job, rank)
            life.ranks.append(hosts.start(own, plan.folder, plan.folder / _LOG_NAME, _environment(plan, rank)))
            life.ends.append(None)
            if rank == 0:
                # A warm server may have to be started first, which is no part of the leg's life.
                begun = time.monotonic()
        _watch(plan, life, hosts, begun + plan.limit_seconds)
    except (HostError, OSError) as error:
        life.trouble = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    _store_listing(plan, DISK_AFTER)
    _store_pointer(plan)
    if life.trouble is None:
        life.trouble = _collect(plan, adapter) or _trouble(plan, life)
    first, last = _steps(plan)
    return LegRecord(
        key=plan.key,
        leg=plan.job.leg,
        folder=str(plan.folder.relative_to(plan.run)),
        argv=tuple("python" if word == sys.executable else word for word in launch.argv),
        until_step=plan.job.until_step,
        restore_from=plan.job.restore_from,
        checkpoint_dir=os.path.normpath(plan.job.given.folder),
        sabotage=plan.job.sabotage,
        shared=plan.shared,
        ranks=tuple(end or RankEnd(exit_code=None, signal=None) for end in life.ends),
        first_steps=first,
        last_steps=last,
        fault=_asked(plan, life),
        timed_out=life.timed_out,
        trouble=life.trouble,
        seconds=seconds,
    )


def _environment(plan: LegPlan, rank: int) -> dict[str, str]:
    return {
        "CONFORMANCE_JOB": str(plan.folder / "job.json"),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(plan.job.world_size),
    }


def _watch(plan: LegPlan, life: _Life, hosts: Hosts, deadline: float) -> None:
    """Follow the ranks until all are dead; act at the fault, and at the limit."""
    acted = False
    while True:
        life.ends = [end or rank.poll() for end, rank in zip(life.ends, life.ranks, strict=True)]
        if all(life.ends):
            return
        if plan.job.fault is not None and plan.job.fault.kind in _SIGNALS and not acted:
            life.reached = tuple(rank for rank in range(len(life.ranks)) if _is_paused(plan, rank))
            if len(life.reached) == len(life.ranks):
                acted = True
                _signal_all(plan, life, _SIGNALS[plan.job.fault.kind])
        if time.monotonic() > deadline:
            if life.timed_out:
                raise HostError(f"a rank survives SIGKILL for {_DEATH_SECONDS:g} s")
            life.timed_out = True
            deadline += _DEATH_SECONDS
            for rank in life.ranks:
                rank.send(signal.SIGKILL)
        hosts.wait()


def _is_paused(plan: LegPlan, rank: int) -> bool:
    return (plan.folder / f"paused_rank_{rank}").exists()


def _signal_all(plan: LegPlan, life: _Life, number: signal.Signals) -> None:
    for rank in life.ranks:
        rank.send(number)
    if number != signal.SIGKILL:
        # One that handles the signal goes on from where it waits.
        (plan.folder / "go").touch()


def _asked(plan: LegPlan, life: _Life) -> AskedFault | None:
    fault = plan.job.fault
    if fault is None:
        return None
    reached = life.reached
    if fault.kind == "raise":
        reached = tuple(rank for rank in range(plan.job.world_size) if _raised(plan, rank))
    return AskedFault(kind=fault.kind, after_step=fault.after_step, moment=fault.moment, reached_by=reached)


def _raised(plan: LegPlan, rank: int) -> bool:
    try:
        events = read_events(plan.folder / f"events_rank_{rank}.jsonl", rank)
    except EvidenceError:
        return False
    return any(event.kind == "fault" for event in events)


def _collect(plan: LegPlan, adapter: Adapter) -> str | None:
    try:
        adapter.collect(plan.job, plan.folder)
    except Exception as error:  # noqa: BLE001  an adapter of anyone
        return f"the adapter can't read what the trainer left: {type(error).__name__}: {error}"
    return None


def _trouble(plan: LegPlan, life: _Life) -> str | None:
    """What makes the leg no evidence at all: it says so itself, it never began, or what it told can't be read."""
    for rank, end in enumerate(life.ends):
        try:
            events = read_events(plan.folder / f"events_rank_{rank}.jsonl", rank)
        except EvidenceError as error:
            return f"{error}; {_log_tail(plan)}"
        told = [str(event.data.get("message")) for event in events if event.kind == "trouble"]
        if told or (end is not None and end.exit_code == TROUBLE_EXIT):
            return told[0] if told else f"rank {rank} ended with {TROUBLE_EXIT}; {_log_tail(plan)}"
        if not any(event.kind == "start" for event in events):
            return f"rank {rank} never said that it started; {_log_tail(plan)}"
    return None


def _steps(plan: LegPlan) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    ranks = range(plan.job.world_size)
    try:
        trajectory = read_trajectory(plan.folder)
    except RecordError:
        none = tuple(None for _ in ranks)
        return none, none
    known = set(trajectory.ranks)
    return (
        tuple(trajectory.first_step(rank) if rank in known else None for rank in ranks),
        tuple(trajectory.last_step(rank) if rank in known else None for rank in ranks),
    )


def _store_listing(plan: LegPlan, name: str) -> None:
    (plan.folder / name).write_text(json.dumps(take_listing(plan.disk), indent=0), encoding="utf-8")


def _store_pointer(plan: LegPlan) -> None:
    pointer = plan.disk / plan.job.given.folder / POINTER_NAME
    if pointer.is_file():
        shutil.copyfile(pointer, plan.folder / "pointer_after.txt")


def _log_tail(plan: LegPlan) -> str:
    log = plan.folder / _LOG_NAME
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "last lines of its log: " + " | ".join(lines[-3:]) if lines else "it wrote no log"

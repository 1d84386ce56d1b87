"""One leg's life, from its job to its record: start the ranks, act at the fault, learn how each ended."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from conformance.matrix.faults import POINTER_NAME
from conformance.records.evidence import (
    DISK_AFTER,
    DISK_BEFORE,
    JOB_NAME,
    Event,
    EvidenceError,
    rank_log,
    read_events,
    take_listing,
)
from conformance.records.results import AskedFault, LegRecord, RankEnd
from conformance.records.trajectory import RecordError, read_trajectory
from conformance.running.adapter import Adapter, Job, JobFault, write_job
from conformance.running.launching import HostError, Launcher, LegOrder, Rank, RunningLeg
from conformance.running.probe import JOB_VARIABLE

TROUBLE_EXIT = 70  # EX_SOFTWARE: the leg's own code says that it is broken, whatever the trainer does
_DEATH_SECONDS = 10.0
# How long a hanging leg may take to write its stacks.
_DUMP_SECONDS = 3.0
_SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}


@dataclass(frozen=True, kw_only=True)
class LegPlan:
    """A leg that is to be run. ``folder`` (absolute) is its own, ``run`` the run's, ``disk`` what is listed around it.

    ``listed`` false leaves the listings out: they read every byte of the disk.
    """

    key: str
    job: Job
    folder: Path
    run: Path
    disk: Path
    limit_seconds: float
    shared: bool = False
    listed: bool = True


@dataclass
class _Life:
    ends: list[RankEnd | None] = field(default_factory=list)
    agents: list[RankEnd | None] = field(default_factory=list)
    reached: tuple[int, ...] = ()
    timed_out: bool = False
    trouble: str | None = None
    name: str = "none"


def run_leg(plan: LegPlan, adapter: Adapter, launcher: Launcher) -> LegRecord:
    """Run one leg to its end, its fault or its limit, and say what happened. Everything that it started is dead by then."""
    plan.folder.mkdir(parents=True)
    plan.disk.mkdir(parents=True, exist_ok=True)
    write_job(plan.job, plan.folder)
    _store_listing(plan, DISK_BEFORE)
    launches = tuple(adapter.launch(plan.job, rank) for rank in range(plan.job.world_size))
    life = _Life(ends=[None] * plan.job.world_size)
    started_at, begun = datetime.now(UTC), time.monotonic()
    try:
        order = LegOrder(
            folder=plan.folder,
            launches=launches,
            environment={JOB_VARIABLE: str(plan.folder / JOB_NAME)},
            nodes=plan.job.nodes,
        )
        leg = launcher.start(order)
        # A warm server may have had to be started first, which is no part of the leg's life.
        started_at, begun = datetime.now(UTC), time.monotonic()
        _live(plan, life, leg, launcher)
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
        launcher=life.name,
        argv=tuple("python" if word == sys.executable else word for word in launches[0].argv),
        until_step=plan.job.until_step,
        restore_from=plan.job.restore_from,
        checkpoint_dir=os.path.normpath(plan.job.given.folder),
        sabotage=plan.job.sabotage,
        shared=plan.shared,
        agents=_known(life.agents),
        ranks=_known(life.ends),
        first_steps=first,
        last_steps=last,
        fault=_asked(plan, life),
        timed_out=life.timed_out,
        trouble=life.trouble,
        started_at=started_at.isoformat(timespec="milliseconds"),
        seconds=seconds,
    )


def _known(ends: Sequence[RankEnd | None]) -> tuple[RankEnd, ...]:
    return tuple(end or RankEnd(exit_code=None, signal=None) for end in ends)


def _live(plan: LegPlan, life: _Life, leg: RunningLeg, launcher: Launcher) -> None:
    """Follow a leg until nothing of it is alive, however this ends."""
    life.name, life.agents = leg.name, [None] * len(leg.agents)
    try:
        _watch(plan, life, leg, launcher)
    finally:
        # A warm server that is gone took its ranks along, but not what these left behind.
        with contextlib.suppress(HostError):
            leg.strike(range(plan.job.world_size), signal.SIGKILL)
        left = leg.clear()
    if left and not _may_leave(plan, life):
        life.trouble = f"processes {left} were left behind; they are killed now"


def _may_leave(plan: LegPlan, life: _Life) -> bool:
    """True for a leg whose ranks were killed: what a killed process had started is nobody's fault but the killer's."""
    fault = plan.job.fault
    is_killed = fault is not None and fault.kind == "kill" and bool(life.reached)
    return life.timed_out or is_killed


def _watch(plan: LegPlan, life: _Life, leg: RunningLeg, launcher: Launcher) -> None:
    """Follow the ranks until all are dead; act at the fault, and at the limit."""
    begun = time.monotonic()
    limits = [
        plan.limit_seconds,
        plan.limit_seconds + _DUMP_SECONDS,
        plan.limit_seconds + _DUMP_SECONDS + _DEATH_SECONDS,
    ]
    acted = False
    while True:
        life.ends = _poll(life.ends, leg.ranks)
        life.agents = _poll(life.agents, leg.agents)
        if all(life.ends) and all(life.agents):
            return
        if not acted and plan.job.fault is not None and plan.job.fault.kind in _SIGNALS:
            acted = _strike_when_reached(plan, life, leg)
        if time.monotonic() > begun + limits[0]:
            del limits[0]
            if not limits:
                raise HostError(f"a process survives SIGKILL for {_DEATH_SECONDS:g} s")
            _end_hanging(plan, life, leg)
        launcher.wait()


def _poll(ends: Sequence[RankEnd | None], processes: Sequence[Rank]) -> list[RankEnd | None]:
    return [end or process.poll() for end, process in zip(ends, processes, strict=True)]


def _strike_when_reached(plan: LegPlan, life: _Life, leg: RunningLeg) -> bool:
    """Do what the job's fault says once every rank that it waits for is at its place."""
    fault = plan.job.fault
    assert fault is not None
    awaited = fault.is_awaited_by(plan.job.world_size)
    life.reached = tuple(rank for rank in awaited if _is_paused(plan, rank))
    if life.reached != awaited:
        return False
    struck = fault.strikes(plan.job.world_size, plan.job.nodes)
    kind, _, node = fault.victims.partition("-")
    if kind == "launcher":
        leg.strike_launcher(int(node), _SIGNALS[fault.kind])
    else:
        leg.strike(struck, _SIGNALS[fault.kind])
    if fault.kind == "terminate" or len(struck) < plan.job.world_size:
        # Who handles the signal, or is spared, goes on from where it waits.
        (plan.folder / "go").touch()
    return True


def _end_hanging(plan: LegPlan, life: _Life, leg: RunningLeg) -> None:
    """First have every rank write where it hangs; what is alive after that is killed."""
    if not life.timed_out:
        life.timed_out = True
        leg.dump()
    else:
        leg.strike(range(plan.job.world_size), signal.SIGKILL)


def _is_paused(plan: LegPlan, rank: int) -> bool:
    return (plan.folder / f"paused_rank_{rank}").exists()


def _asked(plan: LegPlan, life: _Life) -> AskedFault | None:
    fault = plan.job.fault
    if fault is None:
        return None
    reached = life.reached
    if fault.kind == "raise":
        reached = tuple(rank for rank in range(plan.job.world_size) if _raised(plan, rank))
    return AskedFault(
        kind=fault.kind,
        after_step=fault.after_step,
        moment=fault.moment,
        rank=fault.rank,
        operation=_operation_number(plan, fault),
        victims=fault.victims,
        awaited=fault.is_awaited_by(plan.job.world_size),
        struck=fault.strikes(plan.job.world_size, plan.job.nodes),
        reached_by=reached,
    )


def _operation_number(plan: LegPlan, fault: JobFault) -> int | None:
    if not isinstance(fault.operation, str):
        return fault.operation
    for event in _events(plan, fault.rank or 0):
        place = event.data
        is_of_save = event.kind == "operation" and place["save"] == fault.after_step
        if is_of_save and fault.is_operation(place["number"], place["what"], place["where"]):
            return int(place["number"])
    return None


def _raised(plan: LegPlan, rank: int) -> bool:
    return any(event.kind == "fault" for event in _events(plan, rank))


def _events(plan: LegPlan, rank: int) -> Sequence[Event]:
    try:
        return read_events(plan.folder / f"events_rank_{rank}.jsonl", rank)
    except EvidenceError:
        return ()


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
            return f"{error}; {_log_tail(plan, rank)}"
        told = [str(event.data.get("message")) for event in events if event.kind == "trouble"]
        if told or (end is not None and end.exit_code == TROUBLE_EXIT):
            return told[0] if told else f"rank {rank} ended with {TROUBLE_EXIT}; {_log_tail(plan, rank)}"
        if not any(event.kind == "start" for event in events):
            return f"rank {rank} never said that it started; {_log_tail(plan, rank)}"
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
    if not plan.listed:
        return
    (plan.folder / name).write_text(json.dumps(take_listing(plan.disk), indent=0), encoding="utf-8")


def _store_pointer(plan: LegPlan) -> None:
    pointer = plan.disk / plan.job.given.folder / POINTER_NAME
    if pointer.is_file():
        shutil.copyfile(pointer, plan.folder / "pointer_after.txt")


def _log_tail(plan: LegPlan, rank: int) -> str:
    """What a rank said last; where it said nothing, what started it."""
    for log in (rank_log(plan.folder, rank), *sorted(plan.folder.glob("log_agent_*.txt"))):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        if lines:
            return f"last lines of {log.name}: " + " | ".join(lines[-3:])
    return "it wrote no log"

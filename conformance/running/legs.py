"""Runs one leg, from its job to its record: starts the ranks, injects the fault, reads how each process ended."""

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
from conformance.processes.launching import Launcher, LauncherError, LegOrder, Rank, RunningLeg
from conformance.records.evidence import (
    DISK_AFTER,
    DISK_BEFORE,
    JOB_NAME,
    JOB_VARIABLE,
    Event,
    EvidenceError,
    rank_log,
    read_events,
    take_listing,
)
from conformance.records.results import AskedFault, LegRecord, RankEnd
from conformance.records.trajectory import RecordError, read_trajectory
from conformance.running.adapter import Adapter, Job, JobFault, write_job

TROUBLE_EXIT = 70  # EX_SOFTWARE: the adapter's own code is broken, whatever the trainer does
_DEATH_SECONDS = 10.0
# How long a hanging leg may take to write its stacks.
_DUMP_SECONDS = 3.0
_SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}


@dataclass(frozen=True, kw_only=True)
class LegPlan:
    """A leg to be run: ``folder`` (absolute) is the leg's, ``run`` the run's, ``disk`` is listed before and after it.

    ``listed`` false leaves the listings out, which read every byte of the disk.
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
class _LegState:
    ends: list[RankEnd | None] = field(default_factory=list)
    agents: list[RankEnd | None] = field(default_factory=list)
    reached: tuple[int, ...] = ()
    timed_out: bool = False
    trouble: str | None = None
    name: str = "none"


def run_leg(plan: LegPlan, adapter: Adapter, launcher: Launcher) -> LegRecord:
    """Run one leg to its end, its fault or its limit, and return its record. All its processes are dead then."""
    plan.folder.mkdir(parents=True)
    plan.disk.mkdir(parents=True, exist_ok=True)
    write_job(plan.job, plan.folder)
    _store_listing(plan, DISK_BEFORE)
    launches = tuple(adapter.launch(plan.job, rank) for rank in range(plan.job.world_size))
    state = _LegState(ends=[None] * plan.job.world_size)
    started_at, begun = datetime.now(UTC), time.monotonic()
    try:
        order = LegOrder(
            folder=plan.folder,
            launches=launches,
            environment={JOB_VARIABLE: str(plan.folder / JOB_NAME)},
            nodes=plan.job.nodes,
        )
        leg = launcher.start(order)
        # The start of a warm server is no part of the leg's time.
        started_at, begun = datetime.now(UTC), time.monotonic()
        _follow(plan, state, leg, launcher)
    except (LauncherError, OSError) as error:
        state.trouble = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    _store_listing(plan, DISK_AFTER)
    _store_pointer(plan)
    if state.trouble is None:
        state.trouble = _collect(plan, adapter) or _trouble(plan, state)
    first, last = _steps(plan)
    return LegRecord(
        key=plan.key,
        leg=plan.job.leg,
        folder=str(plan.folder.relative_to(plan.run)),
        launcher=state.name,
        argv=tuple("python" if word == sys.executable else word for word in launches[0].argv),
        until_step=plan.job.until_step,
        restore_from=plan.job.restore_from,
        checkpoint_dir=os.path.normpath(plan.job.given.folder),
        sabotage=plan.job.sabotage,
        shared=plan.shared,
        agents=_known(state.agents),
        ranks=_known(state.ends),
        first_steps=first,
        last_steps=last,
        fault=_asked_fault(plan, state),
        timed_out=state.timed_out,
        trouble=state.trouble,
        started_at=started_at.isoformat(timespec="milliseconds"),
        seconds=seconds,
    )


def _known(ends: Sequence[RankEnd | None]) -> tuple[RankEnd, ...]:
    return tuple(end or RankEnd(exit_code=None, signal=None) for end in ends)


def _follow(plan: LegPlan, state: _LegState, leg: RunningLeg, launcher: Launcher) -> None:
    """Follow a leg until none of its processes is alive, also when this raises."""
    state.name, state.agents = leg.name, [None] * len(leg.agents)
    try:
        _poll_until_ended(plan, state, leg, launcher)
    finally:
        # A warm server that died killed its ranks, but not the processes that these started.
        with contextlib.suppress(LauncherError):
            leg.send_signal(range(plan.job.world_size), signal.SIGKILL)
        left = leg.clear()
    if left and not _may_leave(plan, state):
        state.trouble = f"processes {left} were left behind; they are killed now"


def _may_leave(plan: LegPlan, state: _LegState) -> bool:
    """True for a leg whose ranks were killed: the processes that they had started are then left behind by the kill."""
    fault = plan.job.fault
    is_killed = fault is not None and fault.kind == "kill" and bool(state.reached)
    return state.timed_out or is_killed


def _poll_until_ended(plan: LegPlan, state: _LegState, leg: RunningLeg, launcher: Launcher) -> None:
    """Poll the ranks until all are dead; inject the fault when it is reached, and kill at the limit."""
    begun = time.monotonic()
    limits = [
        plan.limit_seconds,
        plan.limit_seconds + _DUMP_SECONDS,
        plan.limit_seconds + _DUMP_SECONDS + _DEATH_SECONDS,
    ]
    acted = False
    while True:
        state.ends = _poll(state.ends, leg.ranks)
        state.agents = _poll(state.agents, leg.agents)
        if all(state.ends) and all(state.agents):
            return
        if not acted and plan.job.fault is not None and plan.job.fault.kind in _SIGNALS:
            acted = _inject_when_reached(plan, state, leg)
        if time.monotonic() > begun + limits[0]:
            del limits[0]
            if not limits:
                raise LauncherError(f"a process survives SIGKILL for {_DEATH_SECONDS:g} s")
            _end_hanging(plan, state, leg)
        launcher.wait()


def _poll(ends: Sequence[RankEnd | None], processes: Sequence[Rank]) -> list[RankEnd | None]:
    return [end or process.poll() for end, process in zip(ends, processes, strict=True)]


def _inject_when_reached(plan: LegPlan, state: _LegState, leg: RunningLeg) -> bool:
    """Inject the job's fault once every rank that has to pause there does."""
    fault = plan.job.fault
    assert fault is not None
    awaited = fault.is_awaited_by(plan.job.world_size)
    state.reached = tuple(rank for rank in awaited if _is_paused(plan, rank))
    if state.reached != awaited:
        return False
    struck = fault.struck_ranks(plan.job.world_size, plan.job.nodes)
    kind, _, node = fault.victims.partition("-")
    if kind == "launcher":
        leg.signal_launcher(int(node), _SIGNALS[fault.kind])
    else:
        leg.send_signal(struck, _SIGNALS[fault.kind])
    if fault.kind == "terminate" or len(struck) < plan.job.world_size:
        # Ranks that handle the signal, or do not get it, go on from where they pause.
        (plan.folder / "go").touch()
    return True


def _end_hanging(plan: LegPlan, state: _LegState, leg: RunningLeg) -> None:
    """First make every rank write its stacks; at the second call kill what is still alive."""
    if not state.timed_out:
        state.timed_out = True
        leg.dump()
    else:
        leg.send_signal(range(plan.job.world_size), signal.SIGKILL)


def _is_paused(plan: LegPlan, rank: int) -> bool:
    return (plan.folder / f"paused_rank_{rank}").exists()


def _asked_fault(plan: LegPlan, state: _LegState) -> AskedFault | None:
    fault = plan.job.fault
    if fault is None:
        return None
    reached = state.reached
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
        struck=fault.struck_ranks(plan.job.world_size, plan.job.nodes),
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
    except Exception as error:  # noqa: BLE001  any error of any adapter
        return f"the adapter can't read the trainer's output: {type(error).__name__}: {error}"
    return None


def _trouble(plan: LegPlan, state: _LegState) -> str | None:
    """Why the leg can't be evidence: it reports trouble itself, it never started, or its events can't be read."""
    for rank, end in enumerate(state.ends):
        try:
            events = read_events(plan.folder / f"events_rank_{rank}.jsonl", rank)
        except EvidenceError as error:
            return f"{error}; {_log_tail(plan, rank)}"
        messages = [str(event.data.get("message")) for event in events if event.kind == "trouble"]
        if messages or (end is not None and end.exit_code == TROUBLE_EXIT):
            return messages[0] if messages else f"rank {rank} ended with {TROUBLE_EXIT}; {_log_tail(plan, rank)}"
        if not any(event.kind == "start" for event in events):
            return f"rank {rank} never reported that it started; {_log_tail(plan, rank)}"
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
    """The last lines of a rank's log, or of its agent's where the rank wrote nothing."""
    for log in (rank_log(plan.folder, rank), *sorted(plan.folder.glob("log_agent_*.txt"))):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        if lines:
            return f"last lines of {log.name}: " + " | ".join(lines[-3:])
    return "it wrote no log"

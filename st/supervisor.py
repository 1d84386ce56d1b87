"""A leg's life, from its start to the proof of its end.

The supervisor follows the ranks' records, never the clock: a fault fires when the records (or the pointer) say that its
moment has come. Then:

1. it notes the agent and every rank, while they live;
2. it sends SIGKILL to the agent first, so that nobody is left to restart or to reap a rank, and at once to every rank;
3. it reaps all of them itself (orphaned ranks become its children, see :func:`st.processes.subreaper`) and asserts from
   each one's wait status that it died of that very signal;
4. it looks for anything else that carries the leg's mark, kills it, and asserts that nothing is left.

However a leg ends (by itself, with an error, past its limit, by Ctrl-C), step 4 is done.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from conformance.proof_record import FaultRecord, LegRecord, ProcessEnd
from conformance.record import RecordError, Trajectory, parse_line, read_trajectory, trajectory_path
from st import launcher, processes

POINTER_NAME = "latest_checkpoint_iteration.txt"
_POLL_SECONDS = 0.01
_DEATH_SECONDS = 20.0
_LOG_LINES = 40


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Kill the leg once every rank has recorded ``step`` (after_step), or once the pointer says it (after_save)."""

    kind: Literal["kill"]
    moment: Literal["after_step", "after_save"]
    step: int


@dataclass(frozen=True, kw_only=True)
class Leg:
    """What to run and where. Paths are absolute; ``results`` is the folder that record paths are relative to."""

    leg: Literal["reference", "interrupted", "resumed"]
    label: str
    ranks: int
    program: tuple[str, ...]
    arguments: tuple[str, ...]
    results: Path
    trajectory: Path
    checkpoints: Path
    log: Path
    fault: Fault | None
    resumes_at: int | None
    limit_seconds: float


class LegError(RuntimeError):
    """A leg did not go the way the proof needs.

    ``record`` is what is known of it; ``log_tail`` holds the last lines of its log.
    """

    def __init__(self, message: str, record: LegRecord, log_tail: str) -> None:
        """``message`` is one line and the same whenever the same thing happens."""
        super().__init__(message)
        self.record = record
        self.log_tail = log_tail


class _LegTrouble(RuntimeError):
    pass


def run_leg(leg: Leg) -> LegRecord:
    """Run one leg to its end, or to its fault and proved death.

    Raises:
        LegError: it failed, ended before its fault, exceeded its limit, left processes behind, or a kill could not be
            proved. Whatever it started is dead by then.
    """
    token = uuid.uuid4().hex
    leg.trajectory.mkdir(parents=True, exist_ok=False)
    leg.checkpoints.mkdir(parents=True, exist_ok=True)
    leg.log.parent.mkdir(parents=True, exist_ok=True)
    command = launcher.torchrun_command(
        ranks=leg.ranks, port=launcher.free_port(), program=leg.program, arguments=leg.arguments
    )
    record = _blank_record(leg, command)
    started_at = time.monotonic()
    with processes.subreaper():
        seen: set[int] = set()
        try:
            record = _live(leg, launcher.start(command, log=leg.log, token=token), record, seen)
            trouble = None
        except (_LegTrouble, processes.DeathNotProvedError, RecordError) as error:
            trouble = str(error)
        finally:
            with _uninterrupted():
                left = processes.sweep(token, seen)
    if trouble is None and left:
        trouble = f"processes {left} were left behind; they are killed now"
    record = _with_steps(replace(record, seconds=time.monotonic() - started_at, failure=trouble), leg)
    if trouble is not None:
        raise LegError(f"leg {leg.label}: {trouble}", record, _log_tail(leg.log))
    return record


def read_pointer(checkpoints: Path) -> int | None:
    """The step that the pointer names; None when there is no pointer (or no number in it)."""
    try:
        text = (checkpoints / POINTER_NAME).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    return int(text) if re.fullmatch(r"[0-9]+", text) else None


class Tail:
    """Follows the records of a leg as they are written: :meth:`poll` reads what is new."""

    def __init__(self, directory: Path, ranks: int) -> None:
        """``directory`` need not hold any file yet; :attr:`last_steps` has 0 for a rank that finished no step."""
        self._paths = [trajectory_path(directory, rank) for rank in range(ranks)]
        self._offsets = [0] * ranks
        self._lines = [0] * ranks
        self.last_steps = [0] * ranks

    def poll(self) -> None:
        """Read the lines that were completed since the last call.

        Raises:
            RecordError: one of them is malformed.
        """
        for rank, path in enumerate(self._paths):
            try:
                with path.open("rb") as file:
                    file.seek(self._offsets[rank])
                    new = file.read()
            except FileNotFoundError:
                continue
            whole = new[: new.rfind(b"\n") + 1]
            self._offsets[rank] += len(whole)
            for line in whole.split(b"\n")[:-1]:
                self._lines[rank] += 1
                record = parse_line(line, rank=rank, where=f"{path}:{self._lines[rank]}")
                self.last_steps[rank] = record.global_step


def _live(leg: Leg, started: launcher.StartedLeg, record: LegRecord, seen: set[int]) -> LegRecord:
    """Follow a leg until its fault or its end."""
    agent = started.agent
    seen.add(agent.pid)
    tail = Tail(leg.trajectory, leg.ranks)
    ranks: dict[int, processes.Process] = {}
    deadline = time.monotonic() + leg.limit_seconds
    while True:
        exit_code = agent.poll()
        tail.poll()
        if exit_code is not None:
            return _ended(leg, exit_code, replace(record, agent=_end_of_agent(agent)), ranks)
        if not ranks and min(tail.last_steps) > 0:
            ranks = processes.ranks_of(agent.pid)
            seen.update(process.pid for process in processes.descendants(agent.pid))
        if leg.fault is not None and _moment_has_come(leg, tail):
            return _kill(leg, agent, record, seen)
        if time.monotonic() > deadline:
            raise _LegTrouble(
                f"still running at its limit of {leg.limit_seconds:g} s, with steps {tail.last_steps} finished by rank"
            )
        time.sleep(_POLL_SECONDS)


def _moment_has_come(leg: Leg, tail: Tail) -> bool:
    assert leg.fault is not None
    if leg.fault.moment == "after_step":
        return min(tail.last_steps) >= leg.fault.step
    pointer = read_pointer(leg.checkpoints)
    if pointer is not None and pointer > leg.fault.step:
        raise _LegTrouble(f"the fault after_save: {leg.fault.step} came too late: the pointer already says {pointer}")
    return pointer == leg.fault.step


def _ended(leg: Leg, exit_code: int, record: LegRecord, ranks: dict[int, processes.Process]) -> LegRecord:
    """A leg whose agent ended by itself: right only with exit code 0 and without a fault to wait for."""
    if exit_code != 0:
        raise _LegTrouble(f"failed: torchrun ended with {_code(exit_code)}")
    if leg.fault is not None:
        moment = f"{leg.fault.moment}: {leg.fault.step}"
        raise _LegTrouble(f"the fault did not fire: training finished before {moment}")
    # The agent has reaped the ranks itself; it ends with 0 only when each of them did.
    pids = [ranks[rank].pid if rank in ranks else None for rank in range(leg.ranks)]
    return replace(record, ranks=tuple(ProcessEnd(pid=pid, exit_code=0) for pid in pids))


def _kill(leg: Leg, agent: subprocess.Popen[bytes], record: LegRecord, seen: set[int]) -> LegRecord:
    assert leg.fault is not None
    family = processes.descendants(agent.pid)
    seen.update(process.pid for process in family)
    ranks = processes.ranks_of(agent.pid)
    if sorted(ranks) != list(range(leg.ranks)):
        raise _LegTrouble(f"at the fault ranks {sorted(ranks)} were alive, not all {leg.ranks}")
    agent.kill()
    for process in (*ranks.values(), *family):
        processes.kill(process)
    deadline = time.monotonic() + _DEATH_SECONDS
    try:
        agent.wait(timeout=_DEATH_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise processes.DeathNotProvedError(f"torchrun's agent {agent.pid} survives SIGKILL") from error
    ends = [_end_of_agent(agent)]
    ends += [_end(process.pid, processes.reap(process.pid, deadline)) for _, process in sorted(ranks.items())]
    for name, end in zip(["the agent", *(f"rank {rank}" for rank in sorted(ranks))], ends, strict=True):
        if end.signal != "SIGKILL":
            raise processes.DeathNotProvedError(
                f"{name} (process {end.pid}) did not die of SIGKILL but ended with {end}"
            )
    return replace(record, agent=ends[0], ranks=tuple(ends[1:]))


def _end_of_agent(agent: subprocess.Popen[bytes]) -> ProcessEnd:
    code = agent.returncode
    return ProcessEnd(pid=agent.pid, signal=signal.Signals(-code).name) if code < 0 else _exit(agent.pid, code)


def _end(pid: int, status: int) -> ProcessEnd:
    if os.WIFSIGNALED(status):
        return ProcessEnd(pid=pid, signal=signal.Signals(os.WTERMSIG(status)).name)
    return _exit(pid, os.waitstatus_to_exitcode(status))


def _exit(pid: int, code: int) -> ProcessEnd:
    return ProcessEnd(pid=pid, exit_code=code)


def _code(exit_code: int) -> str:
    return f"exit code {exit_code}" if exit_code >= 0 else signal.Signals(-exit_code).name


def _blank_record(leg: Leg, command: tuple[str, ...]) -> LegRecord:
    return LegRecord(
        leg=leg.leg,
        label=leg.label,
        command=command,
        trajectory=str(leg.trajectory.relative_to(leg.results)),
        log=str(leg.log.relative_to(leg.results)),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=0.0,
        resumes_at=leg.resumes_at,
        first_steps=(),
        last_steps=(),
        agent=None,
        ranks=(),
        fault=None,
        failure=None,
    )


def _with_steps(record: LegRecord, leg: Leg) -> LegRecord:
    """``record`` with what the dead leg left on disk: its steps and, if it died of the fault, the pointer."""
    try:
        trajectory = read_trajectory(leg.trajectory)
    except RecordError:
        trajectory = Trajectory(records={})
    known = trajectory.ranks
    first = tuple(trajectory.first_step(rank) if rank in known else None for rank in range(leg.ranks))
    last = tuple(trajectory.last_step(rank) if rank in known else None for rank in range(leg.ranks))
    fault = None
    if leg.fault is not None and record.failure is None:
        fault = FaultRecord(
            kind=leg.fault.kind,
            moment=leg.fault.moment,
            step=leg.fault.step,
            observed_steps=tuple(step or 0 for step in last),
            observed_pointer=read_pointer(leg.checkpoints),
        )
    return replace(record, first_steps=first, last_steps=last, fault=fault)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C and a polite kill back until the block is done: a sweep cut short would leave processes behind."""
    held = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _log_tail(log: Path) -> str:
    """What the ranks said last, and torchrun's finding; its own long report between the two is left out."""
    if not log.exists():
        return "(it wrote no log)"
    # Of a progress bar, which returns to the start of its line again and again, the last state is enough.
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    report = next((index for index, line in enumerate(lines) if "ChildFailedError" in line), len(lines))
    if report < len(lines):
        starts = [index for index, line in enumerate(lines[:report]) if line.startswith("Traceback")]
        report = starts[-1] if starts else report
    finding = next((index for index, line in enumerate(lines) if line.startswith("Root Cause")), len(lines))
    kept = [*lines[:report][-_LOG_LINES:], *lines[max(report, finding) :]]
    return "\n".join([f"last lines of {log}:", *(f"  | {line}" for line in kept)])

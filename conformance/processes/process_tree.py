"""Finding, killing and reaping the processes of a leg, on Linux, through /proc.

torchrun starts every rank in a session of its own, so a signal to the agent's process group misses them all. They are
found as descendants of the agent, and, once the agent is dead, by a mark that every process of a leg inherits in its
environment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MARK = "HYPER_RESUME_LEG"
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_POLL_SECONDS = 0.005


class DeathNotVerifiedError(RuntimeError):
    """A process did not die of the signal it was sent, or did not die at all."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process. ``start_ticks`` distinguishes it from a later process with the same pid.

    ``status`` is the wait status of one that ended and was not reaped yet; None for a living one. Only a process of the same
    user may be asked for it.
    """

    pid: int
    parent: int
    start_ticks: int
    state: str
    status: int | None = None

    @property
    def is_zombie(self) -> bool:
        """Dead, but not yet reaped by its parent."""
        return self.state in "ZX"


@contextmanager
def subreaper() -> Iterator[None]:
    """Adopt orphans: while active, processes whose parent dies become children of this one, so it can reap them.

    Raises:
        OSError: the kernel refuses (or this is not Linux).
    """
    if sys.platform != "linux":
        raise OSError("verifying that ranks died needs Linux (prctl PR_SET_CHILD_SUBREAPER and /proc)")
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    if libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_GET_CHILD_SUBREAPER) failed")
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def read(pid: int) -> Process | None:
    """The current state of a process; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name is in brackets and may contain spaces and brackets; the fields after the last one are regular.
    fields = text.rpartition(")")[2].split()
    return Process(
        pid=pid,
        state=fields[0],
        parent=int(fields[1]),
        start_ticks=int(fields[19]),
        status=int(fields[49]) if fields[0] == "Z" and len(fields) > 49 else None,
    )


def everything() -> list[Process]:
    """All processes of the machine."""
    found = (read(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [process for process in found if process is not None]


def descendants(pid: int) -> list[Process]:
    """Children of ``pid``, their children and so on, parents first."""
    by_parent: dict[int, list[Process]] = {}
    for process in everything():
        by_parent.setdefault(process.parent, []).append(process)
    found, waiting = [], [pid]
    while waiting:
        children = by_parent.get(waiting.pop(0), [])
        found += children
        waiting += [child.pid for child in children]
    return found


def environment(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty for a zombie, and when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except (OSError, PermissionError):
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def marked(token: str) -> list[Process]:
    """All living processes with a leg's mark, anywhere in the process tree."""
    return [process for process in everything() if environment(process.pid).get(MARK) == token]


def ranks_of(agent: int) -> dict[int, Process]:
    """The living ranks that torchrun's ``agent`` has started, by rank number."""
    found: dict[int, Process] = {}
    for process in descendants(agent):
        rank = environment(process.pid).get("RANK", "")
        if process.parent == agent and rank.isdigit() and not process.is_zombie:
            found[int(rank)] = process
    return found


def kill(process: Process, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to exactly this process; does nothing if it has ended."""
    now = read(process.pid)
    if now is None or now.start_ticks != process.start_ticks:
        return
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return


def reap(pid: int, deadline: float) -> int:
    """Wait for a child and return its wait status.

    Args:
        pid: a child of this process, by birth or as an adopted orphan.
        deadline: when to give up, on :func:`time.monotonic`'s clock.

    Raises:
        DeathNotVerifiedError: it is still alive at the deadline, or is no child of this process.
    """
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError as error:
            raise DeathNotVerifiedError(f"process {pid} is no child of this one, so its end can't be read") from error
        if done == pid:
            return status
        if time.monotonic() > deadline:
            raise DeathNotVerifiedError(f"process {pid} is still alive ({read(pid)}) although it was killed")
        time.sleep(_POLL_SECONDS)


def sweep(token: str, seen: set[int], *, limit_seconds: float = 20.0) -> list[int]:
    """Kill and reap whatever is left of a leg.

    Args:
        token: the leg's mark.
        seen: pids known to be of this leg; those that died as our adopted children are reaped.
        limit_seconds: when to give up.

    Returns:
        The pids that were still alive, ascending.

    Raises:
        DeathNotVerifiedError: something is still there at the limit.
    """
    deadline = time.monotonic() + limit_seconds
    alive: set[int] = set()
    while True:
        left = [process for process in marked(token) if process.pid != os.getpid()]
        for process in left:
            kill(process)
        alive.update(process.pid for process in left)
        _reap_finished(seen | alive)
        is_late = time.monotonic() > deadline
        if not left and (is_late or not _starting()):
            return sorted(alive)
        if is_late:
            raise DeathNotVerifiedError(f"processes {[process.pid for process in left]} survive SIGKILL")
        time.sleep(_POLL_SECONDS)


def _starting() -> list[Process]:
    """Children of this process that are just executing another program: their environment can't be read yet."""
    own = [process for process in everything() if process.parent == os.getpid() and not process.is_zombie]
    return [process for process in own if not environment(process.pid)]


def _reap_finished(pids: set[int]) -> None:
    for pid in pids:
        process = read(pid)
        if process is not None and process.is_zombie and process.parent == os.getpid():
            os.waitpid(pid, os.WNOHANG)

"""Finding and killing what a leg leaves behind, by its session, its environment or its folder (Linux, through /proc)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from conformance.records.evidence import JOB_NAME, JOB_VARIABLE

# The module of the process that forks legs.
SERVER = "conformance.processes.warm_server"
_RESOURCE_TRACKER = b"multiprocessing.resource_tracker"
_POLL_SECONDS = 0.004
# For how long a process without a command line is left to end by itself.
_GRACE_SECONDS = 1.0


def kill_leftovers(folder: Path, *, limit_seconds: float = 10.0) -> list[int]:
    """Kill every process of the leg in ``folder`` until none is left; returns their process ids, ascending.

    Two kinds are left out: processes that just ended by themselves, and Python's resource tracker, which every process that
    uses ``spawn`` starts and which ends shortly after it.

    Raises:
        OSError: one of them survives SIGKILL (it hangs in the kernel, on a file system say), or can't be killed (permissions).
    """
    killed: set[int] = set()
    trackers: set[int] = set()
    begin = time.monotonic()
    while left := _belonging_to(folder):
        now = time.monotonic()
        if now > begin + limit_seconds:
            raise OSError(f"processes {left} survive SIGKILL for {limit_seconds:g} s")
        if now < begin + _GRACE_SECONDS:
            left = [pid for pid in left if pid in killed or not _is_nameless(pid)]
        # A process that was killed in an earlier round is a zombie now because of that, so it is not asked again.
        trackers.update(pid for pid in left if pid not in killed and _ends_by_itself(pid))
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(left)
        time.sleep(_POLL_SECONDS)
    for pid in killed:
        # Where this process adopts orphans (see st), it has to reap them.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return sorted(killed - trackers)


def _is_nameless(pid: int) -> bool:
    """True for a process that has lost its command line: it ends by itself just now, or executes another program."""
    try:
        return _words(Path("/proc") / str(pid) / "cmdline") == [b""]
    except OSError:
        return True


def _ends_by_itself(pid: int) -> bool:
    process = Path("/proc") / str(pid)
    try:
        is_zombie = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
        return is_zombie or any(_RESOURCE_TRACKER in word for word in _words(process / "cmdline"))
    except OSError:
        return True


def _belonging_to(folder: Path) -> list[int]:
    """The living processes of a leg: those with its job in their environment, and those forked into its folder."""
    mark = f"{JOB_VARIABLE}={folder / JOB_NAME}".encode()
    found = []
    for process in Path("/proc").iterdir():
        # A process that has ended, or is a zombie, can't be read.
        with contextlib.suppress(OSError):
            if process.name.isdigit() and (mark in _words(process / "environ") or _is_forked_into(process, folder)):
                found.append(int(process.name))
    return found


def _is_forked_into(process: Path, folder: Path) -> bool:
    """True for a fork of the warm server in the leg's folder. Other processes may work in that folder too; a fork has the
    server's command line, or none (and no environment) while it executes another program.
    """
    words = _words(process / "cmdline")
    return (words == [b""] or SERVER.encode() in words) and (process / "cwd").readlink() == folder


def _words(file: Path) -> list[bytes]:
    return file.read_bytes().split(b"\0")


def kill_process_group(pid: int) -> None:
    """Kill what a dead rank left behind in its process group, such as data loader workers."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)

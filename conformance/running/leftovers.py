"""What a leg without torchrun may leave behind: found by its session, its environment or its folder (Linux, through /proc)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from conformance.records.evidence import JOB_NAME
from conformance.running.probe import JOB_VARIABLE

# The module whose processes fork legs.
SERVER = "conformance.running.warm_server"
_KEEPER = b"multiprocessing.resource_tracker"
_POLL_SECONDS = 0.004


def kill_leftovers(folder: Path, *, limit_seconds: float = 10.0) -> list[int]:
    """Kill every process of the leg in ``folder`` until none is left; the process ids that were, ascending.

    Not named is what has just ended by itself, and Python's own keeper of shared resources: whoever has started a process by
    ``spawn`` has one, which ends a moment after all of them.

    Raises:
        OSError: one of them survives SIGKILL (it hangs in the kernel, on a file system say), or may not be killed.
    """
    killed: set[int] = set()
    keepers: set[int] = set()
    deadline = time.monotonic() + limit_seconds
    while left := _belonging_to(folder):
        if time.monotonic() > deadline:
            raise OSError(f"processes {left} survive SIGKILL for {limit_seconds:g} s")
        # Of one that was killed in an earlier round it says nothing any more that it has ended.
        keepers.update(pid for pid in left if pid not in killed and _ends_by_itself(pid))
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(left)
        time.sleep(_POLL_SECONDS)
    for pid in killed:
        # Where this process adopts orphans (see st), it is what they wait for to be gone.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return sorted(killed - keepers)


def _ends_by_itself(pid: int) -> bool:
    process = Path("/proc") / str(pid)
    try:
        is_zombie = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
        return is_zombie or any(_KEEPER in word for word in _words(process / "cmdline"))
    except OSError:
        return True


def _belonging_to(folder: Path) -> list[int]:
    """The living processes of a leg: who was started with its job in the environment, and who was forked into its folder."""
    mark = f"{JOB_VARIABLE}={folder / JOB_NAME}".encode()
    found = []
    for process in Path("/proc").iterdir():
        # A process that is gone, and a zombie, can't be read.
        with contextlib.suppress(OSError):
            if process.name.isdigit() and (mark in _words(process / "environ") or _is_forked_into(process, folder)):
                found.append(int(process.name))
    return found


def _is_forked_into(process: Path, folder: Path) -> bool:
    """Not everybody who works in the folder is of the leg: a fork has the server's command line, and none while it becomes
    another program (nor an environment).
    """
    words = _words(process / "cmdline")
    return (words == [b""] or SERVER.encode() in words) and (process / "cwd").readlink() == folder


def _words(file: Path) -> list[bytes]:
    return file.read_bytes().split(b"\0")


def kill_process_group(pid: int) -> None:
    """Kill what a dead rank left behind in its process group: loader workers, say."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)

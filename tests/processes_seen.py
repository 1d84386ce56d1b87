"""Living processes, seen in a way that shares nothing with the code under test."""

from __future__ import annotations

import contextlib
from pathlib import Path


def living_with(text: str) -> list[str]:
    """Process id and command line of every living process with ``text`` in its command line, its environment or the
    folder that it works in."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        # One that is gone meanwhile, or only waits to be reaped, has neither.
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            seen = command + (process / "environ").read_bytes() + str((process / "cwd").readlink()).encode()
            if text.encode() in seen:
                found.append(f"{process.name}: {command.replace(bytes(1), b' ').decode(errors='replace')}")
    return found

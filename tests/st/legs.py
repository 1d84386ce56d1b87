"""Legs of the stand-in trainer, and a way to see its processes that shares nothing with the code under test."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from conformance.proof_record import LegRecord
from st.supervisor import Fault, Leg, run_leg
from tests.st.run_prove import STAND_IN

RANKS = 4


def fault_after_step(step: int) -> Fault:
    return Fault(kind="kill", moment="after_step", step=step)


def stand_in_leg(
    folder: Path,
    kind: Literal["reference", "interrupted", "resumed"],
    *options: str,
    fault: Fault | None = None,
    checkpoints: Path | None = None,
    limit_seconds: float = 60.0,
) -> Leg:
    """A leg under ``folder``; a resumed one goes on from ``checkpoints``, which is copied first."""
    own = folder / "checkpoints"
    if checkpoints is not None:
        shutil.copytree(checkpoints, own)
    trajectory = folder / "legs" / kind
    arguments = [f"--checkpoint.checkpoint_dir={own}", f"--trajectory.dir={trajectory}", *options]
    if kind == "resumed":
        arguments.append("--checkpoint.restore_from=LATEST")
    return Leg(
        leg=kind,
        label=kind,
        ranks=RANKS,
        program=STAND_IN,
        arguments=tuple(arguments),
        results=folder,
        trajectory=trajectory,
        checkpoints=own,
        log=folder / "logs" / f"{kind}.log",
        fault=fault,
        resumes_at=10 if kind == "resumed" else None,
        limit_seconds=limit_seconds,
    )


def run_stand_in(
    folder: Path,
    kind: Literal["reference", "interrupted", "resumed"],
    *options: str,
    fault: Fault | None = None,
    checkpoints: Path | None = None,
    limit_seconds: float = 60.0,
) -> LegRecord:
    leg = stand_in_leg(folder, kind, *options, fault=fault, checkpoints=checkpoints, limit_seconds=limit_seconds)
    return run_leg(leg)


def processes_naming(folder: Path) -> list[str]:
    """The command lines of all living processes that mention ``folder``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(folder) in line:
            found.append(line)
    return found

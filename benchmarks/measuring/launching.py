"""Starts the processes that measure a point, waits for them, and reports the end of their output when one fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.protocol import BenchmarkError, Options, Point, UnableError

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT_SECONDS = 3600.0
_POLL_SECONDS = 0.05
_TAIL_LINES = 12


def in_fresh_process(
    benchmark: str, point: Point, index: int, options: Options, results: Path, *, weigh: str = ""
) -> dict[str, Any]:
    """Measure a point, or the peak memory of one contender, and return the outcome of the process.

    Args:
        benchmark: name in the registry.
        point: the point; its ``ranks`` is the number of processes.
        index: index of the point among the benchmark's points.
        options: the options of the run.
        results: a folder on the measured disk; a temporary folder is made in it.
        weigh: name of the contender whose peak memory is measured; empty to measure times.

    Raises:
        UnableError: it can't be measured on this machine.
        BenchmarkError: a process failed; the text is the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix=".work-", dir=results) as made:
        folder = Path(made).resolve()
        out = folder / "outcome.json"
        command = [
            *(sys.executable, "-m", "benchmarks.measuring.child"),
            *("--benchmark", benchmark, "--point", str(index), "--options", json.dumps(asdict(options))),
            *("--folder", str(folder), "--out", str(out), "--weigh", weigh),
        ]
        logs = [folder / f"log_{rank}" for rank in range(point.ranks or 1)]
        processes = [_start(command, rank, log, point.ranks) for rank, log in enumerate(logs)]
        try:
            failed = _wait(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if failed is not None:
            raise BenchmarkError(_said(failed, processes[failed].returncode, logs[failed], folder))
        outcome: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        if "unable" in outcome:
            raise UnableError(outcome["unable"])
        return outcome


def _start(command: Sequence[str], rank: int, log: Path, ranks: int | None) -> subprocess.Popen[bytes]:
    environment = {**os.environ}
    if ranks is not None:
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    with log.open("wb") as file:
        return subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Return the first process that failed, or that still runs at the time limit; None when all ended with 0."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    running = dict(enumerate(processes))
    while running:
        for rank, process in list(running.items()):
            code = process.poll()
            if code is not None:
                del running[rank]
                if code:
                    return rank
        if running and time.monotonic() > deadline:
            return min(running)
        time.sleep(_POLL_SECONDS)
    return None


def _said(rank: int, code: int | None, log: Path, folder: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").replace(str(folder), "…").splitlines()
    text = "\n".join(lines[-_TAIL_LINES:]) or "nothing"
    return f"process {rank} ended with {code}; end of its output:\n{text}"

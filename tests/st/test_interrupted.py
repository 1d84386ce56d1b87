"""Interrupting the system tests in the middle of a leg ends them at once, and no process is left."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from conformance.records.results import read_results
from conformance.records.trajectory import RecordError
from tests.processes_seen import living_with

CHECKOUT = Path(__file__).parents[2]
RUN = ("-m", "tests.st.run_scenarios", "run", "S1", "--results")
PYTEST = ("-m", "pytest", "-p", "tests.st.run_scenarios", "st/test_scenarios.py", "-k", "S1-cpu4", "--st-results")


@pytest.mark.parametrize(
    ("program", "launcher", "number", "code"),
    [
        pytest.param(RUN, "torchrun", signal.SIGINT, 130, id="run, torchrun, Ctrl-C"),
        pytest.param(RUN, "warm", signal.SIGTERM, 130, id="run, warm, a polite kill"),
        pytest.param(PYTEST, "warm", signal.SIGINT, pytest.ExitCode.INTERRUPTED, id="pytest, warm, Ctrl-C"),
        pytest.param(
            PYTEST, "torchrun", signal.SIGTERM, pytest.ExitCode.INTERRUPTED, id="pytest, torchrun, a polite kill"
        ),
    ],
)
def test_nothing_is_left(
    tmp_path: Path, program: tuple[str, ...], launcher: str, number: signal.Signals, code: int
) -> None:
    mark = f"INTERRUPTED_{uuid.uuid4().hex}"
    results = tmp_path / "results"
    runner = subprocess.Popen(
        [sys.executable, *program, str(results), "--launcher", launcher],
        cwd=CHECKOUT,
        env={**os.environ, mark: "1", "DEFECT": "never-ends"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell's background processes ignore SIGINT, and their children inherit that.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_for_step_3(results, runner)
        assert len(living_with(mark)) > 2
        # A terminal sends Ctrl-C to the whole foreground group; SIGTERM goes to one process.
        if number == signal.SIGINT:
            os.killpg(runner.pid, number)
        else:
            runner.send_signal(number)
        output, _ = runner.communicate(timeout=30)
    finally:
        runner.kill()
        left = living_with(mark)
        for line in left:
            os.kill(int(line.partition(":")[0]), signal.SIGKILL)
    assert runner.returncode == code, output
    assert left == []
    (folder,) = [path.parent for path in tmp_path.rglob("results.jsonl")]
    with pytest.raises(RecordError, match=r"no footer|torn"):
        read_results(folder)


def wait_for_step_3(results: Path, runner: subprocess.Popen[str]) -> None:
    while sum(path.read_bytes().count(b"\n") == 3 for path in results.rglob("trajectory_rank_*.jsonl")) < 2:
        assert runner.poll() is None, runner.communicate()[0]
        time.sleep(0.01)

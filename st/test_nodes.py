"""torchrun's own restart: one rank is killed, the agent restarts all ranks, and they resume without help of the harness.

The agent runs the trainer's program, with LATEST from the first start on. Each attempt of the ranks records into a folder of
its own (``attempt_0``, ``attempt_1``), named by the restart count that the agent passes. In one shared file the steps of both
attempts would overlap; so each attempt is read, and compared with the reference, separately.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.checks.compare import compare_trajectories
from conformance.matrix.faults import POINTER_NAME
from conformance.matrix.given import complete
from conformance.processes import process_tree
from conformance.processes.local import QUIET, LocalLauncher
from conformance.processes.torchrun import free_port
from conformance.records.trajectory import Trajectory, read_trajectory, trajectory_path
from conformance.running.adapter import Job, build_adapter
from conformance.running.legs import LegPlan, run_leg

_CHECKOUT = Path(__file__).resolve().parent.parent
_CONFIG = "examples/training_demo/demo.yaml"
_TRAINER = ("-m", "hyper_resume.cli", "train")
_RANKS = 4
_LAST_STEP = 25
_KILLED_AFTER = 13
_VICTIM = 2
_SECONDS = 240.0
# The command of each rank: the program, with the folder that its attempt records into.
_ATTEMPT = ("sh", "-c", 'exec "$@" --trajectory.dir="$ATTEMPTS/attempt_$TORCHELASTIC_RESTART_COUNT"', "attempt")


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A running agent, and where its ranks write."""

    agent: subprocess.Popen[bytes]
    folder: Path
    token: str

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def attempt(self, number: int) -> Path:
        return self.folder / f"attempt_{number}"


@pytest.mark.cpu4
@pytest.mark.timeout(600)
def test_ranks_that_torchrun_restarts_resume_from_latest_and_end_where_nobody_was_killed(tmp_path: Path) -> None:
    """One rank dies of SIGKILL; the second attempt begins after the last save and equals the reference, bit for bit."""
    with _started(tmp_path) as run:
        _await_step(run, _KILLED_AFTER)
        assert _kill(run, _VICTIM) == -signal.SIGKILL
        # With a dead rank no save is committed any more.
        resumed_at = _pointer(run)
        assert run.agent.wait(timeout=_SECONDS) == 0, _log_tails(run)
        assert process_tree.marked(run.token) == []
    assert [path.name for path in sorted(tmp_path.glob("attempt_*"))] == ["attempt_0", "attempt_1"]
    first, second = (read_trajectory(run.attempt(number), ranks=_RANKS) for number in (0, 1))
    assert resumed_at in (10, 20)
    assert _steps(first)[0] == {1}
    last = first.last_common_step()
    assert last is not None
    assert last >= max(_KILLED_AFTER, resumed_at)
    assert _steps(second) == ({resumed_at + 1}, {_LAST_STEP})
    reference = _reference(tmp_path / "reference")
    for attempt, begin, end in ((first, 1, last), (second, resumed_at + 1, _LAST_STEP)):
        assert compare_trajectories(reference, attempt, begin, end).divergence is None
    assert _pointer(run) == _LAST_STEP


@contextmanager
def _started(folder: Path) -> Iterator[_Run]:
    """Start the agent; on exit kill what is left of it and its ranks."""
    token = uuid.uuid4().hex
    paths = [str(_CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        **QUIET,
        process_tree.MARK: token,
        "ATTEMPTS": str(folder),
        "PYTHONPATH": os.pathsep.join(paths),
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    with ExitStack() as stack:
        stack.enter_context(process_tree.subreaper())
        log = stack.enter_context((folder / "agent.log").open("wb"))
        agent = subprocess.Popen(
            _command(folder),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield _Run(agent=agent, folder=folder, token=token)
        finally:
            agent.kill()
            agent.wait()
            process_tree.sweep(token, set())


def _command(folder: Path) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(_RANKS), "--max-restarts", "1"),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        *("--monitor-interval", "0.5"),
        *("--redirects", "3", "--log-dir", str(folder / "logs"), "--no-python"),
        *(*_ATTEMPT, sys.executable, *_TRAINER, str(_CHECKOUT / _CONFIG)),
        *(f"--checkpoint.checkpoint_dir={folder / 'checkpoints'}", "--checkpoint.restore_from=LATEST"),
        *(f"--training.max_steps={_LAST_STEP}", "--accelerator.device=cpu", "--trajectory.digests=true"),
    )


def _await_step(run: _Run, step: int) -> None:
    """Follow the records until every rank of the first attempt has finished ``step``."""
    deadline, finished = time.monotonic() + _SECONDS, [0] * _RANKS
    while min(finished) < step:
        assert run.agent.poll() is None, _log_tails(run)
        assert time.monotonic() < deadline, f"only at steps {finished}; {_log_tails(run)}"
        time.sleep(0.01)
        finished = [_lines(trajectory_path(run.attempt(0), rank)) for rank in range(_RANKS)]


def _lines(path: Path) -> int:
    """The number of complete lines (finished steps) in an attempt's file; 0 if it does not exist yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _pointer(run: _Run) -> int:
    """The step that the pointer names."""
    return int((run.checkpoints / POINTER_NAME).read_text())


def _kill(run: _Run, rank: int) -> int | None:
    """Kill one rank, and read its exit code (negative: a signal) from the kernel before its agent reaps it."""
    victim = process_tree.ranks_of(run.agent.pid)[rank]
    process_tree.kill(victim)
    while (now := process_tree.read(victim.pid)) is not None and now.start_ticks == victim.start_ticks:
        if now.status is not None:
            return os.waitstatus_to_exitcode(now.status)
        time.sleep(0.001)
    return None


def _steps(attempt: Trajectory) -> tuple[set[int | None], set[int | None]]:
    """The first and the last steps of its ranks."""
    return {attempt.first_step(rank) for rank in attempt.ranks}, {attempt.last_step(rank) for rank in attempt.ranks}


def _reference(folder: Path) -> Trajectory:
    """The same training, uninterrupted. It is forked from a process that has torch loaded, which changes no bit."""
    folder.mkdir()
    job = Job(
        task="train",
        leg="reference",
        checkpoint_dir="../disk/checkpoints",
        world_size=_RANKS,
        given=complete({"config": _CONFIG, "world_size": _RANKS}, "test_nodes"),
        until_step=_LAST_STEP,
    )
    leg = folder / "leg"
    plan = LegPlan(key="reference", job=job, folder=leg, run=folder, disk=folder / "disk", limit_seconds=_SECONDS)
    launcher = LocalLauncher(folder)
    try:
        record = run_leg(plan, build_adapter("hyper_resume"), launcher)
    finally:
        launcher.close()
    assert (record.trouble, [end.exit_code for end in record.ranks]) == (None, [0] * _RANKS)
    return read_trajectory(leg, ranks=_RANKS)


def _log_tails(run: _Run) -> str:
    """The ends of the logs of the agent and the ranks."""
    logs = [run.folder / "agent.log", *sorted((run.folder / "logs").rglob("std*.log"))]
    lines = [f"{log.relative_to(run.folder)}: {log.read_text(errors='replace')[-1500:]}" for log in logs]
    return "\n".join(lines)

"""SIGTERM to torchrun's agent, which hands it to its ranks and waits: every rank saves, leaves with 75, and goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance.processes.torchrun import free_port
from hyper_resume import cli
from tests.ranks import run_ranks
from tests.trainer.tiny_training import saved_steps

pytestmark = pytest.mark.xdist_group("preemption-torchrun")

REPOSITORY = Path(__file__).resolve().parent.parent.parent
RANKS = 2
STRIKE_AFTER = 3
LIMIT_SECONDS = 90.0
# What torchrun gives its ranks between the signal and SIGKILL.
GRACE_SECONDS = 30.0

TRAIN = """\
model: {preset: tiny-llama, overrides: {attention_dropout: 0.2}}
data: {paths: [text.txt], seq_length: 16}
accelerator: {device: cpu}
lr_scheduler: {decay_steps: 100}
training: {max_steps: 5000, num_train_epochs: 1000, progress_bar: false}
checkpoint: {save_epochs: 0}
trajectory: {digests: true}
"""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A training under torchrun that was asked to stop."""

    folder: Path
    agent_log: str
    rank_logs: list[str]
    seconds: float


def _start(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    folder.mkdir()
    (folder / "train.yaml").write_text(TRAIN)
    (folder / "text.txt").write_text("".join(f"line {i} of a short text\n" for i in range(40)))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", "0"),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        *("--redirects", "3", "--log-dir", str(folder / "logs")),
        *("-m", "hyper_resume.cli", "train", "train.yaml", "--trajectory.dir=cut", *overrides),
    ]
    with (folder / "agent.log").open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _stop(folder: Path, strike: Callable[[subprocess.Popen[bytes]], None], *overrides: str) -> Stopped:
    """Start, strike when a few steps are recorded, and wait for the end."""
    agent = _start(folder, *overrides)
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(_records(folder / "cut", 0)) < STRIKE_AFTER:
            assert agent.poll() is None, (folder / "agent.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        started = time.monotonic()
        strike(agent)
        agent.wait(timeout=LIMIT_SECONDS)
        seconds = time.monotonic() - started
    finally:
        if agent.poll() is None:
            for rank in _ranks_of(agent):
                os.kill(rank, signal.SIGKILL)
            agent.kill()
            agent.wait()
    logs = [next((folder / "logs").glob(f"*/attempt_0/{rank}/stderr.log")).read_text() for rank in range(RANKS)]
    return Stopped(folder=folder, agent_log=(folder / "agent.log").read_text(), rank_logs=logs, seconds=seconds)


def _ranks_of(agent: subprocess.Popen[bytes]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]


def _records(trajectory: Path, rank: int) -> list[dict[str, Any]]:
    file = trajectory / f"trajectory_rank_{rank}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


def _train(folder: Path, *overrides: str) -> None:
    os.chdir(folder)
    cli.train("train.yaml", overrides)


def _assert_goes_on(stopped: Stopped) -> None:
    """Every rank saved the same step, and a resume trains what an uninterrupted training does, bit for bit."""
    folder = stopped.folder
    (step,) = saved_steps(folder / "checkpoints")
    cut = [_records(folder / "cut", rank) for rank in range(RANKS)]
    assert [records[-1]["global_step"] for records in cut] == [step] * RANKS
    for log in stopped.rank_logs:
        assert f"hyper-resume: preempted: training was preempted by SIGTERM after global_step {step}" in log
        assert "Traceback" not in log
    for rank in range(RANKS):
        saves = [json.loads(line) for line in (folder / "cut" / f"saves_rank_{rank}.jsonl").read_text().splitlines()]
        assert [(save["state"], save["global_step"]) for save in saves] == [
            ("staged", step),
            ("written", step),
            ("durable", step),
        ]

    end = f"--training.max_steps={step + 2}"
    run_ranks(_train, RANKS, folder, end, "--trajectory.dir=resumed", "--checkpoint.restore_from=LATEST")
    run_ranks(_train, RANKS, folder, end, "--trajectory.dir=straight", "--checkpoint.save_ckpt=false")
    for rank in range(RANKS):
        straight = _records(folder / "straight", rank)
        assert [record["global_step"] for record in straight] == list(range(1, step + 3))
        assert cut[rank] + _records(folder / "resumed", rank) == straight


def test_ranks_that_their_agent_is_asked_to_end_have_the_time_to_save_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    # torchrun signals the process group of each rank, so the loader's worker gets the signal too.
    stopped = _stop(tmp_path / "run", lambda agent: agent.send_signal(signal.SIGTERM), "--data.num_workers=1")
    assert "shutting down workers" in stopped.agent_log
    assert stopped.seconds < GRACE_SECONDS
    _assert_goes_on(stopped)


def test_every_rank_leaves_with_75_however_often_it_is_signalled(tmp_path: Path) -> None:
    def bombard(agent: subprocess.Popen[bytes]) -> None:
        ranks = _ranks_of(agent)
        assert len(ranks) == RANKS
        while agent.poll() is None:
            for rank in ranks:
                # A rank that ended stays a zombie until its agent reaps it, and is gone when that was before this.
                if Path(f"/proc/{rank}").exists():
                    os.kill(rank, signal.SIGTERM)
            time.sleep(0.002)

    stopped = _stop(tmp_path / "run", bombard)
    codes = re.findall(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*exitcode\s*:\s*(-?\d+)", stopped.agent_log)
    assert {code for _, code in codes} == {str(cli.EXIT_PREEMPTED)} == {"75"}
    assert {rank for rank, _ in codes} == {str(rank) for rank in range(RANKS)}
    _assert_goes_on(stopped)

"""A rank that holds a warning writes it and ends, whatever the process group's store does: with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hyper_resume.log_output import ANSWER_SECONDS, HOLD_SECONDS
from st.torchrun import free_port

REPOSITORY = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 60.0

STORE = """\
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(600)
"""
# The group has one member, so that it needs the store for nothing but the warnings.
RANK = """\
import logging, os, sys, time
import torch.distributed as dist
from hyper_resume.log_output import configure_logging
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
configure_logging()
print("joined", flush=True)
sys.stdin.readline()
for number in range(3):
    logging.getLogger("mine").warning("warning %d", number)
logging.getLogger("mine").error("the next line")
time.sleep(float(sys.argv[2]))
began = time.monotonic()
import atexit
atexit._run_exitfuncs()
print(f"{time.monotonic() - began:.3f}", flush=True)
os._exit(0)
"""


@contextmanager
def started(program: str, *arguments: str, rank: int = 0) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "RANK": str(rank)}
    command = (sys.executable, "-c", program, *arguments)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def logged_by(process: subprocess.Popen[str]) -> tuple[float, list[str]]:
    """Let the rank log; how long its end took (s), and the messages that it wrote."""
    out, err = process.communicate("go\n", timeout=LIMIT_SECONDS)
    return float(out.strip().splitlines()[-1]), [
        line.split("mine: ")[1] for line in err.splitlines() if "mine: " in line
    ]


@pytest.mark.parametrize("lost", ["stopped", "killed"])
@pytest.mark.parametrize("pause", [0.0, HOLD_SECONDS + 1.0], ids=["at the end", "while it runs"])
def test_a_rank_whose_store_no_longer_answers_logs_what_it_held_and_ends(lost: str, pause: float) -> None:
    port = str(free_port())
    with started(STORE, port) as store:
        assert store.stdout is not None
        assert store.stdout.readline() == "ready\n"
        with started(RANK, port, str(pause), rank=1) as rank:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "joined\n"
            store.send_signal(signal.SIGSTOP if lost == "stopped" else signal.SIGKILL)
            time.sleep(0.2)
            seconds, messages = logged_by(rank)
    assert seconds < HOLD_SECONDS + ANSWER_SECONDS + 1.0
    assert sorted(messages) == ["the next line", "warning 0", "warning 1", "warning 2"]
    # What is no warning waits for nobody.
    assert messages[0] == "the next line"


def test_what_rank_0_logs_too_is_left_out_and_the_end_does_not_wait() -> None:
    port = str(free_port())
    with started(STORE, port) as store:
        assert store.stdout is not None
        assert store.stdout.readline() == "ready\n"
        with started(RANK, port, "0", rank=0) as first, started(RANK, port, "0", rank=1) as second:
            for rank in (first, second):
                assert rank.stdout is not None
                assert rank.stdout.readline() == "joined\n"
            _, of_first = logged_by(first)
            seconds, of_second = logged_by(second)
    assert of_first == ["warning 0", "warning 1", "warning 2", "the next line"]
    assert of_second == ["the next line"]
    assert seconds < HOLD_SECONDS / 2


def test_a_forked_process_says_its_warning_at_once() -> None:
    program = (
        "import logging, os\n"
        "from hyper_resume.log_output import configure_logging\n"
        "configure_logging()\n"
        "logging.getLogger('mine').warning('of the parent')\n"
        "if os.fork() == 0:\n"
        "    logging.getLogger('mine').warning('of the worker')\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    with started(program, rank=1) as process:
        _, err = process.communicate(timeout=LIMIT_SECONDS)
    assert [line.split("mine: ")[1] for line in err.splitlines()] == ["of the worker", "of the parent"]

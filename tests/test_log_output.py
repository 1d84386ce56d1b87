"""A rank that holds a warning writes it and ends, whatever the process group's store does: with real processes."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from conformance.processes.torchrun import free_port
from hyper_resume.log_output import ANSWER_SECONDS, HOLD_SECONDS, configure_logging
from tests.ranks import server_context

REPOSITORY = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 60.0


def _keep_store(port: int, pipe: Connection) -> None:
    """A process: host the store until it is stopped or killed."""
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    pipe.send("ready")
    time.sleep(600)
    del store


def _log(rank: int, port: int, pause: float, err: Path, pipe: Connection) -> None:
    """A process: join a group that has one member, so that it needs the store for nothing but the warnings; log, and end."""
    os.environ["RANK"] = str(rank)
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    logging.getLogger().handlers.clear()
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    configure_logging()
    pipe.send("joined")
    pipe.recv()
    for number in range(3):
        logging.getLogger("mine").warning("warning %d", number)
    logging.getLogger("mine").error("the next line")
    time.sleep(pause)
    began = time.monotonic()
    atexit._run_exitfuncs()
    pipe.send(time.monotonic() - began)
    # Without the end of the process group, which may wait for the store as well.
    os._exit(0)


@contextmanager
def started(function: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """The process, once it has said its first word, and a pipe to it."""
    here, there = Pipe()
    process = server_context.Process(target=function, args=(*arguments, there))
    process.start()
    try:
        assert here.poll(LIMIT_SECONDS)
        here.recv()
        yield process, here
    finally:
        process.kill()
        process.join()


def logged(pipe: Connection, err: Path) -> tuple[float, list[str]]:
    """Let the rank log; how long its end took (s), and the messages that it wrote."""
    pipe.send("go")
    assert pipe.poll(LIMIT_SECONDS)
    return pipe.recv(), [line.split("mine: ")[1] for line in err.read_text().splitlines() if "mine: " in line]


@pytest.mark.parametrize("lost", ["stopped", "killed"])
@pytest.mark.parametrize("pause", [0.0, HOLD_SECONDS + 1.0], ids=["at the end", "while it runs"])
def test_a_rank_whose_store_no_longer_answers_logs_what_it_held_and_ends(
    tmp_path: Path, lost: str, pause: float
) -> None:
    port = free_port()
    with started(_keep_store, port) as (store, _), started(_log, 1, port, pause, tmp_path / "err") as (_, pipe):
        os.kill(store.pid, signal.SIGSTOP if lost == "stopped" else signal.SIGKILL)
        time.sleep(0.2)
        seconds, messages = logged(pipe, tmp_path / "err")
    assert seconds < ANSWER_SECONDS + 1.0
    assert sorted(messages) == ["the next line", "warning 0", "warning 1", "warning 2"]
    # What is no warning waits for nobody.
    assert messages[0] == "the next line"


def test_what_rank_0_logs_too_is_left_out_and_the_end_does_not_wait(tmp_path: Path) -> None:
    port = free_port()
    ranks = [(rank, port, 0.0, tmp_path / str(rank)) for rank in (0, 1)]
    with started(_keep_store, port), started(_log, *ranks[0]) as (_, first), started(_log, *ranks[1]) as (_, second):
        _, of_first = logged(first, tmp_path / "0")
        seconds, of_second = logged(second, tmp_path / "1")
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
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RANK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=True,
    )
    assert [line.split("mine: ")[1] for line in done.stderr.splitlines()] == ["of the worker", "of the parent"]

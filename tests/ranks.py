"""Run one module-level function in several real gloo processes and bring results and errors back.

The ranks are forked from a server process that has torch and transformers loaded and never computes anything, so a
rank costs a few tens of milliseconds and never inherits a half-locked thread pool from pytest. The server takes some
seconds to start, once in a pytest process. The rendezvous is a store that this process serves on a free loopback port:
nothing races for a port number.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not by name

from conformance.processes.joining import wait_for_all

GROUP_TIMEOUT = timedelta(seconds=30)
# What a failing rank's peers get to report errors of their own before they are killed.
GRACE_SECONDS = 2.0
_WITH_CORE = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
STACK_DUMP_LEAD_SECONDS = 0.5

_PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "peft",
    "numpy",
    "pytest",
    # What nearly every rank imports by itself, some tenths of a second each time.
    "hyper_resume.cli",
    "hyper_resume.models",
    "hyper_resume.optim",
    "hyper_resume.parallel",
    "hyper_resume.trainer.text_trainer",
    "tests.ranks",
    "tests.frozen",
]
server_context = multiprocessing.get_context("forkserver")
server_context.set_forkserver_preload(_PRELOAD)


class RankFailure(AssertionError):
    """At least one rank raised, died or did not finish; the text holds every failing rank's traceback."""


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """How one rank ended: ``value`` when ``error`` is None."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 60,
    expect_errors: bool = False,
) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` processes that share a gloo process group.

    Inside a rank the default process group exists (timeout 30 s), RANK, LOCAL_RANK and WORLD_SIZE are set as torchrun
    sets them, and torch uses one thread. ``function`` must be module-level; arguments and results are pickled.

    Args:
        function: what each rank runs.
        world_size: number of ranks; 1 also gets a process group.
        args: passed to ``function`` unchanged, the same for every rank.
        timeout_seconds: the ranks are killed when they have not all finished by then.
        expect_errors: return a rank's exception in its place instead of raising; a rank that died without a word gives
            a ``RankFailure``.

    Returns:
        One result a rank, in rank order.

    Raises:
        RankFailure: a rank raised, died or hung. A hanging rank's stack is in the text.
    """
    payload = pickle.dumps((function, args))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes, pipes = [], []
        try:
            for rank in range(world_size):
                receiver, sender = server_context.Pipe(duplex=False)
                arguments = (sender, payload, rank, world_size, store.port, folder, timeout_seconds)
                process = server_context.Process(target=_rank_main, args=arguments, name=f"rank-{rank}")
                process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
            outcomes = _collect(pipes, processes, timeout_seconds, stop_early=not expect_errors)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
        stacks = [_read_stack(folder, rank) for rank in range(world_size)]
    return _unwrap(outcomes, stacks, function.__name__, timeout_seconds, expect_errors)


def _collect(
    pipes: Sequence[Connection], processes: Sequence[Any], timeout_seconds: float, *, stop_early: bool
) -> list[_Outcome | None]:
    """Wait for one outcome a rank; None for a rank that is still running at the limit."""
    outcomes: list[_Outcome | None] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + timeout_seconds
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                outcomes[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                code = processes[rank].exitcode
                text = f"rank {rank} died without a word, exit code {code}"
                if code < 0 and -code in _WITH_CORE:
                    text += f"; its process id was {processes[rank].pid}, and cores go to {_core_pattern()}"
                outcomes[rank] = _Outcome(error=RankFailure(text), trace=text)
            if stop_early and outcomes[rank].error is not None:  # type: ignore[union-attr]  # set just above
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return outcomes


def _unwrap(
    outcomes: Sequence[_Outcome | None], stacks: Sequence[str], name: str, timeout_seconds: float, expect_errors: bool
) -> list[Any]:
    """Results in rank order, or one ``RankFailure`` that tells of every failing rank."""
    failed = any(outcome is not None and outcome.error is not None for outcome in outcomes)
    reports, results = [], []
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            reason = "was still waiting when another rank had failed" if failed else "did not finish"
            limit = "" if failed and not expect_errors else f" in {timeout_seconds} s"
            reports.append(f"--- rank {rank} {reason}{limit}\n{stacks[rank]}")
        elif outcome.error is not None and not expect_errors:
            # Of a rank that a signal killed, such as the abort of a broken heap, the stack is all that is left.
            reports.append(f"--- rank {rank} raised\n{outcome.trace}\n{stacks[rank]}".rstrip())
        else:
            results.append(outcome.value if outcome.error is None else outcome.error)
    if reports:
        raise RankFailure(f"{name} failed on {len(reports)} of {len(outcomes)} ranks\n" + "\n".join(reports))
    return results


def _rank_main(
    sender: Connection, payload: bytes, rank: int, world_size: int, port: int, folder: str, timeout_seconds: float
) -> None:
    """The whole life of one rank, in its own process."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with _stack_file(folder, rank).open("w") as stack:
        _keep_what_a_crash_leaves(stack)
        faulthandler.dump_traceback_later(max(0.1, timeout_seconds - STACK_DUMP_LEAD_SECONDS), file=stack)
        try:
            store = TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
            wait_for_all(store, rank, world_size, GROUP_TIMEOUT)
            function, args = pickle.loads(payload)
            message = pickle.dumps(_Outcome(value=function(*args)))
        except BaseException as error:  # noqa: BLE001  # SystemExit and pytest's own outcomes are results here too
            message = _pack_error(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
            # The file is closed now; from here on a crash goes to standard error.
            faulthandler.enable()
    # Sent before the group is destroyed: a peer that hangs can't take this rank's word with it.
    sender.send_bytes(message)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _keep_what_a_crash_leaves(stack: TextIO) -> None:
    """Let a crash of this rank write the stacks of all threads to ``stack``, and a core as large as this user may have."""
    faulthandler.enable(file=stack, all_threads=True)
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))


def _core_pattern() -> str:
    pattern = Path("/proc/sys/kernel/core_pattern")
    text = pattern.read_text().strip() if pattern.exists() else "where this system keeps them"
    return text if text.startswith(("/", "|")) else f"{Path.cwd() / text} (%p: the process id)"


def _pack_error(error: BaseException) -> bytes:
    """Pickle an error; one that can't make the trip is replaced by its class name and text."""
    trace = "".join(traceback.format_exception(error))
    try:
        packed = pickle.dumps(_Outcome(error=error, trace=trace))
        pickle.loads(packed)
    except Exception:  # noqa: BLE001  # an exception class may fail in any way when it is rebuilt
        return pickle.dumps(_Outcome(error=RankFailure(f"{type(error).__name__}: {error}"), trace=trace))
    return packed


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-{rank}.txt"


def _read_stack(folder: str, rank: int) -> str:
    file = _stack_file(folder, rank)
    return file.read_text() if file.exists() else ""

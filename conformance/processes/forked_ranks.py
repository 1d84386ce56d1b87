"""Ranks and workers that start in hundredths of a second: forked from a process that has imported torch and has no threads.

Two layers. :class:`Workers` are clean interpreters, one per core, that import torch once and then take jobs. Inside such a
worker :func:`run_ranks` forks the ranks of one case, which share a gloo group, and :func:`run_alone` forks a single process.
Both kill the processes that they started when the time limit has passed: a hang is a result (``hung``), not an endless wait.

The worker itself never computes with torch and never makes a process group, so that a child inherits no lock that is held.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import select
import shutil
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
from typing import Any, Literal, NoReturn

from conformance.processes.joining import wait_for_all

LIMIT_SECONDS = 20.0
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
# What a save or a load imports at its first use: imported before the fork, because torch._dynamo alone takes a second.
_LOADED = (
    "numpy.random",
    "torch._dynamo",
    "torch.distributed._functional_collectives",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.tensor",
)
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one process ended.

    ``value`` is what its function returned; ``error``, ``message`` and ``trace`` are class, text and traceback of what it
    raised. For a process that ``died`` the ``message`` holds the exit status (negative: the signal).
    """

    rank: int
    how: Literal["returned", "raised", "died", "hung"]
    value: Any = None
    error: str = ""
    message: str = ""
    trace: str = ""

    @property
    def summary(self) -> str:
        """One line for a report."""
        if self.how == "raised":
            return f"rank {self.rank} raised {self.error}: {self.message}"
        return f"rank {self.rank} {self.how} {self.message}".rstrip()


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    limit_seconds: float = LIMIT_SECONDS,
    collective_seconds: float = 600.0,
) -> list[Ended]:
    """Call ``function(*args)`` in ``world_size`` forked processes that share a gloo group; one :class:`Ended` per rank.

    ``limit_seconds`` is for the whole call. ``collective_seconds`` is torch's timeout for one collective; the default is so
    long that a rank which waits for another is reported as ``hung`` instead.

    Closures are allowed: only results are pickled. RANK, LOCAL_RANK and WORLD_SIZE are set as torchrun sets them. No rank
    begins before all have joined the group, and none exits before all have sent their result, so no rank disappears during
    another's handshake or last collective. Call it in a process without threads (a worker, or :func:`run_alone`).
    """
    folder = tempfile.mkdtemp(prefix="ranks-", dir=scratch())
    try:
        store = os.path.join(folder, "store")  # noqa: PTH118  what FileStore takes

        def body(rank: int) -> Any:
            _join_group(store, rank, world_size, collective_seconds)
            return function(*args)

        return _run_forked(body, world_size, limit_seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_alone(function: Callable[..., Any], *args: Any, limit_seconds: float = LIMIT_SECONDS) -> Ended:
    """Call ``function(*args)`` in one forked process without a process group."""
    return _run_forked(lambda rank: function(*args), 1, limit_seconds)[0]


def scratch() -> str | None:
    """The folder for short-lived checkpoint roots: in memory if possible, otherwise None (the default for temporary files)."""
    memory = Path("/dev/shm")
    return str(memory) if sys.platform == "linux" and os.access(memory, os.W_OK) else None


def _join_group(store: str, rank: int, world_size: int, collective_seconds: float) -> None:
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]  # exported, but not by name

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=collective_seconds)
    store_client = FileStore(store, world_size)
    dist.init_process_group("gloo", store=store_client, rank=rank, world_size=world_size, timeout=timeout)
    wait_for_all(store_client, rank, world_size, timeout)


def _run_forked(body: Callable[[int], Any], world_size: int, limit_seconds: float) -> list[Ended]:
    gate_read, gate_write = os.pipe()
    children: list[tuple[int, int]] = []  # process id, where its result is read
    late: set[int] = set(range(world_size))  # all of them, if this is interrupted
    statuses: list[int] = []
    contents: list[bytes] = []
    try:
        for rank in range(world_size):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(gate_write)
                _child(body, rank, writer, gate_read)
            os.close(writer)
            children.append((pid, reader))
        contents, late = _read_all([reader for _, reader in children], time.monotonic() + limit_seconds)
    finally:
        os.close(gate_write)
        os.close(gate_read)
        for rank, (pid, reader) in enumerate(children):
            os.close(reader)
            if rank in late:
                os.kill(pid, signal.SIGKILL)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return [_ended(rank, contents[rank], statuses[rank], rank in late) for rank in range(world_size)]


def _child(body: Callable[[int], Any], rank: int, writer: int, gate: int) -> NoReturn:
    """Run a forked process to its end; never returns into the code that forked it."""
    try:
        _die_with_parent()
        # Discard what C++ libraries print about a broken group; the result reports it.
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        message = _outcome(body, rank)
        view = memoryview(message)
        while view:
            view = view[os.write(writer, view) :]
        os.close(writer)
        os.read(gate, 1)  # until the parent has read every result
    finally:
        os._exit(0)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _outcome(body: Callable[[int], Any], rank: int) -> bytes:
    try:
        return pickle.dumps(Ended(rank=rank, how="returned", value=body(rank)))
    except BaseException as error:  # noqa: BLE001  SystemExit and torch's own BaseExceptions are results here too
        trace = "".join(traceback.format_exception(error))
        return pickle.dumps(Ended(rank=rank, how="raised", error=type(error).__name__, message=str(error), trace=trace))


def _read_all(readers: Sequence[int], deadline: float) -> tuple[list[bytes], set[int]]:
    """What each child wrote until it closed its end, and the indices of those that had not by the deadline."""
    contents = [b""] * len(readers)
    waiting = {reader: index for index, reader in enumerate(readers)}
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for reader in ready:
            chunk = os.read(reader, _CHUNK)
            if chunk:
                contents[waiting[reader]] += chunk
            else:
                del waiting[reader]
    return contents, set(waiting.values())


def _ended(rank: int, content: bytes, status: int, is_late: bool) -> Ended:
    if is_late:
        return Ended(rank=rank, how="hung")
    try:
        result: Ended = pickle.loads(content)
    except Exception:  # noqa: BLE001  it was cut off in the middle of its word
        return Ended(rank=rank, how="died", message=f"with exit status {status}")
    return result


# ---- workers ------------------------------------------------------------------------------------------------------------


class WorkerError(RuntimeError):
    """A worker failed or died: harness trouble, no finding about the library."""


class Workers:
    """Clean interpreters that have torch loaded (some 4 s, all at once) and take jobs. A context manager."""

    def __init__(self, count: int = 2, *, preload: Sequence[str] = ()) -> None:
        """Start ``count`` interpreters, which import torch and ``preload`` before their first job."""
        context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, Any] = {}
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, tuple(preload)), name=f"worker-{number}")
            process.start()
            theirs.close()
            self._processes[ours] = process

    def map(self, function: Callable[[Any], Any], jobs: Sequence[Any]) -> list[Any]:
        """Return ``[function(job) for job in jobs]``, whichever worker did each; jobs are begun in order.

        Args:
            function: module-level; so that it can be found again in another interpreter.
            jobs: pickled, one after the other.

        Raises:
            WorkerError: ``function`` raised, or a worker died.
        """
        results: dict[int, Any] = {}
        running: dict[Connection, int] = {}
        queue = iter(enumerate(jobs))

        def hand_out(connection: Connection) -> None:
            index, job = next(queue, (-1, None))
            if index >= 0:
                connection.send((function, job))
                running[connection] = index

        for connection in self._processes:
            hand_out(connection)
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                results[running.pop(ready)] = _received(ready, self._processes[ready])
                hand_out(ready)
        return [results[index] for index in range(len(jobs))]

    def close(self) -> None:
        """End them."""
        for connection, process in self._processes.items():
            connection.close()
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Workers:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End them."""
        self.close()


def fan_out(
    function: Callable[[Any], Any], jobs: Sequence[Any], *, workers: int = 2, preload: Sequence[str] = ()
) -> list[Any]:
    """Return ``[function(job) for job in jobs]``, computed in as many clean interpreters. See :class:`Workers`.

    Raises:
        WorkerError: ``function`` raised, or a worker died.
    """
    with Workers(max(1, min(workers, len(jobs))), preload=preload) as pool:
        return pool.map(function, jobs)


def _received(connection: Connection, process: Any) -> Any:
    try:
        is_result, content = connection.recv()
    except (EOFError, OSError):
        process.join()
        raise WorkerError(f"{process.name} died, exit code {process.exitcode}") from None
    if not is_result:
        raise WorkerError(f"{process.name} failed\n{content}")
    return content


def _serve(connection: Connection, preload: Sequence[str]) -> None:
    import torch

    _die_with_parent()
    torch.set_num_threads(1)
    for name in (*_LOADED, *preload):
        importlib.import_module(name)
    # A forked process that collects garbage would read, and so copy, every object that is loaded here.
    gc.collect()
    gc.freeze()
    while True:
        try:
            function, job = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, function(job)))
        except Exception:  # noqa: BLE001  whatever it is, it is told where it is read
            connection.send((False, traceback.format_exc()))

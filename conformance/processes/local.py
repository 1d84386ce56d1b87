"""Starts the ranks of a leg and reads how they ended: cold (one interpreter per rank) or warm (forked from a server).

:class:`LocalLauncher` is a :class:`conformance.processes.launching.Launcher`; ``st`` has another for torchrun.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.processes.launching import Launch, LauncherError, LegOrder, Rank, RunningLeg
from conformance.processes.leftovers import SERVER, kill_leftovers, kill_process_group
from conformance.records.evidence import rank_log
from conformance.records.results import RankEnd

_START_SECONDS = 120.0
_POLL_SECONDS = 0.004
# One thread per rank: cases share the machine, and a fixed order of summation keeps results bit for bit equal.
# Python's fault handler writes the stacks of all threads on SIGABRT, whatever the rank hangs in.
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONFAULTHANDLER": "1"}


class ColdRank:
    """A rank with an interpreter of its own."""

    def __init__(self, launch: Launch, folder: Path, log: Path, environment: Mapping[str, str]) -> None:
        """Start it in a session of its own, with ``log`` for what it prints."""
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                launch.argv,
                cwd=folder,
                env={**os.environ, **QUIET, **launch.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._pid = self._process.pid

    def poll(self) -> RankEnd | None:
        """How it ended; kills what is left of its session."""
        code = self._process.poll()
        if code is None:
            return None
        kill_process_group(self._pid)
        return rank_end(code)

    def send(self, number: signal.Signals) -> None:
        """Signal it."""
        self._process.send_signal(number)


class WarmRank:
    """A rank forked by a server."""

    def __init__(self, server: WarmServer, number: int) -> None:
        """Made by :meth:`WarmServer.start`."""
        self._server, self._number = server, number

    def poll(self) -> RankEnd | None:
        """How it ended."""
        status = self._server.status_of(self._number)
        if status is None:
            return None
        return rank_end(os.waitstatus_to_exitcode(status))

    def send(self, number: signal.Signals) -> None:
        """Signal it."""
        self._server.send(self._number, number)


class WarmServer:
    """A warm server: a process that has one module imported and forks ranks. Threads may share it."""

    def __init__(self, module: str, log: Path) -> None:
        """Start the server; the first :meth:`start` waits until it is ready. ``log`` gets what it prints."""
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", SERVER, module],
                env={**os.environ, **QUIET},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=Path(__file__).resolve().parents[2],
            )
        self._module, self._log = module, log
        self._numbers = itertools.count(1)
        self._news = threading.Condition()
        self._ready = self._is_lost = False
        self._pids: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._reader = threading.Thread(target=self._read, name="conformance-warm", daemon=True)
        self._reader.start()

    def start(self, launch: Launch, folder: Path, log: Path, environment: Mapping[str, str]) -> WarmRank:
        """Fork a rank that runs the module's ``main``.

        Raises:
            LauncherError: the server died, or is not ready in time.
        """
        self._wait_until(lambda: self._ready)
        number = next(self._numbers)
        self.send_order(
            {
                "start": number,
                "arguments": list(launch.arguments),
                "environment": {**launch.environment, **environment},
                "folder": str(folder),
                "log": str(log),
            }
        )
        self._wait_until(lambda: number in self._pids)
        return WarmRank(self, number)

    def status_of(self, number: int) -> int | None:
        """The wait status of a dead rank, or None; what is left of its session is killed.

        Raises:
            LauncherError: the server died, so nothing will be known of the rank.
        """
        with self._news:
            status = self._ended.get(number)
            if status is None and self._is_lost:
                raise self._server_gone()
            pid = self._pids.pop(number, None) if status is not None else None
        if pid is not None:
            kill_process_group(pid)
        return status

    def send(self, number: int, which: signal.Signals) -> None:
        """Send a signal to a rank, if it is alive: directly and not by the server, so that it has arrived when this returns."""
        with self._news:
            pid = self._pids.get(number)
            if pid is not None and number not in self._ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, which)

    def send_order(self, order: Mapping[str, Any]) -> None:
        """Send one order.

        Raises:
            LauncherError: the server died.
        """
        assert self._process.stdin is not None
        try:
            with self._news:
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()
        except (OSError, ValueError) as error:  # ValueError: closed from this side
            raise self._server_gone() from error

    def wait(self, seconds: float) -> None:
        """Wait for the next answer of the server, for ``seconds`` at most."""
        with self._news:
            self._news.wait(seconds)

    def close(self) -> None:
        """End the server and all its children."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if not self._ready:
            # It is still importing: it has no children, and does not read its input yet.
            self._process.kill()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=10)
        self._process.stdout.close()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        with self._news:
            met = self._news.wait_for(lambda: condition() or self._is_lost, timeout=_START_SECONDS)
            if not met or self._is_lost:
                raise self._server_gone()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._news:
                self._ready = self._ready or "ready" in answer
                if "started" in answer:
                    self._pids[answer["started"]] = answer["pid"]
                elif "ended" in answer:
                    self._ended[answer["ended"]] = answer["status"]
                self._news.notify_all()
        with self._news:
            self._is_lost = True
            self._news.notify_all()

    def _server_gone(self) -> LauncherError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:] if self._log.exists() else []
        return LauncherError(f"the warm server of {self._module} is gone or does not answer: {' | '.join(lines)}")


class _Ranks:
    """A leg whose only processes are its ranks."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder = name, folder
        self.is_cleared = False
        self.ranks: list[Rank] = []
        self.agents: tuple[Rank, ...] = ()

    def send_signal(self, ranks: Sequence[int], number: signal.Signals) -> None:
        for rank in ranks:
            self.ranks[rank].send(number)

    def signal_launcher(self, node: int, number: signal.Signals) -> None:
        raise LauncherError("a launcher that is a process of its own needs torchrun")

    def dump(self) -> None:
        for rank in self.ranks:
            rank.send(signal.SIGABRT)

    def clear(self) -> list[int]:
        # Each rank leads a session; what it leaves there is killed when its end is read.
        self.is_cleared = True
        return kill_leftovers(self._folder)


class LocalLauncher:
    """A :class:`Launcher`: warm servers by module, each started when it is first needed, or a cold start."""

    def __init__(self, folder: Path) -> None:
        """``folder`` gets the servers' logs."""
        self._folder = folder
        self._lock = threading.Lock()
        self._warm: dict[str, WarmServer] = {}
        self._legs: list[_Ranks] = []
        self._is_stopped = False

    def start(self, order: LegOrder) -> RunningLeg:
        """Start every rank.

        Raises:
            LauncherError: a warm server died (the next call starts another), several nodes are asked for, or this is
                stopped.
        """
        if order.nodes > 1:
            raise LauncherError("several nodes need torchrun")
        leg = _Ranks("cold" if order.launches[0].preload is None else "warm", order.folder)
        with self._lock:
            self._legs = [*(other for other in self._legs if not other.is_cleared), leg]
        try:
            for rank, launch in enumerate(order.launches):
                own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(order.launches)}
                environment = {**order.environment, **{name: str(value) for name, value in own.items()}}
                log = rank_log(order.folder, rank)
                leg.ranks.append(self._start_rank(launch, order.folder, log, environment))
        except BaseException:
            with contextlib.suppress(LauncherError):
                leg.send_signal(range(len(leg.ranks)), signal.SIGKILL)
            raise
        return leg

    def _start_rank(self, launch: Launch, folder: Path, log: Path, environment: Mapping[str, str]) -> Rank:
        with self._lock:
            if self._is_stopped:
                raise LauncherError("no leg is started any more")
            if launch.preload is None:
                return ColdRank(launch, folder, log, environment)
            server = self._warm.get(launch.preload)
            if server is None:
                file = self._folder / f"server-{launch.preload.rpartition('.')[2]}.log"
                server = self._warm[launch.preload] = WarmServer(launch.preload, file)
        try:
            return server.start(launch, folder, log, environment)
        except LauncherError:
            with self._lock:
                if self._warm.get(launch.preload) is server:
                    del self._warm[launch.preload]
            server.close()
            raise

    def wait(self) -> None:
        """Wait for a short time, or until a warm server answers."""
        with self._lock:
            server = next(iter(self._warm.values()), None)
        if server is not None:
            server.wait(_POLL_SECONDS)
        else:
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Kill every running leg; a server that ends kills its own ranks."""
        with self._lock:
            self._is_stopped = True
            legs = list(self._legs)
        self.close()
        for leg in legs:
            with contextlib.suppress(LauncherError):
                leg.send_signal(range(len(leg.ranks)), signal.SIGKILL)

    def close(self) -> None:
        """End all servers."""
        with self._lock:
            servers, self._warm = list(self._warm.values()), {}
        for server in servers:
            server.close()


def rank_end(code: int) -> RankEnd:
    """An exit code, negative for a signal, as a record."""
    if code >= 0:
        return RankEnd(exit_code=code, signal=None)
    return RankEnd(exit_code=None, signal=signal.Signals(-code).name)

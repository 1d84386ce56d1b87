"""Starting ranks and learning how they ended: cold (an interpreter each) or warm (forked from a server)."""

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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from conformance.adapter import Launch
from conformance.results import RankEnd

_START_SECONDS = 120.0
_POLL_SECONDS = 0.004
# One thread a leg: the machine is shared, and sums in one order keep the bits.
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}


class HostError(RuntimeError):
    """The warm server died or does not answer; nothing is known of the leg then."""


class Rank(Protocol):
    """One started process."""

    def poll(self) -> RankEnd | None:
        """How it ended; None while it lives."""
        ...

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it lives."""
        ...


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
        """How it ended; what is left of its session is killed then."""
        code = self._process.poll()
        if code is None:
            return None
        _kill_session(self._pid)
        return RankEnd(exit_code=code, signal=None) if code >= 0 else _signalled(-code)

    def send(self, number: signal.Signals) -> None:
        """Signal it."""
        self._process.send_signal(number)


class WarmRank:
    """A rank forked by a server."""

    def __init__(self, host: WarmHost, number: int) -> None:
        """Made by :meth:`WarmHost.start`."""
        self._host, self._number = host, number

    def poll(self) -> RankEnd | None:
        """How it ended."""
        status = self._host.status_of(self._number)
        if status is None:
            return None
        if os.WIFSIGNALED(status):
            return _signalled(os.WTERMSIG(status))
        return RankEnd(exit_code=os.waitstatus_to_exitcode(status), signal=None)

    def send(self, number: signal.Signals) -> None:
        """Signal it."""
        self._host.tell({"signal": self._number, "number": int(number)})


class WarmHost:
    """A server with one module imported. Threads may share it."""

    def __init__(self, module: str, log: Path) -> None:
        """Start the server; the first :meth:`start` waits until it is ready. ``log`` gets what it prints."""
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "conformance.warm_server", module],
                env={**os.environ, **QUIET},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=Path(__file__).resolve().parent.parent,
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
            HostError: the server died, or is not ready in time.
        """
        self._wait_until(lambda: self._ready)
        number = next(self._numbers)
        self.tell(
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
            HostError: the server died, so nothing will be known of the rank.
        """
        with self._news:
            status = self._ended.get(number)
            if status is None and self._is_lost:
                raise self._lost()
            pid = self._pids.pop(number, None) if status is not None else None
        if pid is not None:
            _kill_session(pid)
        return status

    def tell(self, order: Mapping[str, Any]) -> None:
        """Send one order.

        Raises:
            HostError: the server died.
        """
        assert self._process.stdin is not None
        try:
            with self._news:
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()
        except OSError as error:
            raise self._lost() from error

    def wait(self, seconds: float) -> None:
        """Wait for an answer to anybody, at most so long."""
        with self._news:
            self._news.wait(seconds)

    def close(self) -> None:
        """End the server and all its children."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
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
                raise self._lost()

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

    def _lost(self) -> HostError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:] if self._log.exists() else []
        return HostError(f"the warm server of {self._module} is gone or does not answer: {' | '.join(lines)}")


class Hosts:
    """What ranks are started by: warm servers by module, each started when it is first needed. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        """``folder`` gets the servers' logs."""
        self._folder = folder
        self._lock = threading.Lock()
        self._warm: dict[str, WarmHost] = {}

    def start(self, launch: Launch, folder: Path, log: Path, environment: Mapping[str, str]) -> Rank:
        """Start one rank.

        Raises:
            HostError: a warm server that is needed died; the next call starts another.
        """
        if launch.preload is None:
            return ColdRank(launch, folder, log, environment)
        with self._lock:
            host = self._warm.get(launch.preload)
            if host is None:
                file = self._folder / f"server-{launch.preload.rpartition('.')[2]}.log"
                host = self._warm[launch.preload] = WarmHost(launch.preload, file)
        try:
            return host.start(launch, folder, log, environment)
        except HostError:
            with self._lock:
                if self._warm.get(launch.preload) is host:
                    del self._warm[launch.preload]
            host.close()
            raise

    def wait(self) -> None:
        """Wait a moment, or until a warm server tells something."""
        with self._lock:
            host = next(iter(self._warm.values()), None)
        if host is not None:
            host.wait(_POLL_SECONDS)
        else:
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End all servers."""
        with self._lock:
            hosts, self._warm = list(self._warm.values()), {}
        for host in hosts:
            host.close()


def _signalled(number: int) -> RankEnd:
    return RankEnd(exit_code=None, signal=signal.Signals(number).name)


def _kill_session(pid: int) -> None:
    """Kill what a dead rank left behind in its process group: loader workers, say."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)

"""Runs legs under torchrun: one agent per node; each rank is a process that its agent started in a session of its own.

Their state is read from the kernel:

* a rank is a child of an agent with RANK in its environment; a signal to the agent's process group would miss it;
* a rank that ended is a zombie until its agent reaps it, and its wait status can be read meanwhile (``/proc/PID/stat``). The
  agents poll their ranks twice a second, this module a hundred times;
* a rank whose agent was killed becomes a child of this process, which then reaps it
  (:func:`~conformance.processes.process_tree.subreaper`);
* any other process that a leg left behind has the leg's mark in its environment.

An agent whose ranks get SIGTERM is stopped first (SIGSTOP), so that it neither reaps nor signals one of them before
their ends are known, and gets its own SIGTERM when all of them have ended. An agent that gets SIGTERM itself passes it on, is
stopped then, and goes on only when its ranks have ended.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from conformance.processes import process_tree
from conformance.processes.launching import LauncherError, LegOrder, RunningLeg
from conformance.processes.local import QUIET, rank_end
from conformance.records.evidence import rank_log
from conformance.records.results import RankEnd

_CHECKOUT = Path(__file__).resolve().parent.parent
_POLL_SECONDS = 0.01
# How often /proc is searched for ranks that were not found yet.
_SEARCH_SECONDS = 0.05
_MONITOR_SECONDS = 0.5
_LOGS = "torchrun"
_CLOSED = re.compile(r"[Ss]ending process (\d+) closing signal (\w+)")
# How long an agent may take to pass a signal on; it polls at least twice a second.
_PASSED_SECONDS = 20.0
_FAILURE = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*exitcode\s*:\s*(-?\d+)")


def free_port() -> int:
    """A port of the loopback interface that nothing listens on.

    It lies below Linux's range of ephemeral ports (32768 up): between this check and the agent's bind, no outgoing
    connection of another process can be given it.
    """
    for port in random.SystemRandom().sample(range(20000, 32000), 200):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise LauncherError("no free port on 127.0.0.1 between 20000 and 32000")


class Torchrun:
    """A :class:`conformance.processes.local.Launcher` that starts every leg under torchrun. Threads may share it."""

    def __init__(self) -> None:
        """Begin to adopt orphans, for as long as this lives. Agents do not restart ranks: a leg is one attempt."""
        self._stack = ExitStack()
        self._stack.enter_context(process_tree.subreaper())
        self._lock = threading.Lock()
        self._legs: list[TorchrunLeg] = []
        self._is_stopped = False

    def start(self, order: LegOrder) -> RunningLeg:
        """Start the agents, which start the ranks.

        Raises:
            LauncherError: this is stopped.
        """
        with self._lock:
            if self._is_stopped:
                raise LauncherError("no leg is started any more")
            leg = TorchrunLeg(order)
            self._legs = [*(other for other in self._legs if not other.is_cleared), leg]
        return leg

    def wait(self) -> None:
        """Wait for one polling interval."""
        time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Kill every running leg."""
        with self._lock:
            self._is_stopped = True
            legs = list(self._legs)
        for leg in legs:
            leg.send_signal(range(len(leg.ranks)), signal.SIGKILL)

    def close(self) -> None:
        """Stop adopting orphans."""
        self._stack.close()


class TorchrunLeg:
    """The agents and ranks of one leg."""

    name = "torchrun"

    def __init__(self, order: LegOrder) -> None:
        """Start the agents; the ranks are found as they appear."""
        self._folder = order.folder
        self._size = len(order.launches) // order.nodes
        self._token = uuid.uuid4().hex
        self.is_cleared = False
        # Other processes that were killed with an agent: they become children of this process, which reaps them in the end.
        self._adopted: set[int] = set()
        self._searched_at = 0.0
        self.ranks: list[TorchrunRank] = [TorchrunRank(self, rank) for rank in range(len(order.launches))]
        self.agents: list[Agent] = []
        port = free_port()
        try:
            for node in range(order.nodes):
                self.agents.append(self._start_agent(order, node, port))
        except BaseException:
            self.send_signal(range(len(self.ranks)), signal.SIGKILL)
            self.clear()
            raise

    def _start_agent(self, order: LegOrder, node: int, port: int) -> Agent:
        launch = order.launches[0]
        command = (
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(order.nodes), "--node-rank", str(node), "--nproc-per-node", str(self._size)),
            *("--max-restarts", "0", "--monitor-interval", str(_MONITOR_SECONDS)),
            *("--master-addr", "127.0.0.1", "--master-port", str(port)),
            *("--redirects", "3", "--log-dir", str(self._folder / _LOGS / f"node_{node}")),
            *launch.argv[1:],
            *launch.arguments,
        )
        paths = [str(_CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            **QUIET,
            **launch.environment,
            **order.environment,
            process_tree.MARK: self._token,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
        }
        (self._folder / f"command_agent_{node}.txt").write_text(" ".join(command) + "\n", encoding="utf-8")
        with (self._folder / f"log_agent_{node}.txt").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # So that a Ctrl-C at the terminal reaches this process only, which then ends the leg.
                start_new_session=True,
            )
        return Agent(self, node, process)

    def members(self, node: int) -> list[TorchrunRank]:
        """The ranks of a node."""
        return self.ranks[node * self._size : (node + 1) * self._size]

    def send_signal(self, ranks: Sequence[int], number: signal.Signals) -> None:
        """Send a signal to these ranks. The agent of a node that loses all is killed first, or stopped until they ended."""
        wanted = set(ranks)
        for agent in self.agents:
            own = self.members(agent.node)
            if not all(rank.number in wanted for rank in own):
                continue
            if number == signal.SIGKILL:
                # Searched for first: the children of a dead agent are no longer its descendants.
                adopted = process_tree.descendants(agent.pid)
                agent.send(number)
                for process in adopted:
                    process_tree.kill(process)
                self._adopted.update(process.pid for process in adopted)
            else:
                agent.freeze()
        for rank in wanted:
            self.ranks[rank].send(number)

    def signal_launcher(self, node: int, number: signal.Signals) -> None:
        """Send a signal to an agent alone, and stop the agent as soon as its log says that each rank got a signal.

        Raises:
            LauncherError: it does not pass the signal on.
        """
        self.search(now=True)
        agent = self.agents[node]
        agent.send(number)
        wanted = {rank.process.pid for rank in self.members(node) if rank.process is not None}
        deadline = time.monotonic() + _PASSED_SECONDS
        while not wanted <= {int(pid) for pid, _ in _CLOSED.findall(self._log(node))}:
            if time.monotonic() > deadline:
                raise LauncherError(f"the agent of node {node} did not pass {number.name} on to its ranks")
            time.sleep(_POLL_SECONDS)
        agent.freeze(was_signalled=True)

    def _log(self, node: int) -> str:
        return (self._folder / f"log_agent_{node}.txt").read_text(encoding="utf-8", errors="replace")

    def dump(self) -> None:
        """Stop the agents, so that they do not end a rank first, and make each rank write its stacks."""
        self.search(now=True)
        for agent in self.agents:
            agent.freeze()
        for rank in self.ranks:
            rank.send(signal.SIGABRT)

    def clear(self) -> list[int]:
        """Kill and reap every process with the leg's mark, and collect each rank's output into its log."""
        known = {process.pid for rank in self.ranks if (process := rank.process)} | {agent.pid for agent in self.agents}
        known |= self._adopted
        try:
            with _uninterrupted():
                left = process_tree.sweep(self._token, known)
        except process_tree.DeathNotVerifiedError as error:
            raise LauncherError(str(error)) from error
        self.is_cleared = True
        for agent in self.agents:
            agent.reap()
            for local, rank in enumerate(self.members(agent.node)):
                self._collect_log(agent.node, local, rank.number)
        shutil.rmtree(self._folder / _LOGS, ignore_errors=True)
        return left

    def _collect_log(self, node: int, local: int, rank: int) -> None:
        files = sorted((self._folder / _LOGS / f"node_{node}").glob(f"*/attempt_*/{local}/std*.log"))
        rank_log(self._folder, rank).write_bytes(b"".join(file.read_bytes() for file in files))

    def search(self, *, now: bool = False) -> None:
        """Find the ranks that are not known yet."""
        if all(rank.process for rank in self.ranks) or (
            not now and time.monotonic() < self._searched_at + _SEARCH_SECONDS
        ):
            return
        self._searched_at = time.monotonic()
        for agent in self.agents:
            for number, process in process_tree.ranks_of(agent.pid).items():
                if self.ranks[number].process is None:
                    self.ranks[number].process = process

    def reported(self, rank: int) -> RankEnd:
        """The end of a rank that this process did not see, from its agent: exit code 0 if the agent's is, otherwise the agent's
        report of failures, or the signal that the agent sent.
        """
        agent = self.agents[rank // self._size]
        if agent.end is not None and agent.end.exit_code == 0:
            return RankEnd(exit_code=0, signal=None)
        log = self._log(agent.node)
        codes = {int(number): int(code) for number, code in _FAILURE.findall(log)}
        process = self.ranks[rank].process
        if rank in codes:
            return rank_end(codes[rank])
        reported = {int(pid): name for pid, name in _CLOSED.findall(log)}
        return RankEnd(exit_code=None, signal=reported.get(process.pid) if process else None)


class Agent:
    """torchrun itself, on one node."""

    def __init__(self, leg: TorchrunLeg, node: int, process: subprocess.Popen[bytes]) -> None:
        """``process`` was just started."""
        self._leg, self.node, self._process = leg, node, process
        self._is_frozen = self._was_signalled = False
        self.end: RankEnd | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def poll(self) -> RankEnd | None:
        """How it ended. A stopped agent is continued as soon as all its ranks have ended."""
        if self._is_frozen and all(rank.is_over() for rank in self._leg.members(self.node)):
            self._is_frozen = False
            if not self._was_signalled:
                self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)
        code = self._process.poll()
        if code is not None and self.end is None:
            self.end = rank_end(code)
        return self.end

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it lives."""
        self._process.send_signal(number)

    def freeze(self, *, was_signalled: bool = False) -> None:
        """Stop it until its ranks have ended; ``was_signalled``: it has its SIGTERM already."""
        if self._process.poll() is None:
            self._is_frozen, self._was_signalled = True, was_signalled
            self._process.send_signal(signal.SIGSTOP)

    def reap(self) -> None:
        """Read the end of one that was killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)


class TorchrunRank:
    """One rank; ``process`` is None until it is found."""

    def __init__(self, leg: TorchrunLeg, number: int) -> None:
        """Of ``leg``."""
        self._leg, self.number = leg, number
        self.process: process_tree.Process | None = None
        self._end: RankEnd | None = None

    def is_over(self) -> bool:
        """True when it has ended, whether or not its end could be read."""
        if self.poll() is not None:
            return True
        now = process_tree.read(self.process.pid) if self.process else None
        return self.process is not None and (now is None or now.start_ticks != self.process.start_ticks)

    def poll(self) -> RankEnd | None:
        """How it ended: by reaping it, from the kernel before its agent reaps it, or from its agent's report."""
        if self._end is None:
            self._leg.search()
            self._end = self._read_end()
        return self._end

    def _read_end(self) -> RankEnd | None:
        now = process_tree.read(self.process.pid) if self.process else None
        if self.process is None or now is None or now.start_ticks != self.process.start_ticks:
            # Not started yet, or already reaped: only the end of its agent tells these apart.
            agent = self._leg.agents[self.number // len(self._leg.members(0))]
            return self._leg.reported(self.number) if agent.end is not None else None
        if not now.is_zombie:
            return None
        if now.parent == os.getpid():
            return rank_end(os.waitstatus_to_exitcode(process_tree.reap(now.pid, time.monotonic() + 1)))
        return rank_end(os.waitstatus_to_exitcode(now.status)) if now.status is not None else None

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it lives."""
        self._leg.search(now=True)
        if self.process is not None and self._end is None:
            process_tree.kill(self.process, number)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block is done: an interrupted sweep would leave processes behind.

    They interrupt the main thread only, so in other threads this does nothing. A signal mask would not do: another thread would
    take the signal, and the main thread would be interrupted all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: held.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if held:
            signal.raise_signal(signal.Signals(held[0]))

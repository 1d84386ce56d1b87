"""The interface between legs and launchers: how ranks are started, polled, signalled and cleaned up."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from conformance.records.results import RankEnd


class LauncherError(RuntimeError):
    """The launcher can't start or follow a leg (a warm server died or does not answer): nothing is known of the leg then."""


class Rank(Protocol):
    """One started process."""

    def poll(self) -> RankEnd | None:
        """How it ended; None while it is alive."""
        ...

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is alive."""
        ...


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How one rank is started: a command line, and additions to the environment.

    ``preload``: a module with ``main(argv) -> exit code``. If it is set, the rank is forked from a process that has imported
    the module, and calls ``main(arguments)``. Otherwise ``argv`` is executed.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    preload: str | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LegOrder:
    """A leg to be started: ``launches`` by rank, in ``folder``, on ``nodes`` of equal size."""

    folder: Path
    launches: tuple[Launch, ...]
    environment: Mapping[str, str]
    nodes: int = 1


class RunningLeg(Protocol):
    """A started leg: its ranks, and its agents (the launcher processes, where there are any)."""

    @property
    def name(self) -> str:
        """``warm``, ``cold`` or ``torchrun``."""
        ...

    @property
    def ranks(self) -> Sequence[Rank]:
        """By rank."""
        ...

    @property
    def agents(self) -> Sequence[Rank]:
        """The launcher process of each node; empty where the launcher is no process of the leg."""
        ...

    def send_signal(self, ranks: Sequence[int], number: signal.Signals) -> None:
        """Send a signal to these ranks, and to the agent of each node whose ranks are all among them."""
        ...

    def signal_launcher(self, node: int, number: signal.Signals) -> None:
        """Send a signal to a node's agent alone; returns when the agent has passed it on to its ranks.

        Raises:
            LauncherError: there is no agent, or it does not pass the signal on.
        """
        ...

    def dump(self) -> None:
        """Make every living rank write its Python stacks into its log; this ends the rank."""
        ...

    def clear(self) -> list[int]:
        """Kill every process that is left of a leg whose ranks have ended; returns their process ids."""
        ...


class Launcher(Protocol):
    """Starts legs. Threads may share it."""

    def start(self, order: LegOrder) -> RunningLeg:
        """Start every rank.

        Raises:
            LauncherError: they can't be started.
        """
        ...

    def wait(self) -> None:
        """Wait for a short time, or until there is news of a rank."""
        ...

    def stop(self) -> None:
        """Kill every running leg, so that its thread ends, and start no more. Any thread may call it."""
        ...

    def close(self) -> None:
        """End every process that it has started."""
        ...

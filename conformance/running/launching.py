"""What starts the ranks of a leg, and what is known of them: the interface between legs and launchers."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from conformance.records.results import RankEnd
from conformance.running.adapter import Launch


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


@dataclass(frozen=True, kw_only=True)
class LegOrder:
    """What is to be started: ``launches`` by rank, in ``folder``, as ``nodes`` of equal size."""

    folder: Path
    launches: tuple[Launch, ...]
    environment: Mapping[str, str]
    nodes: int = 1


class RunningLeg(Protocol):
    """A leg that was started: its ranks, and the processes that started them where these live beside them."""

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
        """By node; none for a launcher that is no process of the leg."""
        ...

    def strike(self, ranks: Sequence[int], number: signal.Signals) -> None:
        """Signal these ranks, and the agents of the nodes that lose all their ranks by it."""
        ...

    def strike_launcher(self, node: int, number: signal.Signals) -> None:
        """Signal a node's agent alone; returns when that has passed the signal on to its ranks.

        Raises:
            HostError: there is no agent, or it does not pass it on.
        """
        ...

    def dump(self) -> None:
        """Make every living rank write its Python stacks into its log, which ends it."""
        ...

    def clear(self) -> list[int]:
        """Kill whatever is left of a leg whose ranks have ended; the process ids that were."""
        ...


class Launcher(Protocol):
    """What starts legs. Threads may share it."""

    def start(self, order: LegOrder) -> RunningLeg:
        """Start every rank.

        Raises:
            HostError: they can't be started.
        """
        ...

    def wait(self) -> None:
        """Wait a moment, at most until something is known."""
        ...

    def stop(self) -> None:
        """Kill every running leg, whose thread then comes to its end, and start no other. Any thread may call it."""
        ...

    def close(self) -> None:
        """End everything that it has started."""
        ...

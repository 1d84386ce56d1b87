"""Exchanges the outcome of a test between ranks over MPI, and formats it.

It uses MPI and not the process group under test: after a failure that group is in an unknown state, and every rank must still
learn of the failure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# MPICH waits by spinning: four ranks on two cores would take the cores from the rank that still works.
_POLL_SECONDS = 0.002
_TAGS = 32768  # the smallest upper bound of tags that MPI allows
# A message of this size is sent at once, whether or not the receiver is receiving.
_TEXT_LIMIT = 8000


class RankFailure(AssertionError):
    """A test failed on at least one rank; raised on all of them, with the rank that was first."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one phase (setup, call or teardown) of a test ended on one rank.

    Attributes:
        kind: "left" is a rank that ends its session (Ctrl-C, ``pytest.exit``) and sends nothing more.
        reason: class and message of the failure in one line; empty when passed.
        trace: its traceback.
        at: seconds of the machine's monotonic clock, which all processes share.
        elapsed: seconds since the session of this rank started.
    """

    kind: Literal["passed", "failed", "timed out", "left"] = "passed"
    reason: str = ""
    trace: str = ""
    at: float = 0.0
    elapsed: float = 0.0


def shorten(text: str) -> str:
    """Keep start and end of a text that is too long to be sent without the receiver's help."""
    half = _TEXT_LIMIT // 2
    return (
        text
        if len(text) <= _TEXT_LIMIT
        else f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"
    )


def explain(outcomes: Mapping[int, Outcome], size: int, seconds: float) -> str:
    """Return one text for all ranks: the first failed rank, the others, and the first one's traceback; "" if all passed.

    A rank that is missing comes first, then one that reached its limit, whenever that was: the others usually fail
    earlier than it, because they wait for it in a collective whose limit is shorter. Otherwise the earliest failure is first.

    Args:
        outcomes: of the ranks that answered.
        size: number of ranks.
        seconds: how long the missing ones were waited for.
    """
    lines = [
        f"rank {rank} of {size} is still inside after {seconds:.0f} s" for rank in range(size) if rank not in outcomes
    ]
    order = {"timed out": 0, "left": 1, "failed": 2}
    failed = sorted(
        ((rank, outcome) for rank, outcome in outcomes.items() if outcome.kind != "passed"),
        key=lambda pair: (order[pair[1].kind], pair[1].at, pair[0]),
    )
    lines += [f"rank {rank} of {size} {outcome.kind}: {outcome.reason}" for rank, outcome in failed]
    if not lines:
        return ""
    text = lines[0]
    if lines[1:]:
        text += "\nand then:\n  " + "\n  ".join(lines[1:])
    if failed and failed[0][1].trace:
        text += f"\ntraceback of rank {failed[0][0]}:\n{failed[0][1].trace}"
    return text


class Ranks:
    """The MPI world, as far as the harness needs it."""

    def __init__(self, communicator: Any) -> None:
        """Take a communicator of mpi4py's that nothing else uses."""
        self._communicator = communicator
        self._turn = 0
        self.rank: int = communicator.rank
        self.size: int = communicator.size

    def exchange(self, value: Any, seconds: float) -> dict[int, Any]:
        """Send ``value`` to every rank and return what each has sent within ``seconds``, by rank.

        Every rank must call it equally often. MPI collectives have no timeout, so each rank sends to each.
        """
        deadline = time.monotonic() + seconds
        tag, self._turn = self._turn % _TAGS, self._turn + 1
        others = [rank for rank in range(self.size) if rank != self.rank]
        sending = [self._communicator.isend(value, dest=rank, tag=tag) for rank in others]
        received = {self.rank: value}
        while True:
            for rank in others:
                message = None if rank in received else self._communicator.improbe(source=rank, tag=tag)
                if message is not None:
                    received[rank] = message.recv()
            sending = [request for request in sending if not request.test()[0]]
            if (len(received) == self.size and not sending) or time.monotonic() > deadline:
                return received
            time.sleep(_POLL_SECONDS)

    def abort(self) -> None:
        """End every process of the run, the hanging ones too."""
        self._communicator.Abort(1)

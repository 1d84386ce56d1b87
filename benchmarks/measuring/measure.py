"""The rounds: every contender once per round, in random order, so that a slow minute slows all of them."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.measuring import memory
from benchmarks.protocol import BenchmarkError, Contender, Scenario

# A library may keep buffers after the first call; they count in the second.
_WEIGHED_CALLS = 2


class Together(Protocol):
    """The processes that measure one scenario. A call starts on all of them at once; its time is that of the slowest."""

    def wait(self) -> None:
        """Wait for all processes."""

    def largest(self, seconds: float) -> float:
        """Return the largest of all processes' values."""


class Alone:
    """One process."""

    def wait(self) -> None:
        """Return at once: there is no other process."""

    def largest(self, seconds: float) -> float:
        """Return ``seconds``."""
        return seconds


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One contender's recorded rounds, in order. ``settled_seconds`` is empty where nothing was left to wait for."""

    seconds: tuple[float, ...]
    settled_seconds: tuple[float, ...]
    disk_bytes: int | None
    checked: bool


def measure(
    scenario: Scenario, *, rounds: int, warm_up: bool, together: Together | None = None
) -> Mapping[str, Timing]:
    """Time every contender ``rounds`` times, interleaved.

    Args:
        scenario: what to measure; its ``close`` is the caller's to call.
        rounds: number of recorded rounds.
        warm_up: run one more round first, which is not recorded.
        together: the other processes that call this with the same arguments; None for a single process.

    Returns:
        contender -> what was measured.

    Raises:
        BenchmarkError: a contender did not do its work.
    """
    together = together or Alone()
    order = list(scenario.contenders)
    if len({contender.name for contender in order}) != len(order):
        raise BenchmarkError("two contenders have the same name")
    for contender in order:
        contender.prepare()
    # Objects that exist now are no garbage. Without this, every collection before or during a call would visit all of them.
    gc.collect()
    gc.freeze()
    try:
        found = _rounds(order, rounds, warm_up, together)
    finally:
        gc.unfreeze()
    return found


def _rounds(order: Sequence[Contender], rounds: int, warm_up: bool, together: Together) -> dict[str, Timing]:
    seconds: dict[str, list[float]] = {contender.name: [] for contender in order}
    settled: dict[str, list[float]] = {contender.name: [] for contender in order}
    stored: dict[str, int] = {}
    first = -1 if warm_up else 0
    for number in range(first, rounds):
        for contender in shuffled(order, number):
            took, settled_after, result = _time(contender, together)
            if number == first:
                stored.update(_check_first(contender, result))
            del result
            if number >= 0:
                seconds[contender.name].append(took)
                if contender.settle is not None:
                    settled[contender.name].append(settled_after)
    return {
        contender.name: Timing(
            seconds=tuple(seconds[contender.name]),
            settled_seconds=tuple(settled[contender.name]),
            disk_bytes=stored.get(contender.name),
            checked=contender.check is not None,
        )
        for contender in order
    }


def weigh(contender: Contender) -> int:
    """Return by how many bytes two calls of ``contender`` raise the peak memory of this otherwise unused process."""
    contender.prepare()
    contender.before()
    base = memory.start()
    for number in range(_WEIGHED_CALLS):
        if number:
            contender.before()
        contender.call()
        if contender.settle is not None:
            contender.settle()
    return memory.peak_since(base)


def shuffled(order: Sequence[Contender], number: int) -> list[Contender]:
    """Return the order of round ``number``, the same in each process and run.

    It is random, so that no contender always runs after the same one, which leaves its data in caches and work for the disk.
    """
    return random.Random(number).sample(order, len(order))


def _time(contender: Contender, together: Together) -> tuple[float, float, Any]:
    contender.before()
    gc.collect()
    together.wait()
    started = time.perf_counter()
    result = contender.call()
    took = time.perf_counter() - started
    if contender.settle is not None:
        contender.settle()
    settled = time.perf_counter() - started
    return together.largest(took), together.largest(settled), result


def _check_first(contender: Contender, result: Any) -> dict[str, int]:
    """Check the result of the first call, and return the bytes on disk. Not timed."""
    if contender.check is not None:
        contender.check(result)
    return {} if contender.stored is None else {contender.name: bytes_below(contender.stored())}


def bytes_below(path: Path) -> int:
    """Return the total length of all files of a directory, or of one file."""
    files = [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    if not files:
        raise BenchmarkError(f"{path}: nothing was stored")
    return sum(found.stat().st_size for found in files)

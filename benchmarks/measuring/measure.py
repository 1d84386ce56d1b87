"""The rounds: every contender once a round, in an order that is drawn, so that a slow minute slows all of them."""

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

# The second call finds buffers of the first, which a library may keep: both count.
_WEIGHED_CALLS = 2


class Together(Protocol):
    """The processes that measure one scenario: a round's call starts on all of them at once and lasts as long as the last."""

    def wait(self) -> None:
        """Wait for all processes."""

    def largest(self, seconds: float) -> float:
        """Return the largest of all processes' values."""


class Alone:
    """One process."""

    def wait(self) -> None:
        """Nobody to wait for."""

    def largest(self, seconds: float) -> float:
        """Its own value."""
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
        rounds: recorded ones.
        warm_up: one round more, before, which is not recorded.
        together: the other processes that call this with the same arguments; None where there is none.

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
    # What is there already is no garbage: without this each collection, before a call or within it, would walk all of it.
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
                stored.update(_look(contender, result))
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
    """Return the bytes by which two calls of ``contender`` raise this process's peak; nothing else may have run in it."""
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
    """The order of round ``number``, the same in each process and run.

    Drawn, so that nobody always comes right after the same one: what that has left in caches, and of the disk's work, differs.
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


def _look(contender: Contender, result: Any) -> dict[str, int]:
    """Once, outside of the timing: was the work done, and how many bytes does it take on the disk?"""
    if contender.check is not None:
        contender.check(result)
    return {} if contender.stored is None else {contender.name: bytes_below(contender.stored())}


def bytes_below(path: Path) -> int:
    """Lengths of all files of a directory together, or of one file."""
    files = [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    if not files:
        raise BenchmarkError(f"{path}: nothing was stored")
    return sum(found.stat().st_size for found in files)

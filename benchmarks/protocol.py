"""What a benchmark is: points to measure at, contenders that do the same work, and figures that compare them.

A benchmark is one module of :mod:`benchmarks.subjects` with a ``BENCHMARK``. Each point is measured in a fresh process (or in
one process per rank) by :mod:`benchmarks.measuring.measure`, which calls a contender in this order:

1. ``prepare``, once, untimed; 2. in each round ``before``, untimed; 3. ``call``, timed; 4. ``settle``, timed from the start of
``call``; 5. after the first call ``check``, untimed, with the result of ``call``. At the end the scenario's ``close``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# limit: what the hardware allows; peer: what a user would choose instead; ours: this library.
Role = Literal["limit", "peer", "ours"]
# settled_seconds: from the start of the call to the end of ``settle``. peak_bytes: see benchmarks.measuring.memory.
Quantity = Literal["seconds", "settled_seconds", "disk_bytes", "peak_bytes"]
Relation = Literal["at least", "at most"]

# Values of a figure's ``below``: the bytes of the payload, and 1 in the unit of the quantity.
PAYLOAD = "the payload"
UNIT = "1"
GB = 10**9


class BenchmarkError(RuntimeError):
    """A benchmark could not be measured, or a contender did not do its work."""


class UnableError(BenchmarkError):
    """Something can't be measured on this machine; the text says why. This is not a failure."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run.

    Attributes:
        sizes_gb: payloads of the benchmarks with large tensors, in units of 10**9 bytes.
        smoke: small sizes, to see that everything runs; the figures mean nothing.
        repeat: number of rounds. A round calls every contender once.
        worlds: world sizes that planning is simulated for.
        ranks: world sizes with real processes.
    """

    sizes_gb: tuple[float, ...] = (0.25, 1.0)
    smoke: bool = False
    repeat: int = 5
    worlds: tuple[int, ...] = (64, 256, 1024, 4096, 8192)
    ranks: tuple[int, ...] = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where a benchmark is measured.

    Attributes:
        label: for people, unique within the benchmark (``0.25 GB``).
        axis: the quantity of ``value``; points with the same axis make a curve.
        value: the position on the axis.
        ranks: processes in a gloo group; None means one process without a group.
        rounds: replaces the number of the run where a round takes too long.
        warm_up: run one more round first, which is not recorded.
    """

    label: str
    axis: str
    value: float
    ranks: int | None = None
    rounds: int | None = None
    warm_up: bool = True


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a scenario is built from. ``folder`` is empty, lies on the measured disk, and is deleted afterwards."""

    options: Options
    folder: Path
    rank: int = 0
    world_size: int = 1


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do the work. The module docstring says when each callable is called.

    Attributes:
        name: unique within the scenario.
        role: see :data:`Role`.
        call: the measured work.
        prepare: creates what the work needs.
        before: undoes the previous ``call``, so that no call finds its work done already.
        settle: waits for the background work of ``call``.
        check: raises :class:`BenchmarkError` when the work was not done.
        stored: file or directory whose size is measured after the first call.
        is_weighed: measure its peak memory, in a separate process.
        note: what a reader has to know about it.
    """

    name: str
    role: Role
    call: Callable[[], Any]
    prepare: Callable[[], Any] = nothing
    before: Callable[[], Any] = nothing
    settle: Callable[[], Any] | None = None
    check: Callable[[Any], None] | None = None
    stored: Callable[[], Path] | None = None
    is_weighed: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A ratio of two contenders' quantities, ``above`` over ``below``; with a ``bound`` it is a goal.

    Attributes:
        text: what the ratio is, for people.
        above: contenders; their quantities are added up.
        below: a contender, :data:`PAYLOAD` or :data:`UNIT`.
        quantity: what is compared.
        relation: of the ratio to ``bound``; None where there is no goal.
        bound: see ``relation``.
    """

    text: str
    above: tuple[str, ...]
    below: str
    quantity: Quantity = "seconds"
    relation: Relation | None = None
    bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A benchmark at one point, ready to be measured.

    Attributes:
        payload_bytes: per process.
        contenders: with unique names.
        figures: may name absent contenders; such a figure is not measured.
        absent: contender -> why it is absent.
        close: releases everything but the files in ``folder``.
    """

    payload_bytes: int
    contenders: Sequence[Contender]
    figures: Sequence[Figure]
    absent: Mapping[str, str] = field(default_factory=dict)
    close: Callable[[], None] = nothing


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One module of :mod:`benchmarks.subjects`. With ``growth``, the growth of time along the axis is fitted."""

    name: str
    title: str
    points: Callable[[Options], Sequence[Point]]
    build: Callable[[Point, Context], Scenario]
    growth: bool = False


def size_points(options: Options) -> list[Point]:
    """One point per payload size of the run."""
    return [Point(label=f"{size:g} GB", axis="payload in GB", value=size) for size in options.sizes_gb]


def compared(ours: str, peers: Sequence[str], what: str, quantity: Quantity = "seconds") -> list[Figure]:
    """Figures without a goal: the time of each of ``peers`` divided by the time of ``ours``."""
    return [Figure(text=f"{what}: speedup over {peer}", above=(peer,), below=ours, quantity=quantity) for peer in peers]

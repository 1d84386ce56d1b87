"""What a benchmark is: points to measure at, contenders that do the same work, and figures that compare them.

A benchmark is one module of :mod:`benchmarks.subjects` with a ``BENCHMARK``. Each of its points is measured in a process of
its own (or in several, one a rank), by :mod:`benchmarks.measuring.measure`, which makes these calls of a contender:

1. ``prepare``, once, untimed; 2. in each round ``before``, untimed; 3. ``call``, timed; 4. ``settle``, timed from the start of
``call``; 5. after the first call ``check``, untimed, with what ``call`` returned. At the end the scenario's ``close``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# limit: what the hardware allows; peer: what a user would pick instead; ours: this library.
Role = Literal["limit", "peer", "ours"]
# settled_seconds: from the start of the call until ``settle`` was over. peak_bytes: see benchmarks.measuring.memory.
Quantity = Literal["seconds", "settled_seconds", "disk_bytes", "peak_bytes"]
Relation = Literal["at least", "at most"]

# Stands in a figure's ``below`` for the bytes of the payload, and for one of the quantity's own unit.
PAYLOAD = "the payload"
UNIT = "1"
GB = 10**9


class BenchmarkError(RuntimeError):
    """A benchmark could not be measured, or what it measured did not do its work."""


class UnableError(BenchmarkError):
    """Something can't be measured on this machine, which is nobody's failure; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run was asked for.

    Attributes:
        sizes_gb: payloads of the benchmarks of large tensors, in units of 10**9 bytes.
        smoke: small sizes that show that everything runs, and whose figures prove nothing.
        repeat: rounds, each of which calls every contender once.
        worlds: numbers of ranks that planning is simulated for.
        ranks: numbers of real ranks.
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
        label: unique within the benchmark, for people (``0.25 GB``).
        axis: what ``value`` counts; points of one axis make a curve.
        value: the place on the axis.
        ranks: processes in a gloo group; None is one process without a group.
        rounds: instead of the run's, where a round is too dear.
        warm_up: one more round before, which is not recorded.
    """

    label: str
    axis: str
    value: float
    ranks: int | None = None
    rounds: int | None = None
    warm_up: bool = True


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a scenario is built for: ``folder`` is empty, on the disk that is measured, and deleted afterwards."""

    options: Options
    folder: Path
    rank: int = 0
    world_size: int = 1


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do the work. See the module's text for when each callable is called.

    Attributes:
        name: unique within the scenario.
        role: see :data:`Role`.
        call: the work.
        prepare: what the work needs to be there.
        before: brings everything back to where it was before ``call``, so that no call finds its work done.
        settle: waits for what ``call`` has left running.
        check: raises :class:`BenchmarkError` when the work was not done.
        stored: file or directory whose bytes are counted after the first call.
        is_weighed: its peak memory is measured, in a process of its own.
        note: what a reader has to know of it.
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
        text: what the ratio says, for people.
        above: contenders whose quantities are added up.
        below: a contender, :data:`PAYLOAD` or :data:`UNIT`.
        quantity: of both.
        relation: of the ratio to ``bound``; None where nothing is asked.
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
        payload_bytes: of one process.
        contenders: in the order of the first round.
        figures: may name contenders that are absent; these are then not measured.
        absent: contender -> why it isn't there.
        close: gives back what ``folder``'s deletion doesn't.
    """

    payload_bytes: int
    contenders: Sequence[Contender]
    figures: Sequence[Figure]
    absent: Mapping[str, str] = field(default_factory=dict)
    close: Callable[[], None] = nothing


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One file of :mod:`benchmarks.subjects`. ``growth`` fits, over all points, how time grows on their axis."""

    name: str
    title: str
    points: Callable[[Options], Sequence[Point]]
    build: Callable[[Point, Context], Scenario]
    growth: bool = False


def size_points(options: Options) -> list[Point]:
    """A point for each of the run's sizes."""
    return [Point(label=f"{size:g} GB", axis="payload in GB", value=size) for size in options.sizes_gb]


def compared(ours: str, peers: Sequence[str], what: str, quantity: Quantity = "seconds") -> list[Figure]:
    """Figures without a goal: how many times as long each of ``peers`` takes as ``ours``."""
    return [
        Figure(text=f"{what}: times as fast as {peer}", above=(peer,), below=ours, quantity=quantity) for peer in peers
    ]

"""The result of comparing two trajectories, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first value that differs. ``reference`` and ``resumed`` are the values in full (``repr``; floats round-trip).

    ``bucket`` is the state bucket that the difference is attributed to; ``column`` may name a part, such as ``rng.python``.
    """

    step: int
    rank: int
    bucket: str
    column: str
    reference: str
    resumed: str


@dataclass(frozen=True, kw_only=True)
class ColumnResult:
    """One column of a comparison: how many (step, rank) cells were compared, how many differ, the first of those."""

    name: str
    compared: int
    different: int
    first: Divergence | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two trajectories compared bit for bit, on every rank from ``first_step`` to ``last_step``.

    ``unmoved_streams`` are random streams that never moved in the reference: whether they were restored can't be seen.
    """

    first_step: int
    last_step: int
    ranks: int
    columns: tuple[ColumnResult, ...]
    divergence: Divergence | None
    unmoved_streams: tuple[str, ...]

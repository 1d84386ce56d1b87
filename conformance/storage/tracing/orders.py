"""The orders in which several ranks may have made their operations, as their collectives allow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from conformance.storage.tracing.history import Operation, TraceError
from conformance.storage.tracing.recorder import ENTER, LEAVE, RankTrace


def orders(traces: Sequence[RankTrace]) -> dict[str, tuple[Operation, ...]]:
    """Possible orders of the ranks' operations, by name; equal ones are given once.

    They are: each rank as far ahead of the others as the collectives allow, the ranks in turn, and as recorded.
    """
    found = {f"rank{ahead}_first": _merge(traces, functools.partial(_prefer, ahead)) for ahead in range(len(traces))}
    turn = iter(range(1 << 30))
    found["in_turn"] = _merge(traces, lambda ready: ready[next(turn) % len(ready)])
    # Last, because the next run may record another order.
    found["recorded"] = tuple(sorted((one for trace in traces for one in trace.operations), key=lambda one: one.number))
    seen: dict[tuple[int, ...], str] = {}
    for name, order in found.items():
        seen.setdefault(tuple(one.number for one in order if not is_collective(one)), name)
    return {name: found[name] for name in seen.values()}


def _prefer(ahead: int, ready: list[int]) -> int:
    return ahead if ahead in ready else ready[0]


def is_collective(one: Operation) -> bool:
    """True for a mark of a collective, which matters for the order only."""
    return one.kind == "mark" and one.path.startswith((ENTER, LEAVE))


def _merge(traces: Sequence[RankTrace], choose: Callable[[list[int]], int]) -> tuple[Operation, ...]:
    at = [0] * len(traces)
    entered: dict[str, set[int]] = {}
    order: list[Operation] = []
    while True:
        ready = [
            rank
            for rank, trace in enumerate(traces)
            if at[rank] < len(trace.operations) and _may_go(trace.operations[at[rank]], rank, entered, len(traces))
        ]
        if not ready:
            break
        rank = choose(ready)
        one = traces[rank].operations[at[rank]]
        at[rank] += 1
        order.append(one)
        if one.kind == "mark" and one.path.startswith(ENTER):
            entered.setdefault(one.path.removeprefix(ENTER), set()).add(rank)
    if any(position < len(trace.operations) for position, trace in zip(at, traces, strict=True)):
        raise TraceError("the ranks' collectives do not match")
    return tuple(order)


def _may_go(one: Operation, rank: int, entered: dict[str, set[int]], world_size: int) -> bool:
    if one.kind != "mark" or not one.path.startswith(LEAVE):
        return True
    call = one.path.removeprefix(LEAVE)
    _, waits, root = call.rsplit(" ", 2)
    there = entered.get(call, set())
    if waits == "src":
        return int(root) in there
    return (waits == "dst" and rank != int(root)) or len(there) == world_size

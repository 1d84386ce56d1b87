"""Asynchronous saves: how long training is blocked, how long until the save is durable, and how much memory it takes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.contenders import async_peers, limits, ours, states
from benchmarks.measuring import memory
from benchmarks.protocol import (
    GB,
    PAYLOAD,
    Benchmark,
    Contender,
    Context,
    Figure,
    Point,
    Scenario,
    compared,
    size_points,
)
from benchmarks.subjects.save import check_through_stock, deleting

MEMCPY = "memcpy"


def build(point: Point, context: Context) -> Scenario:
    """The timed call is the one that blocks training. Its background work ends before the next contender starts."""
    layout = states.large(point.value * GB)
    state, room = layout.state(), states.State()
    library = ours.Ours(context.folder / "ours")
    others, absent, close_others = async_peers.async_peers(layout.bytes_in_all, memory.available_bytes())
    contenders = [
        Contender(
            name=MEMCPY,
            role="limit",
            prepare=lambda: room.update(layout.zeros()),
            before=lambda: states.poison(room),
            call=lambda: limits.copy(state, room),
            check=lambda _: states.check_equal(room, layout),
            note="torch's copy_ into memory whose pages are mapped already",
        ),
        Contender(
            name=ours.ASYNC,
            role="ours",
            before=library.forget_step,
            call=lambda: library.save_async(state),
            settle=library.wait,
            check=lambda _: check_through_stock(library.newest(), layout),
            is_weighed=True,
            note="durable means committed, and found as LATEST after a power cut",
        ),
        *(_peer(peer, state, layout, context.folder / f"peer_{place}") for place, peer in enumerate(others)),
    ]

    return Scenario(
        payload_bytes=layout.bytes_in_all, contenders=contenders, figures=_figures(), absent=absent, close=close_others
    )


def _peer(peer: async_peers.AsyncPeer, state: states.State, layout: states.Layout, path: Path) -> Contender:
    return Contender(
        name=peer.name,
        role="peer",
        before=deleting(path),
        call=lambda: peer.save(state, path),
        settle=peer.wait,
        check=lambda _: states.check_equal(peer.load(path, layout.zeros()), layout),
        is_weighed=True,
        note=peer.note,
    )


def _figures() -> list[Figure]:
    others = (async_peers.STOCK, async_peers.STOCK_CACHED, async_peers.CHECKPOINTING)
    return [
        Figure(
            text="blocking time of an async save / one memcpy",
            above=(ours.ASYNC,),
            below=MEMCPY,
            relation="at most",
            bound=1.2,
        ),
        Figure(
            text="peak extra memory of an async save / payload (5% allowed for non-tensor data)",
            above=(ours.ASYNC,),
            below=PAYLOAD,
            quantity="peak_bytes",
            relation="at most",
            bound=2.05,
        ),
        *compared(ours.ASYNC, others, "blocking time"),
        *compared(ours.ASYNC, others, "time to durable", "settled_seconds"),
    ]


BENCHMARK = Benchmark(name="async", title="Asynchronous save", points=size_points, build=build)

"""Loading large tensors from a warm page cache with digests verified, compared with a raw read and with other libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.contenders import limits, ours, peers, states
from benchmarks.protocol import (
    GB,
    PAYLOAD,
    Benchmark,
    Contender,
    Context,
    Figure,
    Point,
    Role,
    Scenario,
    compared,
    size_points,
)

RAW = "raw readinto"


def build(point: Point, context: Context) -> Scenario:
    """Each contender loads what it saved. Before each call its files are read once, and the target is overwritten."""
    layout = states.large(point.value * GB)
    target = layout.zeros()
    library = ours.Ours(context.folder / "ours")
    found, absent = peers.peers()
    contenders = [
        _raw(layout, target, context.folder / "raw"),
        _contender(
            ours.LOAD,
            "ours",
            layout,
            target,
            save=lambda state: library.save(state),
            path=library.newest,
            load=lambda: library.load(target),
            is_weighed=True,
        ),
        *(_peer(peer, layout, target, context.folder / f"peer_{place}") for place, peer in enumerate(found)),
    ]
    return Scenario(
        payload_bytes=layout.bytes_in_all,
        contenders=contenders,
        figures=[
            Figure(
                text="load speed / raw read speed",
                above=(RAW,),
                below=ours.LOAD,
                relation="at least",
                # A load copies every byte once, as a raw read does; the tenth is for verification and metadata.
                bound=0.9,
            ),
            Figure(
                text="peak extra memory of a load / payload (5% allowed for non-tensor data)",
                above=(ours.LOAD,),
                below=PAYLOAD,
                quantity="peak_bytes",
                relation="at most",
                bound=1.05,
            ),
            *compared(ours.LOAD, [peer.load_name for peer in found], "load"),
        ],
        absent=absent,
    )


def _raw(layout: states.Layout, target: states.State, folder: Path) -> Contender:
    views = states.memory_of(target)

    def load() -> states.State:
        limits.read(folder / "payload", views)
        return target

    return _contender(
        RAW,
        "limit",
        layout,
        target,
        save=lambda state: limits.write(states.memory_of(state), folder, []),
        path=lambda: folder,
        load=load,
        note="one file, into existing tensors",
    )


def _peer(peer: peers.Peer, layout: states.Layout, target: states.State, path: Path) -> Contender:
    return _contender(
        peer.load_name,
        "peer",
        layout,
        target,
        save=lambda state: peer.save(state, path),
        path=lambda: path,
        load=lambda: peer.load(path, target),
        is_weighed=peer.load_name == peers.STOCK_LOAD,
        note=peer.load_note,
    )


def _contender(
    name: str,
    role: Role,
    layout: states.Layout,
    target: states.State,
    *,
    save: Callable[[states.State], None],
    path: Callable[[], Path],
    load: Callable[[], states.State],
    is_weighed: bool = False,
    note: str = "",
) -> Contender:
    def before() -> None:
        limits.page_in(path())
        states.poison(target)

    return Contender(
        name=name,
        role=role,
        # The saved state is freed after the save.
        prepare=lambda: save(layout.state()),
        before=before,
        call=load,
        check=lambda found: states.check_equal(found, layout),
        is_weighed=is_weighed,
        note=note,
    )


BENCHMARK = Benchmark(name="load", title="Load of large tensors, warm cache", points=size_points, build=build)

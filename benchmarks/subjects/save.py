"""Saving large tensors: fsync and digests on, against a raw write of the same bytes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contenders import limits, ours, peers, states
from benchmarks.protocol import (
    GB,
    PAYLOAD,
    Benchmark,
    BenchmarkError,
    Contender,
    Context,
    Figure,
    Point,
    Scenario,
    compared,
    size_points,
)

RAW = "raw write + fsync"


def build(point: Point, context: Context) -> Scenario:
    """Everything below one folder; what a contender wrote is deleted before its next turn."""
    layout = states.large(point.value * GB)
    state = layout.state()
    library = ours.Ours(context.folder / "ours")
    found, absent = peers.peers()
    contenders = [
        _raw(state, library, context.folder / "raw"),
        Contender(
            name=ours.SAVE,
            role="ours",
            before=library.forget_step,
            call=lambda: library.save(state),
            check=lambda _: check_through_stock(library.newest(), layout),
            stored=library.newest,
            is_weighed=True,
        ),
        *(_peer(peer, state, layout, context.folder / f"peer_{place}") for place, peer in enumerate(found)),
    ]
    return Scenario(
        payload_bytes=layout.bytes_in_all,
        contenders=contenders,
        figures=[
            Figure(
                text="speed of a save, of a raw write's",
                above=(RAW,),
                below=ours.SAVE,
                relation="at least",
                bound=0.90,
            ),
            Figure(
                text="peak extra memory of a save, in payloads (5% for what is no tensor)",
                above=(ours.SAVE,),
                below=PAYLOAD,
                quantity="peak_bytes",
                relation="at most",
                bound=1.05,
            ),
            *compared(ours.SAVE, [peer.save_name for peer in found], "save"),
        ],
        absent=absent,
    )


def _raw(state: states.State, library: ours.Ours, folder: Path) -> Contender:
    """In as many files as the library's save, of which all but the largest are small and have no tensor in them."""
    views = states.memory_of(state)
    others: list[int] = []

    def look_at_files() -> None:
        library.save(state)
        others.extend(library.other_files())

    def check(_: Any) -> None:
        if (folder / "payload").stat().st_size != sum(map(len, views)):
            raise BenchmarkError("the raw write did not write all bytes")

    return Contender(
        name=RAW,
        role="limit",
        prepare=look_at_files,
        before=deleting(folder),
        call=lambda: limits.write(views, folder, others),
        check=check,
        stored=lambda: folder,
        note="the payload in one file, zeros in as many more as a save has; each fsynced, and the folder",
    )


def _peer(peer: peers.Peer, state: states.State, layout: states.Layout, path: Path) -> Contender:
    return Contender(
        name=peer.save_name,
        role="peer",
        before=deleting(path),
        call=lambda: peer.save(state, path),
        check=lambda _: states.check_equal(peer.load(path, layout.zeros()), layout),
        stored=lambda: path,
        is_weighed=peer.save_name == peers.STOCK_SAVE,
        note=peer.save_note,
    )


def check_through_stock(directory: Path, layout: states.Layout) -> None:
    """Load with stock DCP what the library saved.

    Raises:
        BenchmarkError: it is not what was saved.
    """
    states.check_equal(peers.stock_load(directory, layout.zeros()), layout)


def deleting(path: Path) -> Callable[[], None]:
    """A callable that deletes ``path`` and brings everything that waits to be written to the device."""

    def delete() -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        os.sync()

    return delete


BENCHMARK = Benchmark(name="save", title="Save of large tensors", points=size_points, build=build)

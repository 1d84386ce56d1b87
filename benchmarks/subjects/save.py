"""Saving large tensors with fsync and digests, compared with a raw write of the same bytes and with other libraries."""

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
    """All contenders write below one folder. The files of a contender are deleted before its next call."""
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
                text="save speed / raw write speed",
                above=(RAW,),
                below=ours.SAVE,
                relation="at least",
                bound=0.90,
            ),
            Figure(
                text="peak extra memory of a save / payload (5% allowed for non-tensor data)",
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
    """Write as many files as the library does: one with the payload, the others as small as its files without tensors."""
    views = states.memory_of(state)
    others: list[int] = []

    def measure_files() -> None:
        library.save(state)
        others.extend(library.other_files())

    def check(_: Any) -> None:
        if (folder / "payload").stat().st_size != sum(map(len, views)):
            raise BenchmarkError("the raw write did not write all bytes")

    return Contender(
        name=RAW,
        role="limit",
        prepare=measure_files,
        before=deleting(folder),
        call=lambda: limits.write(views, folder, others),
        check=check,
        stored=lambda: folder,
        note="the payload in one file, and zeros in as many other files as a save has; every file and the folder are fsynced",
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
    """Load with stock DCP what the library saved, and compare it.

    Raises:
        BenchmarkError: the tensors differ from the saved ones.
    """
    states.check_equal(peers.stock_load(directory, layout.zeros()), layout)


def deleting(path: Path) -> Callable[[], None]:
    """Return a callable that deletes ``path`` and writes all dirty pages to the device."""

    def delete() -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        os.sync()

    return delete


BENCHMARK = Benchmark(name="save", title="Save of large tensors", points=size_points, build=build)

"""Saving and loading on several ranks: one process per rank, in a gloo group on the loopback interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.contenders import limits, ours, peers, states
from benchmarks.protocol import GB, Benchmark, Contender, Context, Figure, Options, Point, Scenario, compared
from benchmarks.subjects.load import RAW as RAW_READ
from benchmarks.subjects.save import RAW as RAW_WRITE
from benchmarks.subjects.save import deleting


def points(options: Options) -> Sequence[Point]:
    """One point per world size of the run. The ranks share the smallest payload of the run."""
    size = min(options.sizes_gb)
    return [
        Point(
            label=f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {size:g} GB in all",
            axis="ranks",
            value=ranks,
            ranks=ranks,
        )
        for ranks in options.ranks
    ]


def build(point: Point, context: Context) -> Scenario:
    """Every tensor is sharded along its rows over all ranks. The time is that of the slowest rank."""
    whole = states.large(min(context.options.sizes_gb) * GB)
    # The world size divides the number of rows, so all ranks have the same work.
    rows = max(1, whole.shape[0] // context.world_size) * context.world_size
    layout = replace(whole, shape=(rows, *whole.shape[1:]))
    mesh = init_device_mesh("cpu", (context.world_size,))
    state, target = states.sharded(layout, mesh), states.sharded(layout, mesh)
    library, stock = ours.Ours(context.folder / "ours"), context.folder / "stock"
    loaded, loaded_stock = ours.Ours(context.folder / "loaded"), context.folder / "loaded_stock"

    def check(found: states.State) -> None:
        states.check_equal(found, layout, part=mesh)

    return Scenario(
        payload_bytes=layout.bytes_in_all // context.world_size,
        contenders=[
            *_limits(state, target, context, check),
            Contender(
                name=ours.SAVE,
                role="ours",
                before=library.forget_step,
                call=lambda: library.save(state),
                check=lambda _: check(library.load(states.sharded(layout, mesh))),
            ),
            Contender(
                name=peers.STOCK_SAVE,
                role="peer",
                before=on_first_rank(deleting(stock)),
                call=lambda: peers.stock_save(state, stock),
                check=lambda _: check(peers.stock_load(stock, states.sharded(layout, mesh))),
            ),
            Contender(
                name=ours.LOAD,
                role="ours",
                prepare=lambda: loaded.save(state),
                before=lambda: states.poison(target),
                call=lambda: loaded.load(target),
                check=check,
            ),
            Contender(
                name=peers.STOCK_LOAD,
                role="peer",
                prepare=lambda: peers.stock_save(state, loaded_stock),
                before=lambda: states.poison(target),
                call=lambda: peers.stock_load(loaded_stock, target),
                check=check,
            ),
        ],
        figures=figures(),
    )


def figures() -> list[Figure]:
    """What is compared at each world size."""
    return [
        *compared(ours.SAVE, [peers.STOCK_SAVE], "save"),
        *compared(ours.LOAD, [peers.STOCK_LOAD], "load"),
        Figure(text="save speed / raw write speed of as many ranks", above=(RAW_WRITE,), below=ours.SAVE),
        Figure(text="load speed / raw read speed of as many ranks", above=(RAW_READ,), below=ours.LOAD),
    ]


def _limits(
    state: states.State, target: states.State, context: Context, check: Callable[[states.State], None]
) -> list[Contender]:
    written, kept = context.folder / f"raw_{context.rank}", context.folder / f"raw_kept_{context.rank}"
    views, room = states.memory_of(state), states.memory_of(target)
    return [
        Contender(
            name=RAW_WRITE,
            role="limit",
            before=deleting(written),
            call=lambda: limits.write(views, written, []),
            note="one file per rank",
        ),
        Contender(
            name=RAW_READ,
            role="limit",
            prepare=lambda: limits.write(views, kept, []),
            before=lambda: states.poison(target),
            call=lambda: _read(kept / "payload", room, target),
            check=check,
            note="one file per rank",
        ),
    ]


def _read(path: Path, room: Sequence[memoryview], target: states.State) -> states.State:
    limits.read(path, room)
    return target


def on_first_rank(action: Callable[[], None]) -> Callable[[], None]:
    """Run ``action`` on rank 0 only. The other ranks wait at the barrier of the round."""
    return lambda: action() if dist.get_rank() == 0 else None


BENCHMARK = Benchmark(name="ranks", title="Several ranks", points=points, build=build)

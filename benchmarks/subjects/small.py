"""Very many very small tensors: the cost per tensor, in time and in bytes on disk."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.contenders import limits, ours, peers, states
from benchmarks.protocol import PAYLOAD, Benchmark, Contender, Context, Figure, Options, Point, Scenario
from benchmarks.subjects.save import RAW, check_through_stock, deleting

_COUNT, _SMOKE_COUNT = 20_000, 500


def points(options: Options) -> Sequence[Point]:
    """One point: 20,000 tensors."""
    count = _SMOKE_COUNT if options.smoke else _COUNT
    return [Point(label=f"{count:,} tensors", axis="tensors", value=count)]


def build(point: Point, context: Context) -> Scenario:
    """Saves and loads are interleaved. Loads read a checkpoint that was saved once, before the first round."""
    layout = states.small(int(point.value))
    state, target = layout.state(), layout.zeros()
    contenders = [
        *_limits(state, context),
        *_saves(state, layout, context),
        *_loads(state, target, layout, context),
    ]
    return Scenario(payload_bytes=layout.bytes_in_all, contenders=contenders, figures=_figures())


def _limits(state: states.State, context: Context) -> list[Contender]:
    folder = context.folder / "raw"
    views = states.memory_of(state)
    return [
        Contender(
            name=RAW,
            role="limit",
            before=deleting(folder),
            call=lambda: limits.write(views, folder, []),
            stored=lambda: folder,
            note="one file",
        )
    ]


def _saves(state: states.State, layout: states.Layout, context: Context) -> list[Contender]:
    first, again = ours.Ours(context.folder / "first"), ours.Ours(context.folder / "again")
    stock = context.folder / "stock"

    def save_once() -> None:
        # `first.forget_everything` clears the plans of the whole process, so this layout is planned again here.
        again.save(state)
        again.forget_step()

    return [
        Contender(
            name=ours.SAVE,
            role="ours",
            before=first.forget_everything,
            call=lambda: first.save(state),
            check=lambda _: check_through_stock(first.newest(), layout),
            stored=first.newest,
            is_weighed=True,
            note="the first save of a layout",
        ),
        Contender(
            name=ours.SAVE_AGAIN,
            role="ours",
            before=save_once,
            call=lambda: again.save(state),
            check=lambda _: check_through_stock(again.newest(), layout),
            stored=again.newest,
        ),
        Contender(
            name=peers.STOCK_SAVE,
            role="peer",
            before=deleting(stock),
            call=lambda: peers.stock_save(state, stock),
            check=lambda _: check_through_stock(stock, layout),
            stored=lambda: stock,
        ),
    ]


def _loads(state: states.State, target: states.State, layout: states.Layout, context: Context) -> list[Contender]:
    library, stock = ours.Ours(context.folder / "loaded_ours"), context.folder / "loaded_stock"
    return [
        Contender(
            name=ours.LOAD,
            role="ours",
            prepare=lambda: library.save(state),
            before=lambda: states.poison(target),
            call=lambda: library.load(target),
            check=lambda found: states.check_equal(found, layout),
        ),
        Contender(
            name=peers.STOCK_LOAD,
            role="peer",
            prepare=lambda: peers.stock_save(state, stock),
            before=lambda: states.poison(target),
            call=lambda: peers.stock_load(stock, target),
            check=lambda found: states.check_equal(found, layout),
        ),
    ]


def _figures() -> list[Figure]:
    def faster(what: str, stock: str, mine: str, bound: float) -> Figure:
        return Figure(
            text=f"{what}: speedup over stock DCP", above=(stock,), below=mine, relation="at least", bound=bound
        )

    def size(what: str, name: str) -> Figure:
        return Figure(text=f"bytes on disk of {what} / payload", above=(name,), below=PAYLOAD, quantity="disk_bytes")

    return [
        faster("first save", peers.STOCK_SAVE, ours.SAVE, 5.0),
        faster("next save of an unchanged layout", peers.STOCK_SAVE, ours.SAVE_AGAIN, 8.0),
        faster("load", peers.STOCK_LOAD, ours.LOAD, 10.0),
        Figure(text="first save speed / raw write speed", above=(RAW,), below=ours.SAVE),
        size("a save", ours.SAVE),
        size("a save by stock DCP", peers.STOCK_SAVE),
    ]


BENCHMARK = Benchmark(name="small", title="20,000 small tensors", points=points, build=build)

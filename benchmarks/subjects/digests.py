"""What digests and verification add to a save and to a load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from benchmarks.contenders import library_internals, limits, ours, states
from benchmarks.protocol import GB, Benchmark, Contender, Context, Figure, Options, Point, Scenario, size_points
from hyper_resume import digest

ONE_PASS = "one xxh3 pass"
SAVE_WITHOUT = "hyper_resume save without digests"
LOAD_WITHOUT = "hyper_resume load without digests"
# Shares of the whole time. A share s of the whole makes the rest 1 / (1 - s) times as long.
_SHARE_OF_SAVE, _SHARE_OF_LOAD = 0.05, 0.15


def points(options: Options) -> Sequence[Point]:
    """The largest of the run's sizes."""
    return [max(size_points(options), key=lambda point: point.value)]


def build(point: Point, context: Context) -> Scenario:
    """Compare the whole save and the whole load with and without digests: hashing that overlaps a write costs no time."""
    layout = states.large(point.value * GB)
    state, target = layout.state(), layout.zeros()
    saving, loading, by_size, *without = (
        ours.Ours(context.folder / "saved"),
        ours.Ours(context.folder / "loaded"),
        ours.Ours(context.folder / "by_size", verify="size"),
        ours.Ours(context.folder / "saved_without"),
        ours.Ours(context.folder / "loaded_without"),
    )
    return Scenario(
        payload_bytes=layout.bytes_in_all,
        contenders=[
            Contender(name=ONE_PASS, role="limit", call=lambda: digest.bytes_digest_text(states.memory_of(state))),
            _save(ours.SAVE, saving, state, nullcontext),
            _save(SAVE_WITHOUT, without[0], state, library_internals.without_digests),
            _load(ours.LOAD, loading, state, target, layout, nullcontext),
            _load(LOAD_WITHOUT, without[1], state, target, layout, library_internals.without_digests),
            _load(ours.LOAD_SIZES, by_size, state, target, layout, nullcontext),
        ],
        figures=[
            Figure(
                text="save time with digests / without (digests at most 5% of the save)",
                above=(ours.SAVE,),
                below=SAVE_WITHOUT,
                relation="at most",
                bound=round(1 / (1 - _SHARE_OF_SAVE), 3),
            ),
            Figure(
                text="load time with digests / without (digests at most 15% of the load)",
                above=(ours.LOAD,),
                below=LOAD_WITHOUT,
                relation="at most",
                bound=round(1 / (1 - _SHARE_OF_LOAD), 3),
            ),
            Figure(
                text="load time with verify=digest / with verify=size",
                above=(ours.LOAD,),
                below=ours.LOAD_SIZES,
            ),
            Figure(text="load time / one xxh3 pass", above=(ours.LOAD,), below=ONE_PASS),
        ],
    )


_Context = Callable[[], AbstractContextManager[None]]


def _save(name: str, library: ours.Ours, state: states.State, how: _Context) -> Contender:
    def call() -> None:
        with how():
            library.save(state)

    return Contender(name=name, role="ours", before=library.forget_step, call=call)


def _load(
    name: str,
    library: ours.Ours,
    state: states.State,
    target: states.State,
    layout: states.Layout,
    how: _Context,
) -> Contender:
    def prepare() -> None:
        with how():
            library.save(state)

    def before() -> None:
        limits.page_in(library.newest())
        states.poison(target)

    def call() -> states.State:
        with how():
            return library.load(target)

    return Contender(
        name=name,
        role="ours",
        prepare=prepare,
        before=before,
        call=call,
        check=lambda found: states.check_equal(found, layout),
    )


BENCHMARK = Benchmark(name="digests", title="Cost of digests and verification", points=points, build=build)

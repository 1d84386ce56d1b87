"""What digests and verification cost of a save and of a load."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import limits, ours, seams, states
from benchmarks.protocol import GB, Benchmark, Contender, Context, Figure, Options, Point, Scenario, size_points
from hyper_resume import digest

ONE_PASS = "one xxh3 pass"
OF_SAVE = "digests of a save"
OF_LOAD = "digests of a load"


def points(options: Options) -> Sequence[Point]:
    """The largest of the run's sizes."""
    return [max(size_points(options), key=lambda point: point.value)]


def build(point: Point, context: Context) -> Scenario:
    """Digests alone, beside the whole save and the whole load that they are a share of."""
    layout = states.large(point.value * GB)
    state, target = layout.state(), layout.zeros()
    saving, loading = ours.Ours(context.folder / "saved"), ours.Ours(context.folder / "loaded")
    by_size = ours.Ours(context.folder / "by_size", verify="size")
    return Scenario(
        payload_bytes=layout.bytes_in_all,
        contenders=[
            Contender(name=ONE_PASS, role="limit", call=lambda: digest.digest_bytes(states.memory_of(state))),
            Contender(name=OF_SAVE, role="ours", call=lambda: seams.digests_of_save(state)),
            Contender(name=OF_LOAD, role="ours", call=lambda: seams.digests_of_load(state)),
            Contender(name=ours.SAVE, role="ours", before=saving.forget_step, call=lambda: saving.save(state)),
            _load(ours.LOAD, loading, state, target, layout),
            _load(ours.LOAD_SIZES, by_size, state, target, layout),
        ],
        figures=[
            Figure(
                text="share of digests in a save", above=(OF_SAVE,), below=ours.SAVE, relation="at most", bound=0.05
            ),
            Figure(
                text="share of digests in a load", above=(OF_LOAD,), below=ours.LOAD, relation="at most", bound=0.15
            ),
            Figure(
                text="a load with verify=digest, times as long as with verify=size",
                above=(ours.LOAD,),
                below=ours.LOAD_SIZES,
            ),
            Figure(text="passes of xxh3 that a save's digests amount to", above=(OF_SAVE,), below=ONE_PASS),
        ],
    )


def _load(name: str, library: ours.Ours, state: states.State, target: states.State, layout: states.Layout) -> Contender:
    def before() -> None:
        limits.page_in(library.newest())
        states.poison(target)

    return Contender(
        name=name,
        role="ours",
        prepare=lambda: library.save(state),
        before=before,
        call=lambda: library.load(target),
        check=lambda found: states.check_equal(found, layout),
    )


BENCHMARK = Benchmark(name="digests", title="Share of digests and verification", points=points, build=build)

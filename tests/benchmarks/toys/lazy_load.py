"""A load that restores nothing, and would be the fastest of all."""

from benchmarks.contenders import states
from benchmarks.protocol import UNIT, Benchmark, Contender, Context, Figure, Options, Point, Scenario


def points(options: Options) -> list[Point]:
    return [Point(label="here", axis="nothing", value=1.0)]


def build(point: Point, context: Context) -> Scenario:
    layout = states.small(3)
    target = layout.zeros()
    lazy = Contender(
        name="lazy", role="ours", call=lambda: target, check=lambda found: states.check_equal(found, layout)
    )
    figure = Figure(text="how lazy", above=("lazy",), below=UNIT, relation="at most", bound=1.0)
    return Scenario(payload_bytes=layout.bytes_in_all, contenders=[lazy], figures=[figure])


BENCHMARK = Benchmark(name="tests.benchmarks.toys.lazy_load", title="Lazy", points=points, build=build)

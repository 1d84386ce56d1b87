"""A benchmark whose contender raises."""

from benchmarks.protocol import Benchmark, Contender, Context, Options, Point, Scenario


def call() -> None:
    raise RuntimeError("this contender was made to break")


def points(options: Options) -> list[Point]:
    return [Point(label="here", axis="nothing", value=1.0)]


def build(point: Point, context: Context) -> Scenario:
    return Scenario(payload_bytes=1, contenders=[Contender(name="breaks", role="ours", call=call)], figures=[])


BENCHMARK = Benchmark(name="tests.benchmarks.toys.raises", title="Raises", points=points, build=build)

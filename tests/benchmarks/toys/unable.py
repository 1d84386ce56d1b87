"""A benchmark that this machine can't measure at one point, and that misses its goal at the other."""

from benchmarks.protocol import UNIT, Benchmark, Contender, Context, Figure, Options, Point, Scenario, UnableError


def points(options: Options) -> list[Point]:
    return [Point(label=label, axis="size", value=value) for label, value in (("small", 1.0), ("huge", 2.0))]


def build(point: Point, context: Context) -> Scenario:
    if point.label == "huge":
        raise UnableError("needs more memory than there is")
    figure = Figure(text="no time at all", above=("quick",), below=UNIT, relation="at most", bound=0.0)
    absent = {"another": "another is not installed"}
    # 32 MiB of pages that are written to, and given back at once.
    quick = Contender(name="quick", role="ours", call=lambda: bytearray(b"x" * (1 << 24)), is_weighed=True)
    return Scenario(payload_bytes=1, contenders=[quick], figures=[figure], absent=absent)


BENCHMARK = Benchmark(name="tests.benchmarks.toys.unable", title="Unable", points=points, build=build)

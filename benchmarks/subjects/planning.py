"""What planning a save costs on rank 0, by world size. The other ranks are simulated."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.contenders import coordinator, library_internals
from benchmarks.measuring import memory
from benchmarks.protocol import (
    Benchmark,
    BenchmarkError,
    Contender,
    Context,
    Figure,
    Options,
    Point,
    Scenario,
    UnableError,
)
from benchmarks.subjects.save import deleting

STOCK = "stock DCP, every save"
OURS = "hyper_resume, second save"
_TENSORS = 500
# With more ranks a round takes minutes. These points are measured once, for the curve.
_MOST_RANKS_REPEATED = 1024
_GOAL_RANKS = 1024
# Plans, results and metadata of one entry, measured at 256 ranks and rounded up.
_BYTES_AN_ENTRY = 2_000


def points(options: Options) -> Sequence[Point]:
    """One point per simulated world size of the run."""
    return [
        Point(
            label=f"{world:,} ranks x {_TENSORS} tensors",
            axis="simulated ranks",
            value=world,
            rounds=None if world <= _MOST_RANKS_REPEATED else 1,
            warm_up=False,
        )
        for world in options.worlds
    ]


def build(point: Point, context: Context) -> Scenario:
    """The plans of all ranks are made in advance. Timed is the work of rank 0 with them.

    Raises:
        UnableError: there is not enough memory for the plans of so many ranks.
    """
    world = int(point.value)
    needed = world * _TENSORS * _BYTES_AN_ENTRY
    if needed > memory.available_bytes():
        raise UnableError(f"needs about {needed / 1e9:.1f} GB of memory, {memory.available_bytes() / 1e9:.1f} are free")
    plans = coordinator.local_plans(world, _TENSORS)
    results = coordinator.local_results(plans)
    for name in ("stock", "ours"):
        (context.folder / name).mkdir()
    is_goal = world == _GOAL_RANKS
    return Scenario(
        payload_bytes=0,
        contenders=[
            Contender(
                name=STOCK,
                role="peer",
                call=lambda: coordinator.plan_and_close(plans, results, context.folder / "stock"),
                check=lambda planned: _check(planned, world),
                note="global plan, merge of the results, .metadata written; without gather and scatter",
            ),
            Contender(
                name=OURS,
                role="ours",
                # Stock DCP overwrites its own files. Keeping ours would fill the page cache, round by round.
                before=deleting(context.folder / "ours"),
                call=library_internals.plan_second_save(plans, results, context.folder / "ours"),
                note="the same layout as in the save before",
            ),
        ],
        figures=[
            Figure(
                text="planning time of the second save / planning time of stock DCP",
                above=(OURS,),
                below=STOCK,
                relation="at most" if is_goal else None,
                bound=0.01 if is_goal else None,
            )
        ],
    )


def _check(planned: int, world: int) -> None:
    if planned != world * _TENSORS:
        raise BenchmarkError(f"{planned} entries were planned, of {world * _TENSORS}")


BENCHMARK = Benchmark(name="planning", title="Planning of a save by rank 0", points=points, build=build, growth=True)

"""What one record per step costs, without and with digests of model, optimizer and random streams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.contenders import small_training
from benchmarks.contenders.sliced import Collate, Loops
from benchmarks.contenders.small_training import LAYERS, Numbers
from benchmarks.protocol import Benchmark, BenchmarkError, Contender, Context, Figure, Options, Point, Scenario
from hyper_resume.config import TrajectoryConfig

NO_RECORDS = "trainer without records"
RECORDS = "trainer with trajectory.dir"
DIGESTS = "trainer with trajectory.dir and trajectory.digests"
# Width -> samples per batch, steps per slice, rounds. The parameters and moments of the narrow model stay in the cache; those
# of the wide one take 76 MB.
_TINY, _NARROW, _WIDE = 8, 160, 1256
_SHAPES = {_TINY: (8, 2, 3), _NARROW: (128, 10, 100), _WIDE: (128, 2, 20)}


def points(options: Options) -> Sequence[Point]:
    """A model that fits into the cache, and one that does not; with ``smoke`` a tiny one."""
    widths = (_TINY,) if options.smoke else (_NARROW, _WIDE)
    return [
        Point(
            label=f"{_state_bytes(width) / 1e6:.2g} MB of state",
            axis="width",
            value=width,
            rounds=_SHAPES[width][2] if options.smoke else max(options.repeat, _SHAPES[width][2]),
        )
        for width in widths
    ]


def _state_bytes(width: int) -> int:
    """Bytes of the model and of AdamW's two moments, as float32."""
    return 3 * 4 * sum(parameter.numel() for parameter in small_training.make_model(width).parameters())


def build(point: Point, context: Context) -> Scenario:
    """The same training three times. The number of records and their digests are verified at the end."""
    width = int(point.value)
    batch_size, steps, _ = _SHAPES[width]
    # One slice more for the warm-up round, and one batch after the last, where the loops are held.
    samples = ((point.rounds or 0) + 2) * steps * batch_size
    loops = Loops(lambda: small_training.make_model(width), steps)
    note = f"{LAYERS} layers of width {width}, batches of {batch_size}; slices of {steps} steps, on one thread"

    def contender(name: str, trajectory: TrajectoryConfig) -> Contender:
        def train(model: nn.Module, collate: Collate) -> None:
            small_training.train(model, Numbers(samples, width), batch_size, collate, trajectory)

        return loops.add(name, "limit" if name == NO_RECORDS else "ours", train, note)

    folders = {name: context.folder / name.replace(" ", "_") for name in (RECORDS, DIGESTS)}

    def close() -> None:
        loops.close()
        for name, folder in folders.items():
            _check_records(folder, loops.steps_of(name), has_digests=name == DIGESTS)

    contenders = [
        contender(NO_RECORDS, TrajectoryConfig()),
        contender(RECORDS, TrajectoryConfig(dir=str(folders[RECORDS]))),
        contender(DIGESTS, TrajectoryConfig(dir=str(folders[DIGESTS]), digests=True)),
    ]
    return Scenario(payload_bytes=_state_bytes(width), contenders=contenders, figures=_figures(), close=close)


def _check_records(folder: Path, steps: int, *, has_digests: bool) -> None:
    if steps == 0:
        return
    lines = (folder / "trajectory_rank_0.jsonl").read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    models = {record["digests"]["model"] for record in records if "digests" in record}
    if len(records) != steps or len(models) != (steps if has_digests else 0):
        raise BenchmarkError(f"{len(records)} records with {len(models)} digests of the model in {steps} steps")


def _figures() -> list[Figure]:
    return [
        Figure(text="step time with a record / without", above=(RECORDS,), below=NO_RECORDS),
        Figure(text="step time with a record and its digests / without", above=(DIGESTS,), below=NO_RECORDS),
        Figure(text="step time with a record and its digests / with a record only", above=(DIGESTS,), below=RECORDS),
    ]


BENCHMARK = Benchmark(name="trajectory", title="Records and digests per step", points=points, build=build)

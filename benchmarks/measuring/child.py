"""Measures one point of one benchmark in a separate process: ``python -m benchmarks.measuring.child``.

The outcome is written to a file, so that a library may print whatever it likes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.measuring import memory, registry
from benchmarks.measuring.measure import Alone, Timing, Together, measure, weigh
from benchmarks.protocol import Benchmark, Context, Options, Point, Scenario, UnableError
from benchmarks.reporting.records import MeasurementRecord
from conformance.plain_data import serial


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all contenders, or the peak memory of one, and write the outcome. An error ends the process with a traceback."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--benchmark", required=True)
    parser.add_argument("--point", type=int, required=True)
    parser.add_argument("--options", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weigh", default="")
    arguments = parser.parse_args(argv)
    options = serial.build(Options, json.loads(arguments.options), "--options")
    benchmark = registry.find(arguments.benchmark)
    point = benchmark.points(options)[arguments.point]
    rank = int(os.environ["RANK"]) if point.ranks else 0
    with _in_group(point, rank, arguments.folder) as together:
        folder = arguments.folder / "scenario"
        context = Context(options=options, folder=folder, rank=rank, world_size=point.ranks or 1)
        context.folder.mkdir(exist_ok=True)
        try:
            outcome = _outcome(benchmark, point, context, together, arguments.weigh)
        except UnableError as error:
            outcome = {"unable": str(error)}
        if rank == 0:
            arguments.out.write_text(json.dumps(outcome), encoding="utf-8")
        together.wait()
    return 0


def _outcome(benchmark: Benchmark, point: Point, context: Context, together: Together, weighed: str) -> dict[str, Any]:
    scenario = benchmark.build(point, context)
    try:
        if weighed:
            return {"peak_bytes": _weigh(scenario, weighed)}
        rounds = point.rounds or context.options.repeat
        timings = measure(scenario, rounds=rounds, warm_up=point.warm_up, together=together)
    finally:
        scenario.close()
    return {
        "measurements": [serial.to_plain(record) for record in _records(benchmark, point, scenario, timings)],
        "figures": [asdict(figure) for figure in scenario.figures],
        "absent": dict(scenario.absent),
        "weighed": [contender.name for contender in scenario.contenders if contender.is_weighed],
    }


def _weigh(scenario: Scenario, name: str) -> int:
    reason = memory.why_not()
    if reason:
        raise UnableError(reason)
    if name in scenario.absent:
        raise UnableError(scenario.absent[name])
    return weigh(next(contender for contender in scenario.contenders if contender.name == name))


def _records(
    benchmark: Benchmark, point: Point, scenario: Scenario, timings: Mapping[str, Timing]
) -> list[MeasurementRecord]:
    return [
        MeasurementRecord(
            benchmark=benchmark.name,
            point=point.label,
            axis=point.axis,
            place=point.value,
            contender=contender.name,
            role=contender.role,
            note=contender.note,
            payload_bytes=scenario.payload_bytes,
            seconds=timings[contender.name].seconds,
            settled_seconds=timings[contender.name].settled_seconds,
            disk_bytes=timings[contender.name].disk_bytes,
            peak_bytes=None,
            checked=timings[contender.name].checked,
        )
        for contender in scenario.contenders
    ]


@contextmanager
def _in_group(point: Point, rank: int, folder: Path) -> Iterator[Together]:
    """Join the process group of the point's ranks. A single process needs none, and does not import torch."""
    if point.ranks is None:
        yield Alone()
        return
    group = importlib.import_module("benchmarks.measuring.group")
    with group.joined(rank, point.ranks, folder / "rendezvous") as together:
        yield together


if __name__ == "__main__":
    sys.exit(main())

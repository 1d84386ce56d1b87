"""A run: measures every point of every benchmark in fresh processes, one after the other, and writes the records."""

from __future__ import annotations

import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring.launching import in_fresh_process
from benchmarks.protocol import Benchmark, BenchmarkError, Figure, Options, UnableError
from benchmarks.reporting import ratios
from benchmarks.reporting.records import (
    SCHEMA,
    AbsenceRecord,
    FailureRecord,
    FigureRecord,
    FooterRecord,
    GrowthRecord,
    HeaderRecord,
    MeasurementRecord,
    Record,
    RecordsWriter,
    Report,
)
from conformance.plain_data import serial
from conformance.records import provenance

_PACKAGES = ("hyper_resume", "numpy", "safetensors", "torch", "torchsnapshot", "torch_checkpointing", "xxhash")


def run(benchmarks: Sequence[Benchmark], options: Options, results: Path) -> Iterator[str | Report]:
    """Measure everything. Yields a progress line before each point, and the report at the end.

    Args:
        benchmarks: measured in this order.
        options: the options of the run.
        results: a folder on the measured disk, where ``records.jsonl`` is written.

    Raises:
        FileExistsError: ``results`` has records already.
    """
    started = time.perf_counter()
    writer = RecordsWriter(results, _header(benchmarks, options, results))
    found: list[Record] = []
    for benchmark in benchmarks:
        of_benchmark: list[Record] = []
        for index, point in enumerate(benchmark.points(options)):
            yield f"{benchmark.name}: {point.label} ..."
            records = list(_measure_point(benchmark, index, options, results))
            writer.write(records)
            of_benchmark += records
        growths = list(_growth(benchmark, of_benchmark))
        writer.write(growths)
        found += [*of_benchmark, *growths]
    yield writer.finish(FooterRecord(counts=_counts(found), seconds=time.perf_counter() - started))


def _measure_point(benchmark: Benchmark, index: int, options: Options, results: Path) -> Iterator[Record]:
    point = benchmark.points(options)[index]
    where = {"benchmark": benchmark.name, "point": point.label}
    try:
        outcome = in_fresh_process(benchmark.name, point, index, options, results)
    except UnableError as error:
        yield AbsenceRecord(**where, contender=None, reason=str(error))
        return
    except BenchmarkError as error:
        yield FailureRecord(**where, reason=str(error))
        return
    measured = {
        record.contender: record
        for record in (serial.build(MeasurementRecord, data, "outcome") for data in outcome["measurements"])
    }
    unweighed: list[Record] = []
    for name in outcome["weighed"]:
        try:
            peak = in_fresh_process(benchmark.name, point, index, options, results, weigh=name)["peak_bytes"]
            measured[name] = replace(measured[name], peak_bytes=peak)
        except UnableError as error:
            unweighed.append(AbsenceRecord(**where, contender=name, reason=f"peak memory: {error}"))
        except BenchmarkError as error:
            unweighed.append(FailureRecord(**where, reason=f"peak memory of {name}: {error}"))
    yield from measured.values()
    yield from unweighed
    yield from (AbsenceRecord(**where, contender=name, reason=reason) for name, reason in outcome["absent"].items())
    figures = [serial.build(Figure, data, "outcome") for data in outcome["figures"]]
    yield from (_figure(figure, measured, outcome["absent"], where) for figure in figures)


def _figure(
    figure: Figure, measured: Mapping[str, MeasurementRecord], absent: Mapping[str, str], where: Mapping[str, str]
) -> FigureRecord:
    missing = next((name for name in (*figure.above, figure.below) if name in absent), None)
    judged = ratios.judge(figure, measured, benchmark=where["benchmark"], point=where["point"])
    return judged if missing is None else replace(judged, reason=absent[missing])


def _growth(benchmark: Benchmark, records: Iterable[Record]) -> Iterator[GrowthRecord]:
    if not benchmark.growth:
        return
    by_contender: dict[str, list[MeasurementRecord]] = {}
    for record in records:
        if isinstance(record, MeasurementRecord):
            by_contender.setdefault(record.contender, []).append(record)
    for contender, found in by_contender.items():
        medians = [ratios.spread(record.seconds).median for record in found]
        if len({record.place for record in found}) > 1:
            yield GrowthRecord(
                benchmark=benchmark.name,
                contender=contender,
                axis=found[0].axis,
                points=tuple(record.point for record in found),
                exponent=ratios.exponent([record.place for record in found], medians),
            )


def _counts(records: Iterable[Record]) -> dict[str, int]:
    """Count measured points, failures, and goals by status."""
    counts: Counter[str] = Counter({"points": 0, "failures": 0, "met": 0, "not met": 0, "not measured": 0})
    points = set()
    for record in records:
        if isinstance(record, MeasurementRecord):
            points.add((record.benchmark, record.point))
        elif isinstance(record, FailureRecord):
            counts["failures"] += 1
        elif isinstance(record, FigureRecord) and record.status != "no goal":
            counts[record.status] += 1
    counts["points"] = len(points)
    return dict(counts)


def _header(benchmarks: Sequence[Benchmark], options: Options, results: Path) -> HeaderRecord:
    now = datetime.now(UTC)
    return HeaderRecord(
        schema=SCHEMA,
        run_id=now.strftime("%Y%m%d-%H%M%S"),
        smoke=options.smoke,
        benchmarks={benchmark.name: benchmark.title for benchmark in benchmarks},
        sizes_gb=options.sizes_gb,
        repeat=options.repeat,
        worlds=options.worlds,
        ranks=options.ranks,
        versions={"python": platform.python_version(), **_versions()},
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        machine=provenance.machine(results),
        threads=torch.get_num_threads(),
        packages_digest=provenance.packages_digest(),
        environment=provenance.settings(),
        source=provenance.source_version(),
        argv=tuple(sys.argv[1:]),
        started_at=now.isoformat(timespec="seconds"),
    )


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def as_options(found: Any) -> Options:
    """Return the options of parsed arguments. Defaults are smaller with ``--smoke``."""
    default = Options(smoke=True, sizes_gb=(0.02,), worlds=(64, 256), ranks=(1, 2)) if found.smoke else Options()
    return replace(
        default,
        sizes_gb=found.sizes or default.sizes_gb,
        worlds=found.worlds or default.worlds,
        ranks=found.ranks or default.ranks,
        repeat=found.repeat,
    )

"""Records made by hand."""

from __future__ import annotations

from typing import Any

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
    Report,
)


def measurement(contender: str, seconds: tuple[float, ...], **other: Any) -> MeasurementRecord:
    values: dict[str, Any] = {
        "benchmark": "save",
        "point": "1 GB",
        "axis": "payload in GB",
        "place": 1.0,
        "contender": contender,
        "role": "peer",
        "note": "",
        "payload_bytes": 10**9,
        "seconds": seconds,
        "settled_seconds": (),
        "disk_bytes": None,
        "peak_bytes": None,
        "checked": True,
    }
    return MeasurementRecord(**{**values, **other})


def header(**other: Any) -> HeaderRecord:
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "run_id": "20260102-030405",
        "smoke": False,
        "benchmarks": {"save": "Save of large tensors"},
        "sizes_gb": (1.0, 2.0),
        "repeat": 5,
        "worlds": (64,),
        "ranks": (1, 2),
        "versions": {"torch": "2"},
        "system": "Linux",
        "machine": {"cpu": "one", "cores": "2"},
        "threads": 1,
        "packages_digest": "00",
        "environment": {"OMP_NUM_THREADS": "1"},
        "source": "abc+",
        "argv": ("run",),
        "started_at": "2026-01-02T03:04:05+00:00",
    }
    return HeaderRecord(**{**values, **other})


def figure(**other: Any) -> FigureRecord:
    values: dict[str, Any] = {
        "benchmark": "save",
        "point": "1 GB",
        "text": "save speed / raw write speed",
        "quantity": "seconds",
        "above": ("raw",),
        "below": "ours",
        "median": 0.8765,
        "least": 0.7123,
        "most": 0.9456,
        "lower_quartile": 0.8012,
        "upper_quartile": 0.9034,
        "samples": 5,
        "relation": "at least",
        "bound": 0.9,
        "status": "not met",
        "reason": "",
    }
    return FigureRecord(**{**values, **other})


def report(*records: Record, counts: dict[str, int] | None = None, **of_header: Any) -> Report:
    counts = {"points": 1, "failures": 0, "met": 0, "not met": 0, "not measured": 0, **(counts or {})}
    return Report(header=header(**of_header), footer=FooterRecord(counts=counts, seconds=12.0), records=records)


def whole_report() -> Report:
    """One record of every kind."""
    return report(
        measurement("ours", (2.0, 4.0, 3.0), role="ours", disk_bytes=5, peak_bytes=7, settled_seconds=(5.0, 6.0, 7.0)),
        measurement("raw", (1.0, 2.0, 2.0), role="limit", note="nothing around it"),
        measurement("ours", (4.0, 5.0, 6.0), role="ours", point="2 GB", place=2.0, payload_bytes=2 * 10**9),
        figure(),
        GrowthRecord(
            benchmark="save", contender="ours", axis="payload in GB", points=("1 GB", "2 GB"), exponent=0.7369
        ),
        AbsenceRecord(benchmark="save", point="1 GB", contender="other", reason="other is not installed"),
        FailureRecord(benchmark="save", point="4 GB", reason="process 0 ended with 1"),
    )

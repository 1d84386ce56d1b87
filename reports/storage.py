"""What the storage work is to record, beside the results: ``storage.json``. Schema and strict reader; shown when there.

Everything that can be measured of a peer too has the peer's number beside it (``baseline``), measured in the same run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance import serial
from conformance.record import RecordError

STORAGE_SCHEMA = "hyper_resume.storage/1"
STORAGE_NAME = "storage.json"


@dataclass(frozen=True, kw_only=True)
class CrashStates:
    """States of the disk after a cut at any point of a protocol. ``violations`` is by oracle; ``baseline`` the peer's sum."""

    protocol: str
    states: int
    distinct: int
    violations: Mapping[str, int]
    baseline: int | None


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """One kind of damage: how often it was tried, refused, stepped around, or loaded as if nothing were wrong."""

    kind: str
    tried: int
    refused: int
    fell_back: int
    loaded_silently: int
    baseline: int | None


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change to the code. ``killed_by`` is the test that noticed, None where none did."""

    id: str
    title: str
    killed_by: str | None


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One measured number, and the peer's."""

    name: str
    unit: str
    value: float
    samples: int
    peer: str | None
    baseline: float | None


@dataclass(frozen=True, kw_only=True)
class Storage:
    """All of one ``storage.json``, or of several together."""

    schema: str = STORAGE_SCHEMA
    crash_states: tuple[CrashStates, ...] = ()
    corruption: tuple[Corruption, ...] = ()
    mutants: tuple[Mutant, ...] = ()
    benchmarks: tuple[Benchmark, ...] = ()

    def __add__(self, other: Storage) -> Storage:
        """Both together."""
        return Storage(
            crash_states=self.crash_states + other.crash_states,
            corruption=self.corruption + other.corruption,
            mutants=self.mutants + other.mutants,
            benchmarks=self.benchmarks + other.benchmarks,
        )


def read_storage(path: Path) -> Storage:
    """Read one file.

    Raises:
        RecordError: it is of another schema, or malformed.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("schema") != STORAGE_SCHEMA:
            raise RecordError(f"{path}: no record of schema {STORAGE_SCHEMA}")
        return serial.build(Storage, data, str(path), defaults=True)
    except (ValueError, serial.SerialError) as error:
        raise RecordError(f"{path}: {error}") from error

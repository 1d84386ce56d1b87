"""``storage.json``, the findings of the storage proofs: its schema, its writer and its strict reader.

Where stock DCP can be measured too, its number is recorded as ``baseline``, from the same run. A violation has an id:
``python -m conformance.storage replay ID`` rebuilds that one state and judges it again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from conformance.plain_data import serial
from conformance.records.trajectory import RecordError

STORAGE_SCHEMA = "hyper_resume.storage/2"
STORAGE_NAME = "storage.json"
_SCHEMA_FAMILY = "hyper_resume.storage/"
# A record names the first few of its violations; their number is counted in full.
MOST_EXAMPLES = 10


@dataclass(frozen=True, kw_only=True)
class Part:
    """One proof of the run (``crash``, ``power_cut``, ...). ``reason`` says why it was skipped, is missing or failed."""

    name: str
    status: Literal["run", "skipped", "missing", "error"]
    seconds: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class CrashStates:
    """States of the disk after a crash at any point of one scenario, in one persistence model.

    Attributes:
        scenario: what was running at the crash.
        model: the persistence model: what the disk keeps of unsynced changes.
        crash_points: places between two operations, over all orders of the ranks that were examined.
        states: all states that the model allows at these places; each was judged.
        distinct: of these, those that differ in a name or a byte.
        loaded: distinct states that were fully loaded by the real loader.
        violations: by oracle; 0 for an oracle that held. Counted over distinct states.
        examples: ids of the first violations.
        baseline: violations of stock DCP in the same scenario and model; None where stock has no such thing.
        baseline_distinct: the distinct states of stock DCP.
    """

    scenario: str
    model: str
    crash_points: int
    states: int
    distinct: int
    loaded: int
    violations: Mapping[str, int]
    examples: tuple[str, ...] = ()
    baseline: int | None = None
    baseline_distinct: int | None = None

    @property
    def protocol(self) -> str:
        """Its name in reports."""
        return f"{self.scenario}, {self.model}"


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """One kind of damage to a committed checkpoint.

    Attributes:
        kind: the kind of damage.
        tried: damaged checkpoints.
        harmless: the damaged bytes are never read, or nothing changed.
        refused: a load by path raised.
        fell_back: LATEST went to an earlier step instead.
        loaded_silently: loaded without an error, with wrong values.
        touched_live_state: the load raised after it had written to the live state.
        violations: other promises that were broken, by name (no fall-back, file not named, ...).
        examples: ids of the first violations.
        baseline: loaded silently by stock DCP.
        baseline_tried: damaged checkpoints that stock DCP was given.
    """

    kind: str
    tried: int
    refused: int
    fell_back: int
    loaded_silently: int
    touched_live_state: int = 0
    harmless: int = 0
    examples: tuple[str, ...] = ()
    baseline: int | None = None
    baseline_tried: int | None = None
    violations: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OperationErrors:
    """One error, returned by one operation after the other.

    Attributes:
        scenario: what was running.
        error: its name (``EIO``), or another failure (``short write``).
        persistent: once it failed, every later operation failed too.
        runs: one per operation that can fail.
        survived: the save succeeded in spite of it, rightly (an error that may be handled).
        violations: by oracle, 0 where it held.
        examples: ids of the first violations.
    """

    scenario: str
    error: str
    persistent: bool
    runs: int
    survived: int
    violations: Mapping[str, int]
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One mutant. ``killed_by`` is the probe that failed; None if it survived, ``explanation`` then says why that is right."""

    id: str
    title: str
    killed_by: str | None
    explanation: str | None = None

    @property
    def is_missed(self) -> bool:
        """True if it survived without an explanation."""
        return self.killed_by is None and not self.explanation


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """One kind of hostile input. ``violations`` by kind: code run, a file outside touched, and so on."""

    kind: str
    tried: int
    refused: int
    harmless: int
    violations: Mapping[str, int]
    examples: tuple[str, ...] = ()
    baseline: int | None = None
    baseline_tried: int | None = None


@dataclass(frozen=True, kw_only=True)
class PowerCuts:
    """Copies of a real file system's image, taken while a save was running, mounted and loaded.

    ``skipped`` is the reason for no trial: no root, no loop device.
    """

    scenario: str
    file_system: str
    trials: int
    violations: Mapping[str, int]
    skipped: str | None = None
    examples: tuple[str, ...] = ()
    baseline: int | None = None
    baseline_trials: int | None = None


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One measured number, and that of stock DCP."""

    name: str
    unit: str
    value: float
    samples: int
    peer: str | None
    baseline: float | None


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The content of one ``storage.json``, or of several combined."""

    schema: str = STORAGE_SCHEMA
    parts: tuple[Part, ...] = ()
    crash_states: tuple[CrashStates, ...] = ()
    power_cuts: tuple[PowerCuts, ...] = ()
    corruption: tuple[Corruption, ...] = ()
    operation_errors: tuple[OperationErrors, ...] = ()
    hostile: tuple[Hostile, ...] = ()
    mutants: tuple[Mutant, ...] = ()
    benchmarks: tuple[Benchmark, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)

    def __add__(self, other: Storage) -> Storage:
        """Both combined."""
        joined = {name: getattr(self, name) + getattr(other, name) for name in _LISTS}
        return Storage(**joined, facts={**self.facts, **other.facts})

    def __bool__(self) -> bool:
        """True if anything was recorded."""
        return any(getattr(self, name) for name in _LISTS)

    def complaints(self) -> list[str]:
        """Every violation, one line each; empty when every promise held."""
        return [
            *(f"{one.name}: {one.status}, {one.reason}" for one in self.parts if one.status in ("missing", "error")),
            *_broken((f"crash states of {one.protocol}", one.violations, one.examples) for one in self.crash_states),
            *_broken((f"power cuts of {one.scenario}", one.violations, one.examples) for one in self.power_cuts),
            *_broken((f"corruption, {one.kind}", corruption_violations(one), one.examples) for one in self.corruption),
            *_broken((error_name(one), one.violations, one.examples) for one in self.operation_errors),
            *_broken((f"hostile input, {one.kind}", one.violations, one.examples) for one in self.hostile),
            *(f"mutant {one.id} ({one.title}) was not noticed" for one in self.mutants if one.is_missed),
        ]


_LISTS = tuple(one.name for one in fields(Storage) if one.name not in ("schema", "facts"))


def corruption_violations(one: Corruption) -> dict[str, int]:
    """The violations of a kind of damage, with their counts."""
    return {"loaded silently": one.loaded_silently, "touched live state": one.touched_live_state, **one.violations}


def error_name(one: OperationErrors) -> str:
    """Its name in reports."""
    return f"{one.error} {'for good' if one.persistent else 'once'} during {one.scenario}"


def _broken(items: Iterable[tuple[str, Mapping[str, int], tuple[str, ...]]]) -> list[str]:
    lines = []
    for what, violations, examples in items:
        bad = ", ".join(f"{name} {count}" for name, count in violations.items() if count)
        if bad:
            lines.append(f"{what}: {bad}" + (f" (first: {examples[0]})" if examples else ""))
    return lines


def write_storage(folder: Path, storage: Storage) -> Path:
    """Write ``storage.json`` into ``folder``, which is made if it is missing; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / STORAGE_NAME
    path.write_text(json.dumps(serial.to_plain(storage), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def read_storage(path: Path) -> Storage:
    """Read one file.

    Raises:
        RecordError: it has another schema version, or is malformed.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        schema = data.get("schema") if isinstance(data, dict) else None
        if isinstance(schema, str) and schema != STORAGE_SCHEMA and schema.startswith(_SCHEMA_FAMILY):
            raise RecordError(f"{path}: is of schema {schema}, this reads {STORAGE_SCHEMA} only: run the proofs again")
        if schema != STORAGE_SCHEMA:
            raise RecordError(f"{path}: no record of schema {STORAGE_SCHEMA}")
        return serial.build(Storage, data, str(path), defaults=True)
    except (ValueError, serial.SerialError) as error:
        raise RecordError(f"{path}: {error}") from error

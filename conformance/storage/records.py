"""What the storage proofs found: ``storage.json``. Its form, its writer and its strict reader.

Everything that can be measured of a peer too has the peer's number beside it (``baseline``), measured in the same run. A
violation has an id: ``python -m conformance.storage replay ID`` makes that one state again and judges it again.
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
    """One proof of the run (``crash``, ``power_cut``, ...). ``reason`` says why it was skipped, is missing or broke off."""

    name: str
    status: Literal["run", "skipped", "missing", "error"]
    seconds: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class CrashStates:
    """States of the disk after a crash at any point of one scenario, in one persistence model.

    Attributes:
        scenario: what was being done when the crash came.
        model: what the disk keeps of what was not synced.
        crash_points: places between two operations, over all orders of the ranks that were looked at.
        states: all states that the model allows at these places; each was judged.
        distinct: of these, those that differ in a name or a byte.
        loaded: distinct states that were fully loaded by the real loader.
        violations: by oracle; 0 for an oracle that was asked and held. Counted over distinct states.
        examples: ids of the first violations.
        baseline: violations of stock DCP in the same scenario and model; None where stock has no such thing.
        baseline_distinct: the distinct states that these were found in.
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
        """What a report calls it."""
        return f"{self.scenario}, {self.model}"


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """One kind of damage to a committed checkpoint.

    Attributes:
        kind: what was done to it.
        tried: damaged checkpoints.
        harmless: the damage was to bytes that nothing reads, or changed nothing.
        refused: a load by path raised.
        fell_back: LATEST went to an earlier step instead.
        loaded_silently: loaded as if nothing were wrong, with other values.
        touched_live_state: the load raised, but had written to the live state before.
        violations: other promises that were broken, by name (no fall-back, file not named, ...).
        examples: ids of the first violations.
        baseline: loaded silently by stock DCP.
        baseline_tried: of so many.
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
    """One error that one operation after the other answered with.

    Attributes:
        scenario: what was being done.
        error: its name (``EIO``), or what went wrong otherwise (``short write``).
        persistent: once it failed, every later operation failed too.
        runs: one for each operation that could fail.
        survived: the save came to its end all the same, rightly (an error that may be stepped around).
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
    """One change to the code. ``killed_by`` is what noticed, None where nothing did; ``explanation`` then says why."""

    id: str
    title: str
    killed_by: str | None
    explanation: str | None = None

    @property
    def is_missed(self) -> bool:
        """Nothing noticed, and nobody has said why that is right."""
        return self.killed_by is None and not self.explanation


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """One kind of hostile input. ``violations`` by what must not happen: code run, a file outside touched, and so on."""

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

    ``skipped`` says why there was no trial: no root, no loop device.
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
        """Both together."""
        joined = {name: getattr(self, name) + getattr(other, name) for name in _LISTS}
        return Storage(**joined, facts={**self.facts, **other.facts})

    def __bool__(self) -> bool:
        """Something was recorded."""
        return any(getattr(self, name) for name in _LISTS)

    def complaints(self) -> list[str]:
        """What must not be, one line each; an empty list when every promise held."""
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
    """What a damaged checkpoint must not lead to, and how often it did."""
    return {"loaded silently": one.loaded_silently, "touched live state": one.touched_live_state, **one.violations}


def error_name(one: OperationErrors) -> str:
    """What a report calls it."""
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
        RecordError: it is of another schema (an older one does not tell what this one shows), or malformed.
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

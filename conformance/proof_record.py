"""The record of one proof, ``proof.json``: what was run, how each leg ended, what was compared, the verdict.

Everything that a reader of a results folder needs, beside the trajectories themselves. The writer and the reader of the
file are different rooms; this schema is all they share.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from conformance.record import RecordError

SCHEMA = "hyper_resume.proof/1"
FILE_NAME = "proof.json"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first value that differs. ``reference`` and ``resumed`` are the values in full (``repr``; floats round-trip).

    ``bucket`` is the state bucket whose restore is to be looked at; ``column`` may name a part, as ``rng.python``.
    """

    step: int
    rank: int
    bucket: str
    column: str
    reference: str
    resumed: str


@dataclass(frozen=True, kw_only=True)
class ColumnResult:
    """One column of a comparison: how many (step, rank) cells were compared, how many differ, the first of those."""

    name: str
    compared: int
    different: int
    first: Divergence | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two trajectories held against each other, bit for bit, on every rank from ``first_step`` to ``last_step``.

    ``unmoved_streams`` are random streams that never moved in the reference: whether they were restored can't be seen.
    """

    first_step: int
    last_step: int
    ranks: int
    columns: tuple[ColumnResult, ...]
    divergence: Divergence | None
    unmoved_streams: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """How a process ended: an exit code or the name of a signal. ``pid`` None: it came and went unseen."""

    pid: int | None
    exit_code: int | None = None
    signal: str | None = None


@dataclass(frozen=True, kw_only=True)
class FaultRecord:
    """A fault as it was asked for and as it fired: the last finished step of each rank and the pointer, after death."""

    kind: Literal["kill"]
    moment: Literal["after_step", "after_save"]
    step: int
    observed_steps: tuple[int, ...]
    observed_pointer: int | None


@dataclass(frozen=True, kw_only=True)
class LegRecord:
    """One leg's life. ``trajectory`` and ``log`` are relative to the results folder; step lists are in rank order."""

    leg: Literal["reference", "interrupted", "resumed"]
    label: str
    command: tuple[str, ...]
    trajectory: str
    log: str
    started_at: str
    seconds: float
    resumes_at: int | None
    first_steps: tuple[int | None, ...]
    last_steps: tuple[int | None, ...]
    agent: ProcessEnd | None
    ranks: tuple[ProcessEnd, ...]
    fault: FaultRecord | None
    failure: str | None


@dataclass(frozen=True, kw_only=True)
class LegComparison:
    """A leg's comparison with the reference leg."""

    label: str
    comparison: Comparison


@dataclass(frozen=True, kw_only=True)
class ProofRecord:
    """One run of one proof. ``outcome`` error means that nothing was proved, neither way."""

    schema: str
    id: str
    title: str
    outcome: Literal["identical", "different", "error"]
    verdict: str
    ranks: int
    divergence: Divergence | None
    legs: tuple[LegRecord, ...]
    comparisons: tuple[LegComparison, ...]
    config_name: str
    config_text: str
    overrides: tuple[str, ...]
    versions: dict[str, str]
    reproduce: str
    started_at: str
    seconds: float


def write_proof(record: ProofRecord, folder: Path) -> Path:
    """Write ``proof.json`` so that a reader finds it whole or not at all."""
    text = json.dumps(dataclasses.asdict(record), indent=1, ensure_ascii=False) + "\n"
    target = folder / FILE_NAME
    temporary = folder / f".{FILE_NAME}.{os.getpid()}"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)
    return target


def read_proof(folder: Path) -> ProofRecord:
    """Read a results folder's ``proof.json``.

    Raises:
        RecordError: the file is missing, is of another schema, or holds an unknown, missing or mistyped field.
    """
    path = folder / FILE_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecordError(f"{path}: missing; the run did not come to its end, or this is no results folder") from error
    except ValueError as error:
        raise RecordError(f"{path}: not JSON: {error}") from error
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        raise RecordError(f"{path}: schema is {found!r}, this version reads {SCHEMA!r}")
    return _build(ProofRecord, data, str(path))


def _build(kind: type[T], data: Any, where: str) -> T:
    """Make ``kind`` (a dataclass) from a JSON object that has exactly its fields."""
    if not isinstance(data, dict):
        raise RecordError(f"{where}: expected an object, found {data!r}")
    hints = typing.get_type_hints(kind)
    if set(data) != set(hints):
        missing, unknown = sorted(set(hints) - set(data)), sorted(set(data) - set(hints))
        raise RecordError(f"{where}: missing fields {missing}, unknown fields {unknown}")
    return kind(**{name: _value(hint, data[name], f"{where}: {name}") for name, hint in hints.items()})


def _value(hint: Any, data: Any, where: str) -> Any:
    """``data`` as a value of the annotation ``hint``; only the annotations used in this file are known."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return None if data is None else _value(arguments[0], data, where)
    if origin is tuple and isinstance(data, list):
        return tuple(_value(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(data))
    if origin is dict and isinstance(data, dict):
        return {_value(str, key, where): _value(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if origin is Literal and data in arguments:
        return data
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, data, where)
    if hint is float and type(data) in (int, float):
        return float(data)
    if hint in (int, str) and type(data) is hint:
        return data
    raise RecordError(f"{where}: expected {hint}, found {data!r}")

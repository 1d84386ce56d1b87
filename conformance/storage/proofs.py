"""The proofs by name, with one interface. Each is imported when it is run, so a proof that can't be imported is reported."""

from __future__ import annotations

import importlib
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.storage.records import CrashStates, Part, PowerCuts, Storage

# So many that the kinds which read a single file get some 10,000 cases.
HOSTILE_CASES, HOSTILE_CASES_SMOKE = 15_000, 1_000
# The smoke run tries one mutant of this many.
SMOKE_MUTANT_EVERY = 25


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much is tried. ``share`` is the share of crash states after a power cut, and of failing operations."""

    smoke: bool = False
    share: float = 1.0
    seed: int = 0
    workers: int = 2


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One proof: its tier (t1, ...), title, and the function that runs it and returns fields of ``Storage``."""

    name: str
    tier: str
    title: str
    run: Callable[[Extent], Mapping[str, Any]]


class PartError(RuntimeError):
    """A proof could not be run; the message says why. This is no finding about the library."""


def _crash(extent: Extent) -> Mapping[str, Any]:
    from conformance.storage.crash_states import enumeration

    every, most = (60, 3) if extent.smoke else (25, 40)
    options = enumeration.Options(share=extent.share, aftermath_every=every, most_aftermaths=most)
    found = enumeration.run(options, workers=extent.workers)
    errors = [one.error for one in found if one.error]
    if errors:
        raise PartError("\n".join(errors))
    library = [one for each in found if each.job.subject == "library" for one in each.records]
    stock = [one for each in found if each.job.subject == "stock" for one in each.records]
    return {"crash_states": tuple(library), "facts": {**_sums(library, ""), **_sums(stock, " of stock DCP")}}


def _sums(records: Sequence[CrashStates], of_whom: str) -> dict[str, str]:
    violations = sum(sum(one.violations.values()) for one in records)
    return {
        f"crash states{of_whom}": f"{sum(one.states for one in records):,} judged, "
        f"{sum(one.distinct for one in records):,} distinct, {sum(one.loaded for one in records):,} loaded in full, "
        f"{violations:,} violations"
    }


def _power_cut(extent: Extent) -> Mapping[str, Any]:
    from conformance.storage.power_cuts import power_cut

    found: tuple[PowerCuts, ...] = power_cut.run(smoke=extent.smoke, workers=extent.workers)
    return {"power_cuts": found}


def _corruption(extent: Extent) -> Mapping[str, Any]:
    module = _module("damage.corruption")
    size = module.SMOKE if extent.smoke else module.FULL
    return {"corruption": module.run(size=size, seed=extent.seed, workers=extent.workers)}


def _operation_errors(extent: Extent) -> Mapping[str, Any]:
    module = _module("failing_operations.operation_errors")
    return {"operation_errors": module.run(share=extent.share, seed=extent.seed, workers=extent.workers)}


def _hostile(extent: Extent) -> Mapping[str, Any]:
    module = _module("hostile.fuzz")
    count = HOSTILE_CASES_SMOKE if extent.smoke else HOSTILE_CASES
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        found = module.run(count, extent.seed, Path(folder))
        peer = None
        if not extent.smoke:
            readers = _module("hostile.readers").stock_readers()
            peer = module.run(HOSTILE_CASES_SMOKE, extent.seed, Path(folder), readers=readers)
    return {"hostile": found.records(peer)}


def _mutants(extent: Extent) -> Mapping[str, Any]:
    module = _module("mutants.mutation_run")
    entries = module.MUTANTS[::SMOKE_MUTANT_EVERY] if extent.smoke else module.MUTANTS
    return {"mutants": module.run(entries=entries, workers=extent.workers)}


def _module(name: str) -> Any:
    return importlib.import_module(f"conformance.storage.{name}")


PROOFS = (
    Proof(name="crash", tier="t1", title="every crash state of a save; stock DCP for comparison (t8)", run=_crash),
    Proof(name="corruption", tier="t2", title="every byte of a checkpoint damaged", run=_corruption),
    Proof(name="operation_errors", tier="t3", title="every operation failed", run=_operation_errors),
    Proof(name="power_cut", tier="t5", title="power cuts on a real file system", run=_power_cut),
    Proof(name="hostile", tier="t6", title="hostile files", run=_hostile),
    Proof(name="mutants", tier="t7", title="mutants of the library: does a proof fail?", run=_mutants),
)


def chosen(names: Sequence[str]) -> tuple[Proof, ...]:
    """The proofs of these names or tiers, in order; all if none is named.

    Raises:
        ValueError: there is no such proof.
    """
    # t8 (stock DCP) is measured in the same run as t1.
    wanted = {"t1" if name == "t8" else name for name in names}
    unknown = wanted - {one.name for one in PROOFS} - {one.tier for one in PROOFS}
    if unknown:
        known = ", ".join(f"{one.name} ({one.tier})" for one in PROOFS)
        raise ValueError(f"no such proof: {', '.join(sorted(unknown))}; there are {known}")
    return tuple(one for one in PROOFS if not wanted or wanted & {one.name, one.tier})


def prove(proof: Proof, extent: Extent) -> Storage:
    """Run one proof. There is always a record: of the findings, or of the reason why there are none."""
    started = time.monotonic()

    def part(status: Any, reason: str = "") -> Part:
        return Part(name=proof.name, status=status, seconds=round(time.monotonic() - started, 3), reason=reason)

    try:
        found = proof.run(extent)
    except ModuleNotFoundError as error:
        own = (error.name or "").startswith("conformance.storage")
        return Storage(parts=(part("missing" if own else "error", str(error)),))
    except Exception as error:  # noqa: BLE001  the other proofs go on, and this one is on record as broken off
        # The record gets no paths of this machine, so the traceback is printed here.
        traceback.print_exc()
        return Storage(parts=(part("error", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"),))
    skips = [one.skipped for one in found.get("power_cuts", ()) if one.skipped]
    return Storage(parts=(part("skipped", skips[0]) if skips else part("run"),), **found)

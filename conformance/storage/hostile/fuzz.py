"""T6: hostile input. No content of a checkpoint or configuration may be executed, and reading it stays within limits.

:func:`run` feeds generated manifests, metadata, archives and YAML to the real readers, in a forked process with a memory limit
and an audit hook. Each must be refused with an error of the library, or read as what it says; no code runs, no module is
imported, nothing outside of the file is opened; time and memory stay small. An index or a shard is put into a step directory
with a matching manifest and loaded: then no file is opened that the manifest does not name, and a refused load has not changed
the live state. Each case is made from a seed and a number only, so ``replay(case_id, seed)`` makes it again.

Not covered: good files; reads and writes below Python (torch's archives are read from memory).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from conformance.storage.hostile import indexes, pickles, tables, texts
from conformance.storage.hostile.material import Material, make_material
from conformance.storage.hostile.readers import Reader, library_readers
from conformance.storage.hostile.worker import Outcome, feed
from conformance.storage.records import MOST_EXAMPLES, Hostile

SECONDS_EACH: Final = 2.0
MEMORY_EACH: Final = 256 << 20
"""How much the worker's memory may grow, in bytes; the files are of 300 kB at most, but for one of 4 MB."""

Generator = Callable[[Random, Material], bytes]
# (kind, reader, generator). Case ids depend on their order and number, so nothing may be added to a family.
_FILES: Final[tuple[tuple[str, str, Generator], ...]] = (
    ("metadata with a payload", "metadata", pickles.metadata_payload),
    ("metadata with a path elsewhere", "metadata", pickles.metadata_path),
    ("metadata with impossible numbers", "metadata", pickles.metadata_numbers),
    ("metadata that does not add up", "metadata", pickles.metadata_structure),
    ("metadata bomb", "metadata", pickles.metadata_bomb),
    ("metadata, opcodes shuffled", "metadata", pickles.metadata_opcodes),
    ("metadata, bytes damaged", "metadata", pickles.metadata_bytes),
    ("archive with a payload", "archive", pickles.archive_payload),
    ("archive bomb", "archive", pickles.archive_bomb),
    ("archive, opcodes shuffled", "archive", pickles.archive_opcodes),
    ("archive, bytes damaged", "archive", pickles.archive_bytes),
    ("manifest with other values", "manifest", texts.manifest_tree),
    ("manifest with hostile names", "manifest", texts.manifest_names),
    ("manifest that is no tree", "manifest", texts.manifest_text),
    ("manifest, bytes damaged", "manifest", texts.manifest_bytes),
    ("configuration with other values", "configuration", texts.configuration_values),
    ("configuration with tags", "configuration", texts.configuration_tags),
    ("configuration bomb", "configuration", texts.configuration_bombs),
    ("configuration, bytes damaged", "configuration", texts.configuration_bytes),
)
# Files of a step directory with a matching manifest.
_IN_DIRECTORY: Final[tuple[tuple[str, str, Generator], ...]] = (
    ("index with other values", "index", indexes.index_tree),
    ("index with hostile names", "index", indexes.index_names),
    ("index that does not add up", "index", indexes.index_boxes),
    ("index that is no tree", "index", indexes.index_text),
    ("index, bytes damaged", "index", indexes.index_bytes),
    ("table with other segments", "shard", tables.table_segments),
    ("table bomb", "shard", tables.table_bomb),
    ("table, bytes damaged", "shard", tables.table_bytes),
    ("shard, bytes damaged", "shard", tables.shard_bytes),
)
_FAMILIES: Final = {"hostile-": _FILES, "hostile-directory-": _IN_DIRECTORY}
KINDS: Final = (*_FILES, *_IN_DIRECTORY)


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A violation, and how to repeat it."""

    case_id: str
    seed: int
    kind: str
    what: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class HostileResult:
    """The outcome of a fuzzing run.

    Attributes:
        count: number of cases.
        seed: their seed.
        seconds: time for making and reading them.
        slowest_seconds: CPU time of the slowest single case.
        peak_bytes: the largest growth of the worker's memory.
        outcomes: kind -> ``refused`` or ``read`` -> cases.
        violations: in the order of the cases.
    """

    count: int
    seed: int
    seconds: float
    slowest_seconds: float
    peak_bytes: int
    outcomes: Mapping[str, Mapping[str, int]]
    violations: tuple[Violation, ...]

    def records(self, baseline: HostileResult | None = None) -> tuple[Hostile, ...]:
        """One record per kind; ``baseline`` is the outcome of stock readers."""
        return tuple(self._record(kind, baseline) for kind in self.outcomes)

    def _record(self, kind: str, baseline: HostileResult | None) -> Hostile:
        found = [violation for violation in self.violations if violation.kind == kind]
        peer = baseline.outcomes.get(kind) if baseline else None
        outcomes = self.outcomes[kind]
        return Hostile(
            kind=kind,
            tried=sum(outcomes.values()),
            refused=outcomes.get("refused", 0),
            harmless=outcomes.get("read", 0),
            violations=dict(Counter(violation.what for violation in found)),
            examples=tuple(f"{one.case_id}, seed {one.seed}: {one.detail}" for one in found[:MOST_EXAMPLES]),
            baseline=None if baseline is None or peer is None else baseline.broken_cases(kind),
            baseline_tried=None if peer is None else sum(peer.values()),
        )

    def broken_cases(self, kind: str) -> int:
        """How many cases of a kind had a violation."""
        return len({violation.case_id for violation in self.violations if violation.kind == kind})


def case_id(place: int) -> str:
    """The permanent id of the case at one place of a run: its family, and its number there."""
    turn, kind = divmod(place, len(KINDS))
    for prefix, kinds in _FAMILIES.items():
        if kind < len(kinds):
            return f"{prefix}{turn * len(kinds) + kind}"
        kind -= len(kinds)
    raise AssertionError(place)


def replay(name: str, seed: int) -> tuple[str, str, bytes]:
    """Make a case again: its kind, its reader and its bytes.

    Raises:
        ValueError: no name of a case.
    """
    return make_case(name, seed, make_material())


def make_case(name: str, seed: int, material: Material) -> tuple[str, str, bytes]:
    """Make a case: its kind, its reader and its bytes.

    Raises:
        ValueError: no name of a case.
    """
    prefix, _, number = name.rpartition("-")
    kinds = _FAMILIES.get(f"{prefix}-")
    if kinds is None:
        raise ValueError(f"no such case: {name}")
    kind, reader, generator = kinds[int(number) % len(kinds)]
    chance = number if kinds is _FILES else name
    return kind, reader, generator(Random(f"{seed}/{chance}"), material)


def run(
    count: int,
    seed: int,
    scratch: Path,
    *,
    readers: Mapping[str, Reader] | None = None,
    seconds_each: float = SECONDS_EACH,
) -> HostileResult:
    """Feed ``count`` cases to the readers.

    Args:
        count: number of cases; all kinds in turn.
        seed: another seed makes other cases.
        scratch: an existing directory; the worker works in a new one below it.
        readers: what reads, by name; the library's own by default. Kinds without a reader are left out.
        seconds_each: CPU time that one case may take.
    """
    used = library_readers() if readers is None else readers
    started = time.monotonic()
    material = make_material()
    places = [place for place in range(count) if KINDS[place % len(KINDS)][1] in used]
    outcomes = feed(
        places,
        lambda place: make_case(case_id(place), seed, material)[1:],
        dict(used),
        good=_good_files(material),
        folder=scratch,
        seconds_each=seconds_each,
        memory_each=MEMORY_EACH,
    )
    return _summed(outcomes, seed, time.monotonic() - started)


def _good_files(material: Material) -> dict[str, bytes]:
    """One good file per reader, read before anything hostile, so that imports on first use are done."""
    return {
        "metadata": material.metadata,
        "archive": material.archive,
        "manifest": material.manifest,
        "configuration": material.configuration.encode(),
        "index": material.index,
        "shard": material.shard,
    }


def _summed(outcomes: list[Outcome], seed: int, seconds: float) -> HostileResult:
    counts: dict[str, Counter[str]] = {}
    violations = []
    for outcome in outcomes:
        kind = KINDS[outcome.number % len(KINDS)][0]
        counts.setdefault(kind, Counter())[outcome.how] += 1
        violations += [
            Violation(case_id=case_id(outcome.number), seed=seed, kind=kind, what=what, detail=detail)
            for what, detail in outcome.violations
        ]
    return HostileResult(
        count=len(outcomes),
        seed=seed,
        seconds=seconds,
        slowest_seconds=max((outcome.seconds for outcome in outcomes), default=0.0),
        peak_bytes=max((outcome.grown_bytes for outcome in outcomes), default=0),
        outcomes=counts,
        violations=tuple(violations),
    )

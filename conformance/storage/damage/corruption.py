"""T2: a committed checkpoint is damaged in every listed way, and loaded. No damage may be loaded silently or change live state.

A small checkpoint is saved by two ranks, in both layouts of the training state, with an older undamaged step. Each damage
is then judged in one process, by the real checkpointer:

- by path: the load raises an error of the library that names the file, or what it loads is bit for bit what was saved; where
  one byte of a shard is flipped, before its table of digests, the error names a range of the file that contains it;
- the same with ``verify: size`` of damage that shows in a size;
- by LATEST: the older step is found instead, a warning says why the newer one was refused, and it loads bit for bit;
- the live tensors, plain values and random streams are the same after a failed load, and no file is changed by reading.

Every byte is flipped and verified against the manifest as a load does it (``bit flip, digest checked``); a seeded sample of the
flips, and all other damage, is loaded in full. Stock ``dcp.load`` gets the same damaged files, for comparison.
"""

from __future__ import annotations

import random
import resource
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.processes.forked_ranks import Ended, Workers, fan_out, run_alone, scratch
from conformance.storage.damage import damage_kinds as kinds
from conformance.storage.damage.damage_kinds import Damage, Material
from conformance.storage.damage.judge import Judge, Level, Verdict, build, check_undamaged, material
from conformance.storage.records import MOST_EXAMPLES, Corruption
from conformance.storage.workload import small_checkpoint as small
from conformance.storage.workload.small_checkpoint import Layout

# A load of this small checkpoint that allocates more than this has trusted a damaged size.
_MOST_MEMORY = 8 << 30
_LIBRARY = "hyper_resume.checkpoint"
DIGEST_ROW, FLIP_ROW = "bit flip, digest checked", "bit flip, loaded"


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is tried. ``flips`` None: every byte; ``loads``: how many of the flips are loaded in full."""

    flips: int | None = None
    loads: int = 1000
    truncations: int = 400
    others: int | None = None


FULL = Size()
SMOKE = Size(flips=2000, loads=60, truncations=40, others=60)


def examine(
    folder: Path, layout: Layout, damages: Sequence[Damage], level: Level, *, ask_stock: bool = True
) -> list[Verdict]:
    """Judge cases in a forked process. If it dies or hangs, each case is judged alone to find the culprit."""

    def judge() -> list[Verdict]:
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
        with tempfile.TemporaryDirectory(prefix="damage-", dir=scratch()) as place:
            root = Path(place) / "root"
            shutil.copytree(folder / "root", root)
            judging = Judge(root, material(folder, layout))
            if level == "digest":
                return [judging.at_digest_level(damage) for damage in damages]
            return [judging.by_loading(damage, ask_stock=ask_stock) for damage in damages]

    end = run_alone(judge, limit_seconds=20 + 0.2 * len(damages))
    if end.how == "returned":
        verdicts: list[Verdict] = end.value
        return verdicts
    if len(damages) > 1:
        return [verdict for one in damages for verdict in examine(folder, layout, [one], level, ask_stock=ask_stock)]
    if ask_stock:
        # Find the culprit: library or stock DCP, which unpickles what it finds and may end a process.
        return examine(folder, layout, damages, level, ask_stock=False)
    return [_broken(damages[0], level, end)]


def _broken(damage: Damage, level: Level, end: Ended) -> Verdict:
    what = {"hung": "hung", "died": "ended the process"}.get(end.how, "the judge failed")
    return Verdict(damage=damage, level=level, outcome="broken", violations=(what,), message=end.summary)


def _job(job: tuple[str, str, Layout, Sequence[Damage]]) -> Any:
    """The job of a worker: build, or judge a batch."""
    what, folder, layout, damages = job
    if what == "build":
        build(Path(folder), layout)
        check_undamaged(Path(folder), layout)
        return []
    return examine(Path(folder), layout, damages, "digest" if what == "digest" else "load")


def run(*, size: Size = FULL, seed: int = 0, workers: int = 2) -> tuple[Corruption, ...]:
    """Try all kinds of damage; one record per kind.

    Raises:
        WorkerError: harness trouble, or nothing could be saved.
    """
    return tuple(summarise(verdicts(size=size, seed=seed, workers=workers)))


def verdicts(*, size: Size = FULL, seed: int = 0, workers: int = 2) -> list[Verdict]:
    """The verdict of every case."""
    with (
        tempfile.TemporaryDirectory(prefix="corruption-", dir=scratch()) as place,
        Workers(workers, preload=[_LIBRARY]) as pool,
    ):
        pool.map(_job, [("build", f"{place}/{one}", one, ()) for one in small.LAYOUTS])
        jobs: list[tuple[str, str, Layout, Sequence[Damage]]] = []
        for layout in small.LAYOUTS:
            folder = Path(place) / layout
            found = choose(material(folder, layout), size, seed)
            jobs += [("digest", str(folder), layout, part) for part in _parts(found[0], 2500)]
            jobs += [("load", str(folder), layout, part) for part in _parts(found[1], 60)]
        results = pool.map(_job, jobs)
    return [verdict for part in results for verdict in part]


def choose(material: Material, size: Size, seed: int) -> tuple[list[Damage], list[Damage]]:
    """The cases of one layout (its half of ``size``): those verified against the manifest only, and those loaded in full."""
    choose = random.Random(f"{seed}/{material.layout}/sample")
    flips = list(kinds.flips(material, seed))
    loads = choose.sample(flips, min(len(flips), size.loads // 2))
    if size.flips is not None:
        flips = choose.sample(flips, min(len(flips), size.flips // 2))
    others = kinds.others(material)
    if size.others is not None:
        others = choose.sample(others, min(len(others), size.others // 2))
    return flips, loads + kinds.truncations(material, seed, size.truncations // 2) + others


def _parts(items: Sequence[Damage], size: int) -> Iterable[Sequence[Damage]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def row_of(verdict: Verdict) -> str:
    """The record that a case belongs to."""
    if verdict.damage.kind == "flip":
        return DIGEST_ROW if verdict.level == "digest" else FLIP_ROW
    return verdict.damage.kind


def summarise(found: Iterable[Verdict]) -> list[Corruption]:
    """One record per kind, in order of first appearance."""
    rows: dict[str, list[Verdict]] = {}
    for verdict in found:
        rows.setdefault(row_of(verdict), []).append(verdict)
    return [_record(kind, of_kind) for kind, of_kind in rows.items()]


def _record(kind: str, of_kind: Sequence[Verdict]) -> Corruption:
    bad = [verdict for verdict in of_kind if verdict.violations]
    stock = [verdict.stock_was_silent for verdict in of_kind if verdict.stock_was_silent is not None]
    return Corruption(
        kind=kind,
        tried=len(of_kind),
        refused=sum(verdict.outcome == "refused" for verdict in of_kind),
        fell_back=sum(verdict.fell_back for verdict in of_kind),
        harmless=sum(verdict.outcome == "harmless" for verdict in of_kind),
        loaded_silently=sum(_is_silent(verdict) for verdict in of_kind),
        touched_live_state=sum("touched live state" in verdict.violations for verdict in of_kind),
        examples=tuple(verdict.damage.id for verdict in bad[:MOST_EXAMPLES]),
        baseline=sum(stock) if stock else None,
        baseline_tried=len(stock) if stock else None,
        violations=dict(Counter(name for verdict in bad for name in verdict.violations if not _has_a_field(name))),
    )


def _has_a_field(violation: str) -> bool:
    return violation == "touched live state" or violation.endswith("loaded silently")


def _is_silent(verdict: Verdict) -> bool:
    return any(name.endswith("loaded silently") for name in verdict.violations)


def replay(case_id: str) -> Verdict:
    """Apply one damage to a new checkpoint, and judge it in full.

    Lengths and offsets are the same as before; save ids and times differ from save to save.

    Raises:
        ValueError: no id of this tier.
    """
    damage = kinds.parse_id(case_id)
    (found,) = fan_out(_replay, [damage], workers=1, preload=[_LIBRARY])
    verdict: Verdict = found
    return verdict


def _replay(damage: Damage) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="corruption-", dir=scratch()) as place:
        folder = Path(place) / damage.layout
        build(folder, damage.layout)
        check_undamaged(folder, damage.layout)
        return examine(folder, damage.layout, [damage], "load")[0]

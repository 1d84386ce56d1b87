"""Retention: which step directories are outdated, and their deletion. Runs on rank 0 after a newer save is durable."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.history import lineage
from hyper_resume.checkpoint.history.lineage import Ancestors, Candidate

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which saves to keep. If no option is set, all are kept.

    Kept are the ``keep_last`` newest saves, every step that ``keep_every`` divides, and the ``keep_best`` saves with the
    smallest (``best_mode`` "min") or largest ("max") value of ``best_metric``. With ``keep_best``, a save without a value of
    that metric (it was saved before, or the value was not finite) can't be ranked, and is kept as well.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int = 0
    best_metric: str = "loss"
    best_mode: Literal["min", "max"] = "min"

    @property
    def keeps_all(self) -> bool:
        """True if nothing is ever deleted."""
        return self.keep_last is None and self.keep_every is None and self.keep_best == 0


def find_outdated(
    retention: Retention,
    checkpoint_dir: Path,
    protected: Collection[Path] = (),
    *,
    of_run: Ancestors | None = None,
) -> list[Candidate]:
    """Return the step directories that retention does not keep, oldest first. Deletes nothing.

    Only real directories (no links) that are complete according to their manifest are considered. Directories of other tools
    are kept, and so are directories that can't be read now, because they may be readable later. The newest complete save, the
    one that the pointer names, and those in ``protected`` are always kept.

    Args:
        retention: the rules.
        checkpoint_dir: the root.
        protected: step directories that are kept whatever the rules say.
        of_run: the newest saves of one run, as (step, save id): only they and what they descend from are counted, ranked and
            deleted; None counts the saves of all runs together.

    Raises:
        OSError: the root or its pointer can't be read.
    """
    if retention.keeps_all:
        return []
    complete = _own_saves(checkpoint_dir)
    if of_run is not None:
        lineage_of_run = lineage.with_ancestors(of_run, complete)
        complete = [one for one in complete if lineage.identity(one) in lineage_of_run]
    pointed, _ = layout.read_pointer(checkpoint_dir)
    kept = {path.absolute() for path in protected}
    kept |= {candidate.path.absolute() for candidate in complete[-max(1, retention.keep_last or 0) :]}
    kept |= {
        candidate.path.absolute()
        for candidate in complete
        if retention.keep_every and candidate.step % retention.keep_every == 0
    }
    kept |= {candidate.path.absolute() for candidate in _not_outranked(retention, complete)}
    return [candidate for candidate in complete if candidate.path.absolute() not in kept and candidate.step != pointed]


def metrics_in(checkpoint_dir: Path) -> tuple[int, list[str]]:
    """Return how many saves of this library are complete in a root, and the names of the metrics that they hold."""
    complete = _own_saves(checkpoint_dir)
    return len(complete), sorted({name for one in complete if one.manifest for name in one.manifest.metrics})


def not_of_latest(checkpoint_dir: Path, saves: Collection[Candidate]) -> list[Candidate]:
    """Return those of ``saves`` that the save which LATEST means does not descend from, and is not itself."""
    complete = {one.path: one for one in _own_saves(checkpoint_dir)}
    order = lineage.resume_order(checkpoint_dir).readable
    latest = next((complete[path] for path in order if path in complete), None)
    of_run = set() if latest is None else lineage.with_ancestors((lineage.identity(latest),), complete.values())
    return [one for one in saves if lineage.identity(one) not in of_run]


def _own_saves(checkpoint_dir: Path) -> list[Candidate]:
    """Return the complete saves of this library below their own names, oldest first."""
    # Somebody who copies a step directory to another step's name wants to keep the copy.
    complete = [
        candidate
        for candidate in lineage.list_candidates(checkpoint_dir)
        if candidate.manifest and not candidate.complaint and _has_own_name(candidate.path)
    ]
    return sorted(complete, key=lambda candidate: candidate.order)


def _has_own_name(path: Path) -> bool:
    return not path.is_symlink() and layout.final_path_of(path) == path


def _not_outranked(retention: Retention, complete: list[Candidate]) -> list[Candidate]:
    """Return the best saves, and those that can't be ranked; without ``keep_best``, none."""
    if not retention.keep_best:
        return []
    sign = 1 if retention.best_mode == "min" else -1
    ranked, unranked = [], []
    for candidate in complete:
        assert candidate.manifest is not None
        value = candidate.manifest.metrics.get(retention.best_metric)
        if value is None:
            unranked.append(candidate)
        else:
            # Of two equal values the newer save is kept.
            ranked.append((sign * value, -candidate.manifest.ordinal, candidate))
    if not ranked:
        logger.warning("no save holds the metric %r: keep_best deletes none of them", retention.best_metric)
    best = sorted(ranked, key=lambda item: item[:2])[: retention.keep_best]
    return [*unranked, *(candidate for _, _, candidate in best)]


def prune(checkpoint_dir: Path, outdated: Collection[Candidate]) -> list[Path]:
    """Delete step directories and return their paths: 1. rename all into ``.trash``; 2. sync; 3. delete the files.

    Raises:
        OSError: a rename failed; the directories before it are in ``.trash``, which the next run empties.
    """
    if not outdated:
        return []
    trash = checkpoint_dir / layout.TRASH_NAME
    operations.make_directories(trash)
    moved = []
    for candidate in outdated:
        assert candidate.manifest is not None
        trashed = trash / candidate.manifest.attempt
        layout.remove(trashed)
        operations.current().rename(candidate.path, trashed)
        moved.append(trashed)
    # Before the first file is deleted: a power cut must not leave a step directory with only some of its files.
    operations.current().sync_directory(checkpoint_dir)
    for trashed in moved:
        layout.remove(trashed)
        if trashed.is_dir():
            logger.warning("%s could not be deleted; the next run tries again", trashed)
    return [candidate.path for candidate in outdated]

"""Retention: which step directories are outdated, and their deletion. Runs on rank 0 after a newer save is durable."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.history import lineage
from hyper_resume.checkpoint.history.lineage import Candidate

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which saves to keep. If no option is set, all are kept.

    Kept are the ``keep_last`` newest saves, every step that ``keep_every`` divides, and the ``keep_best`` saves with the
    smallest (``best_mode`` "min") or largest ("max") value of ``best_metric``.
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


def find_outdated(retention: Retention, checkpoint_dir: Path, protected: Collection[Path] = ()) -> list[Candidate]:
    """Return the step directories that retention does not keep, oldest first. Deletes nothing.

    Only real directories (no links) that are complete according to their manifest are considered. Directories of other tools
    are kept, and so are directories that can't be read now, because they may be readable later. The newest complete save, the
    one that the pointer names, and those in ``protected`` are always kept.
    """
    if retention.keeps_all:
        return []
    found = lineage.list_candidates(checkpoint_dir)
    # Somebody who copies a step directory to another step's name wants to keep the copy.
    complete = [
        candidate
        for candidate in found
        if candidate.manifest and not candidate.complaint and _has_own_name(candidate.path)
    ]
    complete.sort(key=lambda candidate: candidate.order)
    pointed, _ = layout.read_pointer(checkpoint_dir)
    kept = {path.absolute() for path in protected}
    kept |= {candidate.path.absolute() for candidate in complete[-max(1, retention.keep_last or 0) :]}
    kept |= {
        candidate.path.absolute()
        for candidate in complete
        if retention.keep_every and candidate.step % retention.keep_every == 0
    }
    kept |= {candidate.path.absolute() for candidate in _best(retention, complete)}
    return [candidate for candidate in complete if candidate.path.absolute() not in kept and candidate.step != pointed]


def _has_own_name(path: Path) -> bool:
    return not path.is_symlink() and layout.final_path_of(path) == path


def _best(retention: Retention, complete: list[Candidate]) -> list[Candidate]:
    sign = 1 if retention.best_mode == "min" else -1
    ranked = []
    for candidate in complete:
        assert candidate.manifest is not None
        value = candidate.manifest.metrics.get(retention.best_metric, math.nan)
        if not math.isnan(value):
            # Of two equal values the newer save is kept.
            ranked.append((sign * value, -candidate.manifest.ordinal, candidate))
    return [candidate for _, _, candidate in sorted(ranked, key=lambda item: item[:2])[: retention.keep_best]]


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

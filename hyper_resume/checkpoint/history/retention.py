"""Which step directories stay. Runs after a newer one is durable and the pointer names it, on rank 0."""

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
    """What to keep; with all of it unset, everything.

    ``keep_last`` newest saves, every step that ``keep_every`` divides, and the ``keep_best`` saves with the smallest or largest
    value of ``best_metric``.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int = 0
    best_metric: str = "loss"
    best_mode: Literal["min", "max"] = "min"

    @property
    def keeps_all(self) -> bool:
        """True when nothing is ever deleted."""
        return self.keep_last is None and self.keep_every is None and self.keep_best == 0


def find_outdated(retention: Retention, checkpoint_dir: Path, protected: Collection[Path] = ()) -> list[Candidate]:
    """Return what retention does not keep, oldest first. Looks only.

    Only real directories that are complete by this library's manifest count. What another tool put there stays, and what
    can't be read now too: it may be readable the next time. The newest complete save, what the pointer names and ``protected``
    always stay.
    """
    if retention.keeps_all:
        return []
    found = lineage.list_candidates(checkpoint_dir)
    # A copy that somebody made under another step's name was made to be kept.
    whole = [one for one in found if one.manifest and not one.complaint and _is_at_home(one.path)]
    whole.sort(key=lambda one: one.order)
    pointed, _ = layout.read_pointer(checkpoint_dir)
    kept = {path.absolute() for path in protected}
    kept |= {one.path.absolute() for one in whole[-max(1, retention.keep_last or 0) :]}
    kept |= {one.path.absolute() for one in whole if retention.keep_every and one.step % retention.keep_every == 0}
    kept |= {one.path.absolute() for one in _best(retention, whole)}
    return [one for one in whole if one.path.absolute() not in kept and one.step != pointed]


def _is_at_home(path: Path) -> bool:
    return not path.is_symlink() and layout.final_path_of(path) == path


def _best(retention: Retention, whole: list[Candidate]) -> list[Candidate]:
    sign = 1 if retention.best_mode == "min" else -1
    ranked = []
    for one in whole:
        assert one.manifest is not None
        value = one.manifest.metrics.get(retention.best_metric, math.nan)
        if not math.isnan(value):
            # Of two equal ones the newer is the better.
            ranked.append((sign * value, -one.manifest.ordinal, one))
    return [one for _, _, one in sorted(ranked, key=lambda item: item[:2])[: retention.keep_best]]


def prune(checkpoint_dir: Path, doomed: Collection[Candidate]) -> list[Path]:
    """Delete step directories: all leave their names first, then their files go. Returns what was deleted.

    Raises:
        OSError: one could not be renamed; those before it are deleted or stand in ``.trash`` for the next sweep.
    """
    if not doomed:
        return []
    trash = checkpoint_dir / layout.TRASH_NAME
    operations.make_directories(trash)
    moved = []
    for one in doomed:
        assert one.manifest is not None
        aside = trash / one.manifest.attempt
        layout.remove(aside)
        operations.current().rename(one.path, aside)
        moved.append(aside)
    # Before the first file goes: a cut must not leave a directory under its name with half of its files.
    operations.current().sync_directory(checkpoint_dir)
    for aside in moved:
        layout.remove(aside)
        if aside.is_dir():
            logger.warning("%s could not be deleted; it stays until the next run begins", aside)
    return [one.path for one in doomed]

"""Defects in retention (which checkpoints are kept and deleted) and in the writer lock."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from conformance.sabotages.saboteur import Saboteur, sabotage

_DCP = "hyper_resume.checkpoint.dcp"
_STORAGE = f"{_DCP}:DistributedCheckpointer"
_SAVING = "hyper_resume.checkpoint.saving.publication"
_RETENTION = "hyper_resume.checkpoint.history.retention"
_LOCK = "hyper_resume.checkpoint.disk.lock"


@sabotage("retention-never-acts")
def _retention_never_acts(put: Saboteur) -> None:
    put.replace(f"{_SAVING}:_clear_outdated", lambda original, *args: None)


@sabotage("retention-deletes-the-newest")
def _retention_deletes_the_newest(put: Saboteur) -> None:
    """The oldest are kept instead of the newest."""

    def outdated(original: Any, keep: Any, checkpoint_dir: Path, *args: Any, **options: Any) -> Any:
        from hyper_resume.checkpoint.history import lineage

        doomed = original(keep, checkpoint_dir, *args, **options)
        found = sorted(lineage.list_candidates(checkpoint_dir), key=lambda one: one.order, reverse=True)
        if doomed:
            put.fired()
        return found[: len(doomed)]

    put.replace(f"{_RETENTION}:find_outdated", outdated, fires=False)


def _with_retention(put: Saboteur, **changes: Any) -> None:
    def outdated(original: Any, keep: Any, *args: Any, **options: Any) -> Any:
        return original(dataclasses.replace(keep, **changes), *args, **options)

    put.replace(f"{_RETENTION}:find_outdated", outdated)


@sabotage("keep-every-ignored")
def _keep_every_ignored(put: Saboteur) -> None:
    _with_retention(put, keep_every=None)


@sabotage("best-mode-ignored")
def _best_mode_ignored(put: Saboteur) -> None:
    _with_retention(put, best_mode="min")


@sabotage("keep-one-by-default")
def _keep_one_by_default(put: Saboteur) -> None:
    _with_retention(put, keep_last=1)


@sabotage("metric-left-out")
def _metric_left_out(put: Saboteur) -> None:
    def draft(original: Any, attempt: Any, *, metrics: Any, **options: Any) -> Any:
        return original(attempt, metrics={}, **options)

    put.replace(f"{_DCP}:draft_manifest", draft)


@sabotage("retention-deletes-the-restored")
def _retention_deletes_the_restored(put: Saboteur) -> None:
    def outdated(original: Any, keep: Any, checkpoint_dir: Path, protected: Any, **options: Any) -> Any:
        return original(keep, checkpoint_dir, protected[:1], **options)

    put.replace(f"{_RETENTION}:find_outdated", outdated)


@sabotage("retention-reaches-other-roots")
def _retention_reaches_other_roots(put: Saboteur) -> None:
    """The root that a run was restored from is cleared too."""

    def clear(original: Any, keep: Any, save: Any, protected: Any) -> None:
        from hyper_resume.checkpoint.history import retention

        original(keep, save, protected)
        for root in {path.parent for path in protected} - {save.target.parent}:
            retention.prune(root, retention.find_outdated(keep, root))

    put.replace(f"{_SAVING}:_clear_outdated", clear)


@sabotage("retention-deletes-other-runs")
def _retention_deletes_other_runs(put: Saboteur) -> None:
    """All saves in the root are counted and deleted as if they were this run's."""

    def outdated(original: Any, *args: Any, of_run: Any = None) -> Any:
        return original(*args)

    put.replace(f"{_RETENTION}:find_outdated", outdated)


@sabotage("other-run-not-noticed")
def _other_run_not_noticed(put: Saboteur) -> None:
    put.replace("hyper_resume.checkpoint.history.other_runs:notice", lambda original, *args: None)


@sabotage("unranked-is-worst")
def _unranked_is_worst(put: Saboteur) -> None:
    """A save without the metric counts as the worst of all."""

    def not_outranked(original: Any, keep: Any, complete: Any) -> Any:
        return [one for one in original(keep, complete) if keep.best_metric in one.manifest.metrics]

    put.replace(f"{_RETENTION}:_not_outranked", not_outranked)


@sabotage("retention-deletes-what-is-not-ours")
def _retention_deletes_what_is_not_ours(put: Saboteur) -> None:
    def prune(original: Any, checkpoint_dir: Path, doomed: Any) -> Any:
        for path in checkpoint_dir.glob("global_step_*"):
            if not (path / "manifest.json").exists():
                put.fired()
                shutil.rmtree(path)
        return original(checkpoint_dir, doomed)

    put.replace(f"{_RETENTION}:prune", prune, fires=False)


@sabotage("outdated-deleted-before-the-commit")
def _outdated_deleted_before_the_commit(put: Saboteur) -> None:
    def publish(original: Any, attempt: Any, *args: Any) -> Any:
        from hyper_resume import collective

        if collective.rank() == 0:
            for path in attempt.target.parent.glob("global_step_*"):
                put.fired()
                shutil.rmtree(path)
        return original(attempt, *args)

    put.replace(f"{_SAVING}:publish", publish, fires=False)


@sabotage("taken-names-replaced")
def _taken_names_replaced(put: Saboteur) -> None:
    put.replace("hyper_resume.checkpoint.format.layout:why_not_ours", lambda original, path: "")


@sabotage("lock-not-taken")
def _lock_not_taken(put: Saboteur) -> None:
    put.replace(f"{_LOCK}:acquire", lambda original, checkpoint_dir: None)


@sabotage("readers-take-the-lock")
def _readers_take_the_lock(put: Saboteur) -> None:
    def find_latest(original: Any, storage: Any, checkpoint_dir: str) -> Any:
        from hyper_resume.checkpoint.disk import lock

        lock.acquire(Path(checkpoint_dir))
        return original(storage, checkpoint_dir)

    put.replace(f"{_STORAGE}.find_latest_checkpoint", find_latest)


@sabotage("lock-of-the-dead-respected")
def _lock_of_the_dead_respected(put: Saboteur) -> None:
    """A lock file that exists counts as held."""
    own: list[Path] = []

    def acquire(original: Any, checkpoint_dir: Path) -> None:
        from hyper_resume.errors import CheckpointLockedError

        if checkpoint_dir not in own and (checkpoint_dir / ".writer.lock").exists():
            put.fired()
            raise CheckpointLockedError("there is a lock file")
        own.append(checkpoint_dir)
        original(checkpoint_dir)

    put.replace(f"{_LOCK}:acquire", acquire, fires=False)

"""What a run begins from: the checkpoint to restore, and the notice that other runs have saved where this one will."""

from __future__ import annotations

import logging
from pathlib import Path

from hyper_resume import collective
from hyper_resume.checkpoint.base import CheckpointerBase
from hyper_resume.checkpoint.format.foreign import recognise
from hyper_resume.checkpoint.history import lineage, other_runs
from hyper_resume.config.schema import CheckpointingConfig
from hyper_resume.errors import CheckpointNotFoundError, describe, explained

logger = logging.getLogger(__name__)

LATEST = "latest"
RESTORE_FROM = "checkpoint.restore_from"


def find_restore_path(config: CheckpointingConfig, root: Path, storage: CheckpointerBase) -> str | None:
    """Return the directory to restore from, the same on all ranks: rank 0 reads the disk.

    ``LATEST`` without any checkpoint starts from ``initial_restore_from``, and without that from scratch, whatever
    ``on_mismatch`` is: the command that resumes a job is the one that starts it, and no checkpoint is skipped. If this run has
    published a checkpoint and none can be used, that is an error, and ``initial_restore_from`` does not take its place.

    Raises:
        CheckpointNotFoundError: an explicit path that is not a directory; raised on every rank.
    """
    wanted = config.restore_from
    if wanted is None:
        return None
    if wanted.lower() != LATEST:
        return _existing(wanted, RESTORE_FROM, storage)
    found = storage.find_latest_checkpoint(str(root))
    initial = config.initial_restore_from
    if found is None and initial is not None:
        logger.info("no checkpoint found under %s: starting from %s", root, initial)
        return _existing(initial, "checkpoint.initial_restore_from", storage)
    if found is None:
        logger.warning("no checkpoint found under %s: training starts from scratch", root)
    else:
        logger.info("Resolved LATEST checkpoint: %s", found)
    return found


def _existing(wanted: str, field: str, storage: CheckpointerBase) -> str:
    def check() -> str:
        path = Path(wanted)
        with explained(f"{field} can't be read", path):
            exists = storage.has_checkpoint(wanted)
        if not exists:
            other = recognise(path)
            raise CheckpointNotFoundError(
                describe(
                    f"{field} is not a directory",
                    where=str(path),
                    expected=f"an existing global_step_N directory{', or LATEST' if field == RESTORE_FROM else ''}",
                    found="nothing" if other is None else other.what,
                    do="correct the path" if other is None else other.do,
                )
            )
        return str(path)

    return collective.on_rank_zero(check)


def notice_other_runs(config: CheckpointingConfig, root: Path, continued: str | None) -> None:
    """Warn, or refuse the run, if it saves where others have saved and ``continued`` is none of their checkpoints.

    Raises:
        CheckpointExistsError: ``config.on_other_run`` is "error"; raised on every rank, before anything is changed.
    """

    def check() -> None:
        if not (continued and lineage.is_step_of(Path(continued), root)):
            other_runs.notice(root, config.on_other_run)

    if config.save_ckpt:
        collective.on_rank_zero(check)

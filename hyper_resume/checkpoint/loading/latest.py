"""Finds the step directory that LATEST means and that verifies, also beside a run that saves to the root and deletes there."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch.distributed as dist

from hyper_resume import collective
from hyper_resume.checkpoint.disk import observing
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.history import lineage
from hyper_resume.checkpoint.loading.last_verified import LastVerified
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError, CheckpointUnreadableError

logger = logging.getLogger(__name__)


def find_latest(root: Path, verified: LastVerified, group: dist.ProcessGroup | None) -> str | None:
    """Return the newest step directory of the root's lineage that verifies; rank 0 decides, every rank calls it.

    Args:
        root: the root.
        verified: verifies the directories, and remembers the one that is returned.
        group: the process group of all ranks.

    Returns:
        None if nothing was ever published.

    Raises:
        CheckpointNotFoundError: something was published, but no step directory verifies; or the root is no
            directory, or can't be read.
        CheckpointUnreadableError: a directory that LATEST may mean can't be read now.
    """
    root_now = partial(_root_identity, root)
    for _ in range(observing.MAX_LOOKS):
        before = collective.on_rank_zero(root_now, group)
        order = collective.on_rank_zero(partial(lineage.resume_order, root), group)
        found, complaints = _first_that_verifies(order, verified, group)
        if found is not None:
            return found
        if collective.on_rank_zero(root_now, group) == before:
            break
    collective.on_rank_zero(lambda: lineage.refuse_if_published(root, order, complaints), group)
    return None


def _first_that_verifies(
    order: lineage.ResumeOrder, verified: LastVerified, group: dist.ProcessGroup | None
) -> tuple[str | None, list[str]]:
    """Return the first directory of ``order`` that verifies, and why those before it do not."""
    complaints: list[str] = []
    for directory in order.directories:
        if directory in order.unreadable:
            raise CheckpointUnreadableError(order.unreadable[directory])
        try:
            verified.verify(directory, group, training_state=True)
        except (CheckpointMismatchError, CheckpointNotFoundError) as error:
            if not collective.on_rank_zero(directory.is_dir, group):
                # Not the next one: a run has deleted it, and LATEST means another step now.
                logger.info("%s was deleted while it was read", directory)
                return None, [*complaints, f"{directory.name}: it was deleted while it was read"]
            complaints.append(f"{directory.name}: {error}")
            logger.warning("skipping %s: %s", directory, error)
            continue
        return str(directory), complaints
    return None, complaints


def _root_identity(root: Path) -> tuple[object, ...] | None:
    """Return what changes when a run saves to the root; None for one that can't be read, which the search explains."""
    try:
        return layout.root_identity(root)
    except OSError:
        return None

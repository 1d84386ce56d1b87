"""The train_dataloader bucket: the position in the training data."""

from __future__ import annotations

import copy
import logging
import sys
from contextlib import ExitStack
from typing import Any

logger = logging.getLogger(__name__)


def collect_dataloader(data_iterator: Any, train_dataloader: Any) -> dict[str, Any] | None:
    """Return the data position of the last TRAINED batch, or None if neither object has a ``state_dict``.

    The iterator comes first: with background prefetching, the loader's own position is ahead of training.
    """
    for source in (data_iterator, train_dataloader):
        if getattr(source, "has_state", hasattr(source, "state_dict")):
            state: dict[str, Any] = source.state_dict()
            return state
    logger.warning("the dataloader has no state_dict: after a resume this epoch will be replayed from its start")
    return None


def check_dataloader(train_dataloader: Any, saved: dict[str, Any] | None) -> list[str]:
    """Return why reading would not continue at the saved position; changes nothing.

    Raises:
        CheckpointMismatchError: the loader can't take this position.
    """
    skipped = _why_skipped(train_dataloader, saved)
    if skipped is not None:
        return [skipped]
    doubts_about = getattr(train_dataloader, "doubts_about", None)
    if doubts_about is not None:
        return list(doubts_about(saved))
    changes_since = getattr(getattr(train_dataloader, "order", None), "changes_since", None)
    changes = changes_since(saved) if changes_since is not None else ()
    return [f"the data has changed since the checkpoint ({'; '.join(changes)})"] if changes else []


def knows_shares(train_dataloader: Any) -> bool:
    """True for a loader whose position is the same on all ranks, and whose state has the number of data-parallel ranks."""
    return hasattr(getattr(train_dataloader, "order", None), "dp_world_size")


def apply_dataloader(train_dataloader: Any, saved: dict[str, Any] | None, *, undo: ExitStack | None = None) -> bool:
    """Set the loader's position; call it before the iterator is created. Returns False if the bucket was skipped.

    The loader itself warns of changed data. ``undo`` receives a callback that restores the previous position; the
    ``state_dict`` of a foreign loader is not called for it, because some begin to read then, and lose what is restored.
    """
    skipped = _why_skipped(train_dataloader, saved)
    if skipped is not None:
        logger.warning("%s", skipped)
        return False
    if undo is not None:
        if hasattr(train_dataloader, "batches_consumed") and hasattr(train_dataloader, "state_dict"):
            undo.callback(train_dataloader.load_state_dict, copy.deepcopy(train_dataloader.state_dict()))
        else:
            undo.callback(logger.warning, "the position of %s can't be put back", type(train_dataloader).__name__)
    train_dataloader.load_state_dict(saved)
    return True


def why_streams_move(train_dataloader: Any) -> list[str]:
    """Return why the first batch after a restore would find other random streams than those that were restored."""
    torch_loader = getattr(sys.modules.get("torch.utils.data"), "DataLoader", ())
    if not isinstance(train_dataloader, torch_loader) or getattr(train_dataloader, "generator", None) is not None:
        return []
    name = type(train_dataloader).__name__
    return [
        f"iter() of a {name} draws from the torch_cpu stream, also in the middle of an epoch: make "
        f"hyper_resume.ResumableLoader({name}(...)) the train_dataloader, and iterate its batches(epoch)"
    ]


def _why_skipped(train_dataloader: Any, saved: dict[str, Any] | None) -> str | None:
    if saved is None:
        return "the checkpoint holds no data position: this epoch is replayed from its start"
    if not hasattr(train_dataloader, "load_state_dict"):
        return "the dataloader has no load_state_dict: its saved position is skipped, this epoch is replayed from its start"
    return None

"""The train_dataloader bucket: where in the data training stands."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def collect_dataloader(data_iterator: Any, train_dataloader: Any) -> dict[str, Any] | None:
    """Return the data position of the last TRAINED batch, or None where nothing can tell it.

    The iterator is asked first: with background prefetching the loader itself has already read ahead of training.
    """
    for source in (data_iterator, train_dataloader):
        if getattr(source, "has_state", hasattr(source, "state_dict")):
            state: dict[str, Any] = source.state_dict()
            return state
    logger.warning("the dataloader has no state_dict: after a resume this epoch will be replayed from its start")
    return None


def apply_dataloader(train_dataloader: Any, saved: dict[str, Any] | None) -> bool:
    """Set the loader's position; must run before its iterator is made. Returns False when the bucket was skipped."""
    if saved is None:
        logger.warning("the checkpoint holds no data position: this epoch is replayed from its start")
        return False
    if not hasattr(train_dataloader, "load_state_dict"):
        logger.warning(
            "the dataloader has no load_state_dict: its saved position is skipped, this epoch is replayed from its start"
        )
        return False
    train_dataloader.load_state_dict(saved)
    return True

"""Whether a loop draws random numbers between a save and the next batch: a resume from that save does not draw them again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from hyper_resume.data.streams import moved_since, read_streams
from hyper_resume.trainer.payload import device_type

logger = logging.getLogger(__name__)


class DrawsAfterSaves:
    """Observes the random streams of this rank from each save to the next batch of a loader that shows when it reads."""

    def __init__(self, trainer: Any) -> None:
        """Observe nothing yet."""
        self._trainer = trainer
        self._device_type = device_type(trainer)
        self._saved: Mapping[str, Any] | None = None
        self._step = 0
        self._thread = 0
        # Whether the next batch continued an epoch -> the streams that had moved before it.
        self._moved: dict[bool, set[str]] = {True: set(), False: set()}

    def after_save(self, step: int) -> None:
        """Note the streams at the end of the hook that has saved ``step``."""
        before_next_batch = getattr(self._trainer.train_dataloader, "before_next_batch", None)
        if before_next_batch is not None:
            self._saved, self._step, self._thread = read_streams(self._device_type), step, threading.get_ident()
            before_next_batch(self._at_next_batch)

    def note_epoch_end(self) -> None:
        """Leave out what the hooks of an epoch's end drew, in a loop that makes up for them after a resume."""
        if self._saved is not None and getattr(self._trainer.state, "epoch_ended", False):
            self._saved = read_streams(self._device_type)

    def uncovered(self) -> list[str]:
        """Return the paths of the streams that move after saves at this place: within an epoch, or at its edge."""
        loader = self._trainer.train_dataloader
        if not any(self._moved.values()):
            return []
        is_finished = getattr(loader, "finished", None)
        if is_finished is None:
            consumed = getattr(loader, "batches_consumed", None)
            is_finished = consumed is not None and consumed >= len(loader)
        return [
            f"trainer.rng_state.{name} (drawn from after the save)" for name in sorted(self._moved[not is_finished])
        ]

    def _at_next_batch(self, within: bool) -> None:
        saved, self._saved = self._saved, None
        # A thread that reads ahead comes at any moment of the training.
        if saved is None or threading.get_ident() != self._thread:
            return
        moved = set(moved_since(saved, self._device_type))
        if not moved <= self._moved[within]:
            logger.warning(
                "random numbers were drawn between the save of global_step %s and the next batch (%s): a resume from that "
                "checkpoint does not draw them%s; draw before the hook that saves, or from a generator of your own",
                self._step,
                ", ".join(sorted(moved)),
                "" if within else ", unless the loop does so at the beginning of each epoch",
            )
        self._moved[within] |= moved

"""Whether the lr schedule moves between a step's ``on_step_end`` and the next optimizer step, and so behind the save of it."""

from __future__ import annotations

import logging
from typing import Any

from hyper_resume.trainer.payload import as_list, reachable_optimizers

logger = logging.getLogger(__name__)

STEPPED_LATE = "trainer.lr_scheduler.last_epoch (stepped after on_step_end)"
# Once may be the end of an epoch, for a schedule that is stepped once an epoch.
_OFTEN = 2


class ScheduleOrder:
    """Observes the schedule's count at each ``on_step_end`` and right before each optimizer step."""

    def __init__(self, trainer: Any) -> None:
        """Observe nothing yet."""
        self._trainer = trainer
        self._at_step_end: list[int] | None = None
        self._last_step = 0
        self._was_saved = False
        self._times_in_a_row = 0
        self._is_warned = False
        self._hook: Any = None

    def begin(self) -> None:
        """Look before each step of the first plain optimizer; without one, or without a schedule, nothing is observed."""
        if self._hook is not None:
            self._hook.remove()
        self._at_step_end, self._was_saved, self._times_in_a_row = None, False, 0
        optimizers = reachable_optimizers(self._trainer.optimizer)
        if self._counts() and optimizers and hasattr(optimizers[0], "register_step_pre_hook"):
            self._hook = optimizers[0].register_step_pre_hook(lambda *_: self._before_step())

    def after_step(self, step: int, *, is_saved: bool) -> None:
        """Note where the schedule stands at ``on_step_end`` of ``step``."""
        self._at_step_end, self._last_step, self._was_saved = self._counts(), step, is_saved

    def uncovered(self) -> list[str]:
        """Return the path of the schedule if it is stepped behind every ``on_step_end``."""
        return [STEPPED_LATE] if self._times_in_a_row >= _OFTEN else []

    def _before_step(self) -> None:
        if self._at_step_end is None:
            # Another optimizer step of the same global step.
            return
        is_late, self._at_step_end = self._counts() != self._at_step_end, None
        self._times_in_a_row = self._times_in_a_row + 1 if is_late else 0
        if is_late and self._was_saved and not self._is_warned:
            self._is_warned = True
            logger.warning(
                "the lr scheduler was stepped after on_step_end, which had saved global_step %s: a resume from that checkpoint "
                "would be one scheduler step late from then on; call scheduler.step() before on_step_end()",
                self._last_step,
            )

    def _counts(self) -> list[int]:
        return [
            count
            for one in as_list(self._trainer.lr_scheduler)
            if (count := getattr(one, "last_epoch", None)) is not None
        ]

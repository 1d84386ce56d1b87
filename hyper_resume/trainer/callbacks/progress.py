"""The progress bar on rank 0."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from hyper_resume import collective
from hyper_resume.trainer.callbacks.base import Callback
from hyper_resume.trainer.state import TrainerState


class ProgressCallback(Callback):
    """``Training:  60%|██████    | 15/25 ... loss=6.90772, lr=3.09e-05``; starts at the resumed step."""

    _bar: Any = None

    def on_step_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Show the step's loss and the lr of the next step, then move by one."""
        current: TrainerState = self.trainer.state
        if collective.rank() != 0:
            return
        if self._bar is None:
            self._bar = tqdm(total=self.trainer.train_steps, initial=current.global_step - 1, desc="Training")
        self._bar.set_postfix_str(f"loss={current.loss:.5f}, lr={current.next_lrs[0]:.3g}")
        self._bar.update(1)

    def on_train_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Leave the finished bar on the terminal."""
        if self._bar is not None:
            self._bar.close()

    def on_exception(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Leave the bar where it stopped."""
        self.on_train_end()

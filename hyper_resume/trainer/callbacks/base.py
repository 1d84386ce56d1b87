"""The hooks of a callback, and when each of them runs."""

from __future__ import annotations

from typing import Any

from hyper_resume.trainer.state import TrainerState


class Callback:
    """Base of callbacks; every hook does nothing by default.

    A callback with ``state_dict`` and ``load_state_dict`` is saved and restored with the training state. A hook works with
    the state that it is handed, whatever the trainer's own is; without one, with ``trainer.state``.
    """

    def __init__(self, trainer: Any) -> None:
        """Keep the trainer; hooks read its live objects."""
        self.trainer = trainer

    def current_state(self, state: TrainerState | None) -> TrainerState:
        """Return the state that a hook works with: the one that it is handed, otherwise the trainer's own."""
        own: TrainerState = self.trainer.state
        return own if state is None else state

    def on_train_begin(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Run once, when everything is built and before the first data iterator is made."""

    def on_step_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Run after each optimizer step, its scheduler step and the increment of ``global_step``."""

    def on_epoch_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Run after the ``on_step_end`` of an epoch's last step; not for an epoch that ``max_steps`` cut short."""

    def on_train_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Run once, after the last step of a training that no error stopped."""

    def on_exception(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Run once instead of ``on_train_end`` when an error stops training; the error is raised afterwards."""

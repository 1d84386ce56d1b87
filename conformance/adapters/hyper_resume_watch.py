"""What stands between the library and its trainer to tell what happens: around the storage, and at both ends of the hooks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_resume.trainer.callbacks import Callback, CheckpointerCallback, TrainerState

if TYPE_CHECKING:
    from conformance.adapters.hyper_resume_leg import Leg


class WatchedCheckpointer:
    """Passes every call on, and tells of saves and loads with the state as it is at the call."""

    def __init__(self, inner: Any, leg: Leg) -> None:
        """Stand before ``inner``."""
        self._inner, self._leg = inner, leg
        self.loaded_from: str | None = None

    def save(self, path: str, state: dict[str, Any], *, global_step: int, save_async: bool = False) -> None:
        """Save, and tell."""
        found = self._leg.buckets()
        self._inner.save(path, state, global_step=global_step, save_async=save_async)
        self._leg.probe.event(
            "saved",
            global_step=global_step,
            epoch=self._leg.trainer.state.epoch,
            directory=Path(path).name,
            save_async=save_async,
            buckets=found,
        )

    def load(self, path: str, state: dict[str, Any], **options: Any) -> Any:
        """Load, and remember from where."""
        loaded = self._inner.load(path, state, **options)
        self.loaded_from = path
        return loaded

    def __getattr__(self, name: str) -> Any:
        """Everything else is the storage's own."""
        return getattr(self._inner, name)


class BeforeSaves(Callback):
    """Runs before the checkpointer in every hook."""

    def __init__(self, trainer: Any, leg: Leg) -> None:
        """Tell through ``leg``."""
        super().__init__(trainer)
        self._leg = leg

    def on_step_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Record the step."""
        self._leg.tell_step()


class AfterSaves(Callback):
    """Runs after the checkpointer in every hook."""

    def __init__(self, trainer: Any, leg: Leg) -> None:
        """Tell through ``leg``."""
        super().__init__(trainer)
        self._leg = leg

    def on_train_begin(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Tell where training begins."""
        callback = next((item for item in self.trainer.callbacks if isinstance(item, CheckpointerCallback)), None)
        loaded_from = getattr(callback.checkpointer, "loaded_from", None) if callback else None
        self._leg.tell_begin(loaded_from)
        if self._leg.given.save_at_step_zero and callback is not None and loaded_from is None:
            callback.on_step_end(self.trainer.state)

    def on_step_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Stand at the moment after the step."""
        self._leg.probe.moment("after_step", self.trainer.state.global_step)

    def on_epoch_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Stand at the moment after the epoch."""
        self._leg.probe.moment("after_epoch", self.trainer.state.global_step)

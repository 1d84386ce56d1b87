"""Instrumentation of a trainer: a wrapper around its checkpointer, and callbacks before and after the checkpointer's."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from conformance.adapters.hyper_resume.event_reporter import EventReporter
from hyper_resume.checkpoint.format import layout
from hyper_resume.trainer.callbacks import Callback, CheckpointerCallback, TrainerState

# A held save goes on after this time: training is blocked, so the step that it waits for will not come.
_HOLD_SECONDS = 4.0
# Extra time of a held save, so that code which does not wait for it is detected.
_LINGER_SECONDS = 0.2
_POLL_SECONDS = 0.002


def instrument_saves(leg: EventReporter, callback: CheckpointerCallback | None) -> None:
    """Put a reporting wrapper between the callback and its checkpointer, and hold saves if the case says so."""
    if callback is None:
        return
    callback.checkpointer = InstrumentedCheckpointer(callback.checkpointer, leg)  # type: ignore[assignment]
    if leg.given.hold_saves:
        _hold_saves(leg)


def _hold_saves(leg: EventReporter) -> None:
    """Delay the commit of a save in the background, and report whether training went on (see ``given.hold_saves``)."""
    original = layout.commit

    def commit(staging: Path, target: Path) -> Path | None:
        step = layout.parse_step(target.name)
        if step is None or threading.current_thread() is threading.main_thread():
            return original(staging, target)
        deadline = time.monotonic() + _HOLD_SECONDS
        while not _has_moved_on(leg, step) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        mode = "beside training" if _has_moved_on(leg, step) else "while training stood still"
        time.sleep(_LINGER_SECONDS)
        earlier = original(staging, target)
        leg.probe.event("value", name=f"committed_{step}", value=mode)
        return earlier

    layout.commit = commit


def _has_moved_on(leg: EventReporter, step: int) -> bool:
    trained: int = leg.trainer.state.global_step
    return leg.is_over.is_set() or trained >= step + leg.given.hold_saves


_OWN = frozenset({"_inner", "_leg", "loaded_from"})


class InstrumentedCheckpointer:
    """Passes every call on, and reports saves and loads with the state at the call."""

    def __init__(self, inner: Any, leg: EventReporter) -> None:
        """Wrap ``inner``."""
        self._inner, self._leg = inner, leg
        self.loaded_from: str | None = None

    def save(
        self, path: str, state: dict[str, Any], *, global_step: int, save_async: bool = False, **options: Any
    ) -> None:
        """Save, and report it."""
        found = self._leg.buckets()
        self._inner.save(path, state, global_step=global_step, save_async=save_async, **options)
        self._leg.probe.event(
            "saved",
            global_step=global_step,
            epoch=self._leg.trainer.state.epoch,
            directory=Path(path).name,
            save_async=save_async,
            buckets=found,
        )

    def load(self, path: str, state: dict[str, Any], **options: Any) -> Any:
        """Load, and remember the path."""
        loaded = self._inner.load(path, state, **options)
        self.loaded_from = path
        return loaded

    def __getattr__(self, name: str) -> Any:
        """All other attributes are those of the wrapped checkpointer."""
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What the callback sets (``check_loaded``) is set on the wrapped checkpointer."""
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._inner, name, value)


class BeforeSaves(Callback):
    """Runs before the checkpointer in every hook."""

    def __init__(self, trainer: Any, leg: EventReporter) -> None:
        """Report through ``leg``."""
        super().__init__(trainer)
        self._leg = leg

    def on_step_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Record the step."""
        self._leg.report_step()

    def on_train_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """From now on training waits only for its saves."""
        self._leg.is_over.set()

    def on_exception(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """The same after an error; report a refused restore."""
        self._leg.is_over.set()
        self._leg.report_refused()


class AfterSaves(Callback):
    """Runs after the checkpointer in every hook."""

    def __init__(self, trainer: Any, leg: EventReporter) -> None:
        """Report through ``leg``."""
        super().__init__(trainer)
        self._leg = leg

    def on_train_begin(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Report where training begins."""
        callback = next((item for item in self.trainer.callbacks if isinstance(item, CheckpointerCallback)), None)
        loaded_from = getattr(callback.checkpointer, "loaded_from", None) if callback else None
        self._leg.report_begin(loaded_from)
        if self._leg.given.save_at_step_zero and callback is not None and loaded_from is None:
            callback.on_step_end(self.trainer.state)

    def on_step_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Reach the moment ``after_step``."""
        self._leg.probe.moment("after_step", self.trainer.state.global_step)

    def on_epoch_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Reach the moment ``after_epoch``."""
        self._leg.probe.moment("after_epoch", self.trainer.state.global_step)

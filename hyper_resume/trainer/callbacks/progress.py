"""Progress on rank 0: a bar on a terminal, plain lines in a file."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, TextIO

from tqdm import tqdm

from hyper_resume import collective
from hyper_resume.trainer.callbacks.base import Callback
from hyper_resume.trainer.state import TrainerState

LINE_SECONDS = 30.0
_DESCRIPTION = "Training"


class ProgressCallback(Callback):
    """``Training:  60%|██████    | 15/25 ... loss=6.90772, lr=3.09e-05``; starts at the resumed step.

    On a terminal this is a bar, and log lines are written above it. Elsewhere it is a line of its own: for the first step,
    every :data:`LINE_SECONDS`, and at the end of training.
    """

    _bar: Any = None
    _redirected: tuple[tuple[logging.StreamHandler[Any], Any], ...] = ()
    _lines: _Lines | None = None

    def on_step_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Show the step's loss and the lr of the next step, then move by one."""
        current = self.current_state(state)
        if collective.rank() != 0:
            return
        values = f"loss={current.loss:.5f}, lr={current.next_lrs[0]:.3g}"
        if not sys.stderr.isatty():
            if self._lines is None:
                self._lines = _Lines(self.trainer.train_steps, current.global_step - 1)
            self._lines.show(current.global_step, values)
            return
        if self._bar is None:
            self._bar = tqdm(total=self.trainer.train_steps, initial=current.global_step - 1, desc=_DESCRIPTION)
            self._redirected = _write_logs_above()
        self._bar.set_postfix_str(values)
        self._bar.update(1)

    def on_train_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Leave the last state of the bar on the terminal, or show the last step in a line."""
        if self._lines is not None:
            self._lines.finish()
        if self._bar is not None:
            self._bar.close()
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected = ()

    def on_exception(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Do the same at the step where training stopped."""
        self.on_train_end()


class _Lines:
    """The bar's text in lines of their own, as long as there is no terminal."""

    def __init__(self, total: int, initial: int) -> None:
        self._total, self._initial = total, initial
        self._started = time.monotonic()
        self._shown_at: float | None = None
        self._pending: tuple[int, str] | None = None

    def show(self, step: int, values: str) -> None:
        now = time.monotonic()
        if self._shown_at is None:
            # As the bar does, which shows the values of a step before it moves.
            self._print(step - 1, values)
        elif now - self._shown_at >= LINE_SECONDS:
            self._print(step, values)
        else:
            self._pending = (step, values)
            return
        self._shown_at = now
        self._pending = (step, values) if step == self._initial + 1 else None

    def finish(self) -> None:
        if self._pending is not None:
            self._print(*self._pending)
            self._pending = None

    def _print(self, step: int, values: str) -> None:
        text = tqdm.format_meter(
            step,
            self._total,
            time.monotonic() - self._started,
            prefix=_DESCRIPTION,
            postfix=values,
            initial=self._initial,
        )
        print(text, file=sys.stderr, flush=True)


class _AboveTheBar:
    """A stream for a log handler: what is written appears above the progress bar, which is drawn again below it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with tqdm.external_write_mode(file=self._stream):
            return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _write_logs_above() -> tuple[tuple[logging.StreamHandler[Any], Any], ...]:
    """Redirect the root logger's handlers that write to the terminal; returns each with its own stream."""
    found = [
        (handler, handler.stream)
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.stderr)
    ]
    for handler, stream in found:
        handler.setStream(_AboveTheBar(stream))
    return tuple(found)

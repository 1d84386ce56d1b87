"""On a signal to any rank, all ranks save after the same step and stop."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from hyper_resume import collective
from hyper_resume.errors import PreemptedError, describe
from hyper_resume.trainer.callbacks.base import Callback
from hyper_resume.trainer.callbacks.checkpointer import CheckpointerCallback
from hyper_resume.trainer.state import TrainerState

logger = logging.getLogger(__name__)


class PreemptionCallback(Callback):
    """Turns a signal into a save after the running step and a :class:`PreemptedError` on every rank.

    A signal only sets a flag, so it may come at any moment: in a long step, in another callback's evaluation, in a save. After
    each step the ranks exchange their flags by one small all-reduce. This callback runs after every other one in every hook, so
    all of them have processed the step.

    After the last planned step, training is not stopped early: the step is saved, and training ends normally.
    """

    def __init__(self, trainer: Any, checkpointer: CheckpointerCallback) -> None:
        """Handle ``checkpoint.preemption_signals``; ``checkpointer`` saves."""
        super().__init__(trainer)
        self._checkpointer = checkpointer
        self._numbers = [signal.Signals[name] for name in checkpointer.config.preemption_signals]
        self._group: dist.ProcessGroup | None = None
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def on_train_begin(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Install the handlers. Python allows that in the main thread only; elsewhere this rank notices no signal itself."""
        self._group = collective.new_cpu_group()
        self._received = None
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                self._before[number] = signal.signal(number, self._set_flag)

    def on_step_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Exchange the flags of all ranks; if any received a signal, save and raise.

        1. every rank: one all-reduce of the number of ranks with a signal; 2. if there are any: gathers their signals;
        3. every rank: saves, synchronously; 4. every rank: raises.

        Raises:
            PreemptedError: the step is saved; on every rank.
            CheckpointSaveError: the step could not be saved; on every rank.
        """
        asked = self._received_by_rank()
        if not asked:
            return
        current = self.current_state(state)
        who = ", ".join(f"rank {rank} ({name})" for rank, name in asked.items())
        logger.warning("asked to stop by %s: saving at global_step=%s", who, current.global_step)
        path = self._checkpointer.save_before_leaving(current)
        if current.global_step >= self.trainer.train_steps:
            logger.warning("global_step=%s is the last one: the training ends as planned", current.global_step)
            return
        self.trainer.is_leaving = True
        raise PreemptedError(
            describe(
                f"training was preempted by {', '.join(sorted(set(asked.values())))} after global_step "
                f"{current.global_step} of {self.trainer.train_steps}, which is saved",
                where=path,
                found=f"the signal was received by {who}",
                do=f"start the same command again with checkpoint.restore_from=LATEST (or {path})",
            )
        )

    def on_train_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Restore the earlier handlers. A signal since the last step is dropped: there is nothing left to stop."""
        for number, handler in self._before.items():
            # None: the handler was not installed from Python and can't be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def on_exception(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Restore the earlier handlers."""
        self.on_train_end()

    # ---- the flag ---------------------------------------------------------------------------------------------------

    def _set_flag(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number)

    def _received_by_rank(self) -> Mapping[int, str]:
        """Return rank -> name of its signal, the same on all ranks."""
        # Read once: a signal between two reads would make this rank contradict itself. It counts after the next step.
        received = self._received
        if not collective.is_distributed():
            return {} if received is None else {0: received.name}
        count = torch.tensor(0 if received is None else 1, dtype=torch.int32)
        dist.all_reduce(count, group=self._group)
        if int(count) == 0:
            return {}
        names = collective.all_gather(None if received is None else received.name, self._group)
        return {rank: name for rank, name in enumerate(names) if name is not None}


class PreemptibleCheckpointer(CheckpointerCallback):
    """The checkpointer of a loop of one's own that also stops on ``checkpoint.preemption_signals``: both as one callback.

    ``on_step_end`` raises :class:`PreemptedError` on every rank, once the step is saved. A trainer with a list of callbacks
    needs two entries instead, because :class:`PreemptionCallback` runs after all others.
    """

    def __init__(self, trainer: Any) -> None:
        """Build both; see :class:`CheckpointerCallback` for what is raised."""
        super().__init__(trainer)
        self._preemption = PreemptionCallback(trainer, self)

    def on_train_begin(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Restore, if asked to, and handle the signals from here on."""
        super().on_train_begin(state, **kwargs)
        self._preemption.on_train_begin(state, **kwargs)

    def on_step_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Save if it is time; after a signal save in any case, and raise :class:`PreemptedError`."""
        super().on_step_end(state, **kwargs)
        self._preemption.on_step_end(state, **kwargs)

    def on_train_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Save the last step, and give the signals back."""
        super().on_train_end(state, **kwargs)
        self._preemption.on_train_end(state, **kwargs)

    def on_exception(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Let a save in flight finish, and give the signals back."""
        super().on_exception(state, **kwargs)
        self._preemption.on_exception(state, **kwargs)

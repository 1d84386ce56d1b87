"""Reports the events of a leg, for both kinds of trainer (built from ``given``, or by the library's program)."""

from __future__ import annotations

import threading
from typing import Any

import torch

from conformance.adapters.hyper_resume.live_state import buckets
from conformance.adapters.hyper_resume.pause_points import PausePoints
from conformance.running.adapter import Job
from conformance.running.probe import Probe


class EventReporter:
    """One rank's reports about its trainer. ``trainer`` and ``optimizers`` are set once they are built."""

    def __init__(self, probe: Probe, job: Job, device: torch.device) -> None:
        """Install the pause points of this leg; nothing is reported yet."""
        self.probe, self.job, self.given, self.device = probe, job, job.given, device
        self._stops = PausePoints(probe, job)
        self.trainer: Any = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.extras: dict[str, Any] = {}
        # Set when training waits only for its saves.
        self.is_over = threading.Event()
        self._has_begun = False

    def buckets(self) -> dict[str, Any]:
        """The live state of every bucket, as text."""
        return buckets(self.trainer, self.optimizers, self.device, self.extras)

    def report_built(self, own_callbacks: tuple[type, ...]) -> None:
        """Report what was built, before anything is restored. ``own_callbacks`` (the adapter's) are left out."""
        names = [type(item).__name__ for item in self.trainer.callbacks if not isinstance(item, own_callbacks)]
        self.probe.event("built", buckets=self.buckets())
        self.probe.event("callbacks", names=names)

    def report_begin(self, restored_from: str | None) -> None:
        """Report what was restored, and where training begins."""
        self._has_begun = True
        trainer, state = self.trainer, self.trainer.state
        found = self.buckets()
        if restored_from is not None:
            lrs = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
            self.probe.event(
                "restored",
                global_step=state.global_step,
                epoch=state.epoch,
                path=restored_from,
                lrs=lrs,
                buckets=found,
            )
        self.probe.event(
            "begin",
            global_step=state.global_step,
            epoch=state.epoch,
            start_epoch=trainer.start_epoch,
            start_step=trainer.start_step,
            buckets=found,
        )

    def report_refused(self) -> None:
        """Report the state that an error before the begin of training left behind."""
        if not self._has_begun:
            self.probe.event("refused", buckets=self.buckets())

    def report_step(self) -> None:
        """Reach the moment ``before_save`` of the finished step."""
        self.probe.moment("before_save", self.trainer.state.global_step)

    def report_end(self) -> None:
        """Report where training ended."""
        state = self.trainer.state
        self.probe.event("end", global_step=state.global_step, epoch=state.epoch, buckets=self.buckets())

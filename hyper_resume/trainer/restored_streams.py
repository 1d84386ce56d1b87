"""Whether the random streams that a restore put back are still there when training reads its first batch.

Within an epoch, the run that was saved did not draw what a loop draws before its first batch, so that is undone. At the
beginning of an epoch it may have drawn alike. That can't be known, so the certificate says it. It does so, too, where nobody
can see when the first batch is read, because the loader is none of this package's.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from hyper_resume import collective
from hyper_resume.data.streams import moved_since, put_streams, read_streams
from hyper_resume.state.certificate import Certificate
from hyper_resume.trainer.payload import device_type

logger = logging.getLogger(__name__)


class OpenCertificate:
    """The certificate of a restore until the end of the first step after it."""

    def __init__(self, trainer: Any, certificate: Certificate) -> None:
        """Observe the streams of this rank from now on, unless they are certified as other streams already."""
        self._certificate = certificate
        is_exact = certificate.is_exact_at("rng_state", collective.rank())
        self._streams = RestoredStreams(trainer) if is_exact else None

    def close(self) -> None:
        """Observe no longer: training has ended without a step."""
        if self._streams is not None:
            self._streams.close()

    def note_epoch_end(self) -> None:
        """See :meth:`RestoredStreams.note_epoch_end`."""
        if self._streams is not None:
            self._streams.note_epoch_end()

    def finish(self) -> Certificate | None:
        """Return, at the end of the first step, what the certificate must say instead; None if it was right.

        Every rank calls it, and gets the same. The reasons are logged.
        """
        reasons = collective.all_gather("" if self._streams is None else self._streams.reason())
        if not any(reasons):
            return None
        for reason in dict.fromkeys(filter(None, reasons)):
            logger.warning("%s", reason)
        return self._certificate.degraded("rng_state", reasons)


class RestoredStreams:
    """Observes the random streams of this rank from a restore to the first step after it."""

    def __init__(self, trainer: Any) -> None:
        """Note the streams as they are now, and look again right before the first batch, or else the first forward pass."""
        self._trainer = trainer
        self._device_type = device_type(trainer)
        self._restored = read_streams(self._device_type)
        self._reason = ""
        self._is_looked_at = False
        self._hook: Any = None
        before_next_batch = getattr(trainer.train_dataloader, "before_next_batch", None)
        if before_next_batch is not None:
            before_next_batch(self._at_first_batch)
        else:
            # A function, because a bound method would be copied with the model, and the trainer along with it.
            self._hook = trainer.model.register_forward_pre_hook(lambda model, _: self._at_forward(model))

    def close(self) -> None:
        """Take the hook from the model, which could not be pickled with it."""
        self._is_looked_at = True
        if self._hook is not None:
            self._hook.remove()

    def note_epoch_end(self) -> None:
        """Take the streams as they are now for those of the restore: the hooks of an epoch's end were made up for."""
        if not self._is_looked_at:
            self._restored = read_streams(self._device_type)

    def reason(self) -> str:
        """Return, at the end of the first step, why the streams were not those of the restore; "" if they were."""
        if not self._is_looked_at:
            self._look("the end of the first step, and no batch of train_dataloader was read", self._remedy())
        return self._reason

    def _at_first_batch(self, within: bool) -> None:
        if self._is_looked_at:
            return
        if not within:
            remedy = "draw before on_train_begin, or from a generator of your own"
            self._look("an epoch's first batch, which the run that was saved may not have done", remedy)
            return
        self._is_looked_at = True
        moved = moved_since(self._restored, self._device_type)
        if moved:
            put_streams(self._restored, self._device_type)
            logger.warning(
                "the random streams moved between the restore and the first batch (%s): they were put back, because the run "
                "that was saved did not draw there",
                ", ".join(moved),
            )

    def _at_forward(self, model: torch.nn.Module) -> None:
        if model.training and not self._is_looked_at:
            self._look("the first forward pass, and this loader does not show who moved them", self._remedy())

    def _look(self, until: str, remedy: str) -> None:
        self._is_looked_at = True
        if self._hook is not None:
            self._hook.remove()
        moved = moved_since(self._restored, self._device_type)
        if moved:
            names = ", ".join(moved)
            self._reason = f"the random streams moved between the restore and {until} ({names}): {remedy}"

    def _remedy(self) -> str:
        name = type(self._trainer.train_dataloader).__name__
        return f"make hyper_resume.ResumableLoader({name}(...)) the train_dataloader, and iterate its batches(epoch)"

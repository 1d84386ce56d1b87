"""Did the state move? A bucket that should have changed between two saves and has the same digest is warned of by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hyper_resume.trainer.progress import steps_per_epoch

WATCHED = ("model", "optimizer", "progress", "train_dataloader")


class Liveness:
    """Remembers the digests of this run's last save, on this rank."""

    def __init__(self) -> None:
        """Know of no save."""
        self._step = 0
        self._digests: Mapping[str, str] = {}
        self._weights_moved = False

    def saw_step(self, lrs: Sequence[float]) -> None:
        """Take note of a finished step's learning rates; a trainer that does not tell them is taken to have moved."""
        if not lrs or any(lr != 0 for lr in lrs):
            self._weights_moved = True

    def check(self, step: int, digests: Mapping[str, str] | None, movable: set[str]) -> list[str]:
        """Return a warning for each bucket that stands still since the last save, and remember this one.

        Args:
            step: of the save.
            digests: bucket -> digest of this rank's part at the save; None where the backend has none.
            movable: buckets in which there is anything that could have changed.
        """
        before, last = self._digests, self._step
        moved, self._weights_moved = self._weights_moved, False
        self._digests, self._step = dict(digests or {}), step
        if step == last:
            return []
        still = [
            bucket
            for bucket in WATCHED
            if bucket in movable and bucket in before and before[bucket] == self._digests.get(bucket)
        ]
        return [
            f"the {bucket} bucket of global_step {step} has the same digest as that of global_step {last}: "
            "nothing of it changed in between"
            for bucket in still
            if bucket != "model" or moved
        ]

    def movable(self, trainer: Any, payload: Mapping[str, Any], step: int) -> set[str]:
        """Return the buckets that have something on this rank which training changes.

        Not the weights of a rank that holds no part of a trainable one, nor an optimizer without state, nor a position that
        nothing tells; nor one after whole epochs, which a loader without a count of epochs rightly tells by the same state.
        """
        found = {"progress"}
        if any(_local_size(parameter) for parameter in trainer.model.parameters() if parameter.requires_grad):
            found.add("model")
        if any(part["state"] for part in payload.get("optimizer", {}).values()):
            found.add("optimizer")
        position = payload.get("extra_state", {}).get("train_dataloader")
        if position is not None and (step - self._step) % steps_per_epoch(trainer) != 0:
            found.add("train_dataloader")
        return found


def _local_size(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()

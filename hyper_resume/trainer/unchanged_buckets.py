"""Warns of a bucket that should have changed between two saves and has the same digest in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hyper_resume.trainer.resume_point import steps_per_epoch

CHECKED = ("model", "optimizer", "progress", "train_dataloader")


class UnchangedBuckets:
    """Compares the digests of this rank's buckets with those of the run's previous save."""

    def __init__(self) -> None:
        """Start without a previous save."""
        self._step = 0
        self._digests: Mapping[str, str] = {}
        self._weights_changed = False

    def note_step(self, lrs: Sequence[float]) -> None:
        """Note a finished step's learning rates; without any, the weights are assumed to have changed."""
        if not lrs or any(lr != 0 for lr in lrs):
            self._weights_changed = True

    def check(self, step: int, digests: Mapping[str, str] | None, changeable: set[str]) -> list[str]:
        """Return a warning for each bucket that has not changed since the previous save, and remember this save.

        Args:
            step: the step that is saved.
            digests: bucket -> digest of this rank's shard at the save; None where the backend provides none.
            changeable: the buckets that hold something which training changes.
        """
        before, last = self._digests, self._step
        weights_changed, self._weights_changed = self._weights_changed, False
        self._digests, self._step = dict(digests or {}), step
        if step == last:
            return []
        unchanged = [
            bucket
            for bucket in CHECKED
            if bucket in changeable and bucket in before and before[bucket] == self._digests.get(bucket)
        ]
        return [
            f"the {bucket} bucket of global_step {step} has the same digest as that of global_step {last}: "
            "nothing in it changed in between"
            for bucket in unchanged
            if bucket != "model" or weights_changed
        ]

    def changeable(self, trainer: Any, payload: Mapping[str, Any], step: int) -> set[str]:
        """Return the buckets that hold something on this rank which training changes.

        Left out are the model where this rank holds no shard of a trainable parameter, an optimizer without state, and the data
        position where the loader has none, or where whole epochs have passed: a loader that does not count epochs then has the
        same position again.
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

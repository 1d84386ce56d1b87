"""A storage backend that saves and loads, and implements nothing else of the interface (``checkpoint.manager: plain-file``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hyper_resume.checkpoint.base import CHECKPOINTER_REGISTRY, CheckpointerBase

_NAME = "state.pt"


@CHECKPOINTER_REGISTRY.register("plain-file")
class PlainFileBackend(CheckpointerBase):
    """One file per step directory, for one process."""

    def save(self, path: str, state: dict[str, Any], *, global_step: int, save_async: bool = False) -> None:
        """Write everything to one file."""
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(state, Path(path, _NAME))

    def load(
        self,
        path: str,
        state: dict[str, Any],
        *,
        strict_model: bool = True,
        extra_state_skeleton: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the whole payload, as it was saved."""
        # The harness wrote it itself.
        payload: dict[str, Any] = torch.load(Path(path, _NAME), weights_only=False)
        return payload


@CHECKPOINTER_REGISTRY.register("plain-file-damaging")
class DamagingBackend(PlainFileBackend):
    """The same, which returns another value for one weight."""

    def load(self, path: str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Return the payload with another value in it."""
        payload = super().load(path, state, **options)
        payload["model"]["hidden.weight"][0, 0] += 1.0
        return payload

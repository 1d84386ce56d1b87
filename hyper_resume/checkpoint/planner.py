"""DCP load planner: strict about the model, lenient about the optimizer, and running no code from the checkpoint."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from hyper_resume.checkpoint import safe_load
from hyper_resume.errors import CheckpointMismatchError, describe

MODEL_BUCKET = "model"
_NAMES_SHOWN = 5


def check_model_entries(wanted: dict[str, Any], metadata: Metadata, *, strict: bool, where: str) -> None:
    """Hold the running model's entries against the checkpoint's, before anything is read.

    Args:
        wanted: flattened entry names (``model.x.y``) to the objects that will receive them.
        metadata: the checkpoint's own description.
        strict: a name that the checkpoint lacks is an error.
        where: the path, for the message.

    Raises:
        CheckpointMismatchError: ``missing model key``, or an entry of another shape or type, or a tensor on one side only.
    """
    stored = metadata.state_dict_metadata
    missing = [name for name in wanted if name not in stored]
    if strict and missing:
        raise CheckpointMismatchError(
            describe(
                f"missing model key: {_first(missing)}",
                where=where,
                expected=f"{len(wanted)} model entries",
                found=f"{len(wanted) - len(missing)} of them",
                do="resume with the model that was saved, or set checkpoint.is_peft for an adapter-only checkpoint",
            )
        )
    for name, value in wanted.items():
        if name in stored and _kind_of_live(value) != _kind_of_stored(stored[name]):
            raise CheckpointMismatchError(
                describe(
                    f"model entry {name} does not fit",
                    where=where,
                    expected=f"{_kind_of_live(value)} (the running model)",
                    found=f"{_kind_of_stored(stored[name])} (the checkpoint)",
                    do="resume with the model configuration that was saved",
                )
            )


def _kind_of_live(value: Any) -> str:
    return f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else "no tensor"


def _kind_of_stored(entry: Any) -> str:
    if isinstance(entry, TensorStorageMetadata):
        return f"shape {tuple(entry.size)}, {entry.properties.dtype}"
    return "no tensor"


def _first(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


class _ModelStrictLoadPlanner(DefaultLoadPlanner):
    """Refuses a missing ``model.*`` entry; passes over any other entry that the checkpoint lacks."""

    def __init__(self, *, strict_model: bool, where: str) -> None:
        super().__init__(allow_partial_load=True)
        self._strict_model = strict_model
        self._where = where

    def create_local_plan(self) -> LoadPlan:
        """Check the model's entries on this rank, then plan as DCP does."""
        assert self.metadata is not None  # DCP calls set_up_planner with it first
        model = {name: value for name, value in self.state_dict.items() if name.startswith(f"{MODEL_BUCKET}.")}
        check_model_entries(model, self.metadata, strict=self._strict_model, where=self._where)
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode a non-tensor entry; only tensors and plain values, so that opening a checkpoint runs no code."""
        path = self.mappings[read_item.dest_index.fqn]
        container: Any = self.original_state_dict
        for part in path[:-1]:
            container = container[part]
        # One rank wrote the entry and any rank may read it, so a device in it says nothing about where it belongs.
        container[path[-1]] = safe_load.load_plain(value.getvalue(), f"{self._where}, entry {read_item.dest_index.fqn}")

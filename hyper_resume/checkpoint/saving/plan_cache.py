"""A cache of DCP's save plan and of the entries' locations in the files, reused while the layout of the state is unchanged.

Every rank compares the layout entry by entry at every save. If it differs on one rank, all ranks plan anew. The cache holds
locations, never data. torch's own plan cache is a class attribute that is keyed by the planner's name, so two jobs in one
process would share it.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from hyper_resume.checkpoint.saving import planning
from hyper_resume.checkpoint.tensors.flattening import flatten

Layout = tuple[tuple[Any, ...], ...]


def payload_layout(flat: Mapping[str, Any], paths: Mapping[str, Any]) -> Layout:
    """Return everything in a flattened payload that a plan depends on; ``paths``: entry name -> its keys in the payload."""
    return tuple((name, paths[name], *_tensor_layout(value)) for name, value in flat.items())


def _tensor_layout(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor):
        return ()
    if isinstance(value, DTensor):
        return value.dtype, value.shape, value.device_mesh, value.placements, value.to_local().shape
    return value.dtype, value.shape


class PlanCache:
    """The cache of one checkpointer on one rank. After a failed save, every rank must call :meth:`forget`.

    Attributes:
        plan: this rank's final plan.
        metadata: rank 0 only: DCP's metadata without the locations.
        contents: rank 0 only: the content of ``.metadata`` (as a template) and of the index at the last save.
    """

    def __init__(self) -> None:
        """Create an empty cache."""
        self.forget()

    def forget(self) -> None:
        """Empty the cache, so that the next save plans anew."""
        self._layout: Layout | None = None
        self.plan: SavePlan | None = None
        self.metadata: Metadata | None = None
        self._places: Sequence[tuple[Any, ...]] | None = None
        self._results: dict[Any, list[WriteResult]] = {}
        self.contents: tuple[MetadataTemplate, bytes] | None = None

    def has_layout(self, layout: Layout) -> bool:
        """True when this rank's payload had this layout at the last save."""
        return self.plan is not None and self._layout == layout

    def store(self, layout: Layout, plan: SavePlan, metadata: Metadata | None) -> None:
        """Store the plan of this rank and the metadata that all ranks planned together."""
        self.forget()
        self._layout, self.plan, self.metadata = layout, plan, metadata

    def update_locations(self, written: Sequence[tuple[WriteItem, int, int]]) -> bool:
        """Store the locations of this rank's entries; True when they are the same as at the last save."""
        places = [(item.index, offset, length) for item, offset, length in written]
        is_same = self._places == places
        self._places = places
        return is_same

    def expand_results(self, summary: list[WriteResult]) -> list[WriteResult]:
        """Return the write results of the last save for which ``summary``, the first of them, stands."""
        return self._results[summary[0].index] if summary else summary

    def store_results(self, of_ranks: Sequence[list[WriteResult]], contents: tuple[MetadataTemplate, bytes]) -> None:
        """Store each rank's write results, by the rank's first entry, and the contents of the metadata files."""
        self._results = {results[0].index: results for results in of_ranks if results}
        self.contents = contents


class _EmptyWhenPickled(Metadata):
    """Metadata that pickles as an empty one: DCP sends it to every rank at the end of a save, and no rank uses it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Metadata, ({},)


class CachingPlanner(DefaultSavePlanner):
    """A save planner that reuses the cached plan, or plans as DCP does.

    Args:
        cache: where the plan is stored.
        layout: the layout of this rank's payload.
        reuse: use the cached plan; only if every rank's layout is the cached one.
    """

    def __init__(self, cache: PlanCache, layout: Layout, *, reuse: bool) -> None:
        """Plan nothing yet."""
        super().__init__()
        self._cache, self._layout, self._reuse = cache, layout, reuse
        self._metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state; the first call that DCP makes."""
        self.state_dict, self.mappings = flatten(state_dict)
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return the items that this rank offers to write."""
        if self._reuse:
            return SavePlan([])
        items = planning.local_write_items(self.state_dict, is_coordinator=self.is_coordinator)
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Combine the plans of all ranks; called on rank 0."""
        if self._reuse:
            assert self._cache.metadata is not None  # stored with the plan
            return all_plans, self._cache.metadata
        alone = planning.single_rank_metadata(all_plans)
        plans, metadata = (all_plans, alone) if alone is not None else super().create_global_plan(all_plans)
        fields = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(metadata)}
        self._metadata = _EmptyWhenPickled(**fields)
        return plans, self._metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return this rank's final plan."""
        if self._reuse:
            assert self._cache.plan is not None  # has_layout was true
            return dataclasses.replace(self._cache.plan, storage_data=new_plan.storage_data)
        plan = super().finish_plan(new_plan)
        self._cache.store(self._layout, plan, self._metadata)
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of an item: a tensor, or the serialised bytes of any other value."""
        if write_item.type == WriteItemType.TENSOR:
            value = self.state_dict[write_item.index.fqn]
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                return value
        return super().resolve_data(write_item)

    def lookup_object(self, index: Any) -> Any:
        """Return an entry's value; for a sharded tensor, this rank's part."""
        value = self.state_dict[index.fqn]
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            return value
        return super().lookup_object(index)


class MetadataTemplate:
    """A pickled ``Metadata`` in which the save id and the directory can be replaced, without pickling it again."""

    def __init__(self, metadata: Metadata) -> None:
        """Pickle ``metadata`` with two placeholders. Protocol 2 has no frames whose lengths would change with the texts."""
        self._marks = uuid.uuid4().hex, uuid.uuid4().hex
        about = StorageMeta(checkpoint_id=self._marks[0], save_id=self._marks[1])
        content = pickle.dumps(dataclasses.replace(metadata, storage_meta=about), protocol=2)
        self._parts: list[bytes] = []
        for mark in self._marks:
            before, content = content.split(_text(mark))
            self._parts.append(before)
        self._parts.append(content)

    def for_save(self, directory: str, save_id: str) -> tuple[bytes, ...]:
        """Return the pickle for one save, in pieces, because joining them would copy many megabytes in a large job."""
        first, second, rest = self._parts
        return first, _text(directory), second, _text(save_id), rest


def _text(text: str) -> bytes:
    """Return a text as pickle protocol 2 encodes it."""
    content = text.encode("utf-8", "surrogatepass")
    return b"X" + len(content).to_bytes(4, "little") + content

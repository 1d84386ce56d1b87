"""What one save leaves for the next: the plan, and where everything stands in the files, as long as the layout is the same.

The layout is compared entry by entry at every save, on every rank; one rank that has another one makes all plan anew. Only
places are kept, never data. torch's own cache of plans lives in the class, and is found by the planner's name: two jobs'
states in one process get each other's.
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
    """Return all of a flattened payload that a plan depends on; ``paths`` lead to the entries in the payload."""
    return tuple((name, paths[name], *_kind(value)) for name, value in flat.items())


def _kind(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor):
        return ()
    if isinstance(value, DTensor):
        return value.dtype, value.shape, value.device_mesh, value.placements, value.to_local().shape
    return value.dtype, value.shape


class PlanCache:
    """Of one checkpointer on one rank. :meth:`forget` it after a save that failed, on every rank.

    Attributes:
        plan: this rank's part, as DCP finished it.
        metadata: rank 0: DCP's description without the places.
        contents: rank 0: the files that describe the step directory, when places and layout are as they were.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self.forget()

    def forget(self) -> None:
        """Plan anew the next time."""
        self._layout: Layout | None = None
        self.plan: SavePlan | None = None
        self.metadata: Metadata | None = None
        self._places: Sequence[tuple[Any, ...]] | None = None
        self._results: dict[Any, list[WriteResult]] = {}
        self.contents: tuple[MetadataTemplate, bytes] | None = None

    def has_layout(self, layout: Layout) -> bool:
        """True when this rank's part of the last save was laid out so."""
        return self.plan is not None and self._layout == layout

    def store(self, layout: Layout, plan: SavePlan, metadata: Metadata | None) -> None:
        """Keep what all ranks have agreed on."""
        self.forget()
        self._layout, self.plan, self.metadata = layout, plan, metadata

    def update_locations(self, written: Sequence[tuple[WriteItem, int, int]]) -> bool:
        """Take where this rank's entries stand now; True when that is where they stood in the last save."""
        places = [(item.index, offset, length) for item, offset, length in written]
        is_same = self._places == places
        self._places = places
        return is_same

    def expand_results(self, standing: list[WriteResult]) -> list[WriteResult]:
        """Return what the one result that stands for all of a rank stands for."""
        return self._results[standing[0].index] if standing else standing

    def store_results(self, of_ranks: Sequence[list[WriteResult]], contents: tuple[MetadataTemplate, bytes]) -> None:
        """Keep what each rank's write returned, by the entry that comes first, and the files that tell of it."""
        self._results = {results[0].index: results for results in of_ranks if results}
        self.contents = contents


class _EmptyWhenPickled(Metadata):
    """DCP sends the description to every rank when a save has ended, and no rank looks at it: an empty one travels."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Metadata, ({},)


class CachingPlanner(DefaultSavePlanner):
    """Plans as DCP does, or not at all where every rank's layout is the one of the last save."""

    def __init__(self, cache: PlanCache, layout: Layout, *, reuse: bool) -> None:
        """Use ``cache``, whose layout is ``layout`` on every rank when ``reuse``."""
        super().__init__()
        self._cache, self._layout, self._reuse = cache, layout, reuse
        self._metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take what is to be saved."""
        self.state_dict, self.mappings = flatten(state_dict)
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Plan this rank's part."""
        if self._reuse:
            return SavePlan([])
        items = planning.local_write_items(self.state_dict, is_coordinator=self.is_coordinator)
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Put the parts together; on rank 0."""
        if self._reuse:
            assert self._cache.metadata is not None  # kept with the plan
            return all_plans, self._cache.metadata
        alone = planning.single_rank_metadata(all_plans)
        plans, metadata = (all_plans, alone) if alone is not None else super().create_global_plan(all_plans)
        fields = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(metadata)}
        self._metadata = _EmptyWhenPickled(**fields)
        return plans, self._metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return what this rank writes."""
        if self._reuse:
            assert self._cache.plan is not None  # it knows the layout
            return dataclasses.replace(self._cache.plan, storage_data=new_plan.storage_data)
        plan = super().finish_plan(new_plan)
        self._cache.store(self._layout, plan, self._metadata)
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return what an item writes: a tensor, or the archive of anything else."""
        if write_item.type == WriteItemType.TENSOR:
            value = self.state_dict[write_item.index.fqn]
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                return value
        return super().resolve_data(write_item)

    def lookup_object(self, index: Any) -> Any:
        """Return an entry's value; this rank's part of a sharded one."""
        value = self.state_dict[index.fqn]
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            return value
        return super().lookup_object(index)


class MetadataTemplate:
    """The pickle of a description in which the save's own id and directory can be replaced."""

    def __init__(self, metadata: Metadata) -> None:
        """Pickle it, with marks for the two texts. Protocol 2, because its texts stand alone: later ones count frames."""
        self._marks = uuid.uuid4().hex, uuid.uuid4().hex
        about = StorageMeta(checkpoint_id=self._marks[0], save_id=self._marks[1])
        content = pickle.dumps(dataclasses.replace(metadata, storage_meta=about), protocol=2)
        self._parts: list[bytes] = []
        for mark in self._marks:
            before, content = content.split(_text(mark))
            self._parts.append(before)
        self._parts.append(content)

    def for_save(self, directory: str, save_id: str) -> tuple[bytes, ...]:
        """Return the pickle for one save, in pieces: of a thousand ranks it is too large to be put together for nothing."""
        first, second, rest = self._parts
        return first, _text(directory), second, _text(save_id), rest


def _text(text: str) -> bytes:
    """A text as protocol 2 pickles it."""
    content = text.encode("utf-8", "surrogatepass")
    return b"X" + len(content).to_bytes(4, "little") + content

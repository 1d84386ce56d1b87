"""Checks that replicas are equal: tensors, or parts of tensors, that several ranks hold.

DCP writes one of the copies and loads it on every rank. If the copies differ, the parallelisation has a defect (a gradient that
was not reduced), which the loss does not show, and a checkpoint silently loses the other copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyper_resume import collective
from hyper_resume.errors import ReplicaMismatchError, describe

_NAMES_SHOWN = 5
_Int64 = npt.NDArray[np.int64]


def check_replicas(entries: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Check that all ranks with the same part of a tensor have the same bytes.

    A plain tensor has one part, which every rank holds. The part of a DTensor depends on the rank's coordinates in the mesh
    dimensions that shard it; ranks that differ only in other dimensions hold copies. Entries without copies are neither
    digested nor exchanged.

    1. every rank: digests its copies (xxh3 of the local bytes); an error on one rank is raised on all;
    2. every rank: gathers from all ranks one digest of all names and layouts;
    3. every rank: gathers from all ranks a digest and a part number for each copied entry, and compares them. All ranks see
       the same numbers, so all return or all raise.

    Args:
        entries: name -> tensor, of any dtype and shape; every rank passes the same names.
        group: the ranks to compare, with a backend for CPU tensors; None for all.

    Raises:
        ReplicaMismatchError: copies, names or layouts differ; the message lists the first names and their ranks.
    """
    if not collective.is_distributed() or dist.get_world_size(group) == 1:
        return
    world_size = dist.get_world_size(group)
    copies = collective.on_all_ranks(lambda: _copies(entries, world_size), group)
    _check_same_layouts(copies.layouts, group)
    digests = _gather(copies.digests, group)
    parts = _gather(copies.parts, group)
    _compare(copies.names, digests, parts)


@dataclass(frozen=True, kw_only=True)
class _Copies:
    """This rank's data for the comparison.

    ``names``, ``digests`` and ``parts`` have one item for each entry with copies; ``layouts`` has one line for every entry.
    """

    names: list[str]
    digests: _Int64
    parts: _Int64
    layouts: list[str]


def _copies(entries: Mapping[str, Tensor], world_size: int) -> _Copies:
    names, digests, parts, layouts = [], [], [], []
    for name in sorted(entries):
        tensor = entries[name]
        part, part_count = _part(tensor)
        layouts.append(_layout(name, tensor))
        if part_count < world_size:
            names.append(name)
            digests.append(_digest(tensor))
            parts.append(part)
    return _Copies(
        names=names,
        digests=np.array(digests, dtype=np.uint64).view(np.int64),
        parts=np.array(parts, dtype=np.int64),
        layouts=layouts,
    )


def _part(tensor: Tensor) -> tuple[int, int]:
    """Return the number of the part of ``tensor`` that this rank holds, and the number of parts."""
    if not isinstance(tensor, DTensor):
        return 0, 1
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    # A partial sum counts as a copy: DCP would save one rank's summand as the whole, so different ones must be reported.
    sharding = [dim for dim, kind in enumerate(tensor.placements) if not (kind.is_replicate() or kind.is_partial())]
    sizes = [mesh.size(dim) for dim in sharding]
    if coordinate is None:  # ranks outside the mesh hold nothing
        return -1, math.prod(sizes)
    part = 0
    for dim, size in zip(sharding, sizes, strict=True):
        part = part * size + coordinate[dim]
    return part, math.prod(sizes)


def _layout(name: str, tensor: Tensor) -> str:
    where = (tuple(tensor.device_mesh.shape), tensor.placements) if isinstance(tensor, DTensor) else "plain"
    return f"{name} {tuple(tensor.shape)} {tensor.dtype} {where}"


def _digest(tensor: Tensor) -> int:
    """Return the xxh3 of the local bytes. Different shards have different part numbers, so lengths are not digested."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data)


def _gather(values: _Int64, group: dist.ProcessGroup | None) -> _Int64:
    """Return the ``values`` of all ranks, shape (ranks, length); the length is the same on all ranks."""
    gathered = torch.empty(dist.get_world_size(group), len(values), dtype=torch.int64)
    dist.all_gather(list(gathered.unbind()), torch.from_numpy(values), group=group)
    result: _Int64 = gathered.numpy()
    return result


def _check_same_layouts(layouts: list[str], group: dist.ProcessGroup | None) -> None:
    """Check that all ranks have the same tensors with the same layouts; otherwise their digests can't be compared."""
    summary = np.array([xxhash.xxh3_64_intdigest("\n".join(layouts).encode())], dtype=np.uint64).view(np.int64)
    summaries = _gather(summary, group)[:, 0]
    if (summaries == summaries[0]).all():
        return
    everyone = collective.all_gather(layouts, group)
    first = set(everyone[0])
    rank = next(rank for rank, other in enumerate(everyone) if set(other) != first)
    differences = sorted(first.symmetric_difference(everyone[rank]))
    raise ReplicaMismatchError(
        describe(
            "ranks do not hold the same tensors",
            where=f"ranks 0 and {rank}",
            expected="equal names, shapes, types and placements on all ranks",
            found=f"only on one of them: {_shorten(differences)}",
            do="build the same model and optimizer on every rank",
        )
    )


def _compare(names: list[str], digests: _Int64, parts: _Int64) -> None:
    """Raise if two ranks (rows) with the same part have different digests in any column."""
    order = np.argsort(parts, axis=0, kind="stable")
    parts_sorted = np.take_along_axis(parts, order, axis=0)
    digests_sorted = np.take_along_axis(digests, order, axis=0)
    differ = (parts_sorted[1:] == parts_sorted[:-1]) & (digests_sorted[1:] != digests_sorted[:-1])
    wrong = np.flatnonzero(differ.any(axis=0))
    if not len(wrong):
        return
    found = [f"{names[column]} ({_differing_ranks(digests[:, column], parts[:, column])})" for column in wrong]
    raise ReplicaMismatchError(
        describe(
            f"copies that a checkpoint would merge differ in {len(wrong)} of {len(names)} tensors",
            where=_shorten(found),
            expected="the same bytes on all ranks that hold the same part",
            do="make copied parameters start equal and reduce their gradients over the ranks that copy them",
        )
    )


def _differing_ranks(digests: _Int64, parts: _Int64) -> str:
    """Return the ranks whose copies differ, for each part: ``rank 0, 2 != rank 1`` (ranks 0 and 2 have equal copies)."""
    texts = []
    for part in np.unique(parts):
        holders = np.flatnonzero(parts == part)
        versions = [holders[digests[holders] == digest].tolist() for digest in dict.fromkeys(digests[holders].tolist())]
        if len(versions) > 1:
            texts.append(" != ".join(f"rank {', '.join(map(str, version))}" for version in versions))
    return "; ".join(texts)


def _shorten(texts: list[str]) -> str:
    more = len(texts) - _NAMES_SHOWN
    return ", ".join(texts[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")

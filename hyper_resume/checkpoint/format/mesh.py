"""The mesh of a run: which place each rank has in it. Per-rank state belongs to a place, not to the number of a rank.

A stream of random numbers and a share of the samples belong to a data-parallel coordinate: ranks that differ in other
dimensions only (tensor, context or pipeline parallelism) work on the same samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyper_resume.checkpoint.parsing.strict_json import JsonFormatError, JsonObject

# Dimensions whose ranks share samples, by the first word of their names; every other dimension is data-parallel.
_SHARES_SAMPLES = re.compile(
    r"(?:e?tp|tensor|mp|model|sp|sequence|cp|context|pp|pipe|pipeline)(?![a-z])", re.IGNORECASE
)
_DATA = "data"
_MAX_DIMENSIONS = 16
MAX_RANKS = 1_000_000
"""The most ranks of a run that is read: what is computed of a mesh takes memory for each of them."""
_MOST_SHOWN = 16


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A device mesh.

    Attributes:
        names: names of its dimensions.
        shape: their sizes.
        ranks: the global rank at each place, row by row; empty if they ascend.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """Return lists that can be written as JSON; without ``ranks`` if they ascend."""
        return {name: list(value) for name, value in vars(self).items() if value or name != "ranks"}

    @property
    def sharing(self) -> int:
        """The number of ranks that work on the same samples."""
        return math.prod(size for name, size in zip(self.names, self.shape, strict=True) if _shares_samples(name))


def mesh_from_plain(found: Any) -> Mesh | None:
    """Return the mesh of :meth:`Mesh.to_plain`; None for None.

    Raises:
        JsonFormatError: it is no description of a mesh.
    """
    if found is None:
        return None
    form = JsonObject(found)
    form.refuse_unknown_keys("names", "shape", "ranks")
    names = [JsonObject({"name": item}).text("name") for item in form.items("names", most=_MAX_DIMENSIONS)]
    shape = [JsonObject({"size": item}).integer("size", least=1) for item in form.items("shape", most=_MAX_DIMENSIONS)]
    if len(names) != len(shape):
        raise JsonFormatError(f"mesh: {len(names)} names and {len(shape)} sizes")
    if math.prod(shape) > MAX_RANKS:
        raise JsonFormatError(f"mesh: more than {MAX_RANKS} ranks")
    ranks: list[int] = []
    if "ranks" in found:
        ranks = [JsonObject({"rank": item}).integer("rank") for item in form.items("ranks", most=MAX_RANKS)]
        if len(ranks) != math.prod(shape) or sorted(ranks) != list(range(len(ranks))):
            raise JsonFormatError(f"mesh: its {math.prod(shape)} places do not hold one rank each")
    return Mesh(names=tuple(names), shape=tuple(shape), ranks=tuple(ranks))


def mesh_from_device_mesh(mesh: DeviceMesh, unnamed: str = "dim") -> Mesh:
    """Describe a mesh of torch; dimensions without names are called ``<unnamed>_0``, ``<unnamed>_1``, ..."""
    order = mesh.mesh.flatten()
    ascending = torch.equal(order, torch.arange(order.numel(), dtype=order.dtype))
    return Mesh(
        names=tuple(mesh.mesh_dim_names or (f"{unnamed}_{index}" for index in range(mesh.ndim))),
        shape=tuple(int(size) for size in mesh.shape),
        ranks=() if ascending else tuple(order.tolist()),
    )


def mesh_of_tensors(state: Any) -> Mesh | None:
    """Return the mesh of the sharded tensors in a nested state, that with the most dimensions; None without such tensors.

    It may be a part of the run's mesh, and then of other ranks on other ranks, so the order of its ranks is left out.
    """
    meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor in _sharded(state)}
    largest = max(meshes.values(), key=lambda mesh: mesh.ndim, default=None)
    return None if largest is None else replace(mesh_from_device_mesh(largest), ranks=())


def _sharded(state: Any) -> list[DTensor]:
    if isinstance(state, DTensor):
        return [state]
    if isinstance(state, Mapping):
        return [tensor for value in state.values() for tensor in _sharded(value)]
    if isinstance(state, (list, tuple)):
        return [tensor for value in state for tensor in _sharded(value)]
    return []


def covers(mesh: Mesh | None, world_size: int) -> bool:
    """True if every rank of the run has a place in the mesh, and its dimensions have names; None has one for every rank."""
    # Before version 3 of the manifest, dimensions without names were recorded as dim_0, dim_1, ..., whatever they did.
    return mesh is None or (
        math.prod(mesh.shape) == world_size and not any(name.startswith("dim_") for name in mesh.names)
    )


def same_places(one: Mesh | None, other: Mesh | None, world_size: int) -> bool:
    """True if every rank has the same data-parallel coordinate, and the same place in every other dimension, in both meshes.

    Names of data-parallel dimensions, and how they are divided (sharded, replicated), do not matter.
    """
    first, second = _axes(one, world_size), _axes(other, world_size)
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def data_coordinate(mesh: Mesh | None, rank: int, world_size: int) -> int:
    """Return the data-parallel coordinate of a rank: ranks with the same one work on the same samples."""
    return int(_axes(mesh, world_size)[_DATA][rank])


def mesh_in_words(mesh: Mesh | None, world_size: int) -> str:
    """Return names and sizes of the dimensions, for a message: ``dp_shard 2 x tp 2``."""
    if mesh is None:
        return f"data parallel {world_size}"
    text = " x ".join(f"{name} {size}" for name, size in zip(mesh.names, mesh.shape, strict=True))
    if not mesh.ranks:
        return text
    more = ", ..." if len(mesh.ranks) > _MOST_SHOWN else ""
    return f"{text} of ranks {', '.join(map(str, mesh.ranks[:_MOST_SHOWN]))}{more}"


def _axes(mesh: Mesh | None, world_size: int) -> Mapping[str, npt.NDArray[np.int64]]:
    """Return name -> each rank's coordinate, for the data-parallel dimensions together, and for every other one."""
    if mesh is None:
        return {_DATA: np.arange(world_size)}
    places = np.indices(mesh.shape).reshape(len(mesh.shape), -1)
    if mesh.ranks:
        of_ranks = np.empty_like(places)
        of_ranks[:, list(mesh.ranks)] = places
        places = of_ranks
    found = {_DATA: np.zeros(places.shape[1], dtype=np.int64)}
    for name, size, coordinates in zip(mesh.names, mesh.shape, places, strict=True):
        if _shares_samples(name):
            # A dimension of one rank says nothing, and a run without it is the same run.
            found |= {name: coordinates} if size > 1 else {}
        else:
            found[_DATA] = found[_DATA] * size + coordinates
    return found


def _shares_samples(name: str) -> bool:
    return _SHARES_SAMPLES.match(name) is not None

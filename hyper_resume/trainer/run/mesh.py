"""The mesh of a run, as its trainer shows it, and what a change of it means for the random streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hyper_resume import collective
from hyper_resume.checkpoint.format import mesh as meshes
from hyper_resume.checkpoint.format.extra_state import MESH
from hyper_resume.checkpoint.format.mesh import Mesh
from hyper_resume.parallel.mesh import DP_DIM, TP_DIM
from hyper_resume.state.rng import apply_rng, derive_streams
from hyper_resume.trainer.payload import device_type


def find_run_mesh(trainer: Any) -> Mesh | None:
    """Return the mesh of the run; None for plain data parallelism over all ranks.

    It is that of the model's sharded parameters, whole, because they may use a part of it. Without these, it is that of
    ``config.accelerator``.
    """
    world_size = collective.world_size()
    found = [mesh for mesh in _meshes_of(trainer.model) if meshes.covers(mesh, world_size)]
    if found:
        # Experts may have a mesh of their own over the same ranks. The one that shares samples decides whose streams are equal.
        return max(found, key=lambda mesh: (mesh.sharing, len(mesh.shape)))
    tp_size = getattr(getattr(trainer.config, "accelerator", None), "tp_size", 1)
    if tp_size > 1 and world_size % tp_size == 0:
        return Mesh(names=(DP_DIM, TP_DIM), shape=(world_size // tp_size, tp_size))
    return None


def _meshes_of(model: nn.Module) -> list[Mesh]:
    used = {id(value.device_mesh): value.device_mesh for value in model.parameters() if isinstance(value, DTensor)}
    # A mesh without names divides either the data, as FSDP2 does, or the layers.
    unnamed = "dp" if any(isinstance(module, FSDPModule) for module in model.modules()) else "tp"
    whole: dict[int, DeviceMesh] = {}
    for mesh in used.values():
        root = mesh._get_root_mesh()
        whole |= {id(mesh): mesh, id(root): root}
    return [meshes.mesh_from_device_mesh(mesh, unnamed) for mesh in whole.values()]


class StreamIdentity:
    """Whose random streams this rank has in this run."""

    def __init__(self, trainer: Any) -> None:
        """Find the mesh and the seed of the run; every rank calls it."""
        self.mesh = find_run_mesh(trainer)
        self._device_type = device_type(trainer)
        seed = getattr(getattr(trainer.config, "training", None), "seed", None)
        # The seed must be equal on all ranks. Ranks usually seed their own streams differently.
        self._seed = seed if type(seed) is int else collective.broadcast(torch.initial_seed())

    def change_since(self, extra_state: Mapping[str, Any]) -> str | None:
        """Return why the streams of a training state are not this rank's, for the certificate; None if they are."""
        rank, world_size = collective.rank(), collective.world_size()
        saved_world_size = extra_state.get("world_size", world_size)
        saved = meshes.mesh_from_plain(extra_state[MESH]) if MESH in extra_state else self.mesh
        if saved_world_size != world_size:
            what = "the number of ranks changed"
        elif not meshes.same_places(saved, self.mesh, world_size):
            what = "the mesh changed"
        elif extra_state.get("rank", rank) != rank:
            return f"this is the training state of rank {extra_state['rank']}: random streams start from the seed"
        else:
            return None
        was, now = meshes.mesh_in_words(saved, saved_world_size), meshes.mesh_in_words(self.mesh, world_size)
        return (
            f"{what}: random streams start from the seed, the step and the data-parallel coordinate "
            f"(the mesh was {was}, is {now})"
        )

    def apply(self, extra_state: Mapping[str, Any]) -> None:
        """Set every stream of this process: as saved, or anew where the saved ones belong to another mesh."""
        if self.change_since(extra_state) is None:
            apply_rng(extra_state["rng_state"], self._device_type)
            return
        coordinate = meshes.data_coordinate(self.mesh, collective.rank(), collective.world_size())
        derive_streams(self._seed, extra_state["global_step"], coordinate, self._device_type)

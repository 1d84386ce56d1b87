"""FSDP2: every parameter becomes a DTensor that is sharded over the data-parallel ranks."""

from __future__ import annotations

import warnings

from torch import nn
from torch.distributed.fsdp import fully_shard

from hyper_resume.parallel.layers import decoder_layers
from hyper_resume.parallel.mesh import ParallelMesh


def apply_fsdp(model: nn.Module, mesh: ParallelMesh) -> None:
    """Shard ``model`` in place over ``mesh.dp_mesh``, one unit a decoder layer and one for the rest.

    It is done for a data-parallel size of 1 too: then every parameter is a DTensor in every job of several processes,
    and a checkpoint looks the same whatever the sizes are. Tensor parallelism must have been applied before.

    Raises:
        UnsupportedError: the model has no stack of decoder layers.
    """
    # A gathered output layer returns its logits as a view, of which FSDP2 warns in every process at the first step.
    # It concerns in-place changes of the logits, and losses make none.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    for _, layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh.dp_mesh)
    fully_shard(model, mesh=mesh.dp_mesh)

"""FSDP2: makes every parameter a DTensor that is sharded over the data-parallel ranks."""

from __future__ import annotations

import warnings

from torch import nn
from torch.distributed.fsdp import fully_shard

from hyper_resume.parallel.layers import decoder_layers
from hyper_resume.parallel.mesh import ParallelMesh


def apply_fsdp(model: nn.Module, mesh: ParallelMesh) -> None:
    """Shard ``model`` in place over ``mesh.dp_mesh``, with one FSDP unit per decoder layer and one for the rest.

    It is applied for a data-parallel size of 1 too. So every parameter is a DTensor in every job with several processes, and
    checkpoints have the same form for all sizes. Tensor parallelism must be applied before.

    Raises:
        UnsupportedError: the model has no stack of decoder layers.
    """
    # A gathered output layer returns its logits as a view, and FSDP2 warns of it in every process at the first step. The
    # warning is about in-place changes of the logits, which losses do not make.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    for _, layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh.dp_mesh)
    fully_shard(model, mesh=mesh.dp_mesh)

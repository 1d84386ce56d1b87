"""The device mesh (dp_shard, tp): tensor-parallel groups are adjacent ranks, data parallelism is the outer dimension."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_resume.config.schema import AcceleratorConfig
from hyper_resume.errors import ConfigError, UnsupportedError, describe

DP_DIM = "dp_shard"
TP_DIM = "tp"


@dataclass(frozen=True, kw_only=True)
class ParallelMesh:
    """A (dp_shard, tp) mesh and this rank's coordinates: global rank = dp_rank * tp_size + tp_rank."""

    device_mesh: DeviceMesh
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int

    @property
    def dp_mesh(self) -> DeviceMesh:
        """The submesh of the ranks with the same tp shard as this rank; each of them reads other data."""
        return self.device_mesh[DP_DIM]

    @property
    def tp_mesh(self) -> DeviceMesh:
        """The submesh of the ranks that read the same data as this rank; each of them has other attention heads."""
        return self.device_mesh[TP_DIM]


def mesh_sizes(accelerator: AcceleratorConfig, world_size: int) -> tuple[int, int]:
    """(dp size, tp size) for ``world_size`` ranks.

    Raises:
        ConfigError: the sizes don't multiply to ``world_size``.
        UnsupportedError: pipeline parallelism is asked for.
    """
    tp_size, dp_size = accelerator.tp_size, accelerator.dp_shard_size
    if accelerator.pp_size != 1:
        raise UnsupportedError(
            describe(
                "pipeline parallelism is not built",
                where=f"accelerator.pp_size={accelerator.pp_size}",
                expected="1",
                do="set accelerator.pp_size=1 and use tp_size and dp_shard_size",
            )
        )
    for name, size in (("tp_size", tp_size), ("dp_shard_size", dp_size)):
        if size < 1 and (name, size) != ("dp_shard_size", -1):
            raise ConfigError(describe("not a group size", where=f"accelerator.{name}", found=str(size)))
    if dp_size == -1:
        dp_size = max(1, world_size // tp_size)
    if dp_size * tp_size != world_size:
        raise ConfigError(
            describe(
                "the mesh does not have one place for each process",
                where="accelerator",
                expected=f"dp_shard_size * tp_size = {world_size}, the number of processes",
                found=f"dp_shard_size={accelerator.dp_shard_size}, tp_size={tp_size}: {dp_size * tp_size} places",
                do=_advice(tp_size, dp_size, world_size),
            )
        )
    return dp_size, tp_size


def _advice(tp_size: int, dp_size: int, world_size: int) -> str:
    """Settings that fit this number of processes whatever the other field is, and the number of processes that fits these."""
    start = f"start {dp_size * tp_size} processes"
    if world_size % tp_size == 0:
        return f"set accelerator.dp_shard_size={world_size // tp_size} (or -1), or {start}"
    # A model that divides into tp_size parts also divides into a divisor of it.
    fitting = gcd(tp_size, world_size)
    return (
        f"set accelerator.tp_size={fitting} and accelerator.dp_shard_size=-1, "
        f"or {start} if the model divides into tp_size={tp_size} parts"
    )


def build_mesh(accelerator: AcceleratorConfig, device_type: str, world_size: int) -> ParallelMesh | None:
    """The mesh of this job; None for a single process, which needs none. A collective: every rank calls it.

    Args:
        accelerator: the sizes; ``dp_shard_size`` -1 takes all ranks that ``tp_size`` leaves.
        device_type: cpu, cuda or npu.
        world_size: number of ranks in the default process group.

    Raises:
        ConfigError: the sizes don't multiply to ``world_size``.
        UnsupportedError: pipeline parallelism is asked for.
    """
    dp_size, tp_size = mesh_sizes(accelerator, world_size)
    if world_size == 1:
        return None
    mesh = init_device_mesh(device_type, (dp_size, tp_size), mesh_dim_names=(DP_DIM, TP_DIM))
    return ParallelMesh(
        device_mesh=mesh,
        dp_rank=mesh.get_local_rank(DP_DIM),
        dp_size=dp_size,
        tp_rank=mesh.get_local_rank(TP_DIM),
        tp_size=tp_size,
    )

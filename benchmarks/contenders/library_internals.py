"""The places where a benchmark has to know how the library works, and nothing but these.

Everything else goes through the public interface. Who changes the library's planning or its digests changes these functions.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from hyper_resume import digest
from hyper_resume.checkpoint.format.manifest import FileEntry, Manifest
from hyper_resume.checkpoint.saving.plan_cache import CachingPlanner, PlanCache
from hyper_resume.checkpoint.saving.shard_writer import ShardWriter, ShardWriteResult


def forget_plans() -> None:
    """Forget what earlier saves of this process have planned. A checkpointer keeps its own plans, so there is nothing else."""


def plan_second_save(
    plans: Sequence[SavePlan], results: Sequence[list[WriteResult]], folder: Path
) -> Callable[[], object]:
    """Return what rank 0 does to plan the second save of an unchanged layout, and to close it.

    No rank sends a plan or places; what describes the directory is written again, and the manifest of all ranks' files.

    Args:
        plans: of all ranks, as they made them for the first save.
        results: of all ranks, as they wrote them.
        folder: where metadata may be written.
    """
    cache = PlanCache()
    first = CachingPlanner(cache, ((),), reuse=False)
    planned, metadata = first.create_global_plan(list(plans))
    first.finish_plan(planned[0])
    _writer(folder, cache, len(plans)).finish(metadata, [_told(of_rank, all_known=False) for of_rank in results])
    told = [_told(of_rank, all_known=True) for of_rank in results]

    def second() -> None:
        planner = CachingPlanner(cache, ((),), reuse=True)
        writer = _writer(folder, cache, len(plans))
        planned, metadata = planner.create_global_plan([SavePlan([])] * len(plans))
        writer.prepare_global_plan(planned)
        planner.finish_plan(planned[0])
        writer.finish(metadata, told)

    return second


def _told(of_rank: Sequence[WriteResult], *, all_known: bool) -> list[WriteResult]:
    """A rank's results as the library's writer gives them."""
    size = sum(result.size_in_bytes for result in of_rank)
    name = of_rank[0].storage_data.relative_path
    entry = FileEntry(size_bytes=size, digest=digest.bytes_digest_text([name.encode()]), rank=int(name.split("_")[2]))
    return [
        ShardWriteResult(**vars(result), file_name=name, file=entry, is_summary=all_known)
        for result in (of_rank[:1] if all_known else of_rank)
    ]


def _writer(folder: Path, cache: PlanCache, world_size: int) -> ShardWriter:
    """A writer for a new staging directory."""
    staging = folder / uuid.uuid4().hex
    staging.mkdir(parents=True)
    draft = Manifest(
        step=1,
        attempt=staging.name,
        ordinal=1,
        ancestors=(),
        world_size=world_size,
        mesh=None,
        created_at="2026-01-01T00:00:00.000+00:00",
        versions={},
        files={},
        buckets={str(rank): {"model": digest.bytes_digest_text([b"model"])} for rank in range(world_size)},
        names={str(rank): {"model": digest.bytes_digest_text([b"names"])} for rank in range(world_size)},
    )
    return ShardWriter(staging, draft, cache)


@contextmanager
def without_digests() -> Iterator[None]:
    """Hash nothing of tensors: each has the same digest, so that what was saved so can be loaded so."""
    data_digest = digest.data_digest
    digest.data_digest = lambda content: bytes(16)
    try:
        yield
    finally:
        digest.data_digest = data_digest

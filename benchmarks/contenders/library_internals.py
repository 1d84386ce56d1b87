"""The only module of the benchmarks that uses the library's internals.

Everything else uses the public interface. A change of the library's planning or digests needs a change here.
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
    """Clear the plans that earlier saves of this process left. Each checkpointer keeps its own, so nothing is left to clear."""


def plan_second_save(
    plans: Sequence[SavePlan], results: Sequence[list[WriteResult]], folder: Path
) -> Callable[[], object]:
    """Return the planning work of rank 0 in the second save of an unchanged layout, including the metadata at its end.

    The ranks send no plans and no write results; the metadata of the directory and the manifest are written again.

    Args:
        plans: the plans of all ranks in the first save.
        results: the write results of all ranks in the first save.
        folder: where metadata may be written.
    """
    cache = PlanCache()
    first = CachingPlanner(cache, ((),), reuse=False)
    planned, metadata = first.create_global_plan(list(plans))
    first.finish_plan(planned[0])
    _writer(folder, cache, len(plans)).finish(
        metadata, [_as_shard_results(of_rank, all_known=False) for of_rank in results]
    )
    repeated = [_as_shard_results(of_rank, all_known=True) for of_rank in results]

    def second() -> None:
        planner = CachingPlanner(cache, ((),), reuse=True)
        writer = _writer(folder, cache, len(plans))
        planned, metadata = planner.create_global_plan([SavePlan([])] * len(plans))
        writer.prepare_global_plan(planned)
        planner.finish_plan(planned[0])
        writer.finish(metadata, repeated)

    return second


def _as_shard_results(of_rank: Sequence[WriteResult], *, all_known: bool) -> list[WriteResult]:
    """Return the results of one rank as the library's writer returns them."""
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
    """Hash no tensor: all have the same digest, so that a checkpoint saved this way can be loaded this way."""
    data_digest = digest.data_digest
    digest.data_digest = lambda content: bytes(16)
    try:
        yield
    finally:
        digest.data_digest = data_digest

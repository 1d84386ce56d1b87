"""Defects that only a job of several ranks, or of several kinds of optimizer, can show."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from conformance.sabotages.saboteur import Saboteur, sabotage

_RESTORE = "hyper_resume.trainer.restore"
_MESH = "hyper_resume.trainer.run.mesh"
_CALLBACK_MODULE = "hyper_resume.trainer.callbacks.checkpointer"
_CALLBACK = f"{_CALLBACK_MODULE}:CheckpointerCallback"
_STORAGE = "hyper_resume.checkpoint.dcp:DistributedCheckpointer"
_EXTRA = "hyper_resume.checkpoint.format.extra_state"
_TENSOR_PARALLEL = "hyper_resume.parallel.tensor_parallel"
# The rank that a defect affects; it exists in every job of several ranks.
_AFFECTED_RANK = 1


@sabotage("streams-of-rank-0-for-all")
def _streams_of_rank_0_for_all(put: Saboteur) -> None:
    def apply(original: Any, saved: Any, device_type: str) -> None:
        from hyper_resume import collective

        original(collective.on_rank_zero(lambda: saved), device_type)

    put.replace(f"{_MESH}:apply_rng", apply)


@sabotage("places-by-rank-number")
def _places_by_rank_number(put: Saboteur) -> None:
    put.replace("hyper_resume.checkpoint.format.mesh:same_places", lambda original, *args: True)
    put.replace("hyper_resume.checkpoint.loading.reading:same_places", lambda original, *args: True, fires=False)


@sabotage("new-streams-without-coordinate")
def _new_streams_without_coordinate(put: Saboteur) -> None:
    def derive(original: Any, seed: int, global_step: int, coordinate: int, device_type: str) -> None:
        original(seed, global_step, 0, device_type)

    put.replace(f"{_MESH}:derive_streams", derive)


@sabotage("new-streams-by-rank")
def _new_streams_by_rank(put: Saboteur) -> None:
    def derive(original: Any, seed: int, global_step: int, coordinate: int, device_type: str) -> None:
        from hyper_resume import collective

        original(seed, global_step, collective.rank(), device_type)

    put.replace(f"{_MESH}:derive_streams", derive)


@sabotage("parts-not-put-together")
def _parts_not_put_together(put: Saboteur) -> None:
    put.replace("hyper_resume.checkpoint.loading.reading:reshard", lambda original, first, *args: first)


@sabotage("muon-momentum-left-behind")
def _muon_momentum_left_behind(put: Saboteur) -> None:
    def apply(original: Any, optimizers: Any, names: Any, loaded: Any, **how: Any) -> None:
        original(optimizers, names, loaded, **how)
        for optimizer in optimizers:
            for entries in optimizer.state.values():
                if "momentum_buffer" in entries:
                    put.fired()
                    entries["momentum_buffer"].zero_()

    put.replace(f"{_RESTORE}:apply_optimizers", apply, fires=False)


@sabotage("moments-lost-on-one-rank")
def _moments_lost_on_one_rank(put: Saboteur) -> None:
    def apply(original: Any, optimizers: Any, names: Any, loaded: Any, **how: Any) -> None:
        from hyper_resume import collective

        original(optimizers, names, loaded, **how)
        if collective.rank() != _AFFECTED_RANK:
            return
        for optimizer in optimizers:
            for entries in optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    put.fired()
                    _local(entries[key]).zero_()

    put.replace(f"{_RESTORE}:apply_optimizers", apply, fires=False)


@sabotage("extra-state-of-one-rank-left-out")
def _extra_state_of_one_rank_left_out(put: Saboteur) -> None:
    def write(original: Any, step_directory: Any, rank: int, content: bytes) -> Any:
        if rank != _AFFECTED_RANK:
            return original(step_directory, rank, content)
        put.fired()
        return _entry(rank, content)

    put.replace(f"{_EXTRA}:write_file", write, fires=False)


@sabotage("embedded-entries-of-rank-0-for-all")
def _embedded_entries_of_rank_0_for_all(put: Saboteur) -> None:
    """As DCP returns them if the names do not contain the rank."""

    def read(original: Any, directory: Any, metadata: Any, found: Any, rank: int, *manifest: Any) -> Any:
        if found.kind != "embedded" or rank == 0:
            return original(directory, metadata, found, rank, *manifest)
        put.fired()
        return {**original(directory, metadata, found, 0, *manifest), "rank": rank}

    put.replace("hyper_resume.checkpoint.loading.reading:read_training_state", read, fires=False)
    # The digests of each rank's buckets would detect it.
    put.replace(
        "hyper_resume.checkpoint.format.bucket_digests:compare_digests", lambda original, *args: None, fires=False
    )


@sabotage("refusal-heard-by-one-rank")
def _refusal_heard_by_one_rank(put: Saboteur) -> None:
    def load(original: Any, callback: Any, *path: str) -> Any:
        from hyper_resume import collective

        try:
            return original(callback, *path)
        except (FileNotFoundError, RuntimeError):
            if collective.rank() == 0:
                raise
            put.fired()

    put.replace(f"{_CALLBACK}._resolve_restore_path", load, fires=False)
    put.replace(f"{_CALLBACK}._load_checkpoint", load, fires=False)


@sabotage("commit-before-all-ranks-are-done")
def _commit_before_all_ranks_are_done(put: Saboteur) -> None:
    """All ranks but one write their training state into the committed directory."""
    late: list[tuple[int, bytes]] = []

    def write(original: Any, step_directory: Any, rank: int, content: bytes) -> Any:
        if rank == 0:
            return original(step_directory, rank, content)
        late.append((rank, content))
        return _entry(rank, content)

    def publish(original: Any, storage: Any, attempt: Any) -> None:
        from hyper_resume.checkpoint.format import extra_state

        original(storage, attempt)
        while late:
            put.fired()
            # Its own name is the replaced one, which would wait for the next publication.
            extra_state.write_file.__wrapped__(attempt.target, *late.pop())  # type: ignore[attr-defined]

    put.replace(f"{_EXTRA}:write_file", write, fires=False)
    put.replace(f"{_STORAGE}._publish", publish, fires=False)


@sabotage("shard-arrives-after-the-commit")
def _shard_arrives_after_the_commit(put: Saboteur) -> None:
    """All ranks but one write their shard elsewhere, and move it into the directory after the commit."""
    late: list[Path] = []

    def write(original: Any, writer: Any, plan: Any, planner: Any) -> Any:
        if plan.storage_data == 0:
            return original(writer, plan, planner)
        place, writer._path = writer._path, Path(tempfile.mkdtemp())
        try:
            results = original(writer, plan, planner)
            late.extend(writer._path.iterdir())
        finally:
            writer._path = place
        return results

    def publish(original: Any, storage: Any, attempt: Any) -> None:
        from hyper_resume.checkpoint.disk import operations

        original(storage, attempt)
        while late:
            put.fired()
            shard = late.pop()
            content = shard.read_bytes()
            shutil.rmtree(shard.parent)
            with operations.current().create(attempt.target / shard.name) as file:
                file.write(content)
                file.sync()

    put.replace("hyper_resume.checkpoint.saving.shard_writer:ShardWriter._write_shard", write, fires=False)
    put.replace(f"{_STORAGE}._publish", publish, fires=False)


@sabotage("head-norms-left-out-of-the-plan")
def _head_norms_left_out_of_the_plan(put: Saboteur) -> None:
    """Each rank of a pair trains its own copy, and their equality is not checked."""
    put.replace(f"{_TENSOR_PARALLEL}:_check_covered", lambda original, *args: None)
    put.replace(f"{_CALLBACK_MODULE}:check_replicas", lambda original, *args: None)
    put.set(f"{_TENSOR_PARALLEL}:_HEAD_NORMS", ())


def _entry(rank: int, content: bytes) -> Any:
    """The manifest's entry of a file, written or not."""
    from hyper_resume import digest
    from hyper_resume.checkpoint.format.manifest import FileEntry

    return FileEntry(size_bytes=len(content), digest=digest.bytes_digest_text([content]), rank=rank)


def _local(tensor: Any) -> Any:
    """This rank's shard of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

"""What one rank prepares for a save: digests of its state, the copy to write in the background, its training state's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from hyper_resume import collective, device
from hyper_resume.checkpoint.format import extra_state as extra
from hyper_resume.checkpoint.format.bucket_digests import bucket_digests, part_digests
from hyper_resume.checkpoint.format.manifest import FileEntry
from hyper_resume.checkpoint.format.save_id import SAVE_ID, add_save_id
from hyper_resume.checkpoint.saving.plan_cache import Layout, payload_layout
from hyper_resume.checkpoint.saving.publication import SaveInProgress
from hyper_resume.checkpoint.saving.shard_writer import WrittenTensor
from hyper_resume.checkpoint.saving.staging import Stager, deep_copy
from hyper_resume.checkpoint.tensors.flattening import flatten
from hyper_resume.errors import CheckpointSaveError, describe

SaveMode = Literal["sync", "thread", "process"]


@dataclass
class RankContribution:
    """One rank's part of a save.

    Attributes:
        written: the payload that DCP writes; for a save in a thread, a copy.
        flat: entry name -> value of the live payload.
        layout: everything that the save plan depends on.
        names: bucket -> digest of the names of its entries, and of which parts of them this rank has.
        buckets: bucket -> digest, for the buckets that are digested so far.
        files: path below the step directory -> manifest entry, for the files that are written already.
        uncovered: paths of what moves on this rank and is not saved.
        run: what the run on this rank is made of.
    """

    written: dict[str, Any]
    flat: Mapping[str, Any]
    layout: Layout
    names: Mapping[str, str]
    buckets: dict[str, str]
    files: dict[str, FileEntry] = field(default_factory=dict)
    uncovered: tuple[str, ...] = ()
    run: Mapping[str, Any] = field(default_factory=dict)

    def digest_written(self, written: Mapping[str, WrittenTensor]) -> Mapping[str, str]:
        """Digest the live payload's buckets. Reuses the digests in ``written`` of tensors that share memory with live ones."""
        return self.digest_payload(
            {name: found.data_digest for name, found in written.items() if _is_live(found.tensor, self.flat.get(name))}
        )

    def digest_payload(self, known: Mapping[str, bytes] = MappingProxyType({})) -> Mapping[str, str]:
        """Digest the live payload's buckets; ``known``: entry name -> digest of the tensor's bytes, if computed already."""
        found = bucket_digests(self.flat, known=known)
        self.buckets.update(found)
        return found


def _is_live(written: torch.Tensor, live: Any) -> bool:
    if isinstance(live, DTensor):
        live = live.to_local()
    return (
        isinstance(live, torch.Tensor)
        # Of a tensor on a device, a copy was written. Its digest would not show an error of that copy.
        and written.is_cpu
        and written.data_ptr() == live.data_ptr()
        and (written.dtype, written.shape, written.device) == (live.dtype, live.shape, live.device)
        and all(one.is_contiguous() and not one.is_neg() and not one.is_conj() for one in (written, live))
    )


def prepare(
    save: SaveInProgress,
    payload: dict[str, Any],
    training_state: dict[str, Any] | None,
    how: SaveMode,
    stager: Stager,
    *,
    per_rank: bool,
) -> RankContribution:
    """Digest the current state and write this rank's training state; without collectives.

    For a save in a thread, the state is copied and digested in one pass. For a synchronous save, the shard writer digests the
    payload while it writes, because the live state does not change meanwhile.

    Args:
        save: the save in progress.
        payload: what DCP writes, without the training state.
        training_state: this rank's training state, or None.
        how: synchronous, in a thread, or in a separate process.
        stager: copies the state for a save in a thread.
        per_rank: write the training state to a file per rank; otherwise embed it in the payload of DCP.

    Raises:
        CheckpointSaveError: this rank can't see the staging directory.
        OSError: the training state could not be written.
    """
    _check_shared(save.staging)
    flat, places = flatten(payload)
    layout = (*payload_layout(flat, places), (training_state is not None, *(training_state or ())))
    # Threads read the tensors next, each on its own device stream, so pending work must be finished.
    for kind in {value.device.type for value in flat.values() if isinstance(value, torch.Tensor)}:
        device.synchronize(kind)
    buckets = extra.bucket_digests(training_state or {})
    part = RankContribution(payload, flat, layout, part_digests(flat), buckets)
    part.uncovered = tuple((training_state or {}).get(extra.UNCOVERED, ()))
    part.run = (training_state or {}).get(extra.RUN, {})
    if how == "thread":
        staged = stager.stage(flat, places)
        part.written = staged.state
        part.digest_payload(staged.data_digests)
    elif how == "process":
        part.digest_payload()
    rank = collective.rank()
    add_save_id(part.written, save.save_id, rank)
    if training_state is not None:
        training_state[SAVE_ID] = save.save_id
        if per_rank:
            content = extra.encode(training_state)
            part.files[extra.file_name(rank)] = extra.write_file(save.staging, rank, content)
        else:
            embedded = extra.embed(training_state, rank)
            part.written[extra.PAYLOAD_KEY] = deep_copy(embedded) if how == "thread" else embedded
    return part


def _check_shared(staging: Path) -> None:
    if not staging.is_dir():
        raise CheckpointSaveError(
            describe(
                "this rank does not see the directory that rank 0 has just created",
                where=f"{staging}, rank {collective.rank()}",
                expected="checkpoint_dir on storage shared by all ranks",
                found="no such directory here",
                do="set checkpoint.checkpoint_dir to a shared file system",
            )
        )

"""What one rank brings to a save beside its shard: digests of its state as it is at the call, and its training state's file."""

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
from hyper_resume.checkpoint.format.bucket_digests import bucket_digests, name_digests
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
        written: the payload that goes through DCP; a copy for a save in a thread.
        flat: the live payload's entries by name.
        layout: what a plan for it depends on.
        names: bucket -> digest of the names of its entries.
        buckets: bucket -> digest, as far as they are taken.
        files: path below the step directory -> what the manifest says of a file that was written already.
    """

    written: dict[str, Any]
    flat: Mapping[str, Any]
    layout: Layout
    names: Mapping[str, str]
    buckets: dict[str, str]
    files: dict[str, FileEntry] = field(default_factory=dict)

    def digest_written(self, written: Mapping[str, WrittenTensor]) -> Mapping[str, str]:
        """Take the digests of the live payload's buckets, from those of ``written`` where that is the live tensor's memory."""
        return self.digest_payload(
            {name: found.data_digest for name, found in written.items() if _is_live(found.tensor, self.flat.get(name))}
        )

    def digest_payload(self, known: Mapping[str, bytes] = MappingProxyType({})) -> Mapping[str, str]:
        """Take the digests of the live payload's buckets; ``known`` are those of its tensors' bytes that need not be taken."""
        found = bucket_digests(self.flat, known=known)
        self.buckets.update(found)
        return found


def _is_live(written: torch.Tensor, live: Any) -> bool:
    if isinstance(live, DTensor):
        live = live.to_local()
    return (
        isinstance(live, torch.Tensor)
        # What was written of another device's is a copy of it, which the digest is to be held against.
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
    """Digest the state as it is now and write this rank's training state; in this process alone.

    For a save in a thread the state is copied now, and digested while it is. Of one that is waited for the payload's digests
    are left to whoever writes it, of the same live state, which nobody changes meanwhile.

    Args:
        attempt: the save.
        payload: what goes through DCP, without the training state.
        training_state: this rank's; None without one.
        how: the save is waited for, or written in a thread, or in a process of its own.
        stager: copies for a save in a thread.
        per_rank: whether each rank's training state is a file of its own, else it goes through DCP too.

    Raises:
        CheckpointSaveError: the staging directory is not seen here.
        OSError: the training state could not be written.
    """
    _check_shared(save.staging)
    flat, places = flatten(payload)
    layout = (*payload_layout(flat, places), (training_state is not None, *(training_state or ())))
    # Threads look at the tensors next, each with streams of its own on a device: what is still computed is waited for.
    for kind in {value.device.type for value in flat.values() if isinstance(value, torch.Tensor)}:
        device.synchronize(kind)
    buckets = extra.bucket_digests(training_state or {})
    part = RankContribution(payload, flat, layout, name_digests(flat), buckets)
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
                "this rank does not see the directory that rank 0 just made",
                where=f"{staging}, rank {collective.rank()}",
                expected="checkpoint_dir on storage shared by all ranks",
                found="no such directory here",
                do="set checkpoint.checkpoint_dir to a shared file system",
            )
        )

"""Loads named entries, a rank's training state and the save id from a verified step directory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hyper_resume import collective
from hyper_resume.checkpoint.disk import reading as disk_reading
from hyper_resume.checkpoint.format import extra_state as extra
from hyper_resume.checkpoint.format.layout import STAGING_NAME
from hyper_resume.checkpoint.format.manifest import Manifest
from hyper_resume.checkpoint.format.mesh import covers, mesh_from_plain, same_places
from hyper_resume.checkpoint.format.save_id import SAVE_ID, SHARD_ENTRY_PATTERN
from hyper_resume.checkpoint.format.segments import VerifiedFile
from hyper_resume.checkpoint.loading.entry_reader import EntryReader, ReadResult
from hyper_resume.checkpoint.loading.resharding import parts_from_plain, reshard
from hyper_resume.checkpoint.loading.same_save import refuse_mixed_saves
from hyper_resume.checkpoint.parsing import safe_load
from hyper_resume.errors import (
    CheckpointMismatchError,
    HyperResumeError,
    describe,
    insufficient_memory_error,
    is_lack_of_memory,
)

logger = logging.getLogger(__name__)


def load_entries(
    wanted: Mapping[str, Any],
    directory: Path,
    metadata: Metadata,
    verified_files: Mapping[str, VerifiedFile] = MappingProxyType({}),
) -> ReadResult:
    """Read entries; without collectives.

    Args:
        wanted: entry name -> a plain or sharded tensor of the entry's dtype and shape, whose part is read; any other value
            (None, for example) reads the whole entry.
        directory: the step directory.
        metadata: its DCP metadata.
        verified_files: file name -> verified file.

    Returns:
        the values. Tensors are on the CPU and may be views of the mapped file; do not write to them.

    Raises:
        CheckpointMismatchError: an entry is not what a save writes.
        CheckpointUnreadableError: the files can't be read now.
    """
    try:
        return disk_reading.again(lambda: _read_entries(wanted, directory, metadata, verified_files), directory)
    except HyperResumeError:
        raise
    except Exception as error:
        if is_lack_of_memory(error):
            raise insufficient_memory_error(str(directory), error) from error
        raise CheckpointMismatchError(
            describe(
                "the checkpoint can't be read",
                where=str(directory),
                found=safe_load.error_text(error),
                do="verify the files, or resume from another checkpoint",
            )
        ) from error


def _read_entries(
    wanted: Mapping[str, Any], directory: Path, metadata: Metadata, verified_files: Mapping[str, VerifiedFile]
) -> ReadResult:
    described = metadata.state_dict_metadata
    with EntryReader(directory, metadata, verified_files) as entries:
        entries.preload(wanted)
        values = {
            name: entries.tensor(name, live if isinstance(live, torch.Tensor) else None)
            if isinstance(described[name], TensorStorageMetadata)
            else entries.value(name)
            for name, live in wanted.items()
        }
        return ReadResult(values, entries.data_digests)


def describe_entries(metadata: Metadata) -> dict[str, torch.Tensor | None]:
    """Return each entry's shape and dtype as a meta tensor; None for an entry that is not a tensor."""
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }


def read_training_state(
    directory: Path, metadata: Metadata, layout: extra.ExtraStateLayout, rank: int, manifest: Manifest | None = None
) -> dict[str, Any]:
    """Read the training state that ``rank`` saved, in either layout; without collectives.

    With a manifest, a file of its own is compared with it: it was verified before, but may have been changed since.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointMismatchError: it can't be decoded, has a newer format, was written by another rank, or was changed.
    """
    if layout.kind == "per_rank":
        state = extra.read_file(directory, rank, manifest)
    else:
        names = extra.embedded_names(metadata, rank)
        values = load_entries(dict.fromkeys(names.values()), directory, metadata).values
        state = extra.unwrap_embedded({key: values[name] for key, name in names.items()}, rank, str(directory))
    # A load says this of what it has put together; no file can.
    return {key: value for key, value in state.items() if key != extra.RESHARDED}


def load_training_state(
    directory: Path, metadata: Metadata, manifest: Manifest | None, group: Any, skeleton: Mapping[str, Any]
) -> dict[str, Any]:
    """Read this rank's training state, or the lowest saved rank's if the world size or the mesh changed. Every rank calls it.

    After such a change, the state of a rank's number may be that of another place in the mesh. One state for all ranks keeps
    those equal that work on the same samples.

    Args:
        directory: the step directory.
        metadata: its DCP metadata.
        manifest: its manifest, if it has one.
        group: the process group of all ranks.
        skeleton: has the mesh of this run, if the caller knows it, and its parts of sharded tensors; the result has the mesh
            of the run which saved, and this run's parts.

    Raises:
        CheckpointNotFoundError: there is none, or none of this rank.
        CheckpointMismatchError: one can't be decoded, or the ranks' steps differ.
    """
    rank, world_size = collective.rank(), collective.world_size()
    found = collective.on_rank_zero(lambda: extra.detect_layout(directory, metadata, manifest), group)
    first = found.ranks[0]
    probe = collective.on_all_ranks(lambda: read_training_state(directory, metadata, found, first, manifest), group)
    mesh = _saved_mesh(manifest, skeleton)
    if probe["world_size"] == world_size and _is_same_mesh(mesh, skeleton, world_size):
        state = collective.on_all_ranks(lambda: read_training_state(directory, metadata, found, rank, manifest), group)
    else:
        logger.warning(
            "the checkpoint was saved by %s ranks and is resumed by %s%s: progress, scheduler and data position come "
            "from rank %s",
            probe["world_size"],
            world_size,
            " on another mesh" if probe["world_size"] == world_size else "",
            first,
        )
        state = probe
        # The same on all ranks, also where only some of them hold sharded parts: what follows is a collective.
        if extra.SHARDED in skeleton and isinstance(probe.get(extra.SHARDED), Mapping):
            wanted = parts_from_plain(skeleton[extra.SHARDED])
            read = partial(read_training_state, directory, metadata, found, manifest=manifest)
            state = collective.on_all_ranks(lambda: reshard(probe, found.ranks, read, wanted, manifest), group)
    saves = collective.all_gather((state["global_step"], state["world_size"]), group)
    if len(set(saves)) > 1:
        raise CheckpointMismatchError(
            describe(
                "the ranks' extra_state are of different steps",
                where=str(directory),
                expected="one global_step and world size on all ranks",
                found=", ".join(f"rank {i}: step {step} of {size} ranks" for i, (step, size) in enumerate(saves)),
                do="restore the files that belong together, or resume from another checkpoint",
            )
        )
    if found.kind == "embedded":
        logger.info("Read extra_state embedded in the DCP state dict")
    else:
        logger.info("Read extra_state from %s", extra.file_path(directory, state["rank"]))
    return {**({extra.SHARDED: {}} if extra.SHARDED in skeleton else {}), **state, extra.MESH: mesh}


def _saved_mesh(manifest: Manifest | None, skeleton: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the mesh of the run that saved; this run's where it isn't known, so that only a change of world size is seen."""
    if manifest is None or not covers(manifest.mesh, manifest.world_size):
        return skeleton.get(extra.MESH)
    return None if manifest.mesh is None else manifest.mesh.to_plain()


def _is_same_mesh(saved: Any, skeleton: Mapping[str, Any], world_size: int) -> bool:
    if extra.MESH not in skeleton:
        return True
    return same_places(mesh_from_plain(saved), mesh_from_plain(skeleton[extra.MESH]), world_size)


def read_save_id(directory: Path, metadata: Metadata, manifest: Manifest | None = None) -> str | None:
    """Return the save id that the metadata and all shards contain; None if they contain none.

    Raises:
        CheckpointMismatchError: they belong to different saves.
    """
    if manifest is not None:
        # The digests of the manifest already show that all files belong to this save.
        return manifest.attempt
    ranks = [match.group(1) for match in map(SHARD_ENTRY_PATTERN.fullmatch, metadata.state_dict_metadata) if match]
    if not ranks:
        return None
    values = load_entries({f"{SAVE_ID}.{rank}": None for rank in sorted(ranks)}, directory, metadata).values
    found = {f"the shards of {name.removeprefix(f'{SAVE_ID}.')}": save_id for name, save_id in values.items()}
    staged = Path(str(getattr(metadata.storage_meta, "checkpoint_id", None) or ""))
    if staged.parent.name == STAGING_NAME:
        found["the metadata"] = staged.name
    refuse_mixed_saves(found, directory)
    first: str = next(iter(found.values()))
    return first

"""The digest of each bucket of a rank's state: computed at the save, and compared with that of the values a load has read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from hyper_resume import collective, digest
from hyper_resume.checkpoint.format.manifest import Manifest
from hyper_resume.checkpoint.format.mesh import Mesh
from hyper_resume.checkpoint.tensors.threads import map_in_threads
from hyper_resume.errors import CheckpointMismatchError, describe

# Entries of at least this size are digested in threads.
_LARGE_BYTES = 1 << 20
# Versions 1 and 2 of the manifest have digests of the names alone.
_PARTS = "names and parts"


def bucket_digests(
    flat: Mapping[str, Any],
    like: Mapping[str, str] = MappingProxyType({}),
    known: Mapping[str, bytes] = MappingProxyType({}),
) -> dict[str, str]:
    """Return bucket -> digest of this rank's part of a flattened payload, computed by several threads.

    Args:
        flat: entry name -> value.
        like: bucket -> the digest to compare with later; an older digest format is used again.
        known: entry name -> digest of the tensor's bytes, if it is known already.
    """
    buckets: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        buckets.setdefault(name.split(".", 1)[0], {})[name] = value
    found: dict[str, str] = {}
    for bucket, entries in buckets.items():
        earlier = digest.older_format_digest_text(entries, like.get(bucket, ""))
        found[bucket] = earlier or digest.entries_digest_text(_entry_digests(entries, known))
    return found


def _entry_digests(entries: Mapping[str, Any], known: Mapping[str, bytes]) -> dict[str, bytes]:
    def is_large(name: str, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and name not in known and value.nbytes >= _LARGE_BYTES

    large = [name for name, value in entries.items() if is_large(name, value)]
    found = dict(zip(large, map_in_threads(lambda name: digest.entry_digest(entries[name]), large), strict=True))
    return {
        name: found[name] if name in found else digest.entry_digest(value, known.get(name))
        for name, value in entries.items()
    }


def part_digests(flat: Mapping[str, Any]) -> dict[str, str]:
    """Return bucket -> digest of the names of this rank's entries and, of each sharded one, of which part this rank has.

    Two ranks, or two runs, with the same digest hold the same part of every tensor, so their bucket digests can be compared.
    """
    found: dict[str, list[str]] = {}
    known: dict[Any, str] = {}
    for name in sorted(flat):
        value = flat[name]
        parts = found.setdefault(name.split(".", 1)[0], [_PARTS])
        if isinstance(value, DTensor):
            layout = value.device_mesh, value.placements
            if layout not in known:
                known[layout] = _part(*layout)
            name += known[layout]
        parts.append(name)
    return {bucket: digest.state_digest_text(parts) for bucket, parts in found.items()}


def _part(mesh: DeviceMesh, placements: Sequence[Placement]) -> str:
    """Return how, and with which coordinates, a mesh divides a tensor; "" where the rank has all of it."""
    coordinates = mesh.get_coordinate() or (None,) * mesh.ndim
    return "".join(
        f" {placement}:{coordinate}/{size}"
        for placement, coordinate, size in zip(placements, coordinates, mesh.shape, strict=True)
        if size > 1 and not placement.is_replicate()
    )


def saved_digests(manifest: Manifest | None, flat: Mapping[str, Any], mesh: Mesh | None) -> dict[str, str]:
    """Return bucket -> digest at the save of exactly the parts that this rank has, whichever rank had them.

    A bucket is left out if no rank had the same part of the same entries: after a change of placements, of the mesh or of the
    number of ranks, the local bytes are others. Then only the files' digests say that they are those of the save.

    Args:
        manifest: of the checkpoint; None gives no digests.
        flat: this rank's live payload, flattened.
        mesh: that of the sharded tensors in it.
    """
    if manifest is None:
        return {}
    own, found = str(collective.rank()), {}
    same_mesh = (manifest.world_size, manifest.mesh) == (collective.world_size(), mesh)
    older = name_digests(flat) if same_mesh else {}
    for bucket, part in part_digests(flat).items():
        holders = (rank for rank in (own, *manifest.names) if manifest.names.get(rank, {}).get(bucket) == part)
        holder = next(holders, None)
        if holder is None and bucket in older and manifest.names.get(own, {}).get(bucket) == older[bucket]:
            holder = own
        if holder is not None and bucket in manifest.buckets.get(holder, {}):
            found[bucket] = manifest.buckets[holder][bucket]
    return found


def reported_digests(manifest: Manifest | None, mesh: Mesh | None) -> Mapping[str, str]:
    """Return bucket -> digest at the save of what this rank's number had, for a report: other entries may be requested now.

    Args:
        manifest: of the checkpoint.
        mesh: that of the sharded tensors of this rank; with a mesh on either side, the parts may be others, so there are none.
    """
    if manifest is None or manifest.mesh or mesh or manifest.world_size != collective.world_size():
        return {}
    return manifest.buckets.get(str(collective.rank()), {})


def name_digests(flat: Mapping[str, Any]) -> dict[str, str]:
    """Return bucket -> digest of the names of its entries, as versions 1 and 2 of the manifest have it."""
    buckets: dict[str, list[str]] = {}
    for name in sorted(flat):
        buckets.setdefault(name.split(".", 1)[0], []).append(name)
    return {bucket: digest.state_digest_text(names) for bucket, names in buckets.items()}


def compare_digests(saved: Mapping[str, str], loaded: Mapping[str, str], where: str) -> None:
    """Refuse a bucket whose values differ from those at the save.

    Args:
        saved: bucket -> digest at the save.
        loaded: bucket -> digest of the values that were read.
        where: the path, for the message.

    Raises:
        CheckpointMismatchError: names the bucket and both digests.
    """
    for bucket in sorted(set(saved) & set(loaded)):
        if saved[bucket] != loaded[bucket]:
            raise CheckpointMismatchError(
                describe(
                    f"the {bucket} bucket was read otherwise than it was saved",
                    where=where,
                    expected=f"digest {saved[bucket]}, taken from the live state at the save",
                    found=f"digest {loaded[bucket]}",
                    do="check that the entries were equal on all ranks that share them when they were saved (replicas that "
                    "drift are kept once), or resume from another checkpoint",
                )
            )

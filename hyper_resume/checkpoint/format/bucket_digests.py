"""The digest of each bucket of a rank's state: computed at the save, and compared with that of the values a load has read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from hyper_resume import collective, digest
from hyper_resume.checkpoint.format.manifest import Manifest, Mesh
from hyper_resume.checkpoint.tensors.threads import map_in_threads
from hyper_resume.errors import CheckpointMismatchError, describe

# Entries of at least this size are digested in threads.
_LARGE_BYTES = 1 << 20


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


def name_digests(flat: Mapping[str, Any]) -> dict[str, str]:
    """Return bucket -> digest of the names of this rank's entries in a flattened payload."""
    buckets: dict[str, list[str]] = {}
    for name in sorted(flat):
        buckets.setdefault(name.split(".", 1)[0], []).append(name)
    return {bucket: digest.state_digest_text(names) for bucket, names in buckets.items()}


def saved_digests(manifest: Manifest | None, mesh: Mesh | None) -> Mapping[str, str]:
    """Return this rank's bucket digests at the save; empty if there are none, or if world size or mesh have changed."""
    if manifest is None or manifest.world_size != collective.world_size() or manifest.mesh != mesh:
        return {}
    return manifest.buckets.get(str(collective.rank()), {})


def compare_digests(saved: Mapping[str, str], loaded: Mapping[str, str], others: set[str], where: str) -> None:
    """Refuse a bucket whose values differ from those at the save.

    Args:
        saved: bucket -> digest at the save.
        loaded: bucket -> digest of the values that were read.
        others: buckets that can't be compared, because other entries are requested than were saved.
        where: the path, for the message.

    Raises:
        CheckpointMismatchError: names the bucket and both digests.
    """
    for bucket in sorted((set(saved) & set(loaded)) - others):
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

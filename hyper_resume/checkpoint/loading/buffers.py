"""The values that a load has read, kept apart from the live state until all of them are checked, and then written to it."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata

from hyper_resume import collective
from hyper_resume.checkpoint.format.bucket_digests import bucket_digests, reported_digests, saved_digests
from hyper_resume.checkpoint.format.manifest import Manifest
from hyper_resume.checkpoint.format.mesh import mesh_of_tensors
from hyper_resume.checkpoint.loading.entry_reader import ReadResult
from hyper_resume.checkpoint.loading.required_entries import (
    MODEL_BUCKET,
    check_model_entries,
    describe_live,
    describe_stored,
    has_same_form,
)
from hyper_resume.checkpoint.tensors.copying import copy_tensors
from hyper_resume.checkpoint.tensors.flattening import flatten
from hyper_resume.errors import CheckpointMismatchError, describe


class LoadBuffers:
    """Values that were read for a live state; :meth:`write_to_live_state` is called after they are checked.

    Attributes:
        state: the live state.
        wanted: entry name -> live value, for the entries that the checkpoint has.
        unread: names of the checkpoint's entries in the same buckets that the live state does not have.
    """

    def __init__(self, state: dict[str, Any], metadata: Metadata) -> None:
        """Request each entry of ``state`` that the checkpoint has."""
        self.state = state
        self._live, self._places = flatten(state)
        stored = metadata.state_dict_metadata
        self.wanted = {name: value for name, value in self._live.items() if name in stored}
        self.unread = tuple(sorted(_bucket_entries(stored, set(state)) - set(self._live)))
        self._read: dict[str, Any] = {}
        self._known: Mapping[str, bytes] = {}

    def entries_of_bucket(self, bucket: str) -> dict[str, Any]:
        """Return entry name -> live value, for one bucket."""
        return {name: value for name, value in self._live.items() if self._places[name][0] == bucket}

    def check_forms(self, metadata: Metadata, where: str, *, checked: Container[str] = ()) -> None:
        """Refuse an entry whose shape or dtype differs from the live one; a copy would convert it silently.

        Args:
            metadata: the checkpoint's metadata.
            where: the path, for the message.
            checked: names of entries that are checked already.

        Raises:
            CheckpointMismatchError: names the entry.
        """
        for name, value in self.wanted.items():
            entry = metadata.state_dict_metadata[name]
            if name not in checked and not has_same_form(value, entry):
                raise CheckpointMismatchError(
                    describe(
                        f"entry {name} does not fit",
                        where=where,
                        expected=f"{describe_live(value)} (the running job)",
                        found=f"{describe_stored(entry)} (the checkpoint)",
                        do="resume with the configuration that was saved",
                    )
                )

    def store(self, found: ReadResult) -> None:
        """Store the values that were read for ``wanted``."""
        self._read, self._known = found.values, found.data_digests

    def nested_state(self) -> dict[str, Any]:
        """Return the state as it will be after the load, nested as the live state is."""
        found: dict[str, Any] = unflatten_state_dict({**self._live, **self._read}, self._places)
        return found

    def saved_digests(self, manifest: Manifest | None) -> dict[str, str]:
        """Return bucket -> digest at the save of what this rank requests; without buckets that no rank saved in these parts."""
        return saved_digests(manifest, self._live, mesh_of_tensors(self.state))

    def reported_digests(self, manifest: Manifest | None) -> Mapping[str, str]:
        """Return :meth:`saved_digests` and, without sharded tensors, those of buckets of which other entries were saved."""
        return {**reported_digests(manifest, mesh_of_tensors(self.state)), **self.saved_digests(manifest)}

    def needs_file_digests(self, manifest: Manifest, verified: Literal["digest", "size"], group: Any) -> bool:
        """True if only the digests of the files can say that what will be read was saved, and they are not verified yet.

        A bucket that some rank requests in other parts than were saved has no digest to be compared with. Every rank calls it.
        """
        if verified == "digest":
            return False
        buckets = {place[0] for place in self._places.values()}
        return any(collective.all_gather(not buckets <= set(self.saved_digests(manifest)), group))

    def digests(self, like: Mapping[str, str]) -> dict[str, str]:
        """Return bucket -> digest of the values that were read, in the digest format that ``like`` has for the bucket."""
        return bucket_digests({**self._live, **self._read}, like, self._known)

    def write_to_live_state(self) -> None:
        """Copy the values to the live state. At this point nothing in the checkpoint can make it fail."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, value in self._read.items():
            live = self._live[name]
            if isinstance(live, torch.Tensor):
                pairs.append((live, value))
            else:
                set_element(self.state, self._places[name], value)
        copy_tensors(pairs)


def prepare_buffers(state: dict[str, Any], metadata: Metadata, path: str, *, strict_model: bool) -> LoadBuffers:
    """Return the buffers for ``state``, after comparing its entries with the checkpoint's.

    Raises:
        CheckpointMismatchError: a missing model key, or an entry with another shape or dtype.
    """
    buffers = LoadBuffers(state, metadata)
    model = buffers.entries_of_bucket(MODEL_BUCKET)
    check_model_entries(model, metadata, strict=strict_model, where=path)
    buffers.check_forms(metadata, path, checked=model)
    return buffers


def unread_on_all_ranks(of_ranks: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names that are unread on every rank; an entry that any rank requests counts as read."""
    return tuple(sorted(set(of_ranks[0]).intersection(*of_ranks[1:])))


def _bucket_entries(stored: Mapping[str, Any], buckets: set[str]) -> set[str]:
    return {name for name in stored if name.split(".", 1)[0] in buckets}

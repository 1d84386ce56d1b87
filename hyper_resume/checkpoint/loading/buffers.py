"""Buffers that a load reads into; the live state is written only after everything in them is known to be good."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata

from hyper_resume import collective
from hyper_resume.checkpoint.format.bucket_digests import bucket_digests, name_digests
from hyper_resume.checkpoint.format.manifest import Manifest
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
    """What is read, apart from the live tensors until all of it is known to be good.

    Attributes:
        state: the live state.
    """

    def __init__(self, state: dict[str, Any], metadata: Metadata) -> None:
        """Ask for each entry of ``state`` that the checkpoint has."""
        self.state = state
        self._live, self._places = flatten(state)
        stored = metadata.state_dict_metadata
        self.wanted = {name: value for name, value in self._live.items() if name in stored}
        self.unread = tuple(sorted(_bucket_entries(stored, set(state)) - set(self._live)))
        self._read: dict[str, Any] = {}
        self._known: Mapping[str, bytes] = {}

    def entries_of_bucket(self, bucket: str) -> dict[str, Any]:
        """Return name -> live value of one bucket's entries."""
        return {name: value for name, value in self._live.items() if self._places[name][0] == bucket}

    def check_forms(self, metadata: Metadata, where: str, *, checked: Container[str] = ()) -> None:
        """Refuse an entry of another shape or type than the live one; a copy would convert it without a word.

        Args:
            metadata: the checkpoint's description.
            where: the path, for the message.
            checked: entries of which that is known already.

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
        """Take what was read for ``wanted``."""
        self._read, self._known = found.values, found.data_digests

    def nested_state(self) -> dict[str, Any]:
        """Return the state as it will be, in the form of the live one."""
        found: dict[str, Any] = unflatten_state_dict({**self._live, **self._read}, self._places)
        return found

    def incomparable_buckets(self, manifest: Manifest | None) -> set[str]:
        """Buckets of which this rank asks for other entries than it saved, so that their digests can't be compared."""
        saved = {} if manifest is None else manifest.names.get(str(collective.rank()), {})
        asked = name_digests(self._live)
        return {bucket for bucket in asked if saved.get(bucket) != asked[bucket]}

    def digests(self, like: Mapping[str, str]) -> dict[str, str]:
        """Bucket -> digest of what was read, taken as those in ``like`` are."""
        return bucket_digests({**self._live, **self._read}, like, self._known)

    def write_to_live_state(self) -> None:
        """Write to the live state what was read. Nothing here can fail for the checkpoint's sake."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, value in self._read.items():
            live = self._live[name]
            if isinstance(live, torch.Tensor):
                pairs.append((live, value))
            else:
                set_element(self.state, self._places[name], value)
        copy_tensors(pairs)


def prepare_buffers(state: dict[str, Any], metadata: Metadata, path: str, *, strict_model: bool) -> LoadBuffers:
    """Return what is asked for, when the checkpoint has it and it fits.

    Raises:
        CheckpointMismatchError: a missing model key, or an entry of another shape or type.
    """
    incoming = LoadBuffers(state, metadata)
    model = incoming.entries_of_bucket(MODEL_BUCKET)
    check_model_entries(model, metadata, strict=strict_model, where=path)
    incoming.check_forms(metadata, path, checked=model)
    return incoming


def unread_on_all_ranks(of_ranks: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return what is in all of them: an entry that one rank asks for is read, whatever the others ask for."""
    return tuple(sorted(set(of_ranks[0]).intersection(*of_ranks[1:])))


def _bucket_entries(stored: Mapping[str, Any], buckets: set[str]) -> set[str]:
    return {name for name in stored if name.split(".", 1)[0] in buckets}

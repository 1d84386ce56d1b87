"""Loading without touching what runs until everything is known to be good: verify, read into buffers, compare, then fill."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata

from hyper_resume import collective, digest
from hyper_resume.checkpoint import layout, operations, safe_load
from hyper_resume.checkpoint.copying import copy_all, in_threads
from hyper_resume.checkpoint.description import read_metadata
from hyper_resume.checkpoint.entries import Read
from hyper_resume.checkpoint.flat import flatten
from hyper_resume.checkpoint.kinds import (
    MODEL_BUCKET,
    check_model_entries,
    is_of_kind,
    kind_of_live,
    kind_of_stored,
)
from hyper_resume.checkpoint.manifest import (
    MANIFEST_NAME,
    MISSING,
    Manifest,
    Mesh,
    digest_file,
    read_manifest,
    unlisted_files,
    verify_files,
)
from hyper_resume.checkpoint.segments import Proof
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError, describe

logger = logging.getLogger(__name__)

Part = Literal["weights", "training state"]
_NAMES_SHOWN = 5
# Every file carries the id of its save as plain text near its beginning.
_ATTEMPT = re.compile(rb"global_step_[0-9]{1,18}\.[0-9a-f]{12}")
EXTRA_STATE_DIRECTORY = "extra_state"
_HEAD_BYTES = 1 << 20
# Entries that are worth a thread.
_LARGE_BYTES = 1 << 20


def verify(
    directory: Path,
    how: Literal["digest", "size"],
    group: dist.ProcessGroup | None,
    *,
    parts: Collection[Part] = ("weights", "training state"),
    proofs: dict[str, Proof] | None = None,
) -> Manifest | None:
    """Hold a step directory against its manifest; every rank reads the files of its own number, all share the verdict.

    Args:
        directory: the step directory.
        how: sizes only, or digests too.
        group: of all ranks.
        parts: of which files: those of the training state, all others, or both.
        proofs: gets what is known then of this rank's files, by name.

    Returns:
        the manifest; None for a directory without one, of which nothing can be said.

    Raises:
        CheckpointNotFoundError: files are missing; names them, on every rank.
        CheckpointMismatchError: files are not as they were written; names them, on every rank.
    """
    manifest = collective.on_rank_zero(lambda: _read_manifest(directory), group)
    if manifest is None:
        return None
    rank, world_size = collective.rank(), collective.world_size()
    own = [
        name
        for name, entry in sorted(manifest.files.items())
        if entry.rank % world_size == rank and _part_of(name) in parts
    ]
    check = partial(_verify_one, directory, manifest, proofs, digests=how == "digest")
    found = collective.agree(lambda: [complaint for name in own if (complaint := check(name))], group)
    complaints = [complaint for of_rank in collective.gather(found, group) for complaint in of_rank]
    complaints = [*wrong_name(directory, manifest), *complaints]
    if complaints:
        only_missing = all(complaint.endswith(MISSING) for complaint in complaints)
        raise (CheckpointNotFoundError if only_missing else CheckpointMismatchError)(
            describe(
                "files of the checkpoint are missing" if only_missing else "the checkpoint is not as it was written",
                where=str(directory),
                expected=f"every file as the manifest of save {manifest.attempt} describes it",
                found="; ".join(complaints[:3]) + (f"; and {len(complaints) - 3} more" if len(complaints) > 3 else ""),
                do="restore the files from a copy, or resume from another checkpoint (LATEST takes the newest good one); "
                "checkpoint.restore_train_state=false needs no extra_state",
            )
        )
    return manifest


def wrong_name(directory: Path, manifest: Manifest) -> list[str]:
    """Return a complaint about a step directory under another step's name, if it is one; any other name will do."""
    step = layout.parse_step(directory.name)
    if step in (None, manifest.step):
        return []
    return [f"the directory's name says step {step}, its manifest step {manifest.step}"]


def check_description(directory: Path, manifest: Manifest | None) -> Metadata:
    """Read a step directory's description of its entries and hold it against the files.

    It may name only files that the manifest knows, as others would be read without a digest; where there is no manifest it
    must not tell of one.

    Raises:
        CheckpointNotFoundError: there is neither a manifest nor a description.
        CheckpointMismatchError: it does not read, or names what is not there; the manifest was lost.
    """
    metadata = read_metadata(directory, manifest)
    if manifest is None:
        _refuse_lost_manifest(directory, metadata)
    named = {place.relative_path for place in (metadata.storage_data or {}).values()}
    others = set() if manifest is None else named - set(manifest.files)
    if others:
        raise CheckpointMismatchError(
            describe(
                "the checkpoint's metadata names files that its manifest does not know",
                where=str(directory),
                expected="files of the manifest only",
                found=", ".join(sorted(others)[:3]),
                do="resume from another checkpoint",
            )
        )
    safe_load.check_extents(directory, metadata)
    return metadata


def _part_of(name: str) -> Part:
    return "training state" if name.startswith(f"{EXTRA_STATE_DIRECTORY}/") else "weights"


def _read_manifest(directory: Path) -> Manifest | None:
    """Read it, and warn of files that it does not know: no load reads them, but somebody may have meant something by them."""
    manifest = read_manifest(directory)
    others = [] if manifest is None else unlisted_files(directory, manifest)
    if others:
        more = f" and {len(others) - _NAMES_SHOWN} more" if len(others) > _NAMES_SHOWN else ""
        logger.warning(
            "%s holds files that its manifest does not know, and no load reads: %s%s",
            directory,
            ", ".join(others[:_NAMES_SHOWN]),
            more,
        )
    return manifest


def _refuse_lost_manifest(directory: Path, metadata: Metadata) -> None:
    """A save of this library wrote a manifest, and its ``.metadata`` tells so: without it nothing is proved any more."""
    about = metadata.storage_meta
    if about is not None and about.save_id and about.save_id == Path(str(about.checkpoint_id)).name:
        raise CheckpointMismatchError(
            describe(
                "the checkpoint has lost its manifest",
                where=str(directory),
                expected=f"{MANIFEST_NAME}, which save {about.save_id} wrote with it",
                found="no such file",
                do="restore the file from a copy, or resume from another checkpoint",
            )
        )


def _verify_one(
    directory: Path, manifest: Manifest, proofs: dict[str, Proof] | None, name: str, *, digests: bool
) -> str:
    complaints = verify_files(directory, manifest, [name], digests=digests, proofs=proofs)
    return complaints[0] + _origin(directory / name, manifest) if complaints else ""


def _origin(path: Path, manifest: Manifest) -> str:
    """Say which save a file is of, when it is not this one's: a file that was mixed in has the right name and often size."""
    try:
        head = operations.read_head(path, _HEAD_BYTES)
        others = sorted({found.decode() for found in _ATTEMPT.findall(head)} - {manifest.attempt})
        if others:
            return f" (it is a part of another save: {', '.join(others[:3])})"
        size = path.stat().st_size
        twins = [name for name, entry in manifest.files.items() if entry.size_bytes == size and path.name not in name]
        told = {name: manifest.files[name].digest for name in twins}
        # Once for each way of taking it, however many files there are.
        ways = {text.rpartition(":")[0]: text for text in told.values()}
        found = {digest_file(path, like=text) for text in ways.values()}
        same = [name for name in twins if told[name] in found]
    except OSError:
        return ""
    return f" (it has the content of {same[0]})" if same else ""


class Incoming:
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

    def of_bucket(self, bucket: str) -> dict[str, Any]:
        """Return name -> live value of one bucket's entries."""
        return {name: value for name, value in self._live.items() if self._places[name][0] == bucket}

    def refuse_other_kinds(self, metadata: Metadata, where: str, *, checked: Container[str] = ()) -> None:
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
            if name not in checked and not is_of_kind(value, entry):
                raise CheckpointMismatchError(
                    describe(
                        f"entry {name} does not fit",
                        where=where,
                        expected=f"{kind_of_live(value)} (the running job)",
                        found=f"{kind_of_stored(entry)} (the checkpoint)",
                        do="resume with the configuration that was saved",
                    )
                )

    def take(self, found: Read) -> None:
        """Take what was read for ``wanted``."""
        self._read, self._known = found.values, found.data_digests

    def nested(self) -> dict[str, Any]:
        """Return the state as it will be, in the form of the live one."""
        found: dict[str, Any] = unflatten_state_dict({**self._live, **self._read}, self._places)
        return found

    def not_as_saved(self, manifest: Manifest | None) -> set[str]:
        """Buckets of which this rank asks for other entries than it saved, so that their digests can't be compared."""
        saved = {} if manifest is None else manifest.names.get(str(collective.rank()), {})
        asked = name_digests(self._live)
        return {bucket for bucket in asked if saved.get(bucket) != asked[bucket]}

    def digests(self, like: Mapping[str, str]) -> dict[str, str]:
        """Bucket -> digest of what was read, taken as those in ``like`` are."""
        return bucket_digests({**self._live, **self._read}, like, self._known)

    def fill(self) -> None:
        """Write to the live state what was read. Nothing here can fail for the checkpoint's sake."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, value in self._read.items():
            live = self._live[name]
            if isinstance(live, torch.Tensor):
                pairs.append((live, value))
            else:
                set_element(self.state, self._places[name], value)
        copy_all(pairs)


def asked_for(state: dict[str, Any], metadata: Metadata, path: str, *, strict_model: bool) -> Incoming:
    """Return what is asked for, when the checkpoint has it and it fits.

    Raises:
        CheckpointMismatchError: a missing model key, or an entry of another shape or type.
    """
    incoming = Incoming(state, metadata)
    model = incoming.of_bucket(MODEL_BUCKET)
    check_model_entries(model, metadata, strict=strict_model, where=path)
    incoming.refuse_other_kinds(metadata, path, checked=model)
    return incoming


def common(of_ranks: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return what is in all of them: an entry that one rank asks for is read, whatever the others ask for."""
    return tuple(sorted(set(of_ranks[0]).intersection(*of_ranks[1:])))


def _bucket_entries(stored: Mapping[str, Any], buckets: set[str]) -> set[str]:
    return {name for name in stored if name.split(".", 1)[0] in buckets}


def bucket_digests(
    flat: Mapping[str, Any],
    like: Mapping[str, str] = MappingProxyType({}),
    known: Mapping[str, bytes] = MappingProxyType({}),
) -> dict[str, str]:
    """Return bucket -> digest of this rank's part of a flattened payload, found by several threads.

    Args:
        flat: entry name -> value.
        like: bucket -> a digest that it will be held against; one of an earlier version is taken as that one took it.
        known: entry name -> digest of its bytes, for those of which it need not be taken again.
    """
    buckets: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        buckets.setdefault(name.split(".", 1)[0], {})[name] = value
    found: dict[str, str] = {}
    for bucket, entries in buckets.items():
        earlier = digest.earlier_text(entries, like.get(bucket, ""))
        found[bucket] = earlier or digest.text_of_entries(_entry_digests(entries, known))
    return found


def _entry_digests(entries: Mapping[str, Any], known: Mapping[str, bytes]) -> dict[str, bytes]:
    def is_large(name: str, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and name not in known and value.nbytes >= _LARGE_BYTES

    large = [name for name, value in entries.items() if is_large(name, value)]
    found = dict(zip(large, in_threads(lambda name: digest.entry_digest(entries[name]), large), strict=True))
    return {
        name: found[name] if name in found else digest.entry_digest(value, known.get(name))
        for name, value in entries.items()
    }


def name_digests(flat: Mapping[str, Any]) -> dict[str, str]:
    """Return bucket -> digest of the names of this rank's entries in a flattened payload."""
    buckets: dict[str, list[str]] = {}
    for name in sorted(flat):
        buckets.setdefault(name.split(".", 1)[0], []).append(name)
    return {bucket: digest.state_text(names) for bucket, names in buckets.items()}


def saved_digests(manifest: Manifest | None, mesh: Mesh | None) -> Mapping[str, str]:
    """Return this rank's digests at the save; empty where it had none, or had another part of the state."""
    if manifest is None or manifest.world_size != collective.world_size() or manifest.mesh != mesh:
        return {}
    return manifest.buckets.get(str(collective.rank()), {})


def compare_digests(saved: Mapping[str, str], loaded: Mapping[str, str], others: set[str], where: str) -> None:
    """Refuse a bucket that was read otherwise than it was saved.

    Args:
        saved: digests at the save.
        loaded: digests of what was read.
        others: buckets of which other entries were asked for than were saved; these can't be compared.
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

"""``hyper-resume inspect``: summarise a step directory per bucket and per rank, without reading tensors."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hyper_resume.checkpoint.disk import observing
from hyper_resume.checkpoint.format import extra_state as extra
from hyper_resume.checkpoint.format.layout import parse_step
from hyper_resume.checkpoint.format.manifest import read_manifest
from hyper_resume.checkpoint.format.metadata import read_metadata, require_complete
from hyper_resume.checkpoint.format.save_id import SAVE_ID
from hyper_resume.checkpoint.loading.reading import read_training_state
from hyper_resume.errors import CheckpointNotFoundError, explained, printable
from hyper_resume.local_path import local_path

_MOST_MISSING = 1_000
_MOST_OF_A_NAME = 200


@dataclass(frozen=True, kw_only=True)
class BucketSummary:
    """One bucket: how many tensors and other entries it has, the total unsharded size in bytes, and the dtypes."""

    name: str
    tensors: int
    others: int
    size_bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """One rank's training state: its counters, its buckets, the random streams it holds, and what moved and is not saved."""

    rank: int
    global_step: int
    epoch: int | None
    world_size: int
    buckets: tuple[str, ...]
    rng_streams: tuple[str, ...]
    uncovered: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The whole step directory.

    ``size_bytes`` is the total size of its files. ``missing_ranks`` (the first 1,000 of them) took part in the save, but their
    training state is missing, so the training state can't be restored. ``run`` is what the run was made of, from the manifest.
    """

    path: str
    step: int | None
    files: int
    size_bytes: int
    layout: str
    buckets: tuple[BucketSummary, ...]
    ranks: tuple[RankSummary, ...]
    missing_ranks: tuple[int, ...]
    run: Mapping[str, Any] = field(default_factory=dict)

    def as_plain(self) -> dict[str, Any]:
        """Return nested dicts and lists that can be written as JSON."""
        return asdict(self)


def inspect_step_directory(path: str | Path) -> Inspection:
    """Describe the step directory ``path``.

    Raises:
        ConfigError: a path is an address with a scheme.
        CheckpointNotFoundError: it is missing or incomplete, can't be read, or was deleted while it was read.
        CheckpointMismatchError: its metadata or an extra-state file can't be read.
    """
    directory = local_path(path)
    with explained("this can't be inspected", directory):
        if not directory.is_dir():
            require_complete(directory)
        return observing.unchanged(directory, lambda: _inspect(directory))


def _inspect(directory: Path) -> Inspection:
    require_complete(directory)
    manifest = read_manifest(directory)
    metadata = read_metadata(directory, manifest)
    sizes = observing.file_sizes(directory)
    try:
        layout = extra.detect_layout(directory, metadata, manifest)
    except CheckpointNotFoundError:
        kind, ranks = "none", []
    else:
        kind = layout.kind
        ranks = [_rank_summary(read_training_state(directory, metadata, layout, rank)) for rank in layout.ranks]
    return Inspection(
        path=str(directory),
        step=parse_step(directory.resolve().name),
        files=len(sizes),
        size_bytes=sum(sizes),
        layout=kind,
        buckets=_bucket_summaries(metadata),
        ranks=tuple(ranks),
        missing_ranks=_missing(ranks),
        run={} if manifest is None else manifest.run,
    )


def _missing(ranks: list[RankSummary]) -> tuple[int, ...]:
    present = {found.rank for found in ranks}
    every = range(max((found.world_size for found in ranks), default=0))
    return tuple(itertools.islice((rank for rank in every if rank not in present), _MOST_MISSING))


def _bucket_summaries(metadata: Metadata) -> tuple[BucketSummary, ...]:
    entries: dict[str, list[Any]] = defaultdict(list)
    for name, entry in metadata.state_dict_metadata.items():
        bucket = name.split(".", 1)[0]
        if bucket == "optimizer":
            bucket = ".".join(name.split(".", 2)[:2])
        if bucket not in (extra.PAYLOAD_KEY, SAVE_ID):
            entries[bucket].append(entry)
    return tuple(_summarise(bucket, entries[bucket]) for bucket in sorted(entries))


def _summarise(bucket: str, entries: list[Any]) -> BucketSummary:
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    sizes = [
        torch.Size(entry.size).numel() * torch.empty((), dtype=entry.properties.dtype).element_size()
        for entry in tensors
    ]
    return BucketSummary(
        name=bucket,
        tensors=len(tensors),
        others=len(entries) - len(tensors),
        size_bytes=sum(sizes),
        dtypes=tuple(sorted({str(entry.properties.dtype).removeprefix("torch.") for entry in tensors})),
    )


def _rank_summary(state: dict[str, Any]) -> RankSummary:
    streams = state.get("rng_state") or {}
    return RankSummary(
        rank=state["rank"],
        global_step=state["global_step"],
        epoch=state.get("epoch"),
        world_size=state["world_size"],
        buckets=tuple(sorted(set(state) - extra.IDENTITY_KEYS)),
        uncovered=_in_short(state.get(extra.UNCOVERED) or ()),
        rng_streams=_in_short(name for name, value in streams.items() if value is not None),
    )


def _in_short(names: Iterable[Any]) -> tuple[str, ...]:
    """What they are called, if they are text: they come out of a file that may be forged."""
    return tuple(printable(str(name), _MOST_OF_A_NAME) for name in names)

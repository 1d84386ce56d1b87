"""The good files that hostile files are derived from, the same bytes each time: metadata, archive, manifest, configuration."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from conformance.storage.hostile.directory import INDEX, SHARD, good_files
from hyper_resume import digest
from hyper_resume.checkpoint.format.manifest import FileEntry, Manifest, encode
from hyper_resume.checkpoint.format.mesh import Mesh

MARKER = "hostile-marker"
"""The file that a payload creates in its working directory if it is executed."""

CONFIGURATION = """\
model:
  preset: llama-tiny
  overrides: {hidden_size: 32, num_hidden_layers: 2}
data:
  seq_length: 16
  batch_size: 4
  num_workers: 0
optimizer:
  lr: 3e-4
  betas: [0.9, 0.95]
  weight_decay: 0.1
lr_scheduler:
  warmup_steps: 2
training:
  max_steps: 20
  seed: 7
  max_grad_norm: null
checkpoint:
  checkpoint_dir: checkpoints
  save_steps: 5
  restore_from: LATEST
trajectory:
  dir: trajectory
  digests: true
"""


@dataclass(frozen=True, kw_only=True)
class Material:
    """The good files.

    Attributes:
        metadata: of three tensors (one whole, one split by rows, one by rows and columns) and four plain values.
        metadata_opcodes: the same, an opcode with its argument an item, without the frame.
        archive: a training state as ``torch.save`` writes it.
        archive_opcodes: of the pickle in it.
        manifest: a manifest's bytes.
        configuration: YAML text.
        index: of a step directory of two shards (:mod:`conformance.storage.hostile.directory`).
        shard: one of the two, with its table of digests.
    """

    metadata: bytes
    metadata_opcodes: tuple[bytes, ...]
    archive: bytes
    archive_opcodes: tuple[bytes, ...]
    manifest: bytes
    configuration: str
    index: bytes
    shard: bytes


def make_material() -> Material:
    """Make the good files. Two calls give equal bytes."""
    metadata = pickle.dumps(good_metadata(), protocol=4)
    archive = _archive()
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        inner = opened.read("archive/data.pkl")
    return Material(
        metadata=metadata,
        metadata_opcodes=split_opcodes(metadata),
        archive=archive,
        archive_opcodes=split_opcodes(inner),
        manifest=encode(_manifest()),
        configuration=CONFIGURATION,
        index=good_files()[INDEX],
        shard=good_files()[SHARD],
    )


def good_metadata() -> Metadata:
    """The ``.metadata`` of a real save, with its random parts fixed, and two tensors split over ranks."""
    state = {
        "model": {"whole": torch.ones(3, 2), "rows": torch.ones(5, 4), "grid": torch.ones(4, 6, dtype=torch.bfloat16)},
        "optimizer": {"lr": 0.1, "betas": (0.9, 0.95), "names": ["a", "b"]},
    }
    with tempfile.TemporaryDirectory() as folder:
        dcp_save(state, checkpoint_id=folder, no_dist=True)
        metadata: Metadata = pickle.loads((Path(folder) / ".metadata").read_bytes())
    assert metadata.storage_meta is not None
    metadata.storage_meta.checkpoint_id = PosixPath("/checkpoints/.staging/global_step_10.0123456789ab")
    metadata.storage_meta.save_id = "global_step_10.0123456789ab"
    metadata.storage_data = dict(sorted(metadata.storage_data.items(), key=lambda pair: pair[0].fqn))
    _split(metadata, "model.rows", [((0, 0), (3, 4)), ((3, 0), (2, 4))])
    _split(metadata, "model.grid", [((row, column), (2, 3)) for row in (0, 2) for column in (0, 3)])
    return metadata


def _split(metadata: Metadata, name: str, boxes: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    """Describe a tensor as one chunk per rank, each in that rank's file."""
    entry: Any = metadata.state_dict_metadata[name]
    place = metadata.storage_data.pop(MetadataIndex(name, (0, 0)))
    entry.chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    for rank, (offsets, _) in enumerate(boxes):
        moved = type(place)(f"__{rank}_0.distcp", place.offset, place.length)
        metadata.storage_data[MetadataIndex(name, offsets, rank)] = moved


def _archive() -> bytes:
    generator = torch.Generator().manual_seed(3)
    state = {
        "format_version": 1,
        "rank": 0,
        "world_size": 4,
        "global_step": 10,
        "lr_scheduler": [{"last_epoch": 10, "_last_lr": [0.1, 0.2], "nothing": None}],
        "train_dataloader": {"epoch": 1, "batches_consumed": 5, ("a", 1): {2, 3}},
        "rng_state": {"torch_cpu": generator.get_state(), "python": (3, tuple(range(20)), None), "bytes": b"abc"},
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _manifest() -> Manifest:
    def entry(name: str, rank: int) -> FileEntry:
        return FileEntry(size_bytes=100 + len(name), digest=digest.bytes_digest_text([name.encode()]), rank=rank)

    names = {".metadata": 0, "__0_0.distcp": 0, "__1_0.distcp": 1, "extra_state/extra_state_rank_0.pt": 0}
    return Manifest(
        step=10,
        attempt="global_step_10.0123456789ab",
        ordinal=2,
        ancestors=((5, "global_step_5.ba9876543210"),),
        world_size=2,
        mesh=Mesh(names=("dp", "tp"), shape=(2, 1)),
        created_at="2026-01-02T03:04:05+00:00",
        versions={"hyper_resume": "0.1.0", "torch": "2.13.0"},
        metrics={"loss": 2.5},
        files={name: entry(name, rank) for name, rank in names.items()},
        buckets={str(rank): {"model": digest.bytes_digest_text([bytes([rank])])} for rank in range(2)},
        names={str(rank): {"model": digest.bytes_digest_text([b"names"])} for rank in range(2)},
    )


def sign(tree: Any) -> bytes:
    """A manifest with its right digest, so that the checks after that one are reached."""
    content = {key: value for key, value in tree.items() if key != "digest"} if isinstance(tree, dict) else tree
    if not isinstance(content, dict):
        return json.dumps(content).encode()
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({**content, "digest": digest.bytes_digest_text([canonical.encode()])}).encode()


def split_opcodes(content: bytes) -> tuple[bytes, ...]:
    """A pickle as one item per opcode, without frames (a change would make their lengths wrong)."""
    places = [(opcode.name, position) for opcode, _, position in pickletools.genops(content)]
    ends = [position for _, position in places[1:]] + [len(content)]
    return tuple(content[begin:end] for (name, begin), end in zip(places, ends, strict=True) if name != "FRAME")


def archive_with(pickle_bytes: bytes, good: bytes, *, compression: int = zipfile.ZIP_STORED) -> bytes:
    """The archive ``good`` with another pickle in it, and right checksums."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for member in old.infolist():
            content = pickle_bytes if member.filename.endswith("/data.pkl") else old.read(member)
            new.writestr(zipfile.ZipInfo(member.filename), content, compress_type=compression)
    return out.getvalue()

"""A step directory of two shards for a hostile file: the same bytes each time, with a manifest that matches its content.

Digests, tables and the index are computed here from the format description, independently of the library.
"""

from __future__ import annotations

import io
import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import xxhash

from conformance.storage.damage.damage_kinds import own_digest
from hyper_resume.checkpoint.format.archive import template

STEP = "global_step_10"
INDEX, SHARD, OTHER_SHARD, METADATA, MANIFEST = (
    "index.json", "__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json",
)  # fmt: skip
OUTSIDE = "other"
"""A folder next to the step directory, for paths that lead out of it; two links in the step directory lead there."""
LINKS = ("linked.distcp", "linked")
UNLISTED = "unlisted.distcp"

_MAGIC = b"hrsegm01"
_ALIGNMENT = 64
# (name, type, shape, boxes as (shard, offsets, sizes)).
_TENSORS: tuple[
    tuple[str, torch.dtype, tuple[int, ...], tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]], ...
] = (
    ("model.whole", torch.float32, (1, 30), ((0, (0, 0), (1, 30)),)),
    ("model.rows", torch.float32, (5, 4), ((0, (0, 0), (3, 4)), (1, (3, 0), (2, 4)))),
    ("model.grid", torch.bfloat16, (4, 6), tuple((i // 2, (2 * (i // 2), 3 * (i % 2)), (2, 3)) for i in range(4))),
    ("model.scalar", torch.int64, (), ((1, (), ()),)),
    ("model.empty", torch.float32, (0, 3), ((1, (0, 0), (0, 3)),)),
)
_VALUES: Mapping[str, Any] = {"optimizer.lr": 0.1, "optimizer.betas": [0.9, 0.95]}


def good_state() -> dict[str, Any]:
    """The saved values, by flat name."""
    state: dict[str, Any] = {}
    for number, (name, dtype, shape, _) in enumerate(_TENSORS):
        generator = torch.Generator().manual_seed(number)
        state[name] = torch.randint(-100, 100, shape, generator=generator).to(dtype)
    return {**state, **_VALUES}


def table_of(body: bytes, lengths: Sequence[int], *, digests: Mapping[int, bytes] | None = None) -> bytes:
    """A table of these segments, with their right digests except those given in ``digests`` by number."""
    found, begin = [], 0
    for number, length in enumerate(lengths):
        digest = (digests or {}).get(number) or xxhash.xxh3_128_digest(body[begin : begin + length])
        found.append(struct.pack("<Q16s", length, digest))
        begin += length
    return b"".join([*found, struct.pack("<Q8s", len(found), _MAGIC)])


def split_table(content: bytes) -> tuple[bytes, list[int]]:
    """The bytes before a good shard's table, and the lengths of its segments."""
    (count,) = struct.unpack("<Q", content[-16:-8])
    begin = len(content) - 16 - 24 * count
    return content[:begin], [struct.unpack_from("<Q", content, begin + 24 * at)[0] for at in range(count)]


def manifest_digest(name: str, content: bytes) -> str:
    """The digest of a file that a manifest must state to be accepted; for a file that ends like a table, the table's."""
    if name.endswith(".distcp") and content[-8:] == _MAGIC and len(content) >= 16:
        (count,) = struct.unpack("<Q", content[-16:-8])
        return f"xxh3_128/table:{xxhash.xxh3_128_hexdigest(content[max(0, len(content) - 24 * count - 16) :])}"
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}"


@cache
def good_files() -> dict[str, bytes]:
    """Every file except the manifest. Do not change it."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    cuts: tuple[list[int], list[int]] = ([], [])
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    state = good_state()

    def add(shard: int, content: bytes) -> list[int]:
        """Append one archive; returns its place."""
        before = b"".join(parts[shard])
        parts[shard].append(bytes(-len(before) % _ALIGNMENT) + content)
        return [shard, len(b"".join(parts[shard])) - len(content), len(content)]

    for name, dtype, shape, boxes in _TENSORS:
        tensors[name] = [str(dtype).removeprefix("torch."), list(shape), []]
        for shard, offsets, sizes in boxes:
            box = state[name][tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
            archive, begin, length = _archive(box, own=name in ("model.whole", "model.grid"))
            place = add(shard, archive)
            tensors[name][2].append([list(offsets), list(sizes), *place])
            if name == "model.whole":
                cuts[shard].extend((place[1] + begin, place[1] + begin + length))
    for number, (name, value) in enumerate(_VALUES.items()):
        values[name] = add(number % 2, _saved(value))
    index = {"format": "hyper_resume.index", "format_version": 1, "files": [SHARD, OTHER_SHARD]}
    bodies = [b"".join(of_shard) for of_shard in parts]
    shards = [body + table_of(body, _lengths(body, cut)) for body, cut in zip(bodies, cuts, strict=True)]
    return {
        METADATA: b"a load reads the index instead",
        INDEX: json.dumps({**index, "tensors": tensors, "values": values}).encode(),
        SHARD: shards[0],
        OTHER_SHARD: shards[1],
    }


def _lengths(body: bytes, cuts: Sequence[int]) -> list[int]:
    # One more segment each, so that segments can be swapped.
    places = sorted({0, *cuts, len(body) - 300, len(body)})
    return [end - begin for begin, end in itertools.pairwise(places)]


def _archive(tensor: torch.Tensor, *, own: bool) -> tuple[bytes, int, int]:
    """An archive as the library or torch writes it, with offset and length of the tensor's bytes."""
    data = raw(tensor)
    made = template(tensor.dtype, tuple(tensor.shape)) if own else None
    if made is None:
        return _saved(tensor.clone()), 0, 0
    return made.prefix + data + made.suffix, len(made.prefix), len(data)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes."""
    content: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return content


def manifest_of(files: Mapping[str, bytes]) -> bytes:
    """A manifest that is right for every file. It has no bucket digests, so none causes a refusal."""
    content: dict[str, Any] = {
        "format": "hyper_resume.manifest",
        "format_version": 2,
        "step": 10,
        "attempt": f"{STEP}.0123456789ab",
        "ordinal": 2,
        "ancestors": [],
        "world_size": 2,
        "mesh": None,
        "created_at": "2026-01-02T03:04:05+00:00",
        "versions": {},
        "metrics": {},
        "files": {
            name: {"size_bytes": len(file), "digest": manifest_digest(name, file), "rank": 0}
            for name, file in files.items()
        },
        "buckets": {},
        "names": {},
    }
    return json.dumps({**content, "digest": own_digest(content)}).encode()


def put(folder: Path, name: str, content: bytes) -> None:
    """Write the step directory with ``content`` as its file ``name`` into ``folder``, and the files outside of it."""
    step = folder / STEP
    if not step.is_dir():
        step.mkdir()
        (folder / OUTSIDE).mkdir()
        for link, target in zip(LINKS, (f"../{OUTSIDE}/{SHARD}", f"../{OUTSIDE}"), strict=True):
            (step / link).symlink_to(target)
        for file in (SHARD, OTHER_SHARD):
            (folder / OUTSIDE / file).write_bytes(good_files()[file])
        (step / UNLISTED).write_bytes(good_files()[SHARD])
    files = {**good_files(), name: content}
    for file, data in {**files, MANIFEST: manifest_of(files)}.items():
        if (step / file).is_file() and (step / file).read_bytes() == data:
            continue
        # A new file each time: the previous one may still be mapped, and truncating a mapped file kills the process.
        temporary = folder / "temporary"
        temporary.write_bytes(data)
        temporary.replace(step / file)


MAY_OPEN = frozenset((STEP, *(f"{STEP}/{name}" for name in (INDEX, SHARD, OTHER_SHARD, METADATA, MANIFEST))))
"""The paths that a reader may open for reading, and list."""

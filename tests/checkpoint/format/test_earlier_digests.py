"""Digests of buckets and of files as earlier versions took them are still held against what is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from hyper_resume import digest
from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.format import manifest
from hyper_resume.errors import CheckpointMismatchError

_BLOCK = 64 << 20


def _state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((300_000,), value), "b": torch.full((3,), -value)}}


def _reseal(directory: Path, change: Any) -> None:
    path = directory / "manifest.json"
    content = json.loads(path.read_bytes())
    change(content)
    del content["digest"]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({**content, "digest": f"xxh3_128:{xxhash.xxh3_128_hexdigest(canonical)}"}))


def _in_one_go(state: dict[str, Any]) -> str:
    """The digest of a flat bucket as it was taken before: one hash over names, types, shapes and bytes."""
    hasher = xxhash.xxh3_128()
    hasher.update(f"mapping {len(state)}".encode())
    for name in sorted(state, key=repr):
        tensor = state[name]
        hasher.update(f"key {name!r}".encode() + f"tensor {tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.numpy())
    return f"xxh3_128:{hasher.hexdigest()}"


def _of_entries(state: dict[str, Any]) -> str:
    """The digest as the next version took it: of the entries' digests, each over type, shape and bytes in one go."""
    hasher = xxhash.xxh3_128()
    for name in sorted(state):
        tensor = state[name]
        entry = f"tensor {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes()
        hasher.update(f"key {name!r}".encode() + xxhash.xxh3_128_digest(entry))
    return f"xxh3_128/entries:{hasher.hexdigest()}"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    directory = tmp_path / "global_step_1"
    DistributedCheckpointer().save(str(directory), _state(2.0), global_step=1)
    return directory


def test_a_bucket_has_the_digest_of_its_entries_digests(saved: Path) -> None:
    told = json.loads((saved / "manifest.json").read_bytes())["buckets"]["0"]["model"]
    hasher = xxhash.xxh3_128()
    for name, tensor in (("model.b", torch.full((3,), -2.0)), ("model.w", torch.full((300_000,), 2.0))):
        entry = f"tensor torch.float32 {tuple(tensor.shape)} ".encode()
        data = xxhash.xxh3_128_digest(tensor.numpy().tobytes())
        hasher.update(f"key {name!r}".encode() + xxhash.xxh3_128_digest(entry + data))
    assert told == f"xxh3_128/data:{hasher.hexdigest()}"


@pytest.mark.parametrize("earlier", [_in_one_go, _of_entries])
@pytest.mark.parametrize("is_right", [True, False])
def test_a_bucket_digest_of_an_earlier_version_is_compared(
    saved: Path, is_right: bool, earlier: Callable[[dict[str, Any]], str]
) -> None:
    flat = {f"model.{name}": tensor for name, tensor in _state(2.0 if is_right else 3.0)["model"].items()}
    _reseal(saved, lambda content: content["buckets"]["0"].update(model=earlier(flat)))
    live = _state(0.0)
    if is_right:
        DistributedCheckpointer().load(str(saved), live)
        assert torch.equal(live["model"]["w"], torch.full((300_000,), 2.0))
    else:
        with pytest.raises(CheckpointMismatchError, match="the model bucket was read otherwise than it was saved"):
            DistributedCheckpointer().load(str(saved), live)
        assert torch.equal(live["model"]["w"], torch.zeros(300_000))


@pytest.mark.parametrize("size", [_BLOCK - 1, _BLOCK, _BLOCK + 1, 2 * _BLOCK, 2 * _BLOCK + 5])
def test_a_large_files_digest_is_that_of_its_blocks_digests_and_an_earlier_one_is_of_all_of_it(
    tmp_path: Path, size: int
) -> None:
    content = bytes(range(251)) * (size // 251 + 1)
    content = content[:size]
    (tmp_path / "file").write_bytes(content)
    blocks = [xxhash.xxh3_128_digest(content[begin : begin + _BLOCK]) for begin in range(0, size, _BLOCK)]
    whole = f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}"
    expected = whole if size <= _BLOCK else f"xxh3_128/67108864:{xxhash.xxh3_128_hexdigest(b''.join(blocks))}"
    assert manifest.digest_file(tmp_path / "file", like=f"xxh3_128/67108864:{'0' * 32}") == expected
    assert manifest.digest_file(tmp_path / "file", like=whole) == whole
    assert digest.data_digest(content) == xxhash.xxh3_128_digest(b"".join(blocks) if len(blocks) > 1 else content)
    hasher = digest.FileHasher()
    for begin in range(0, size, 50_000_001):
        hasher.update(content[begin : begin + 50_000_001])
    assert hasher.text() == expected
    assert digest.is_digest_text(expected)


def test_a_directory_of_version_1_without_tables_is_verified_and_loaded(saved: Path) -> None:
    shard = saved / "__0_0.distcp"
    (count,) = struct.unpack_from("<Q", shard.read_bytes(), shard.stat().st_size - 16)
    shard.write_bytes(shard.read_bytes()[: -24 * count - 16])
    told = {"size_bytes": shard.stat().st_size, "rank": 0}
    told["digest"] = f"xxh3_128:{xxhash.xxh3_128_hexdigest(shard.read_bytes())}"
    flat = {f"model.{name}": tensor for name, tensor in _state(2.0)["model"].items()}

    def as_version_1(content: Any) -> None:
        content["format_version"] = 1
        content["files"][shard.name] = told
        content["buckets"]["0"]["model"] = _of_entries(flat)

    _reseal(saved, as_version_1)
    live = _state(0.0)
    DistributedCheckpointer().load(str(saved), live)
    assert torch.equal(live["model"]["w"], torch.full((300_000,), 2.0))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointMismatchError, match=f"__0_0.distcp: expected digest {told['digest']}"):
        DistributedCheckpointer().load(str(saved), _state(0.0))

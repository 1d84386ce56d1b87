"""A shard's table has every byte before it in one segment, and a load that verified it hashes no large tensor again."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.disk.operations import FileOperations, InputFile
from hyper_resume.checkpoint.format import manifest, segments
from hyper_resume.checkpoint.format.metadata import read_metadata
from hyper_resume.checkpoint.loading.reading import load_entries
from hyper_resume.errors import CheckpointMismatchError

_BLOCK = 64 << 20
_LARGE = 20_000


def _state() -> dict[str, Any]:
    made = torch.Generator().manual_seed(3)
    return {
        "model": {
            "a": torch.rand(_LARGE, generator=made),
            "b": torch.rand(7, generator=made),
            "c": torch.rand(_LARGE, generator=made).to(torch.bfloat16),
            "d": torch.empty(0),
            "e": torch.rand(100, 300, generator=made).t(),
        }
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    directory = tmp_path / "global_step_1"
    DistributedCheckpointer().save(str(directory), _state(), global_step=1)
    return directory


def _shard(directory: Path) -> Path:
    return directory / "__0_0.distcp"


def _table(content: bytes) -> list[tuple[int, bytes]]:
    """Length and digest of each segment, read by what the format's description says."""
    count, magic = struct.unpack("<Q8s", content[-16:])
    assert magic == b"hrsegm01"
    return [struct.unpack("<Q16s", content[-16 - 24 * (count - at) :][:24]) for at in range(count)]


def _reseal(directory: Path, content: bytes) -> None:
    """Put another shard in place, with a manifest that says it is right."""
    _shard(directory).write_bytes(content)
    (count,) = struct.unpack("<Q", content[-16:-8])
    told = json.loads((directory / "manifest.json").read_bytes())
    table = content[max(0, len(content) - 24 * count - 16) :]
    digest = f"xxh3_128/table:{xxhash.xxh3_128_hexdigest(table)}"
    told["files"]["__0_0.distcp"].update(size_bytes=len(content), digest=digest)
    del told["digest"]
    canonical = json.dumps(told, sort_keys=True, separators=(",", ":")).encode()
    whole = {**told, "digest": f"xxh3_128:{xxhash.xxh3_128_hexdigest(canonical)}"}
    (directory / "manifest.json").write_text(json.dumps(whole))


def _zeros() -> dict[str, Any]:
    return {"model": {name: torch.zeros_like(value) for name, value in _state()["model"].items()}}


def test_every_byte_before_the_table_is_in_one_segment_with_its_digest(saved: Path) -> None:
    content = _shard(saved).read_bytes()
    begin = 0
    for length, digest in _table(content):
        assert xxhash.xxh3_128_digest(content[begin : begin + length]) == digest
        begin += length
    assert begin + 24 * len(_table(content)) + 16 == len(content)
    told = json.loads((saved / "manifest.json").read_bytes())["files"]["__0_0.distcp"]
    assert told["digest"] == f"xxh3_128/table:{xxhash.xxh3_128_hexdigest(content[begin:])}"


def test_a_large_tensors_bytes_are_segments_of_their_own(saved: Path) -> None:
    lengths = {length for length, _ in _table(_shard(saved).read_bytes())}
    assert {_LARGE * 4, 100 * 300 * 4} <= lengths
    # 40,000 bytes are little: they are written together with what stands around them.
    assert _LARGE * 2 not in lengths


def test_a_tensor_of_more_than_a_block_is_known_by_its_blocks(tmp_path: Path) -> None:
    large = torch.arange(_BLOCK // 4 + 5, dtype=torch.int32)
    directory = tmp_path / "global_step_1"
    DistributedCheckpointer().save(str(directory), {"model": {"w": large}}, global_step=1)
    data = large.numpy().tobytes()
    blocks = [xxhash.xxh3_128_digest(data[:_BLOCK]), xxhash.xxh3_128_digest(data[_BLOCK:])]
    assert [segment for segment in _table(_shard(directory).read_bytes()) if segment[0] in (_BLOCK, 20)] == [
        (_BLOCK, blocks[0]),
        (20, blocks[1]),
    ]
    found = _read(directory, {"model.w": None})
    assert found.data_digests == {"model.w": xxhash.xxh3_128_digest(b"".join(blocks))}
    assert torch.equal(found.values["model.w"], large)


def _read(directory: Path, wanted: dict[str, Any]) -> Any:
    """As a load does: verified, and then read where it was verified."""
    found = manifest.read_manifest(directory)
    assert found is not None
    verified_files: dict[str, segments.VerifiedFile] = {}
    assert (
        manifest.verify_files(directory, found, sorted(found.files), digests=True, verified_files=verified_files) == []
    )
    assert list(verified_files) == ["__0_0.distcp"]
    return load_entries(wanted, directory, read_metadata(directory, found), verified_files)


def test_the_digest_of_a_large_tensor_is_known_and_is_that_of_its_bytes(saved: Path) -> None:
    state = _state()["model"]
    found = _read(saved, {f"model.{name}": value for name, value in state.items()})
    expected = {
        f"model.{name}": xxhash.xxh3_128_digest(state[name].contiguous().numpy().tobytes()) for name in ("a", "e")
    }
    assert found.data_digests == expected
    assert all(torch.equal(found.values[f"model.{name}"], value) for name, value in state.items())


@pytest.mark.parametrize("is_harmless", [False, True])
def test_a_file_that_was_changed_after_it_was_verified_is_verified_again(saved: Path, is_harmless: bool) -> None:
    found = manifest.read_manifest(saved)
    assert found is not None
    verified_files: dict[str, segments.VerifiedFile] = {}
    assert manifest.verify_files(saved, found, sorted(found.files), digests=True, verified_files=verified_files) == []
    metadata = read_metadata(saved, found)
    status = _shard(saved).stat()
    content = bytearray(_shard(saved).read_bytes())
    weights = _state()["model"]["a"].numpy().tobytes()
    place = content.index(weights)
    content[place : place + 4] = weights[:4] if is_harmless else bytes(4)
    with _shard(saved).open("r+b") as file:
        file.write(content)
    # A later moment, whatever the clock of the file system can tell.
    os.utime(_shard(saved), ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    if is_harmless:
        read = load_entries({"model.a": None}, saved, metadata, verified_files)
        assert read.data_digests == {"model.a": xxhash.xxh3_128_digest(weights)}
        assert torch.equal(read.values["model.a"], _state()["model"]["a"])
    else:
        with pytest.raises(
            CheckpointMismatchError, match=r"changed after it was verified.*__0_0\.distcp.*other bytes at"
        ):
            load_entries({"model.a": None}, saved, metadata, verified_files)


def test_damage_is_told_by_its_place_in_the_file(saved: Path) -> None:
    content = bytearray(_shard(saved).read_bytes())
    place = content.index(_state()["model"]["a"].numpy().tobytes())
    content[place + 1000] ^= 4
    _shard(saved).write_bytes(content)
    live = _zeros()
    with pytest.raises(CheckpointMismatchError, match=f"found other bytes at {place} to {place + _LARGE * 4}"):
        DistributedCheckpointer().load(str(saved), live)
    assert all(torch.equal(value, torch.zeros_like(value)) for value in live["model"].values())


def _with_table(change: Callable[[list[tuple[int, bytes]]], list[tuple[int, bytes]]]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        table = _table(content)
        body = content[: len(content) - 24 * len(table) - 16]
        parts = [struct.pack("<Q16s", *item) for item in change(table)]
        return body + b"".join(parts) + struct.pack("<Q8s", len(parts), b"hrsegm01")

    return changed


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "one segment less": _with_table(lambda table: table[:-1]),
    "no segment": _with_table(lambda table: []),
    "one more, of nothing that is there": _with_table(lambda table: [*table, (64, bytes(16))]),
    "a length beyond any file": _with_table(lambda table: [((1 << 64) - 1, table[0][1]), *table[1:]]),
    "lengths that come round to the right sum": _with_table(
        lambda table: [((1 << 63) + table[0][0], table[0][1]), (1 << 63, bytes(16)), *table[1:]]
    ),
    "a digest of other bytes": _with_table(lambda table: [(table[0][0], bytes(16)), *table[1:]]),
    "two segments in the other order": _with_table(lambda table: [table[1], table[0], *table[2:]]),
    "more segments than bytes": lambda content: content[:-16] + struct.pack("<Q8s", len(content), b"hrsegm01"),
    "a count beyond any file": lambda content: content[:-16] + struct.pack("<Q8s", (1 << 64) - 1, b"hrsegm01"),
    "another mark": lambda content: content[:-8] + b"hrsegm99",
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_table_that_does_not_describe_the_file_is_refused_though_the_manifest_has_its_digest(
    saved: Path, how: str
) -> None:
    _reseal(saved, HOSTILE[how](_shard(saved).read_bytes()))
    live = _zeros()
    with pytest.raises(CheckpointMismatchError, match=r"__0_0\.distcp: (expected digest|its table of digests)"):
        DistributedCheckpointer().load(str(saved), live)
    assert all(torch.equal(value, torch.zeros_like(value)) for value in live["model"].values())


def test_segments_of_no_bytes_are_no_harm_wherever_they_stand(saved: Path) -> None:
    nothing = (0, xxhash.xxh3_128_digest(b""))
    _reseal(
        saved,
        _with_table(lambda table: [nothing, *table[:1], nothing, nothing, *table[1:], nothing])(
            _shard(saved).read_bytes()
        ),
    )
    live = _zeros()
    DistributedCheckpointer().load(str(saved), live)
    assert all(torch.equal(live["model"][name], value) for name, value in _state()["model"].items())


def test_a_file_shorter_than_a_tables_end_has_none(tmp_path: Path) -> None:
    for size in (0, 1, 15):
        (tmp_path / "file").write_bytes((bytes(8) + b"hrsegm01")[16 - size :])
        with operations.current().open_read(tmp_path / "file") as file:
            assert segments.read_table(file) is None


class _Unmapped(InputFile):
    """Where one thread has just gone to its place, another is let go to its own, if nothing keeps it from that."""

    may_map = False
    meeting = threading.Barrier(2)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        place = super().seek(offset, whence)
        try:
            self.meeting.wait(timeout=0.02)
        except threading.BrokenBarrierError:
            self.meeting.reset()
        return place


class _UnmappedReads(FileOperations):
    def open_read(self, path: Path) -> InputFile:
        return _Unmapped(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path)


def test_a_file_that_can_not_be_mapped_is_verified_by_several_threads_that_do_not_read_at_each_others_places(
    tmp_path: Path,
) -> None:
    state = {"model": {f"w{number}": torch.full((1 << 20,), float(number)) for number in range(12)}}
    directory = tmp_path / "global_step_1"
    DistributedCheckpointer().save(str(directory), state, global_step=1)
    live = {"model": {name: torch.zeros(1 << 20) for name in state["model"]}}
    with operations.use(_UnmappedReads()):
        DistributedCheckpointer().load(str(directory), live)
    assert all(torch.equal(live["model"][name], value) for name, value in state["model"].items())

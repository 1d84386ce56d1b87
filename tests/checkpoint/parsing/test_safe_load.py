"""What a checkpoint holds is read without believing it: good ones as stock reads them, hostile ones not at all."""

from __future__ import annotations

import dataclasses
import io
import itertools
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hyper_resume.checkpoint.parsing import safe_load
from hyper_resume.checkpoint.parsing.metadata_pickle import FIELDS
from hyper_resume.errors import CheckpointMismatchError
from tests.checkpoint.metadata_made import MakesDirectory, small_metadata
from tests.checkpoint.payloads import payload, sharded_tiny, train
from tests.ranks import run_ranks

# ---- good checkpoints -----------------------------------------------------------------------------------------------


def _odd_values() -> dict[str, Any]:
    """What a state may hold beside parameters."""
    return {
        "number": 3,
        "list": [1, [2, torch.ones(3)], {"a": 1}],
        "tuple": (None,),
        7: torch.zeros(2, 2),
        "bytes": b"x",
        "empty": torch.empty(0),
        "scalar": torch.tensor(1.5),
        "last": torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "half": torch.zeros(2, dtype=torch.float16),
        "float8": torch.zeros(2, dtype=torch.float8_e4m3fn),
        "long name " * 50: 1,
        "häßlich": torch.zeros(1),
    }


def _save_with_four_ranks(folder: str) -> None:
    """Stock saves: tensor parallelism and FSDP2 with AdamW, and meshes that divide nothing evenly."""
    model = sharded_tiny(1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    dcp.save(payload(model, optimizer), checkpoint_id=f"{folder}/tensor parallel")
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    tensors = {
        "fewer rows than ranks": distribute_tensor(torch.ones(2, 3), line, [Shard(0)]),
        "no rows": distribute_tensor(torch.ones(0, 3), line, [Shard(0)]),
        "last rank empty": distribute_tensor(torch.ones(5, 2), line, [Shard(0)]),
        "two axes": distribute_tensor(torch.ones(5, 7), grid, [Shard(0), Shard(1)]),
        "one axis, a copy": distribute_tensor(torch.ones(5, 7), grid, [Shard(0), Replicate()]),
        "one axis twice": distribute_tensor(torch.ones(7, 2), grid, [Shard(0), Shard(0)]),
    }
    dcp.save({"tensors": tensors, **_odd_values()}, checkpoint_id=f"{folder}/uneven")


def _save_with_two_ranks(folder: str) -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.randn(2, 7, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=f"{folder}/bfloat16")
    path = f"{folder}/a file each"
    writer = dcp.FileSystemWriter(path, single_file_per_rank=False, thread_count=2)
    dcp.save({**states, **_odd_values()}, checkpoint_id=path, storage_writer=writer)


REAL = ("tensor parallel", "uneven", "bfloat16", "a file each", "one process")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    run_ranks(_save_with_four_ranks, 4, str(folder))
    run_ranks(_save_with_two_ranks, 2, str(folder))
    dcp.save(_odd_values(), checkpoint_id=folder / "one process", no_dist=True)
    return folder


@pytest.mark.parametrize("name", REAL)
def test_metadata_of_a_real_save_reads_as_stock_reads_it(name: str, saved: Path) -> None:
    content = (saved / name / ".metadata").read_bytes()
    metadata = safe_load.load_metadata(content, name)
    assert metadata == pickle.loads(content)
    safe_load.check_file_sizes(saved / name, metadata)


@pytest.mark.parametrize("name", REAL)
def test_every_entry_of_a_real_save_reads_as_stock_reads_it(name: str, saved: Path) -> None:
    metadata = safe_load.load_metadata((saved / name / ".metadata").read_bytes(), name)
    for index, place in metadata.storage_data.items():
        with (saved / name / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            content = file.read(place.length)
        expected = torch.load(io.BytesIO(content), weights_only=True)
        assert _same(safe_load.load_plain(content, str(index)), expected)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and one.tolist() == other.tolist()
    return type(one) is type(other) and repr(one) == repr(other)


def test_the_fields_that_are_read_are_those_of_this_torch() -> None:
    for kind, fields in FIELDS.items():
        assert set(fields) == {field.name for field in dataclasses.fields(kind)}, kind


def test_a_path_that_python_3_13_wrote_is_read() -> None:
    content = pickle.dumps(small_metadata(), protocol=4)
    renamed = content.replace(b"\x8c\x07pathlib\x94", b"\x8c\x0epathlib._local\x94")
    frame = struct.unpack_from("<Q", content, 3)[0]
    renamed = renamed[:3] + struct.pack("<Q", frame + 7) + renamed[11:]
    assert renamed != content
    assert safe_load.load_metadata(renamed, "here") == small_metadata()


PLAIN: dict[str, Any] = {
    "containers": {"a": 1, "b": 2.5, "c": [1, (2, "x")], "d": {1, 2}, "e": OrderedDict(a=1), "f": Counter("aab")},
    "values": [b"yy", 1 + 2j, None, True, 2**1000, -5, "x" * 300, "\ud800", {(1, (2, 3)): 4}],
    "torch's own": [torch.float32, torch.Size([1, 2]), torch.device("cuda:1"), torch.strided, {torch.float32: 1}],
    "a state dict": nn.Linear(2, 2).state_dict(),
    "a number": 3,
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_are_read(name: str) -> None:
    assert _same(safe_load.load_plain(_packed(PLAIN[name]), name), PLAIN[name])


def test_tensors_of_all_kinds_are_read() -> None:
    with_attribute = torch.zeros(2)
    with_attribute.note = 1  # type: ignore[attr-defined]
    tensors = [
        torch.arange(6).reshape(2, 3).t(),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(3, dtype=torch.uint16),
        torch.zeros(2, dtype=torch.complex64).conj(),
        nn.Parameter(torch.zeros(2)),
        with_attribute,
        torch.empty(0),
    ]
    assert all(itertools.starmap(_same, zip(safe_load.load_plain(_packed(tensors), ""), tensors, strict=True)))


def test_a_file_is_read_like_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(_packed({"a": 1}))
    with path.open("rb") as file:
        assert safe_load.load_plain(file, str(path)) == {"a": 1}


# ---- archives -------------------------------------------------------------------------------------------------------


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _repacked(good: bytes, compression: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for member in old.infolist():
            new.writestr(zipfile.ZipInfo(member.filename), old.read(member), compress_type=compression)
    return out.getvalue()


def test_an_archive_that_unfolds_is_refused() -> None:
    good = _packed({"a": torch.zeros(100_000)})
    assert torch.equal(safe_load.load_plain(_repacked(good, zipfile.ZIP_STORED), "x")["a"], torch.zeros(100_000))
    bomb = _repacked(good, zipfile.ZIP_DEFLATED)
    assert len(bomb) < 10_000
    with pytest.raises(CheckpointMismatchError, match="compressed"):
        safe_load.load_plain(bomb, "x")


def test_an_archive_with_something_around_it_is_refused() -> None:
    good = _packed([1])
    with pytest.raises(CheckpointMismatchError, match="before the archive"):
        safe_load.load_plain(b"x" + good, "x")
    with pytest.raises(CheckpointMismatchError, match="behind"):
        safe_load.load_plain(good + b"x", "x")
    with pytest.raises(CheckpointMismatchError, match="does not begin"):
        safe_load.load_plain(good + good, "x")


def test_a_flipped_bit_in_the_values_structure_is_found() -> None:
    good = _packed({"step": 1_000_000})
    at = good.index((1_000_000).to_bytes(3, "little"))
    with pytest.raises(CheckpointMismatchError, match="CRC"):
        safe_load.load_plain(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :], "x")


def test_an_error_of_torch_comes_without_its_advice() -> None:
    with pytest.raises(CheckpointMismatchError) as caught:
        safe_load.load_plain(_packed(b""), "x")
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("where", ["the whole", "an entry of a state", "deep in a state", "a zip", "no zip"])
def test_code_in_a_value_does_not_run(where: str, tmp_path: Path) -> None:
    bad = MakesDirectory(tmp_path / "ran")
    value = {"the whole": bad, "an entry of a state": {"step": bad}, "deep in a state": [{"a": (1, [bad])}]}.get(
        where, bad
    )
    content = pickle.dumps(value) if where == "no zip" else _packed(value)
    with pytest.raises(CheckpointMismatchError, match="entry x") as caught:
        safe_load.load_plain(content, "entry x")
    assert not (tmp_path / "ran").exists()
    assert "weights_only" not in str(caught.value)


# ---- bounds ---------------------------------------------------------------------------------------------------------

_MEASURE = """
import pickle, resource, sys, time
from conformance.storage.hostile.material import make_material
from conformance.storage.hostile.pickles import ARCHIVE_BOMBS, PICKLE_BOMBS, PLAIN_BOMBS
from conformance.storage.hostile.material import archive_with
from hyper_resume.checkpoint.parsing import safe_load
from hyper_resume.errors import CheckpointMismatchError

material = make_material()
bombs = [(safe_load.load_metadata, bomb()) for bomb in PICKLE_BOMBS]
bombs += [(safe_load.load_plain, archive_with(bomb(), material.archive)) for bomb in (*PICKLE_BOMBS, *PLAIN_BOMBS)]
bombs += [(safe_load.load_plain, bomb(material)) for bomb in ARCHIVE_BOMBS]
safe_load.load_metadata(material.metadata, "good")
safe_load.load_plain(material.archive, "good")
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
limit = (int(status["VmSize"].split()[0]) << 10) + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for number, (read, content) in enumerate(bombs):
    started = time.process_time()
    try:
        read(content, f"bomb {number}")
    except CheckpointMismatchError as error:
        assert "MemoryError" not in str(error) and "alloc" not in str(error), (number, str(error))
    else:
        raise AssertionError(f"bomb {number} was read")
    assert time.process_time() - started < 2, number
print(len(bombs), "refused")
"""


def test_bombs_are_refused_in_little_memory_and_time() -> None:
    """64 MiB above what the process has with torch loaded; each bomb is of 300 kB at most, some ask for 256 TiB."""
    done = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 60


def _bytes_needed(content: bytes) -> tuple[int, bool]:
    """Peak of Python's own memory while reading, and whether it was refused."""
    import tracemalloc

    tracemalloc.start()
    try:
        safe_load.load_metadata(content, "here")
        refused = False
    except CheckpointMismatchError:
        refused = True
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, refused


def test_memory_grows_with_the_bytes_that_are_there(saved: Path) -> None:
    """A file made to need much for its size needs no more than a few times what a good one of that size does."""
    good = (saved / "tensor parallel" / ".metadata").read_bytes()
    peak, refused = _bytes_needed(good)
    assert not refused
    worst = 4 * peak / len(good)
    for opcode in (b"N", b"}", b"]", b"(", b"M\xff\xff", b"\x8c\x02ab", b")\x94", b"]\x94"):
        content = b"\x80\x04" + opcode * (200_000 // len(opcode)) + b"."
        peak, refused = _bytes_needed(content)
        assert refused
        assert peak < worst * len(content), opcode

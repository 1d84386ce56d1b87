"""``index.json`` says what DCP's description says, refuses all damage, and is not needed to read what was written before."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.format import index
from hyper_resume.errors import CheckpointMismatchError
from tests.checkpoint.payloads import same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.int64)


def stock(folder: Path, state: dict[str, Any]) -> Metadata:
    """What stock DCP writes of a state."""
    dcp_save(state, checkpoint_id=folder, no_dist=True)
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return found


def split(name: str, size: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Metadata:
    """One tensor in chunks, (offsets, sizes) each, a file a chunk."""
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(size), chunks)
    places = {
        MetadataIndex(name, chunk.offsets): _StorageInfo(f"__{rank}_0.distcp", 64 * rank, 4096)
        for rank, chunk in enumerate(chunks)
    }
    return Metadata(state_dict_metadata={name: entry}, storage_data=places)


def plain(metadata: Metadata) -> Any:
    """All that a reader needs of a description."""
    entries = {
        name: (entry.properties.dtype, entry.size, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
        if isinstance(entry, TensorStorageMetadata)
        else type(entry)
        for name, entry in metadata.state_dict_metadata.items()
    }
    places = {
        (found.fqn, found.offset): (place.relative_path, place.offset, place.length)
        for found, place in metadata.storage_data.items()
    }
    return entries, places


def check_round_trip(metadata: Metadata) -> None:
    content = index.encode(metadata)
    found = index.decode(content, "index.json")
    assert plain(found) == plain(metadata)
    assert found.storage_data.keys() == metadata.storage_data.keys()
    assert all(type(entry.size) is torch.Size for entry in found.state_dict_metadata.values() if hasattr(entry, "size"))
    assert index.encode(found) == content
    assert content.endswith(b"}\n")


def test_what_stock_planning_says_of_a_state_comes_back(tmp_path: Path) -> None:
    state = {
        "model": {f"of {dtype}": torch.zeros(24, dtype=torch.uint8).view(dtype) for dtype in DTYPES},
        "shapes": [torch.zeros(shape) for shape in ((), (0,), (1,), (2, 0, 3), (3, 4), (1, 2, 3, 4, 5))],
        "values": {"number": 1, "text": "x" * 10000, "nothing": None, "empty": {}, "tuple": (1, 2)},
        'Ünïcode \N{SNOWMAN} \ud800 \n " \\': torch.ones(2),
    }
    check_round_trip(stock(tmp_path, state))


@pytest.mark.parametrize(
    ("size", "boxes"),
    [
        ((7,), [((0,), (4,)), ((4,), (3,))]),
        ((2,), [((0,), (1,)), ((1,), (1,)), ((2,), (0,))]),
        ((4, 6), [((0, 0), (2, 3)), ((0, 3), (2, 3)), ((2, 0), (2, 3)), ((2, 3), (2, 3))]),
        ((5, 3), [((0, 0), (2, 3)), ((2, 0), (3, 1)), ((2, 1), (3, 2))]),
        ((3, 0), [((0, 0), (2, 0)), ((2, 0), (1, 0))]),
    ],
)
def test_the_parts_of_several_ranks_come_back(size: tuple[int, ...], boxes: Any) -> None:
    check_round_trip(split("w", size, boxes))


def test_an_empty_state_comes_back() -> None:
    check_round_trip(Metadata(state_dict_metadata={}, storage_data={}))


def valid() -> dict[str, Any]:
    """An index of a whole tensor, one in two chunks, and a value."""
    metadata = split("w", (7,), [((0,), (4,)), ((4,), (3,))])
    assert metadata.storage_data is not None
    whole = TensorStorageMetadata(
        TensorProperties(dtype=torch.int64),
        torch.Size([2, 3]),
        [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))],
    )
    metadata.state_dict_metadata |= {"whole": whole, "value": BytesStorageMetadata()}
    metadata.storage_data[MetadataIndex("whole", torch.Size([0, 0]))] = _StorageInfo("__0_0.distcp", 4096, 100)
    metadata.storage_data[MetadataIndex("value")] = _StorageInfo("__0_0.distcp", 5000, 10)
    found: dict[str, Any] = json.loads(index.encode(metadata))
    return found


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def damage(content: dict[str, Any]) -> None:
        inner: Any = content
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = value

    return damage


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def damage(content: dict[str, Any]) -> None:
        inner: Any = content
        for part in path[:-1]:
            inner = inner[part]
        del inner[path[-1]]

    return damage


# "tensors" -> name -> [dtype, size, [[offsets, sizes, file, offset, length], ...]]
W, FIRST, SECOND, WHOLE = ("tensors", "w"), ("tensors", "w", 2, 0), ("tensors", "w", 2, 1), ("tensors", "whole", 2, 0)
DAMAGE: dict[str, Callable[[dict[str, Any]], None]] = {
    "unknown key": put("more", value=1),
    "a file that stands there twice": put("files", value=["__0_0.distcp", "__0_0.distcp"]),
    "sizes of true, equal to the shape": put(
        "tensors", "whole", value=["int64", [1, 3], [[[0, 0], [True, 3], 0, 4096, 100]]]
    ),
    "sizes of a float, equal to the shape": put(
        "tensors", "whole", value=["int64", [2, 3], [[[0, 0], [2, 3.0], 0, 4096, 100]]]
    ),
    "more elements than memory has addresses, and none": put(
        "tensors", "whole", value=["int64", [1 << 61, 8, 0], [[[0, 0, 0], [1 << 61, 8, 0], 0, 4096, 100]]]
    ),
    "no key": drop("values"),
    "no files": drop("files"),
    "other format": put("format", value="hyper_resume.manifest"),
    "other version": put("format_version", value=2),
    "version that is true": put("format_version", value=True),
    "version that is a float": put("format_version", value=1.0),
    "files that are no list": put("files", value={}),
    "file that is no text": put("files", 0, value=0),
    "tensors that are a list": put("tensors", value=[]),
    "tensor that is a number": put(*W, value=1),
    "tensor of two parts": drop(*W, 2),
    "unknown type": put(*W, 0, value="float31"),
    "type that is a list": put(*W, 0, value=["float32"]),
    "type that is no type of torch": put(*W, 0, value="nn"),
    "shape that is a number": put(*W, 1, value=7),
    "shape that is a text": put(*W, 1, value="7"),
    "shape that is null": put(*W, 1, value=None),
    "shape with a list": put(*W, 1, value=[[7]]),
    "shape with a text": put(*W, 1, value=["7"]),
    "negative size": put(*W, 1, value=[-7]),
    "true as a size": put(*WHOLE, 1, value=[2, True]),
    "float as a size": put(*W, 1, value=[7.0]),
    "huge size": put(*W, 1, value=[1 << 63]),
    "shape of many dimensions": put(*W, 1, value=[1] * 65),
    "negative offset": put(*FIRST, 0, value=[-1]),
    "false as an offset": put(*FIRST, 0, value=[False]),
    "float as an offset": put(*FIRST, 0, value=[0.0]),
    "offset of two dimensions": put(*FIRST, 0, value=[0, 0]),
    "sizes of two dimensions": put(*FIRST, 1, value=[4, 1]),
    "chunk out of the tensor": put(*SECOND, 1, value=[4]),
    "whole chunk that is moved": put(*WHOLE, 0, value=[1, 0]),
    "hole": put(*FIRST, 1, value=[3]),
    "hole of a whole chunk": drop(*SECOND),
    "no chunks": put(*W, 2, value=[]),
    "no chunks, as an object": put(*W, 2, value={}),
    "chunks of an empty tensor that are an object": put("tensors", "more", value=["float32", [0], {}]),
    "chunks of an empty tensor that are a text": put("tensors", "more", value=["float32", [0], ""]),
    "overlap": put(*SECOND, 0, value=[3]),
    "two chunks at one place": put(*SECOND, 0, value=[0]),
    "the same chunk twice": put(*SECOND, value=[[0], [4], 1, 64, 4096]),
    "shared bytes": put("values", "value", value=[0, 4195, 10]),
    "shared bytes with the one before": put(*WHOLE, 3, value=4095),
    "file number out of range": put(*FIRST, 2, value=2),
    "negative file number": put(*FIRST, 2, value=-1),
    "true as a file number": put(*SECOND, 2, value=True),
    "float as a file number": put(*FIRST, 2, value=0.0),
    "negative place": put(*FIRST, 3, value=-64),
    "true as a place": put(*FIRST, 3, value=False),
    "float as a place": put(*FIRST, 3, value=0.5),
    "huge place": put(*FIRST, 3, value=1 << 63),
    "negative length": put("values", "value", 2, value=-1),
    "float as a length": put("values", "value", 2, value=10.0),
    "fewer bytes than the values have": put(*FIRST, 4, value=15),
    "place of two numbers": drop("values", "value", 2),
    "place of four numbers": put("values", "value", value=[0, 5000, 10, 0]),
    "value that is null": put("values", "value", value=None),
    "name of a tensor and of a value": put("values", "w", value=[0, 9000, 1]),
    **{
        f"path {name!r}": put("files", 0, value=name)
        for name in ("../x", "/etc/passwd", "a/../b", "..", ".", "", "a/b/c", "a//b", "a\\b", "a\nb", "\0", "x" * 300)
    },
}


def test_the_undamaged_one_is_read() -> None:
    found = index.decode(json.dumps(valid()).encode(), "x")
    assert sorted(found.state_dict_metadata) == ["value", "w", "whole"]


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused(kind: str) -> None:
    content = valid()
    before = copy.deepcopy(content)
    DAMAGE[kind](content)
    # By type too: 1 is True to Python.
    assert json.dumps(content) != json.dumps(before)
    with pytest.raises(CheckpointMismatchError, match=r"the checkpoint's index can't be read; where: here/index\.json"):
        index.decode(json.dumps(content).encode(), "here/index.json")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"format":"hyper_resume.index","format":"hyper_resume.index"}',
        b"[" * 200_000,
        b'{"tensors":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"format_version":' + b"9" * 10_000 + b"}",
        b'{"format_version":NaN}',
        b'{"format_version":1e999}',
    ],
    ids=range(11),
)
def test_what_is_no_such_json_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointMismatchError, match="the checkpoint's index can't be read"):
        index.decode(content, "index.json")


def test_a_key_that_stands_twice_is_refused_at_every_depth() -> None:
    text = json.dumps(valid())
    for key in ('"files": ', '"w": ', '"value": '):
        assert text.count(key) == 1
        begin = text.index(key)
        twice = f"{text[:begin]}{key}1, {text[begin:]}"
        with pytest.raises(CheckpointMismatchError, match="a key occurs twice"):
            index.decode(twice.encode(), "index.json")


def test_a_nested_shape_is_refused_and_not_shown_at_length() -> None:
    text = json.dumps(valid()).replace("[7]", "[" * 500 + "]" * 500)
    with pytest.raises(CheckpointMismatchError) as caught:
        index.decode(text.encode(), "index.json")
    assert len(str(caught.value)) < 1000


def test_a_truncated_index_is_refused_at_every_length() -> None:
    content = json.dumps(valid()).encode()
    for size in range(len(content)):
        with pytest.raises(CheckpointMismatchError):
            index.decode(content[:size], "index.json")


# ---- in a step directory ------------------------------------------------------------------------------------------------


def saved(root: Path) -> Path:
    directory = root / "global_step_1"
    state = {"model": {"w": torch.arange(6.0).reshape(2, 3), "n": 5}, "extra_state": {"value": 1.5}}
    DistributedCheckpointer().save(str(directory), state, global_step=1)
    return directory


def reseal(directory: Path, *, without: str = "") -> None:
    """Have the manifest say what stands there now."""
    content = json.loads((directory / "manifest.json").read_text())
    content.pop("digest")
    content["files"].pop(without, None)
    for name, entry in content["files"].items():
        found = (directory / name).read_bytes()
        entry.update(size_bytes=len(found), digest=f"xxh3_128:{xxhash.xxh3_128_hexdigest(found)}")
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    whole = {**content, "digest": f"xxh3_128:{xxhash.xxh3_128_hexdigest(canonical)}"}
    (directory / "manifest.json").write_text(json.dumps(whole))


def check_loads(directory: Path) -> None:
    live: dict[str, Any] = {"model": {"w": torch.zeros(2, 3), "n": 0}}
    extra = DistributedCheckpointer().load(str(directory), live, extra_state_skeleton={"value": None})
    assert same(live, {"model": {"w": torch.arange(6.0).reshape(2, 3), "n": 5}})
    assert extra["value"] == 1.5


def test_a_saves_index_says_what_its_metadata_says(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    found = index.decode((directory / "index.json").read_bytes(), "index.json")
    assert plain(found) == plain(pickle.loads((directory / ".metadata").read_bytes()))


def test_a_directory_with_a_manifest_is_read_by_its_index_alone(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    (directory / ".metadata").write_bytes(b"garbage")
    reseal(directory)
    check_loads(directory)


def test_a_directory_that_was_written_before_there_was_an_index_is_read(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    (directory / "index.json").unlink()
    reseal(directory, without="index.json")
    check_loads(directory)
    assert DistributedCheckpointer().find_latest_checkpoint(str(tmp_path)) == str(directory)


def test_a_damaged_index_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    content = json.loads((directory / "index.json").read_text())
    content["tensors"]["model.w"][1] = [3, 3]
    (directory / "index.json").write_text(json.dumps(content))
    live: dict[str, Any] = {"model": {"w": torch.zeros(2, 3), "n": 0}}
    with pytest.raises(CheckpointMismatchError, match="not as it was written"):
        DistributedCheckpointer().load(str(directory), live)
    reseal(directory)
    with pytest.raises(CheckpointMismatchError, match="leave a hole"):
        DistributedCheckpointer().load(str(directory), live)
    assert same(live, {"model": {"w": torch.zeros(2, 3), "n": 0}})


def test_an_index_that_names_files_outside_the_manifest_is_refused(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    (directory / "other.distcp").write_bytes((directory / "__0_0.distcp").read_bytes())
    content = (directory / "index.json").read_text()
    (directory / "index.json").write_text(content.replace("__0_0.distcp", "other.distcp"))
    reseal(directory)
    with pytest.raises(CheckpointMismatchError, match="names files that its manifest does not know"):
        DistributedCheckpointer().load(str(directory), {"model": {"w": torch.zeros(2, 3), "n": 0}})

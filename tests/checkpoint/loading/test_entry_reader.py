"""EntryReader are read where they lie in the files, whole, in part, or put together, and are never written back."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.format import archive
from hyper_resume.checkpoint.format.metadata import read_metadata
from hyper_resume.checkpoint.loading.entry_reader import EntryReader
from hyper_resume.checkpoint.loading.reading import load_entries
from hyper_resume.errors import CheckpointMismatchError
from tests.checkpoint.payloads import same
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Box = tuple[tuple[int, ...], tuple[int, ...]]


def by_torch(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def by_template(value: torch.Tensor) -> bytes:
    around = archive.template(value.dtype, tuple(value.shape))
    assert around is not None
    return around.prefix + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() + around.suffix


def described(dtype: torch.dtype, size: Sequence[int], boxes: Sequence[Box]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks)


def written(
    folder: Path, whole: torch.Tensor, boxes: Sequence[Box], make: Any = by_template, gap: int = 64
) -> Metadata:
    """``whole`` under the name "w", a chunk after the other in two files, with ``gap`` bytes before each."""
    contents = [bytearray(), bytearray()]
    places = {}
    for number, (offsets, sizes) in enumerate(boxes):
        part = whole[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))]
        content, file = make(part.clone(memory_format=torch.contiguous_format)), contents[number % 2]
        file += b"\xaa" * gap
        index = MetadataIndex("w", torch.Size(offsets))
        places[index] = _StorageInfo(f"__{number % 2}_0.distcp", len(file), len(content))
        file += content
    for number, file in enumerate(contents):
        (folder / f"__{number}_0.distcp").write_bytes(file)
    entry = described(whole.dtype, whole.shape, boxes)
    return Metadata(state_dict_metadata={"w": entry}, storage_data=places)


def only(folder: Path, entry: Any, content: bytes, *, offset: int = 0, **place: Any) -> Metadata:
    """One entry, "w", at ``offset`` in one file."""
    (folder / "__0_0.distcp").write_bytes(bytes(offset) + content)
    index = (
        MetadataIndex("w", entry.chunks[0].offsets) if isinstance(entry, TensorStorageMetadata) else MetadataIndex("w")
    )
    info = _StorageInfo(**{"relative_path": "__0_0.distcp", "offset": offset, "length": len(content), **place})
    return Metadata(state_dict_metadata={"w": entry}, storage_data={index: info})


def read(folder: Path, metadata: Metadata) -> Any:
    return load_entries({"w": None}, folder, metadata).values["w"]


def grid(size: tuple[int, ...], cuts: tuple[tuple[int, ...], ...]) -> list[Box]:
    """The boxes that ``cuts`` along each axis make."""
    spans = []
    for whole, places in zip(size, cuts, strict=True):
        edges = [0, *places, whole]
        spans.append([(begin, end - begin) for begin, end in itertools.pairwise(edges)])
    boxes = itertools.product(*spans)
    return [(tuple(begin for begin, _ in box), tuple(length for _, length in box)) for box in boxes]


LAYOUTS = {
    "a whole vector": ((11,), ((),)),
    "a vector in three": ((11,), ((1, 5),)),
    "a vector with empty parts": ((11,), ((0, 4),)),
    "a whole matrix": ((4, 6), ((), ())),
    "two by two": ((4, 6), ((2,), (3,))),
    "uneven rows": ((5, 3), ((2, 4), ())),
    "uneven rows and columns": ((5, 7), ((3,), (1, 2, 6))),
    "three dimensions": ((3, 4, 5), ((1,), (2,), (3,))),
}


@pytest.mark.parametrize("make", [by_template, by_torch], ids=["own", "torch's"])
@pytest.mark.parametrize("gap", [64, 3], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_part_is_numpys_slice(tmp_path: Path, layout: str, gap: int, make: Any) -> None:
    """Every box that rows and columns can be cut into, of every layout of chunks."""
    size, cuts = LAYOUTS[layout]
    whole = torch.arange(math.prod(size), dtype=torch.int32).reshape(size)
    metadata = written(tmp_path, whole, grid(size, cuts), make, gap)
    assert same(read(tmp_path, metadata), whole)
    expected = np.arange(math.prod(size), dtype=np.int32).reshape(size)
    spans = [[(begin, end) for begin in range(n) for end in range(begin + 1, n + 1) if (begin + end) % 3] for n in size]
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    with EntryReader(tmp_path, metadata) as entries:
        for box in list(itertools.product(*spans))[::7]:
            offsets, sizes = tuple(b for b, _ in box), tuple(e - b for b, e in box)
            found = entries._box("w", entry, offsets, sizes)  # a sharded live tensor's part, without the ranks
            assert np.array_equal(found.numpy(), expected[tuple(slice(b, e) for b, e in box)]), box


def test_what_lies_in_one_chunk_stays_mapped_and_what_lies_in_several_is_new(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    for name, cuts in (("one", ((), ())), ("two", ((2,), ()))):
        folder = tmp_path / name
        folder.mkdir()
        found = read(folder, written(folder, whole, grid((4, 6), cuts)))
        maps = Path("/proc/self/maps").read_text()
        assert (str(folder) in maps) == (name == "one")
        assert same(found, whole)


def test_writing_to_what_was_read_does_not_change_the_file(tmp_path: Path) -> None:
    whole = torch.arange(100_000, dtype=torch.int64)
    metadata = written(tmp_path, whole, grid((100_000,), ((),)))
    before = (tmp_path / "__0_0.distcp").read_bytes()
    found = read(tmp_path, metadata)
    found.fill_(-1)
    assert int(found.sum()) == -100_000
    assert (tmp_path / "__0_0.distcp").read_bytes() == before
    assert same(read(tmp_path, metadata), whole)


def test_what_was_read_stays_when_the_files_are_closed_and_deleted(tmp_path: Path) -> None:
    whole = torch.arange(100_000, dtype=torch.int64)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    found = read(tmp_path, written(tmp_path, whole, grid((100_000,), ((),))))
    for file in tmp_path.iterdir():
        file.unlink()
    assert same(found, whole)
    del found
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_empty_and_scalar_entries_are_read(tmp_path: Path) -> None:
    for number, shape in enumerate([(), (0,), (2, 0, 3), (0, 5)]):
        for make in (by_torch, by_template):
            folder = tmp_path / f"{number}{make.__name__}"
            folder.mkdir()
            whole = torch.full(shape, 7.0)
            entry = described(torch.float32, shape, [((0,) * len(shape), shape)])
            assert same(read(folder, only(folder, entry, make(whole))), whole)


@pytest.mark.parametrize("offset", [0, 1, 64, 4095, 5000])
def test_a_place_beyond_the_end_of_the_file_is_refused(tmp_path: Path, offset: int) -> None:
    whole = torch.arange(6.0)
    content = by_template(whole)
    entry = described(torch.float32, (6,), [((0,), (6,))])
    for more in (1, 4096, 1 << 40):
        metadata = only(tmp_path, entry, content, offset=offset, length=len(content) + more)
        with pytest.raises(CheckpointMismatchError, match="does not match its metadata"):
            read(tmp_path, metadata)
    metadata = only(tmp_path, entry, content)
    for far in (len(content), 1 << 20, 1 << 40):
        place = _StorageInfo("__0_0.distcp", far, len(content))
        beyond = Metadata(metadata.state_dict_metadata, storage_data=dict.fromkeys(metadata.storage_data or {}, place))
        with pytest.raises(CheckpointMismatchError, match="found: 0 bytes"):
            read(tmp_path, beyond)


def test_a_transformed_entry_is_refused(tmp_path: Path) -> None:
    entry = described(torch.float32, (6,), [((0,), (6,))])
    metadata = only(tmp_path, entry, by_template(torch.zeros(6)), transform_descriptors=["zstd"])
    with pytest.raises(CheckpointMismatchError, match="transformed by zstd"):
        read(tmp_path, metadata)
    metadata = only(tmp_path, BytesStorageMetadata(), by_torch(1), transform_descriptors=["zstd"])
    with pytest.raises(CheckpointMismatchError, match="transformed by zstd"):
        read(tmp_path, metadata)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.zeros(6, dtype=torch.int32), r"torch.int32, \(6,\)"),
        (torch.zeros(2, 3), r"torch.float32, \(2, 3\)"),
        (torch.zeros(7), r"torch.float32, \(7,\)"),
        ([1, 2], "list"),
        (None, "NoneType"),
    ],
)
def test_another_content_than_described_is_refused(tmp_path: Path, value: Any, found: str) -> None:
    entry = described(torch.float32, (6,), [((0,), (6,))])
    with pytest.raises(CheckpointMismatchError, match=f"found: {found}"):
        read(tmp_path, only(tmp_path, entry, by_torch(value)))


@pytest.mark.parametrize("kind", ["missing", "link", "folder", "outside"])
def test_only_a_regular_file_of_the_directory_is_opened(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    entry = described(torch.float32, (6,), [((0,), (6,))])
    path = "../secret" if kind == "outside" else "__0_0.distcp"
    metadata = only(folder, entry, by_template(torch.zeros(6)), relative_path=path)
    (folder / "__0_0.distcp").rename(tmp_path / "secret")
    if kind == "link":
        (folder / "__0_0.distcp").symlink_to(tmp_path / "secret")
    elif kind == "folder":
        (folder / "__0_0.distcp").mkdir()
    with pytest.raises(CheckpointMismatchError):
        read(folder, metadata)


@pytest.mark.parametrize("make", [by_torch, by_template], ids=["torch's", "own"])
def test_a_flipped_byte_gives_a_tensor_as_described_or_this_librarys_error(tmp_path: Path, make: Any) -> None:
    """Digests are for the values; what is looked at here is that nothing else is raised, and that the form is right."""
    entry = described(torch.float32, (5,), [((0,), (5,))])
    content = make(torch.arange(20, dtype=torch.uint8).view(torch.float32))
    metadata = only(tmp_path, entry, content)
    refused = 0
    for index in range(len(content)):
        damaged = bytearray(content)
        damaged[index] ^= 1 << index % 8
        (tmp_path / "__0_0.distcp").write_bytes(damaged)
        try:
            found = read(tmp_path, metadata)
        except CheckpointMismatchError:
            refused += 1
            continue
        assert (found.dtype, found.shape) == (torch.float32, (5,))
    assert refused > len(content) / 5


KINDS: dict[str, Any] = {
    **{
        str(kind): torch.arange(48, dtype=torch.uint8).view(kind)
        for kind in (torch.float32, torch.bfloat16, torch.int64)
    },
    **{str(kind): torch.arange(48, dtype=torch.uint8).view(kind) for kind in (torch.uint16, torch.float8_e4m3fn)},
    "bool": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j, -0.0]),
    "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "part": torch.arange(100.0)[3:5],
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "strided": torch.arange(20)[::3],
    "expanded": torch.tensor([1.0]).expand(5),
    "large": torch.arange(300_000),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "numbers": {"a": [1, 2.5, None], "b": "text"},
}


def test_a_stock_directory_is_read_bit_for_bit(tmp_path: Path) -> None:
    dcp_save({"model": dict(KINDS)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = read_metadata(tmp_path)
    found = load_entries(dict.fromkeys(metadata.state_dict_metadata), tmp_path, metadata).values
    for name, value in KINDS.items():
        if isinstance(value, torch.Tensor):
            assert same(found[f"model.{name}"], value.detach().contiguous()), name
    assert [found[f"model.numbers.{name}"] for name in ("a", "b")] == [[1, 2.5, None], "text"]


# ---- several ranks -------------------------------------------------------------------------------------------------------

TENSORS: dict[str, torch.Tensor] = {
    "even": torch.arange(96.0).reshape(8, 12),
    "uneven": torch.arange(35, dtype=torch.int64).reshape(7, 5),
    "thin": torch.arange(6, dtype=torch.int32).reshape(2, 3),
    "deep": torch.arange(210.0).to(torch.bfloat16).reshape(5, 6, 7),
    "vector": torch.arange(10, dtype=torch.uint8),
    "nothing": torch.zeros(0, 4),
}
SAVED: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(1), Shard(0)]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((4,), [Shard(0)]),
    ((4,), [Replicate()]),
]
LOADED: dict[int, list[tuple[tuple[int, ...], list[Placement]]]] = {
    4: [((4,), [Shard(0)]), ((4,), [Shard(1)]), ((4,), [Replicate()]), ((2, 2), [Shard(1), Shard(0)])],
    2: [((2,), [Shard(0)]), ((2,), [Shard(1)])],
}


def _laid_out(kinds: Any) -> dict[str, Any]:
    """Every tensor on every mesh, by name; a vector has no second dimension to split."""
    found: dict[str, Any] = {}
    for shape, placements in kinds:
        mesh = init_device_mesh("cpu", shape)
        parts = {
            name: distribute_tensor(whole.clone(), mesh, placements)
            for name, whole in TENSORS.items()
            if whole.ndim > 1 or Shard(1) not in placements
        }
        found[f"{shape} {placements}"] = parts
    return found


def _not_as_stock_distributes(folder: str, metadata: Metadata, kinds: Any) -> list[str]:
    wrong = []
    for kind, parts in _laid_out(kinds).items():
        for saved in {name.split(".")[1] for name in metadata.state_dict_metadata if name.startswith("model.")}:
            names = {
                name: f"model.{saved}.{name}"
                for name in parts
                if f"model.{saved}.{name}" in metadata.state_dict_metadata
            }
            found = load_entries({names[name]: parts[name] for name in names}, Path(folder), metadata).values
            for name, stored in names.items():
                local = found[stored].to_local()
                if (
                    not same(local, parts[name].to_local().contiguous())
                    or found[stored].placements != parts[name].placements
                ):
                    wrong.append(f"{saved} -> {kind}: {name}")
    return wrong


def _save_and_load(folder: str) -> list[str]:
    state = {"model": _laid_out(SAVED)}
    DistributedCheckpointer().save(f"{folder}/global_step_1", state, global_step=1)
    dcp_save({"model": _laid_out(SAVED)}, checkpoint_id=f"{folder}/stock")
    return _load(folder)


def _load(folder: str) -> list[str]:
    kinds = LOADED[dist.get_world_size()]
    wrong = []
    for name in ("global_step_1", "stock"):
        wrong += _not_as_stock_distributes(f"{folder}/{name}", read_metadata(Path(folder) / name), kinds)
    return wrong


def test_what_four_ranks_saved_is_laid_out_anew_on_four_two_and_one(tmp_path: Path) -> None:
    assert run_ranks(_save_and_load, 4, str(tmp_path)) == [[]] * 4
    assert run_ranks(_load, 2, str(tmp_path)) == [[]] * 2
    for folder in (tmp_path / "global_step_1", tmp_path / "stock"):
        metadata = read_metadata(folder)
        names = [name for name in metadata.state_dict_metadata if name.startswith("model.")]
        assert len(names) == 3 * len(TENSORS) + 2 * (len(TENSORS) - 1)
        for name, found in load_entries(dict.fromkeys(names), folder, metadata).values.items():
            assert same(found, TENSORS[name.rsplit(".", 1)[1]]), name

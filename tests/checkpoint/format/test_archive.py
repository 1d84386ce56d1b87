"""The archive around a tensor is what torch.save makes and torch.load reads, and a place in one is the right place or none."""

from __future__ import annotations

import io
import math
import pickletools
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.format import archive
from tests.checkpoint.payloads import same

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
SHAPES = (
    (),
    (0,),
    (1,),
    (7,),
    (255,),
    (256,),
    (300,),
    (65535,),
    (65536,),
    (70000,),
    (2, 3),
    (2, 0, 3),
    (1, 300, 2),
    (2, 1, 3, 2),
    (1, 2, 3, 4, 5),
)
OTHERS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)
_CENTRAL_BYTES, _OFFSET_IN_CENTRAL = 46, 42

by_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def made(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes that tell their position, but for truth values."""
    count = math.prod(shape) * dtype.itemsize
    raw = torch.arange(count).remainder(2 if dtype == torch.bool else 251).to(torch.uint8)
    return raw.view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def by_torch(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def by_template(tensor: torch.Tensor, *, is_wide: bool = False) -> bytes:
    around = archive.template(tensor.dtype, tuple(tensor.shape), is_wide=is_wide)
    assert around is not None
    assert around.data_bytes == len(raw(tensor))
    content = around.prefix + raw(tensor) + around.suffix
    assert around.size_bytes == len(content)
    return content


def place(content: bytes | bytearray, tensor: torch.Tensor) -> int | None:
    return archive.data_offset(memoryview(content), tensor.dtype, tuple(tensor.shape))


@pytest.fixture
def without_checksums() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@by_type
def test_the_pickle_is_the_one_of_torch_save_byte_for_byte(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        with zipfile.ZipFile(io.BytesIO(by_torch(made(dtype, shape)))) as found:
            assert archive.tensor_pickle(dtype, shape) == found.read("archive/data.pkl"), shape


@pytest.mark.parametrize(
    "shape",
    [(1 << 31,), (1 << 32, 3), (1 << 40, 1, 7), (0, 1 << 33)],
    ids=["2**31", "2**32 rows", "2**40 rows", "an empty one of many rows"],
)
def test_the_pickle_of_a_tensor_that_is_too_large_to_make_tells_its_shape(shape: tuple[int, ...]) -> None:
    found = archive.tensor_pickle(torch.int8, shape)
    assert found is not None
    numbers = [
        value for code, value, _ in pickletools.genops(found) if code.name in ("BININT1", "BININT2", "BININT", "LONG1")
    ]
    meta = torch.empty(shape, dtype=torch.int8, device="meta")
    assert numbers == [meta.numel(), 0, *meta.shape, *meta.stride()]


@by_type
@pytest.mark.parametrize("is_wide", [False, True], ids=["32 bits", "64 bits"])
def test_torch_load_reads_what_a_template_stands_around(dtype: torch.dtype, is_wide: bool) -> None:
    for shape in SHAPES:
        tensor = made(dtype, shape)
        content = by_template(tensor, is_wide=is_wide)
        assert same(torch.load(io.BytesIO(content), weights_only=True), tensor), shape


@pytest.mark.parametrize("is_wide", [False, True], ids=["32 bits", "64 bits"])
def test_the_bytes_are_aligned_and_every_reader_of_archives_finds_them(is_wide: bool) -> None:
    for dtype in (torch.float32, torch.bool, torch.complex128):
        for shape in SHAPES:
            tensor = made(dtype, shape)
            content = by_template(tensor, is_wide=is_wide)
            around = archive.template(dtype, shape, is_wide=is_wide)
            assert around is not None
            assert len(around.prefix) % 64 == 0
            with zipfile.ZipFile(io.BytesIO(content)) as found:
                names = [info.filename for info in found.infolist()]
                assert names == ["archive/data.pkl", "archive/byteorder", "archive/version", "archive/data/0"]
                assert [found.read(name) for name in names[1:3]] == [b"little", b"3\n"]
                info = found.getinfo("archive/data/0")
            name_bytes, extra_bytes = struct.unpack_from("<2H", content, info.header_offset + 26)
            assert info.file_size == info.compress_size == len(raw(tensor))
            assert info.header_offset + 30 + name_bytes + extra_bytes == len(around.prefix)


def test_a_type_that_torch_saves_otherwise_has_no_template() -> None:
    for dtype in OTHERS:
        assert archive.tensor_pickle(dtype, (3,)) is None
        assert archive.template(dtype, (3,)) is None
        assert place(by_torch(torch.zeros(3, dtype=dtype)), torch.zeros(3, dtype=dtype)) is None


@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
def test_a_type_without_a_template_is_saved_and_loaded_bit_for_bit(tmp_path: Path, save_async: bool) -> None:
    values = {str(dtype): torch.arange(24, dtype=torch.uint8).view(dtype) for dtype in OTHERS}
    # Of a larger storage, of which only a part is to be written.
    values["part"] = torch.arange(100, dtype=torch.uint8).view(torch.uint16)[5:9]
    checkpointer = DistributedCheckpointer()
    path = str(tmp_path / "global_step_1")
    checkpointer.save(path, {"model": dict(values)}, global_step=1, save_async=save_async)
    checkpointer.maybe_wait_for_async_save()
    live = {name: torch.zeros(24, dtype=torch.uint8).view(value.dtype) for name, value in values.items()}
    live["part"] = torch.zeros(4, dtype=torch.uint16)
    checkpointer.load(path, {"model": live})
    assert same(live, values)


def check_place(content: bytes, tensor: torch.Tensor) -> None:
    begin = place(content, tensor)
    assert begin is not None
    assert content[begin : begin + len(raw(tensor))] == raw(tensor)
    if tensor.numel():
        # Where zipfile says that the record's bytes are.
        with zipfile.ZipFile(io.BytesIO(content)) as found, found.open("archive/data/0") as record:
            assert record._orig_compress_start == begin  # type: ignore[attr-defined]  # not told in any other way


@by_type
def test_the_bytes_are_found_in_an_own_archive_and_in_one_of_torch(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        check_place(by_template(made(dtype, shape)), made(dtype, shape))
        check_place(by_torch(made(dtype, shape)), made(dtype, shape))


@pytest.mark.usefixtures("without_checksums")
def test_the_bytes_are_found_in_an_archive_of_torch_without_checksums() -> None:
    for dtype in (torch.float32, torch.bool, torch.complex128):
        for shape in SHAPES:
            check_place(by_torch(made(dtype, shape)), made(dtype, shape))


def test_what_stands_around_an_archive_is_not_taken_for_a_part_of_it() -> None:
    tensor = made(torch.float32, (5,))
    for content in (by_torch(tensor), by_template(tensor)):
        assert place(content + b"\0", tensor) is None
        assert place(b"\0" + content, tensor) is None


@pytest.mark.parametrize("make", [by_torch, by_template], ids=["torch's", "own"])
def test_another_type_or_shape_than_the_archives_finds_nothing(make: object) -> None:
    assert callable(make)
    content = make(made(torch.float32, (2, 3)))
    for dtype, shape in (
        (torch.int32, (2, 3)),
        (torch.float64, (2, 3)),
        (torch.float64, (3,)),
        (torch.float32, (3, 2)),
        (torch.float32, (6,)),
        (torch.float32, (1, 2, 3)),
        (torch.float32, (2, 2)),
        (torch.float32, (2, 0)),
        (torch.float32, ()),
    ):
        assert archive.data_offset(memoryview(content), dtype, shape) is None, (dtype, shape)


def test_a_view_that_is_not_contiguous_finds_nothing_in_torchs_archive() -> None:
    transposed = made(torch.float32, (2, 3)).T
    part = made(torch.float32, (100,))[3:7]
    for tensor in (transposed, part):
        assert archive.data_offset(memoryview(by_torch(tensor)), tensor.dtype, tuple(tensor.shape)) is None


SMALL = {
    "own": lambda: by_template(made(torch.float32, (5,))),
    "own, 64 bits": lambda: by_template(made(torch.float32, (5,)), is_wide=True),
    "torch's": lambda: by_torch(made(torch.float32, (5,))),
}
of_each_kind = pytest.mark.parametrize("kind", SMALL)


@of_each_kind
def test_a_truncated_archive_finds_nothing_at_any_length(kind: str) -> None:
    content, tensor = SMALL[kind](), made(torch.float32, (5,))
    assert [size for size in range(len(content)) if place(content[:size], tensor) is not None] == []
    # Cut off in front, too.
    assert [size for size in range(1, len(content) + 1) if place(content[size:], tensor) is not None] == []


@of_each_kind
def test_a_flipped_byte_never_leads_to_another_place(kind: str) -> None:
    content, tensor = SMALL[kind](), made(torch.float32, (5,))
    right = place(content, tensor)
    found = set()
    for index in range(len(content)):
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            damaged = bytearray(content)
            damaged[index] ^= mask
            if place(damaged, tensor) not in (None, right):
                found.add(index)
    assert sorted(found) == []


@pytest.mark.usefixtures("without_checksums")
def test_a_flipped_byte_never_leads_to_another_place_without_checksums() -> None:
    test_a_flipped_byte_never_leads_to_another_place("torch's")


def test_a_flipped_byte_of_the_bytes_themselves_keeps_the_place() -> None:
    tensor = made(torch.float32, (5,))
    for content in (by_template(tensor), by_torch(tensor)):
        begin = place(content, tensor)
        assert begin is not None
        for index in range(begin, begin + 20):
            damaged = bytearray(content)
            damaged[index] ^= 255
            assert place(damaged, tensor) == begin


def test_a_directory_that_sends_the_data_elsewhere_is_not_followed() -> None:
    tensor = made(torch.float32, (5,))
    content = by_torch(tensor)
    right = place(content, tensor)
    assert right is not None
    with zipfile.ZipFile(io.BytesIO(content)) as found:
        headers = [info.header_offset for info in found.infolist() if info.filename != "archive/data/0"]
    field = content.rfind(b"archive/data/0") - _CENTRAL_BYTES + _OFFSET_IN_CENTRAL
    elsewhere = (*headers, right, len(content) - 10, len(content), len(content) + 1, (1 << 32) - 1)
    for target in elsewhere:
        damaged = bytearray(content)
        struct.pack_into("<L", damaged, field, target)
        assert place(damaged, tensor) is None, target


def rewritten(
    tensor: torch.Tensor, how: int = zipfile.ZIP_STORED, *, order: bytes = b"little", twice: str = "", top: str = ""
) -> bytes:
    """The records of torch's archive, in one that zipfile makes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(by_torch(tensor))) as old, zipfile.ZipFile(buffer, "w", how) as new:
        for info in old.infolist():
            content = order if info.filename.endswith("byteorder") else old.read(info)
            name = info.filename.replace("archive/", top or "archive/", 1)
            new.writestr(name, content)
            if twice and name.endswith(twice):
                # zipfile warns of that, and does it.
                with pytest.warns(UserWarning, match="Duplicate name"):
                    new.writestr(name, bytes(len(content)))
    return buffer.getvalue()


def test_an_archive_made_in_another_way_gives_the_right_place_or_none() -> None:
    tensor = made(torch.float32, (64,))
    content = rewritten(tensor)
    begin = place(content, tensor)
    assert begin is None or content[begin : begin + 256] == raw(tensor)


@pytest.mark.parametrize("how", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_records_find_nothing(how: int) -> None:
    for tensor in (made(torch.float32, (5,)), torch.zeros(1000)):
        assert place(rewritten(tensor, how), tensor) is None


@pytest.mark.parametrize("twice", ["data/0", "data.pkl", "version"])
def test_two_records_of_one_name_find_nothing(twice: str) -> None:
    tensor = made(torch.float32, (5,))
    assert place(rewritten(tensor, twice=twice), tensor) is None


@pytest.mark.parametrize("order", [b"big", b"littl", b"", b"Little"])
def test_another_byte_order_finds_nothing(order: bytes) -> None:
    tensor = made(torch.float32, (5,))
    assert place(rewritten(tensor, order=order), tensor) is None


def test_nothing_is_found_in_what_is_no_archive() -> None:
    tensor = made(torch.float32, (5,))
    for content in (b"", b"PK", bytes(22), bytes(1000), b"PK\x05\x06" + bytes(18), b"PK\x05\x06" + b"\xff" * 18):
        assert place(content, tensor) is None
    assert place(rewritten(tensor, top="other/"), tensor) is None


@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
def test_views_that_are_conjugated_or_negated_are_saved_as_they_look(tmp_path: Path, save_async: bool) -> None:
    base = torch.tensor([1 + 2j, -0.5j, 3])
    values = {"conjugated": base.conj(), "negated": base.conj().imag, "transposed": base.reshape(1, 3).mH}
    expected = {
        "conjugated": torch.tensor([1 - 2j, 0.5j, 3 - 0j]),
        "negated": torch.tensor([-2, 0.5, -0.0]),
        "transposed": torch.tensor([[1 - 2j], [0.5j], [3 - 0j]]),
    }
    checkpointer = DistributedCheckpointer()
    path = str(tmp_path / "global_step_1")
    checkpointer.save(path, {"model": values}, global_step=1, save_async=save_async)
    checkpointer.maybe_wait_for_async_save()
    live = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in expected.items()}
    checkpointer.load(path, {"model": live})
    assert all(torch.equal(live[name], value) for name, value in expected.items())

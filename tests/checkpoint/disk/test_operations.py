"""The one interface to the disk: what is written is all there, nothing is written over, no link is followed."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import stat
from pathlib import Path
from typing import Any

import pytest

from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.disk.operations import FileOperations


class Noted(FileOperations):
    """The real ones, noting what is made and synced."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Path]] = []

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self.calls.append(("make", path))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.calls.append(("sync", path))


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_all_bytes_arrive_however_few_one_write_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    content = bytes(range(256)) * 9
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:most]))
    with operations.current().create(tmp_path / "file") as file:
        assert file.write(content[:100]) == 100
        assert file.write(memoryview(content)[100:]) == len(content) - 100
        assert file.write(b"") == 0
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("most", [1, 7, 1000, 1 << 30])
def test_many_pieces_arrive_in_order_however_few_bytes_one_write_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    pieces = [bytes([number % 251]) * (number % 9) for number in range(2000)]
    whole = b"".join(pieces)
    writev, written = os.writev, os.write
    asked: list[int] = []

    def partly(descriptor: int, views: list[memoryview]) -> int:
        asked.append(len(views))
        return written(descriptor, b"".join(views)[:most]) if most < 1 << 30 else writev(descriptor, views)

    monkeypatch.setattr(os, "writev", partly)
    monkeypatch.setattr(os, "write", lambda descriptor, data: written(descriptor, data[:most]))
    with operations.current().create(tmp_path / "file") as file:
        assert file.write(*pieces) == len(whole)
        assert file.write() == 0
    assert (tmp_path / "file").read_bytes() == whole
    assert max(asked) <= 1024, "the kernel takes no more"


def test_writes_end_where_the_file_system_likes_them_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []

    def told(function: Any) -> Any:
        def instead(descriptor: int, data: Any) -> Any:
            count = function(descriptor, data)
            ends.append(os.lseek(descriptor, 0, os.SEEK_CUR))
            return count

        return instead

    monkeypatch.setattr(os, "writev", told(os.writev))
    monkeypatch.setattr(os, "write", told(os.write))
    part = 8 << 20
    with operations.current().create(tmp_path / "file") as file:
        file.write(bytes(700), bytes(part), bytes(700))
        file.write(bytes(2 * part))
    assert ends == [part, part + 1400, 2 * part, 3 * part, 3 * part + 1400]


def test_a_write_that_the_disk_takes_half_of_is_an_error(tmp_path: Path) -> None:
    """A real short write: the file may not grow further, so the kernel takes a part, and refuses the rest."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with (
            operations.current().create(tmp_path / "file") as file,
            pytest.raises(OSError, match="too large") as caught,
        ):
            file.write(bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert (tmp_path / "file").stat().st_size == 1000


def test_a_write_that_takes_nothing_is_an_error_and_no_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", lambda descriptor, data: 0)
    with operations.current().create(tmp_path / "file") as file, pytest.raises(OSError, match="wrote no bytes"):
        file.write(b"x")


def test_a_view_of_wider_items_is_written_byte_by_byte(tmp_path: Path) -> None:
    numbers = memoryview(b"\x01\x00\x00\x00\x02\x00\x00\x00").cast("i")
    with operations.current().create(tmp_path / "file") as file:
        assert file.write(numbers) == 8
    assert (tmp_path / "file").read_bytes() == b"\x01\x00\x00\x00\x02\x00\x00\x00"


@pytest.mark.parametrize("obstacle", ["file", "folder", "link", "broken link"])
def test_nothing_is_ever_written_over(tmp_path: Path, obstacle: str) -> None:
    path = tmp_path / "taken"
    target = tmp_path / "target"
    if obstacle == "file":
        path.write_bytes(b"earlier")
    elif obstacle == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
        if obstacle == "link":
            target.write_bytes(b"earlier")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileExistsError):
        operations.current().create(path)
    with pytest.raises(FileExistsError):
        operations.write_file(path, b"later")
    with pytest.raises(FileExistsError):
        operations.current().make_directory(path)
    assert sorted(tmp_path.iterdir()) == before
    if obstacle in ("file", "link"):
        assert path.read_bytes() == b"earlier"


def test_files_and_directories_are_for_this_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        operations.write_file(tmp_path / "file", b"x")
        operations.make_directories(tmp_path / "one" / "two")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "one" / "two").stat().st_mode) == 0o700


def test_closing_twice_closes_no_other_file(tmp_path: Path) -> None:
    file = operations.current().create(tmp_path / "first")
    file.close()
    other = operations.current().create(tmp_path / "second")
    file.close()
    other.write(b"still open")
    other.close()
    assert (tmp_path / "second").read_bytes() == b"still open"


def test_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "link").symlink_to("secret")
    for read in (operations.read_bytes, operations.read_head):
        with pytest.raises(OSError, match="symbolic links") as caught:
            read(tmp_path / "link", 100)
        assert caught.value.errno == errno.ELOOP


def test_a_directory_can_not_be_read_and_leaves_no_descriptor_open(tmp_path: Path) -> None:
    open_now = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with pytest.raises(IsADirectoryError):
            operations.read_bytes(tmp_path, 100)
    assert len(list(Path("/proc/self/fd").iterdir())) == open_now


@pytest.mark.parametrize(("most", "fits"), [(5, True), (6, True), (4, False), (0, False)])
def test_a_file_larger_than_the_limit_is_refused(tmp_path: Path, most: int, fits: bool) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    if fits:
        assert operations.read_bytes(tmp_path / "file", most) == b"12345"
    else:
        with pytest.raises(OSError, match=f"larger than {most} bytes") as caught:
            operations.read_bytes(tmp_path / "file", most)
        assert caught.value.errno == errno.EFBIG
    assert operations.read_head(tmp_path / "file", 3) == b"123"


def test_two_directories_change_places(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(name)
    assert operations.current().exchange(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / "name").read_text() == "other"
    assert (tmp_path / "other" / "name").read_text() == "one"


def test_an_exchange_with_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(FileNotFoundError):
        operations.current().exchange(tmp_path / "one", tmp_path / "absent")
    assert (tmp_path / "one").is_dir()


def test_every_new_directory_is_brought_to_the_device_by_a_sync_of_its_parent(tmp_path: Path) -> None:
    with operations.use(Noted()) as noted:
        operations.make_directories(tmp_path / "a" / "b" / "c")
    assert isinstance(noted, Noted)
    assert noted.calls == [
        ("make", tmp_path / "a"),
        ("sync", tmp_path),
        ("make", tmp_path / "a" / "b"),
        ("sync", tmp_path / "a"),
        ("make", tmp_path / "a" / "b" / "c"),
        ("sync", tmp_path / "a" / "b"),
    ]
    noted.calls.clear()
    with operations.use(noted):
        operations.make_directories(tmp_path / "a" / "b")
    assert noted.calls == []


def test_a_directory_that_another_process_makes_meanwhile_is_fine(tmp_path: Path) -> None:
    class Slow(FileOperations):
        def make_directory(self, path: Path) -> None:
            path.mkdir()
            super().make_directory(path)

    with operations.use(Slow()):
        operations.make_directories(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_file_in_the_way_is_an_error_below_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        operations.make_directories(tmp_path / "file" / "a")
    assert (tmp_path / "file").read_text() == "x"


def test_a_tree_is_deleted_without_following_its_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    tree = tmp_path / "tree"
    (tree / "deep" / "er").mkdir(parents=True)
    (tree / "deep" / "file").write_text("x")
    (tree / "to folder").symlink_to(outside)
    (tree / "deep" / "to file").symlink_to(outside / "kept")
    (tree / "broken").symlink_to("nowhere")
    operations.remove_tree(tree)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside"]
    assert (outside / "kept").read_text() == "kept"


def test_deleting_a_link_to_a_tree_deletes_the_link(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "kept").write_text("kept")
    (tmp_path / "link").symlink_to("tree")
    operations.remove_tree(tmp_path / "link")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "tree" / "kept").read_text() == "kept"


def test_other_operations_are_in_use_only_while_the_context_lasts() -> None:
    before = operations.current()
    noted = Noted()

    def fail_within() -> None:
        with operations.use(noted):
            assert operations.current() is noted
            raise KeyError("anything")

    with pytest.raises(KeyError, match="anything"):
        fail_within()
    assert operations.current() is before


def test_room_is_set_aside_without_a_change_of_the_file(tmp_path: Path) -> None:
    with operations.current().create(tmp_path / "file") as file:
        file.reserve(3 << 20)
        status = (tmp_path / "file").stat()
        assert status.st_size == 0
        # Or nothing at all, where the file system has no such thing.
        assert status.st_blocks * 512 in (0, *range(3 << 20, 4 << 20, 512))
        file.write(b"abc")
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_room_that_no_disk_has_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with operations.current().create(tmp_path / "file") as file:
        with pytest.raises(OSError, match=r"File too large|No space left") as caught:
            file.reserve(1 << 61)
        assert caught.value.filename == str(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b""


def test_a_file_that_closed_under_the_writer_is_an_error_and_no_room(tmp_path: Path) -> None:
    file = operations.current().create(tmp_path / "file")
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.reserve(10)


def test_what_can_not_be_set_to_work_early_is_written_all_the_same() -> None:
    """A device that is no disk knows neither of the two."""
    with operations.OutputFile(os.open("/dev/null", os.O_WRONLY), Path("/dev/null")) as file:
        file.reserve(100)
        assert file.write(bytes(20 << 20)) == 20 << 20


def test_the_writeback_of_each_part_is_started_once_and_in_order(tmp_path: Path) -> None:
    asked: list[tuple[str, tuple[int, ...]]] = []

    class Asked(operations.OutputFile):
        def _call_kernel(self, name: str, *numbers: int) -> None:
            asked.append((name, numbers))
            super()._call_kernel(name, *numbers)

    path, part = tmp_path / "file", 8 << 20
    with Asked(os.open(path, os.O_WRONLY | os.O_CREAT), path) as file:
        for size in (5 << 20, 5 << 20, 1, 17 << 20):
            file.write(bytes(size))
    write = 2
    begins = [numbers[0] for _, numbers in asked]
    ends = [begin + length for _, (begin, length, _) in asked]
    assert begins == [0, *ends[:-1]]
    assert all(name == "sync_file_range" and length >= part and how == write for name, (_, length, how) in asked)
    assert ends[-1] > path.stat().st_size - part


def test_a_signal_while_room_is_set_aside_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may ask to try again. No file system here does, so a stand-in asks twice."""
    answers = [errno.EINTR, errno.EINTR, 0]

    def interrupted(*_: int) -> int:
        ctypes.set_errno(answers[0])
        return -1 if answers.pop(0) else 0

    monkeypatch.setattr(operations, "_kernel_function", lambda name: interrupted)
    with operations.current().create(tmp_path / "file") as file:
        file.reserve(100)
    assert answers == []

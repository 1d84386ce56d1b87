"""A file is looked into without a copy: mapped or not the bytes are the same, errors are errors, and the file never changes."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.disk.operations import FileOperations, InputFile
from hyper_resume.checkpoint.tensors.copying import copy_tensors, gc_paused
from hyper_resume.checkpoint.tensors.threads import map_in_threads

PAGE = mmap.PAGESIZE
SIZES = (0, 1, 100, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 7)
EDGES = (0, 1, 99, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 3 * PAGE, 3 * PAGE + 6, 3 * PAGE + 7, 5 * PAGE)


class Unmapped(InputFile):
    may_map = False


class UnmappedReads(FileOperations):
    """The real ones where nothing can be mapped."""

    def open_read(self, path: Path) -> InputFile:
        return Unmapped(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path)


@pytest.fixture(params=["mapped", "read"])
def reads(request: pytest.FixtureRequest) -> Iterator[FileOperations]:
    with operations.use(FileOperations() if request.param == "mapped" else UnmappedReads()) as found:
        yield found


def made(path: Path, size: int) -> bytes:
    content = bytes(index * 7 % 251 for index in range(size))
    path.write_bytes(content)
    return content


@pytest.mark.parametrize("size", SIZES)
def test_every_part_is_the_files_slice(tmp_path: Path, size: int, reads: FileOperations) -> None:
    content = made(tmp_path / "file", size)
    with reads.open_read(tmp_path / "file") as file:
        assert file.size_bytes == size
        for offset in EDGES:
            for length in EDGES:
                assert bytes(file.view(offset, length)) == content[offset : offset + length], (offset, length)
        # What was read at other places leaves earlier parts as they were.
        first, last = file.view(0, 10), file.view(max(0, size - 10), 10)
        assert (bytes(first), bytes(last)) == (content[:10], content[max(0, size - 10) :])


@pytest.mark.parametrize("size", SIZES)
def test_bringing_what_is_there_in_changes_nothing(tmp_path: Path, size: int, reads: FileOperations) -> None:
    content = made(tmp_path / "file", size)
    with reads.open_read(tmp_path / "file") as file:
        for offset in (edge for edge in EDGES if edge <= size):
            for length in (edge for edge in EDGES if offset + edge <= size):
                file.preload(offset, length)
        assert bytes(file.view(0, size)) == content


def test_writing_to_a_part_does_not_change_the_file(tmp_path: Path, reads: FileOperations) -> None:
    content = made(tmp_path / "file", 3 * PAGE)
    with reads.open_read(tmp_path / "file") as file:
        part = file.view(PAGE - 5, 10)
        part[:] = bytes(10)
        assert bytes(part) == bytes(10)
    assert (tmp_path / "file").read_bytes() == content
    with reads.open_read(tmp_path / "file") as file:
        assert bytes(file.view(0, 3 * PAGE)) == content


def test_a_part_outlives_the_file(tmp_path: Path, reads: FileOperations) -> None:
    content = made(tmp_path / "file", 3 * PAGE)
    with reads.open_read(tmp_path / "file") as file:
        part = file.view(PAGE - 5, 10)
    (tmp_path / "file").unlink()
    assert bytes(part) == content[PAGE - 5 : PAGE + 5]


@pytest.mark.parametrize("size", SIZES)
def test_bringing_in_what_is_beyond_the_end_is_an_error_of_the_file_or_nothing(
    tmp_path: Path, size: int, reads: FileOperations
) -> None:
    content = made(tmp_path / "file", size)
    with reads.open_read(tmp_path / "file") as file:
        for offset in EDGES:
            for length in (*EDGES, 1 << 40):
                try:
                    file.preload(offset, length)
                except OSError:
                    assert offset + length > size
        assert bytes(file.view(0, size)) == content


@pytest.mark.parametrize("kind", ["link to a file", "link to nothing", "missing", "folder"])
def test_what_is_no_file_can_not_be_opened_and_leaves_nothing_open(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "path"
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.symlink_to("other")
        if kind == "link to a file":
            (tmp_path / "other").write_bytes(b"secret")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(OSError, match=r"path|directory") as caught:
            operations.current().open_read(path)
    expected = {"missing": errno.ENOENT, "folder": errno.EISDIR}.get(kind, errno.ELOOP)
    assert caught.value.errno == expected
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_files_leave_no_descriptor_and_no_map_open(tmp_path: Path, reads: FileOperations) -> None:
    made(tmp_path / "file", 3 * PAGE)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        with reads.open_read(tmp_path / "file") as file:
            file.preload(0, 3 * PAGE)
            assert len(file.view(0, 3 * PAGE)) == 3 * PAGE
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def child(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script that may end by a signal."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_file_that_was_cut_off_since_is_an_error_when_it_is_brought_in(tmp_path: Path) -> None:
    """In a process of its own: to touch the bytes instead would end it."""
    made(tmp_path / "file", 8 * PAGE)
    script = """
        import os, sys
        from pathlib import Path
        from hyper_resume.checkpoint.disk import operations
        path, page = Path(sys.argv[1]), int(sys.argv[2])
        with operations.current().open_read(path) as file:
            os.truncate(path, 2 * page)
            for offset, length in ((0, 8 * page), (4 * page, page), (7 * page, 5 * page), (page, 2 * page)):
                try:
                    file.preload(offset, length)
                except OSError as error:
                    print(type(error).__name__, error.errno, flush=True)
            file.preload(0, 2 * page)
            print(bytes(file.view(page, 3)).hex(), flush=True)
            bytes(file.view(4 * page, 1))
            print("not reached", flush=True)
    """
    first = bytes((PAGE + index) * 7 % 251 for index in range(3)).hex()
    found = child(script, str(tmp_path / "file"), str(PAGE))
    assert found.stdout.splitlines() == [f"OSError {errno.EFAULT}"] * 4 + [first], found.stderr
    # The danger is real: this is what ends the process that touches them.
    assert found.returncode == -signal.SIGBUS


# ---- what is done with many tensors --------------------------------------------------------------------------------------


def pairs_of(count: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros(size), torch.arange(float(size)) + index) for index in range(count)]


def test_small_and_large_tensors_are_copied(reads: FileOperations) -> None:
    pairs = [pair for size in (0, 1, 7, 65_535, 65_536, 65_537, 1_000_000) for pair in pairs_of(3, size)]
    pairs += [(torch.zeros((), dtype=torch.bool), torch.tensor(True)), (torch.zeros(3), torch.arange(3))]
    # Not contiguous on either side, and parts of larger ones.
    wide = torch.zeros(500, 600)
    pairs += [
        (wide.T, torch.arange(300_000.0).reshape(600, 500)),
        (torch.zeros(3, 2), torch.arange(6.0).reshape(2, 3).T),
    ]
    base = torch.zeros(1_000_000)
    pairs += [(base[10:20], torch.arange(10.0)), (base[::2][100:], torch.arange(499_900.0))]
    parameter = torch.nn.Parameter(torch.zeros(100_000))
    pairs += [(parameter, torch.ones(100_000, requires_grad=True)), (torch.nn.Parameter(torch.zeros(2)), torch.ones(2))]
    copy_tensors(iter(pairs))
    for target, source in pairs:
        assert torch.equal(target, source.to(target.dtype))
    assert torch.equal(wide, torch.arange(300_000.0).reshape(600, 500).T)
    assert parameter.grad_fn is None
    assert parameter.requires_grad
    copy_tensors([])


@pytest.mark.parametrize("size", [100, 200_000])
def test_what_shares_memory_is_written_in_the_order_of_the_pairs(size: int) -> None:
    for _ in range(20):
        base = torch.zeros(size)
        parts = [base, base[size // 2 :], base.view(2, -1), base[: size // 2], base[::2]]
        copy_tensors((part, torch.full_like(part, float(index))) for index, part in enumerate(parts))
        expected = torch.full((size,), 2.0)
        expected[: size // 2] = 3.0
        expected[::2] = 4.0
        assert torch.equal(base, expected)


def test_what_shares_memory_by_way_of_numpy_is_written_in_the_order_of_the_pairs() -> None:
    """Each tensor has a storage of its own then, over the same bytes."""
    for _ in range(40):
        array = np.zeros(2_000_000, dtype=np.float32)
        parts = [torch.from_numpy(part) for part in (array, array[500:], array[1000:2000])]
        copy_tensors((part, torch.full_like(part, float(index + 1))) for index, part in enumerate(parts))
        assert [float(array[place]) for place in (0, 499, 500, 999, 1000, 1999, 2000, -1)] == [1, 1, 2, 2, 3, 3, 2, 2]


def test_threads_keep_the_order_and_raise_the_first_items_error() -> None:
    assert map_in_threads(lambda item: item * 2, list(range(100))) == [item * 2 for item in range(100)]
    assert map_in_threads(lambda item: item, []) == []
    done = []

    def fail_some(item: int) -> None:
        done.append(item)
        if item in (3, 5):
            raise KeyError(item)

    with pytest.raises(KeyError, match="3"):
        map_in_threads(fail_some, list(range(8)))
    assert {0, 1, 2, 3} <= set(done)
    with pytest.raises(KeyError, match="5"):
        map_in_threads(fail_some, [5])


def test_the_collector_of_cycles_is_back_afterwards_as_it_was() -> None:
    import gc

    def within(fail: bool) -> Any:
        with gc_paused():
            assert not gc.isenabled()
            if fail:
                raise KeyError("anything")

    assert gc.isenabled()
    within(False)
    assert gc.isenabled()
    with pytest.raises(KeyError):
        within(True)
    assert gc.isenabled()
    gc.disable()
    try:
        within(False)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_all_of_it_works_when_the_interpreter_ends(tmp_path: Path) -> None:
    """No thread can be started then; a checkpoint that an exit handler saves has to work all the same."""
    script = """
        import atexit, sys
        import torch
        from hyper_resume.checkpoint import DistributedCheckpointer
        from hyper_resume.checkpoint.tensors.copying import copy_tensors
        from hyper_resume.checkpoint.tensors.threads import map_in_threads
        checkpointer = DistributedCheckpointer()

        def late():
            print(map_in_threads(lambda item: item + 1, [1, 2, 3]))
            pairs = [(torch.zeros(100_000), torch.ones(100_000)) for _ in range(3)]
            copy_tensors(pairs)
            print(sum(float(target.sum()) for target, _ in pairs))
            state = {"model": {"w": torch.arange(300_000.0), "b": torch.ones(3)}}
            checkpointer.save(sys.argv[1], state, global_step=1)
            live = {"model": {"w": torch.zeros(300_000), "b": torch.zeros(3)}}
            checkpointer.load(sys.argv[1], live)
            print(torch.equal(live["model"]["w"], state["model"]["w"]), flush=True)

        atexit.register(late)
    """
    found = child(script, str(tmp_path / "global_step_1"))
    assert found.stdout.splitlines() == ["[2, 3, 4]", "300000.0", "True"], found.stderr
    assert found.returncode == 0

"""The recorder's replacements of the functions that change the disk, and of torch's collectives."""

from __future__ import annotations

import builtins
import functools
import io
import os
from collections.abc import Callable
from typing import Any

from conformance.running.file_operations import wrapped
from conformance.storage.tracing.history import TraceError
from conformance.storage.tracing.recorder import ENTER, LEAVE, Recorder

# Which rank waits for which: all for all, the destination for all, all for the source.
_COLLECTIVES = {
    "barrier": "all",
    "all_gather_object": "all",
    "all_reduce": "all",
    "all_gather": "all",
    "gather_object": "dst",
    "broadcast_object_list": "src",
    "broadcast": "src",
    "scatter_object_list": "src",
}


def install(recorder: Recorder, rank: int, *, wants_interface: bool) -> None:
    """Record the operations of this process from now on, as ``rank``. ``wants_interface``: see :meth:`Recorder.begin`."""
    recorder.begin(rank, wants_interface=wants_interface)
    _replace_functions(recorder)
    _replace_collectives(recorder)


def _replace_functions(recorder: Recorder) -> None:
    """Replace Python's functions that change the disk, for the rest of the process, by functions that also record it."""
    for name, kind in (
        ("mkdir", "make_directory"), ("rmdir", "remove_directory"), ("unlink", "remove"), ("remove", "remove"),
    ):  # fmt: skip
        setattr(os, name, _on_path(recorder, getattr(os, name), kind))
    for name in ("rename", "replace"):
        setattr(os, name, _renaming(recorder, getattr(os, name)))
    for name in ("link", "symlink", "truncate", "pwritev", "sendfile", "copy_file_range", "posix_fallocate"):
        if hasattr(os, name):
            setattr(os, name, _unknown(recorder, getattr(os, name), name))
    os.open = _opening(recorder, os.open)
    os.close = _closing(recorder, os.close)
    os.write = _writing(recorder, os.write)
    os.writev = _writing_pieces(recorder, os.writev)
    os.pwrite = _writing(recorder, os.pwrite)
    os.lseek = _seeking(recorder, os.lseek)
    os.ftruncate = _truncating(recorder, os.ftruncate)
    os.fsync = _syncing(recorder, os.fsync)
    os.fdatasync = _syncing(recorder, os.fdatasync)
    builtins.open = io.open = _open_function(recorder, io.open)


def _on_path(recorder: Recorder, original: Callable[..., Any], kind: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def instead(path: Any, *args: Any, **kwargs: Any) -> Any:
        where = recorder.below(path, kwargs.get("dir_fd"))
        if where is None:
            return original(path, *args, **kwargs)
        with recorder.step():
            try:
                result = original(path, *args, **kwargs)
            except FileExistsError:
                # Another rank made it first. In another order this rank does, so it is recorded all the same.
                if kind == "make_directory":
                    recorder.note(kind, where)
                raise
            recorder.note(kind, where)
        return result

    return instead


def _renaming(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def instead(src: Any, dst: Any, **kwargs: Any) -> None:
        source, target = recorder.below(src, kwargs.get("src_dir_fd")), recorder.below(dst, kwargs.get("dst_dir_fd"))
        if source is None and target is None:
            original(src, dst, **kwargs)
            return
        if source is None or target is None:
            raise TraceError(f"a rename across the border of the traced folder: {src} -> {dst}")
        with recorder.step():
            original(src, dst, **kwargs)
            recorder.note("rename", source, target=target)

    return instead


def _unknown(recorder: Recorder, original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def instead(*args: Any, **kwargs: Any) -> Any:
        for one in args[:2]:
            place = recorder.is_open(one) if isinstance(one, int) else recorder.below(one)
            if place:
                raise TraceError(f"the persistence models do not support {name}")
        return original(*args, **kwargs)

    return instead


def _opening(recorder: Recorder, original: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(original)
    def instead(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        where = recorder.below(path, kwargs.get("dir_fd"))
        if where is None:
            return original(path, flags, *args, **kwargs)
        with recorder.step():
            existed = recorder.exists(where)
            descriptor = original(path, flags, *args, **kwargs)
            recorder.opened(descriptor, where, existed=existed, flags=flags)
        return descriptor

    return instead


def _closing(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def instead(fd: int) -> None:
        recorder.closed(fd)
        original(fd)

    return instead


def _writing(recorder: Recorder, original: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(original)
    def instead(fd: int, data: Any, *offset: int) -> int:
        if not recorder.is_open(fd):
            return original(fd, data, *offset)
        with recorder.step():
            count = original(fd, data, *offset)
            recorder.wrote(fd, data, count, *offset)
        return count

    return instead


def _writing_pieces(recorder: Recorder, original: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(original)
    def instead(fd: int, pieces: Any) -> int:
        if not recorder.is_open(fd):
            return original(fd, pieces)
        with recorder.step():
            count = original(fd, pieces)
            recorder.wrote(fd, b"".join(pieces), count)
        return count

    return instead


def _seeking(recorder: Recorder, original: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(original)
    def instead(fd: int, position: int, how: int) -> int:
        found = original(fd, position, how)
        recorder.seeked(fd, found)
        return found

    return instead


def _truncating(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def instead(fd: int, length: int) -> None:
        with recorder.step():
            original(fd, length)
            recorder.truncated(fd, length)

    return instead


def _syncing(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def instead(fd: Any) -> None:
        descriptor = fd if isinstance(fd, int) else fd.fileno()
        with recorder.step():
            original(descriptor)
            recorder.synced(descriptor)

    return instead


class _TracedFile(io.FileIO):
    """The raw file under Python's buffered files."""

    recorder: Recorder

    def write(self, data: Any) -> int:
        with self.recorder.step():
            count = super().write(data)
            self.recorder.wrote(self.fileno(), data, count)
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        found = super().seek(offset, whence)
        self.recorder.seeked(self.fileno(), found)
        return found

    def truncate(self, size: int | None = None, /) -> int:
        with self.recorder.step():
            length = super().truncate(size)
            self.recorder.truncated(self.fileno(), length)
        return length

    def close(self) -> None:
        if not self.closed:
            self.recorder.closed(self.fileno())
        super().close()


def _open_function(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """``open``: a file for writing is opened through ``os.open``, which is traced, and wrapped as ``open`` would."""

    @functools.wraps(original)
    def instead(
        file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None, newline: Any = None,
        closefd: bool = True, opener: Any = None,
    ) -> Any:  # fmt: skip
        known = recorder.is_open(file) if isinstance(file, int) else recorder.below(file) is not None
        if not set("wax+") & set(mode) or not known:
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw_mode = mode.replace("b", "").replace("t", "")
        raw = _TracedFile(file, raw_mode, closefd=closefd, opener=opener or (lambda path, flags: os.open(path, flags)))
        raw.recorder = recorder
        if "a" in mode:
            recorder.seeked(raw.fileno(), os.fstat(raw.fileno()).st_size)
        return wrapped(raw, mode, buffering, encoding, errors, newline)

    return instead


# ---- collectives ----------------------------------------------------------------------------------------------------------


def _replace_collectives(recorder: Recorder) -> None:
    """Mark entering and leaving each collective from now on."""
    import torch.distributed as dist

    for name, waits in _COLLECTIVES.items():
        setattr(dist, name, _collective(recorder, getattr(dist, name), waits))


def _collective(recorder: Recorder, original: Callable[..., Any], waits: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def instead(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        name = "default" if group is None else str(group.group_name)
        root = kwargs.get(waits, 0) or 0
        with recorder.step():
            call = f"{name}/{recorder.next_collective(name)} {waits} {root}"
            recorder.note("mark", ENTER + call)
        result = original(*args, **kwargs)
        recorder.mark(LEAVE + call)
        return result

    return instead

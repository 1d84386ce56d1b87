"""The library's interface to the disk, connected to the recorder. It imports ``hyper_resume``, so it is imported late."""

from __future__ import annotations

from pathlib import Path

from conformance.storage.tracing.recorder import Recorder
from hyper_resume.checkpoint.disk.operations import Buffer, FileOperations, OutputFile


class RecordingOperations(FileOperations):
    """The real operations, marked for the recorder as made through the interface."""

    def __init__(self, recorder: Recorder) -> None:
        """``can_exchange`` False stands for a file system without it."""
        self.can_exchange = True
        self._recorder = recorder

    def make_directory(self, path: Path) -> None:
        """See the base class."""
        with self._recorder.inside():
            super().make_directory(path)

    def create(self, path: Path) -> OutputFile:
        """See the base class."""
        with self._recorder.inside():
            return _RecordedFile(super().create(path), self._recorder)

    def rename(self, source: Path, target: Path) -> None:
        """See the base class."""
        with self._recorder.inside():
            super().rename(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        """See the base class. It goes to the kernel through C, so it is recorded here."""
        if not self.can_exchange:
            return False
        with self._recorder.inside(), self._recorder.step():
            done = super().exchange(one, other)
            if done:
                here, there = self._recorder.below(one), self._recorder.below(other)
                assert here is not None and there is not None  # noqa: PT018
                self._recorder.note("exchange", here, target=there)
            return done

    def remove(self, path: Path) -> None:
        """See the base class."""
        with self._recorder.inside():
            super().remove(path)

    def remove_directory(self, path: Path) -> None:
        """See the base class."""
        with self._recorder.inside():
            super().remove_directory(path)

    def sync_directory(self, path: Path) -> None:
        """See the base class."""
        with self._recorder.inside():
            super().sync_directory(path)


class _RecordedFile(OutputFile):
    def __init__(self, inner: OutputFile, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder
        self.path = inner.path

    def write(self, *pieces: Buffer) -> int:
        with self._recorder.inside():
            return self._inner.write(*pieces)

    def reserve(self, size: int) -> None:
        # Changes nothing that a crash could leave, neither bytes nor size.
        self._inner.reserve(size)

    def sync(self) -> None:
        with self._recorder.inside():
            self._inner.sync()

    def close(self) -> None:
        self._inner.close()

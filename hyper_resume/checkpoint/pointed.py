"""What a storage backend that only saves and loads leaves to others: the lock of the root, the pointer, and LATEST."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hyper_resume import collective
from hyper_resume.checkpoint.base import CheckpointerBase, LoadReport, SaveEvent, SaveListener
from hyper_resume.checkpoint.disk import lock, operations
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.saving import trial
from hyper_resume.errors import CheckpointNotFoundError, describe
from hyper_resume.local_path import local_path


def with_pointer(backend: CheckpointerBase) -> CheckpointerBase:
    """Return ``backend`` if it can search for its newest checkpoint, otherwise one that keeps a pointer for it."""
    # Of the method, not of the class: an object that only forwards to a backend counts as that backend.
    search = getattr(backend.find_latest_checkpoint, "__func__", None)
    can_search = search is not CheckpointerBase.find_latest_checkpoint
    return backend if can_search else PointedCheckpointer(backend)


class PointedCheckpointer(CheckpointerBase):
    """A backend without ``find_latest_checkpoint``, and a pointer file in the root that names its last finished save.

    The pointer moves, and the save counts as durable, when ``save`` has returned on every rank; with ``save_async``, when
    the next save or wait has waited for it.
    """

    def __init__(self, backend: CheckpointerBase) -> None:
        """Keep a pointer for ``backend``."""
        self._backend = backend
        self._unfinished: tuple[Path, int, float] | None = None

    @property
    def accepts_metrics(self) -> bool:  # type: ignore[override]
        """As the backend."""
        return self._backend.accepts_metrics

    @property
    def reshards_training_state(self) -> bool:  # type: ignore[override]
        """As the backend."""
        return self._backend.reshards_training_state

    @property
    def last_bucket_digests(self) -> Mapping[str, str] | None:  # type: ignore[override]
        """As the backend."""
        return self._backend.last_bucket_digests

    @property
    def last_load(self) -> LoadReport | None:  # type: ignore[override]
        """As the backend."""
        return self._backend.last_load

    def describe_run(self, path: str) -> Mapping[str, Any] | None:
        """As the backend."""
        return self._backend.describe_run(path)

    def describe(self, path: str) -> Mapping[str, torch.Tensor | None] | None:
        """As the backend."""
        return self._backend.describe(path)

    def has_checkpoint(self, path: str) -> bool:
        """As the backend."""
        return self._backend.has_checkpoint(path)

    def add_listener(self, listener: SaveListener) -> None:
        """Call ``listener`` with the event of each finished save."""
        self._backend.add_listener(listener)

    def try_save(self, checkpoint_dir: str, state: dict[str, Any]) -> None:
        """As the backend; and try to write to the root, where the pointer will be."""
        root = local_path(checkpoint_dir).absolute()
        self._backend.try_save(checkpoint_dir, state)
        trial.try_root(root, None)

    def check_names(self, checkpoint_dir: str, is_planned: Callable[[int], bool]) -> None:
        """As the backend."""
        self._backend.check_names(checkpoint_dir, is_planned)

    def begin_run(self, checkpoint_dir: str, *, restored_from: str | None) -> None:
        """Create and lock the root, and let LATEST mean the save that this run continues.

        Raises:
            CheckpointLockedError: another run saves there; raised on every rank.
        """
        root = local_path(checkpoint_dir).absolute()
        source = None if restored_from is None else local_path(restored_from)

        def on_rank_zero() -> None:
            operations.make_directories(root)
            lock.acquire(root)
            step = None if source is None else layout.parse_step(source.name)
            if source is not None and step is not None and source.parent.resolve() == root.resolve():
                layout.write_pointer(root, step)

        collective.on_rank_zero(on_rank_zero)
        self._backend.begin_run(checkpoint_dir, restored_from=restored_from)

    def save(
        self, path: str, state: dict[str, Any], *, global_step: int, save_async: bool = False, **options: Any
    ) -> None:
        """Let the backend save, then move the pointer; every rank calls it."""
        target = local_path(path).absolute()
        self.maybe_wait_for_async_save()
        started = time.perf_counter()
        save = partial(self._backend.save, path, state, global_step=global_step, save_async=save_async, **options)
        # An error on one rank must be raised on all: the others would wait for it at the pointer.
        collective.on_all_ranks(save)
        self._unfinished = (target, global_step, started)
        if not save_async:
            self._finish()

    def load(self, path: str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
        """As the backend; an error on one rank is raised on all."""
        self._backend.check_loaded = self.check_loaded
        try:
            return collective.on_all_ranks(lambda: self._backend.load(path, state, **options))
        finally:
            self._backend.check_loaded = None

    def maybe_wait_for_async_save(self) -> None:
        """Wait for the backend, and move the pointer to what it has finished; every rank calls it."""
        if self._unfinished is None:
            return
        try:
            collective.on_all_ranks(self._backend.maybe_wait_for_async_save)
        except Exception:
            # Of an interrupt, nothing is known: the save may still end well.
            self._unfinished = None
            raise
        self._finish()

    def _finish(self) -> None:
        assert self._unfinished is not None  # a save has returned on every rank
        path, step, started = self._unfinished
        try:
            if path.name == layout.step_directory_name(step):
                collective.on_rank_zero(lambda: _move_pointer(path.parent, step))
        except Exception:
            self._unfinished = None
            raise
        self._unfinished = None
        event = SaveEvent(
            state="durable",
            global_step=step,
            path=str(path),
            seconds=time.perf_counter() - started,
            at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )
        for listener in self._backend.listeners:
            listener(event)

    def find_latest_checkpoint(self, checkpoint_dir: str) -> str | None:
        """Return the step directory that the pointer names, or None without a pointer; rank 0 decides for all ranks.

        Raises:
            CheckpointNotFoundError: the pointer is damaged.
        """
        self.maybe_wait_for_async_save()
        root = local_path(checkpoint_dir)

        def on_rank_zero() -> str | None:
            step, complaint = layout.read_pointer(root)
            if complaint:
                raise CheckpointNotFoundError(
                    describe(
                        "the newest checkpoint is not known",
                        where=str(root),
                        expected=f"{layout.POINTER_NAME} with the number of a step",
                        found=complaint,
                        do="name one global_step_N in checkpoint.restore_from, or correct the pointer",
                    )
                )
            return None if step is None else str(root / layout.step_directory_name(step))

        return collective.on_rank_zero(on_rank_zero)


def _move_pointer(root: Path, step: int) -> None:
    operations.make_directories(root)
    layout.write_pointer(root, step)

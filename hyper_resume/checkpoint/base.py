"""The interface of a storage backend, and the registry that finds one by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, TypeVar

import torch

C = TypeVar("C", bound="type[CheckpointerBase]")
ENTRY_POINTS = "hyper_resume.checkpointers"
"""The group of entry points by which an installed package offers a storage backend: name = "package.module:Class"."""


@dataclass(frozen=True, kw_only=True)
class SaveEvent:
    """The progress of one save.

    ``staged``: the state was copied, or is written already; training may change it now. ``written``: the files of every rank
    are on the device, in the staging directory. ``durable``: the save is committed, survives a power cut, and is what LATEST
    means; retention deletes old saves after this. ``failed``: the save was abandoned; or it is committed, and is not what
    LATEST means, and the error says so. ``seconds`` is the time since ``save`` was called; ``at`` is UTC, ISO 8601.
    """

    state: Literal["staged", "written", "durable", "failed"]
    global_step: int
    path: str
    seconds: float
    at: str


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The result of this rank's last load.

    ``saved`` and ``loaded`` map a bucket to the digest of this rank's part: at the save, and of the values that were read.
    ``saved`` lacks a bucket if the checkpoint holds no digest of it, or if no rank had the same parts of its sharded tensors.
    ``unread`` names the entries of the checkpoint that no rank requested.
    """

    path: str
    step: int | None
    verified: Literal["digest", "size", "no manifest"]
    saved: Mapping[str, str]
    loaded: Mapping[str, str]
    unread: tuple[str, ...]


SaveListener = Callable[[SaveEvent], None]
# (state that was read, this rank's training state) -> None; raises to refuse it.
LoadCheck = Callable[[Mapping[str, Any], Mapping[str, Any]], None]


class CheckpointerBase(ABC):
    """A storage backend: writes a payload to a step directory and reads it back. It does not depend on the trainer.

    A payload is ``{"model": {...}, "optimizer": {...}, "extra_state": {...}}``, each part optional. ``save`` and ``load``
    are collective: every rank calls them in the same order. ``extra_state`` is each rank's own. A backend implements
    ``save`` and ``load``; everything else has a default. Without a ``find_latest_checkpoint`` of its own, the callback
    keeps the pointer, from which LATEST is read.

    Attributes:
        listeners: called with every :class:`SaveEvent`; see :meth:`add_listener`.
        check_loaded: an optional check. A backend that reads into its own buffers calls it on every rank with the values that
            were read, before it writes to ``state``. An error is raised on all ranks, and ``state`` stays unchanged.
        last_bucket_digests: bucket -> digest of this rank's part at the last save; None before the first save.
        last_load: see :class:`LoadReport`; None before the first load, or if the backend does not report it.
        accepts_metrics: whether ``save`` takes the keyword ``metrics``, for retention by metric.
        reshards_training_state: whether ``load`` puts this rank's parts of sharded tensors in a training state together on
            another mesh; ``extra_state_skeleton`` then has them under ``sharded``: path -> [shape, offsets, sizes].
        verifies_digests: whether ``last_load`` reports the digests of save and load. Otherwise the callback saves digests of
            the payload in the training state, and compares them after the load.
    """

    listeners: tuple[SaveListener, ...] = ()
    check_loaded: LoadCheck | None = None
    last_bucket_digests: Mapping[str, str] | None = None
    last_load: LoadReport | None = None
    accepts_metrics: ClassVar[bool] = False
    verifies_digests: ClassVar[bool] = False
    reshards_training_state: ClassVar[bool] = False

    @abstractmethod
    def save(self, path: str, state: dict[str, Any], *, global_step: int, save_async: bool = False) -> None:
        """Write ``state`` to the step directory ``path``.

        With ``save_async`` the call returns once the state has been copied. The state at the call is what gets written.
        """

    @abstractmethod
    def load(
        self,
        path: str,
        state: dict[str, Any],
        *,
        strict_model: bool = True,
        extra_state_skeleton: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Fill ``state``'s tensors in place from ``path`` and return this rank's extra state.

        A backend that can't fill in place returns the whole payload instead, as ``save`` was given it.

        Args:
            path: a step directory.
            state: nested dicts of tensors with the shapes and dtypes of the checkpoint; other leaves are replaced.
            strict_model: a model key that is missing in the checkpoint is an error.
            extra_state_skeleton: the keys of the training state that must be read; None reads no training state and returns
                an empty dict. ``mesh`` has the mesh of this run. What is returned there is that of the run which saved, as it
                was in the training state that was saved.
        """

    def add_listener(self, listener: SaveListener) -> None:
        """Call ``listener`` with every :class:`SaveEvent`, on every rank, in the thread in which the event happens."""
        self.listeners = (*self.listeners, listener)

    def try_save(self, checkpoint_dir: str, state: dict[str, Any]) -> None:  # noqa: B027  optional
        """Check at the start of a run that ``state`` could be saved below ``checkpoint_dir``. Every rank calls it.

        It writes no checkpoint and copies no tensor. By default, nothing is checked.

        Raises:
            CheckpointSaveError: ``checkpoint_dir`` can't be written; on every rank.
            StateNotPlainError: ``state`` can't be saved; on every rank.
        """

    def check_names(self, checkpoint_dir: str, is_planned: Callable[[int], bool]) -> None:  # noqa: B027  optional
        """Check at the start of a run that no planned save would replace what is not its own. Every rank calls it.

        It changes nothing. By default, nothing is checked.

        Args:
            checkpoint_dir: the root, which may not exist yet.
            is_planned: whether this run plans to save a step.

        Raises:
            CheckpointSaveError: something that is no save has the name of a planned step; on every rank.
        """

    def begin_run(self, checkpoint_dir: str, *, restored_from: str | None) -> None:  # noqa: B027  optional
        """Announce that this run will save below ``checkpoint_dir``. Every rank calls it once.

        Args:
            checkpoint_dir: the root, which holds the step directories.
            restored_from: the step directory that the run continues; None for a start from scratch.

        Raises:
            CheckpointLockedError: another run saves there.
        """

    def maybe_wait_for_async_save(self) -> None:
        """Wait for the background save, if one is running, and raise its error."""
        return

    def has_checkpoint(self, path: str) -> bool:
        """Return whether something may be loaded from ``path``, for an early error; by default, ``load`` decides."""
        return True

    def find_latest_checkpoint(self, checkpoint_dir: str) -> str | None:
        """Return the newest complete step directory under ``checkpoint_dir``, or None if there is none."""
        raise NotImplementedError(f"{type(self).__name__} can't search for the newest checkpoint")

    def describe_run(self, path: str) -> Mapping[str, Any] | None:
        """Return what the run that saved ``path`` is made of (``run`` in its training state); None if it isn't known.

        Every rank calls it, right before a :meth:`load` that reads no training state.
        """
        return None

    def describe(self, path: str) -> Mapping[str, torch.Tensor | None] | None:
        """Describe the entries of the step directory, without reading tensors.

        Returns:
            flattened entry name (``model.layers.0.weight``) -> a meta tensor with the global shape and dtype, or None for an
            entry that is not a tensor. None in place of the mapping if the backend can't tell; the caller then initializes
            the optimizer state before the load.
        """
        return None


class CheckpointerRegistry:
    """Storage backends by name. ``@CHECKPOINTER_REGISTRY.register("name")`` adds one.

    A package adds one without being imported by an entry point of the group :data:`ENTRY_POINTS`.
    """

    def __init__(self) -> None:
        """Create an empty registry."""
        self._classes: dict[str, type[CheckpointerBase]] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Return a class decorator that registers the class as ``name``.

        Raises:
            ValueError: the name is taken by another class.
        """

        def decorate(cls: C) -> C:
            known = self._classes.get(name)
            if known is not None and known is not cls:
                raise ValueError(f"checkpointer name {name!r} is taken by {known.__qualname__}")
            self._classes[name] = cls
            return cls

        return decorate

    def get(self, name: str) -> type[CheckpointerBase]:
        """Return the class that is registered as ``name``.

        Raises:
            KeyError: the name is unknown; the message lists the registered names.
            Exception: what the import of an entry point raises.
        """
        if name not in self._classes:
            for entry_point in entry_points(group=ENTRY_POINTS, name=name):
                self.register(name)(entry_point.load())
        try:
            return self._classes[name]
        except KeyError:
            raise KeyError(f"no checkpointer named {name!r}; registered: {', '.join(self.names())}") from None

    def names(self) -> list[str]:
        """Return the names that are registered or offered by entry points, sorted."""
        return sorted({*self._classes, *(entry_point.name for entry_point in entry_points(group=ENTRY_POINTS))})


CHECKPOINTER_REGISTRY = CheckpointerRegistry()


def build_checkpointer(ckpt_manager: str = "dcp", **kwargs: Any) -> CheckpointerBase:
    """Create the backend registered as ``ckpt_manager`` with ``kwargs`` (for ``dcp``: ``extra_state_per_rank=...``)."""
    return CHECKPOINTER_REGISTRY.get(ckpt_manager)(**kwargs)

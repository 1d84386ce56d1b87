"""What a storage backend is, and how one is chosen by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch

C = TypeVar("C", bound="type[CheckpointerBase]")


@dataclass(frozen=True, kw_only=True)
class SaveEvent:
    """What a save has reached.

    ``staged``: the state at the call is safe from later changes. ``written``: every rank's bytes are on the device, under a
    name that does not count yet. ``durable``: it is committed, survives a power cut, and LATEST means it; retention deletes
    after that. ``failed``: it was given up. ``seconds`` counts from the call of ``save``; ``at`` is UTC, ISO 8601.
    """

    state: Literal["staged", "written", "durable", "failed"]
    global_step: int
    path: str
    seconds: float
    at: str


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What the last load of this rank found.

    ``saved`` and ``loaded`` are digests by bucket of this rank's part: at the save, and of what was read. ``saved`` is empty
    where the checkpoint has none, or was saved by another number of ranks or on another mesh. ``unread`` names entries of the
    checkpoint that nothing asked for.
    """

    path: str
    step: int | None
    verified: Literal["digest", "size", "no manifest"]
    saved: Mapping[str, str]
    loaded: Mapping[str, str]
    unread: tuple[str, ...]


SaveListener = Callable[[SaveEvent], None]
# (state as read, this rank's training state) -> None, or an error.
LoadCheck = Callable[[Mapping[str, Any], Mapping[str, Any]], None]


class CheckpointerBase(ABC):
    """How a payload becomes a durable directory and comes back. Knows no trainer.

    A payload is ``{"model": {...}, "optimizer": {...}, "extra_state": {...}}``, each part optional. ``save`` and ``load``
    are collective: every rank calls them in the same order.

    Attributes:
        check_loaded: where it is set, a backend that reads into buffers of its own calls it on every rank with what was read,
            before it writes to ``state``; what it raises is raised on all ranks, and nothing of ``state`` is changed.
        last_bucket_digests: bucket -> digest of this rank's part, as the last save took it; None before the first.
        last_load: see :class:`LoadReport`; None before the first load, and where the backend does not say.
    """

    listeners: tuple[SaveListener, ...] = ()
    check_loaded: LoadCheck | None = None
    last_bucket_digests: Mapping[str, str] | None = None
    last_load: LoadReport | None = None
    accepts_metrics: ClassVar[bool] = False

    @abstractmethod
    def save(self, path: str, state: dict[str, Any], *, global_step: int, save_async: bool = False) -> None:
        """Write ``state`` as the step directory ``path``.

        With ``save_async`` it returns once the state has been copied; what is written is the state at the call.
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

        Args:
            path: a step directory.
            state: nested dicts of tensors of the right shape and type; non-tensor leaves are replaced.
            strict_model: a model key that the checkpoint lacks is an error.
            extra_state_skeleton: the keys of the training state that must be read back; None reads none and returns
                an empty dict.
        """

    def add_listener(self, listener: SaveListener) -> None:
        """Tell ``listener`` of every :class:`SaveEvent`, on every rank, in the thread where it happens."""
        self.listeners = (*self.listeners, listener)

    def begin_run(self, checkpoint_dir: str, *, restored_from: str | None) -> None:  # noqa: B027  optional
        """Say, once and on every rank, that this run will save below ``checkpoint_dir``.

        Args:
            checkpoint_dir: the root.
            restored_from: the step directory that the run goes on from; None for a start from scratch.

        Raises:
            CheckpointLockedError: another run saves there.
        """

    def maybe_wait_for_async_save(self) -> None:
        """Wait for the save in flight, if there is one, and raise its failure."""
        return

    def find_latest_checkpoint(self, checkpoint_dir: str) -> str | None:
        """Return the newest complete step directory under ``checkpoint_dir``, or None where there is none."""
        raise NotImplementedError(f"{type(self).__name__} can't search for the newest checkpoint")

    def describe(self, path: str) -> Mapping[str, torch.Tensor | None] | None:
        """Say what the step directory holds, without reading its tensors.

        Returns:
            flattened entry name (``model.layers.0.weight``) to a meta tensor of the global shape and type, or to None
            for an entry that is no tensor. None where the backend can't tell; the optimizer's state is then created
            before the load instead of after the checkpoint's own description.
        """
        return None


class CheckpointerRegistry:
    """Backends by name. ``@CHECKPOINTER_REGISTRY.register("name")`` adds one."""

    def __init__(self) -> None:
        """Start empty."""
        self._classes: dict[str, type[CheckpointerBase]] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Return a class decorator that files the class under ``name``.

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
        """Return the class filed under ``name``.

        Raises:
            KeyError: no such name; the message lists the names that exist.
        """
        try:
            return self._classes[name]
        except KeyError:
            raise KeyError(f"no checkpointer named {name!r}; registered: {', '.join(self.names())}") from None

    def names(self) -> list[str]:
        """Return the registered names, sorted."""
        return sorted(self._classes)


CHECKPOINTER_REGISTRY = CheckpointerRegistry()


def build_checkpointer(ckpt_manager: str = "dcp", **kwargs: Any) -> CheckpointerBase:
    """Construct the backend registered as ``ckpt_manager`` with ``kwargs`` (``extra_state_per_rank=...`` for ``dcp``)."""
    return CHECKPOINTER_REGISTRY.get(ckpt_manager)(**kwargs)

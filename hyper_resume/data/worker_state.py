"""Random streams of a torch loader's workers, without reading anything twice.

``collate_fn`` runs in the worker, behind the reads of the batch. A wrapper around it sends the worker's state along with the
batch, so that the main process knows, of each worker, the state behind its last consumed batch. At a resume each worker starts
from there: behind torch's seeding and the user's ``worker_init_fn``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from hyper_resume.data.held_state import HeldState
from hyper_resume.data.streams import pack_streams, unpack_streams
from hyper_resume.data.worker_signals import ignore_signals

WorkerState = dict[str, Any]
"""``streams`` (bytes) and ``held`` (the generators and counters of the worker's copy of the dataset); plain values."""


class CarriedBatch(NamedTuple):
    """What a worker sends: a tuple, so that a batch in it is pinned as it would be alone."""

    batch: Any
    state: WorkerState


class CarryingCollate:
    """A ``collate_fn`` that sends the worker's state with the batch.

    Args:
        collate_fn: the loader's own.
        initial: the dataset's counters as the main process found them first.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], initial: Mapping[str, int | float]) -> None:
        """Find the dataset's generators when the first batch is made, in the worker."""
        self._collate_fn = collate_fn
        self._initial = initial
        self._held: HeldState | None = None

    def __call__(self, samples: Any) -> CarriedBatch:
        """Collate, then note the state."""
        batch = self._collate_fn(samples)
        if self._held is None:
            self._held = _held_by_dataset(self._initial)
        return CarriedBatch(batch, {"streams": pack_streams(), "held": self._held.collect()})


class WorkerStart:
    """A ``worker_init_fn`` that puts the worker where it was.

    Args:
        worker_init_fn: the user's, called first; may be None.
        states: of each worker by number, None for one that starts afresh.
        initial: the dataset's counters as the main process found them first.
        ignored_signals: names of signals that the worker ignores (see :mod:`hyper_resume.data.worker_signals`).
    """

    def __init__(
        self,
        worker_init_fn: Callable[[int], None] | None,
        states: Sequence[WorkerState | None],
        initial: Mapping[str, int | float],
        ignored_signals: Sequence[str],
    ) -> None:
        """Runs in the worker, before it reads."""
        self._ignored_signals = ignored_signals
        self._worker_init_fn = worker_init_fn
        self._states = list(states)
        self._initial = initial

    def __call__(self, worker_id: int) -> None:
        """Start worker ``worker_id``."""
        ignore_signals(self._ignored_signals, worker_id)
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)
        state = self._states[worker_id]
        if state is not None:
            _held_by_dataset(self._initial).put(state["held"])
            unpack_streams(state["streams"])


def _held_by_dataset(initial: Mapping[str, int | float]) -> HeldState:
    info = get_worker_info()
    assert info is not None  # only called in a worker
    return HeldState({"dataset": info.dataset}, initial)

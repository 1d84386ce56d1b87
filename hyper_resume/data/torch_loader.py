"""Positions in a torch ``DataLoader`` over a map-style dataset; consumed batches are passed over without being read.

The order of an epoch comes from the random streams, the generators and the counters as they were before its iterator was made.
A resume puts them back, makes the iterator in the same way, takes the consumed index batches from the sampler, and then puts
everything where it was when the checkpoint was written. See :mod:`hyper_resume.data.worker_state` for the workers.

torch makes its iterator in ``loader._get_iterator()``. While a pass is open that name is set on the loader itself, so that a
subclass whose ``__iter__`` wraps torch's (accelerate's) is served as well, and persistent workers stay the loader's own.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hyper_resume.data.drawn_indices import DrawnIndices, sampler_name
from hyper_resume.data.held_state import HeldState
from hyper_resume.data.passes import Pass, length_of, set_epoch_everywhere
from hyper_resume.data.streams import put_streams, read_streams
from hyper_resume.data.worker_state import CarriedBatch, CarryingCollate, WorkerStart, WorkerState


class MapSource:
    """Opens passes over a torch loader, and keeps what outlives a pass.

    Args:
        loader: what the user iterates.
        base: the torch ``DataLoader`` in it, or the same object.
        device_type: the kind of device whose stream is put back with the host's.
        ignored_signals: names of signals that the workers ignore.
    """

    kind = "torch map-style"

    def __init__(self, loader: Any, base: Any, device_type: str, ignored_signals: Sequence[str] = ()) -> None:
        """Note the counters of samplers and dataset as they are now."""
        self.loader = loader
        self.base = base
        self.device_type = device_type
        self.ignored_signals = tuple(ignored_signals)
        # accelerate reads one batch ahead of what it returns.
        self.reads_ahead = loader is not base
        self.is_persistent = bool(base.persistent_workers and base.num_workers > 0)
        self.sampler_key = "batch_sampler" if base.batch_sampler is not None else "sampler"
        self.held = HeldState(
            {
                "generator": base.generator,
                "synchronized_generator": getattr(loader, "synchronized_generator", None),
                "sampler": base.sampler,
                "batch_sampler": base.batch_sampler,
                "dataset": base.dataset,
            }
        )
        self.dataset_counters = {
            path: value for path, value in self.held.initial.items() if path.startswith("dataset.")
        }
        # The state of each worker behind the last batch of it that came to this process.
        self.latest: list[WorkerState | None] = [None] * base.num_workers
        # The streams before persistent workers were started; they decide the workers' seed for all epochs.
        self.birth: Mapping[str, Any] | None = None
        # Held weakly, because a pass holds this object; see DrawnIndices for why there must be no cycle.
        self._current: weakref.ref[MapPass] | None = None
        self._indices: DrawnIndices | None = None

    def open(self, epoch: int, restored: Mapping[str, Any] | None, *, goes_on: bool) -> MapPass:
        """Begin ``epoch``, or go on in it behind what ``restored`` had consumed."""
        self.settle()
        opened = MapPass(self, epoch, restored, goes_on=goes_on)
        self._current, self._indices = weakref.ref(opened), opened.indices
        return opened

    def between(self) -> dict[str, Any]:
        """What the next epoch depends on, between two passes."""
        self.settle()
        return {"held": self.held.collect(), **self.worker_parts(self.latest)}

    def worker_parts(self, states: list[WorkerState | None]) -> dict[str, Any]:
        """The part of a state that persistent workers add."""
        return {"workers": list(states), "birth": self.birth} if self.is_persistent else {}

    def settle(self) -> None:
        """Take in what persistent workers still read for a pass that was left early; nothing new is given to them."""
        iterator = self.base._iterator if self.is_persistent else None
        if iterator is None or self._indices is None or self._open_pass() is not None:
            return
        self._indices.is_held = True
        waiting = -1
        while iterator._task_info and waiting != len(iterator._task_info):
            waiting = len(iterator._task_info)
            try:
                iterator._next_data()
            except StopIteration:
                break
            except Exception:  # noqa: BLE001 - a batch that nobody takes
                continue

    def arrive(self, worker: int, state: WorkerState) -> None:
        """A worker's batch has come to this process."""
        self.latest[worker] = state
        current = self._open_pass()
        if current is not None:
            current.arrive(worker, state)

    def _open_pass(self) -> MapPass | None:
        current = self._current() if self._current is not None else None
        return current if current is not None and current.is_open else None

    def describe(self) -> dict[str, Any]:
        """What the position is a position in; plain values."""
        moved = self.held.collect()["counters"]
        options = {
            path: value
            for path, value in self.held.initial.items()
            if path not in moved and path.startswith(("sampler.", "batch_sampler."))
        }
        return {
            "sampler": sampler_name(self.base.__dict__[self.sampler_key]),
            "samples": length_of(self.base.dataset),
            "batches": length_of(self.base.__dict__[self.sampler_key]),
            "num_workers": self.base.num_workers,
            **options,
        }

    def start(self) -> dict[str, Any]:
        """The streams, generators and counters as they are now."""
        return {"streams": read_streams(self.device_type), "held": self.held.collect()}

    def put(self, start: Mapping[str, Any]) -> None:
        """Put back what :meth:`start` returned."""
        self.held.put(start["held"])
        put_streams(start["streams"], self.device_type)


class MapPass(Pass):
    """One pass over an epoch of a torch loader, or over what is left of it."""

    def __init__(self, source: MapSource, epoch: int, restored: Mapping[str, Any] | None, *, goes_on: bool) -> None:
        """Make the iterator; of a loader that makes it late, everything but that."""
        self._source = source
        self._epoch = epoch
        self._saved = restored if goes_on else None
        self.is_open = True
        self._live: Any = None
        # What comes back when the replay is done.
        self._streams_now = read_streams(source.device_type)
        self._ahead: deque[dict[str, Any]] = deque()
        self._arrived: deque[tuple[int, WorkerState]] = deque()
        base, workers = source.base, source.base.num_workers
        self._workers: list[WorkerState | None] = list(source.latest) if source.is_persistent else [None] * workers
        saved_birth = None
        if restored is not None:
            if not goes_on:
                source.held.put(restored["held"])
            # Without one the epoch that was saved was the first of the workers.
            saved_birth = restored.get("birth") or (None if goes_on else restored.get("start"))
            states = restored.get("workers", [])
            if not goes_on:
                states = restored.get("workers_at_end", states) if source.is_persistent else []
            if len(states) == workers:
                self._workers, source.latest = list(states), list(states)
        self._start = self._saved["start"] if self._saved is not None else source.start()
        self._birth = (saved_birth if source.is_persistent else None) or self._start
        self.indices = DrawnIndices(base.__dict__[source.sampler_key], self)
        if self._saved is not None:
            source.put(self._start)
        set_epoch_everywhere(source.loader, epoch)
        base.__dict__["_get_iterator"] = self._make_iterator
        if source.is_persistent and base._iterator is not None:
            # torch goes on with the iterator that it has, which knows the indices of the pass that made it.
            base._iterator._index_sampler = self.indices
        try:
            self._batches: Iterator[Any] = iter(source.loader)
        except BaseException:
            self.close()
            raise

    @property
    def sample_ids(self) -> list[int]:
        """Dataset indices of the batch last returned."""
        return self.indices.sample_ids

    def __next__(self) -> Any:
        """The next batch."""
        batch = next(self._batches)
        self.indices.consume()
        if self._arrived:
            worker, state = self._arrived.popleft()
            self._workers[worker] = state
        if self._ahead:
            self._ahead.popleft()
        return batch

    def is_over(self, consumed: int, length: int | None) -> bool:
        """Whether the batch last returned was the epoch's last, as far as that is known."""
        if self.indices.exhausted or self._source.base.num_workers > 0 or self._source.reads_ahead:
            return self.indices.exhausted and self.indices.drawn == self.indices.consumed
        return length is not None and consumed >= length

    def state(self) -> dict[str, Any]:
        """What a resume behind the batch last returned needs; plain values and tensors."""
        source = self._source
        parts = source.worker_parts(self._workers)
        if parts.get("birth") is self._start:
            # Then both are put back at once.
            parts["birth"] = None
        if not self.is_open and source.is_persistent:
            source.settle()
            parts["workers_at_end"] = list(source.latest)
        return {
            "start": self._start,
            "held": source.held.collect(),
            "drawn": self.indices.drawn,
            "drawn_digest": self.indices.drawn_digest,
            "consumed_digest": self.indices.consumed_digest,
            "ahead": list(self._ahead)[: self.indices.drawn - self.indices.consumed],
            "workers": list(self._workers),
            **parts,
        }

    def close(self) -> None:
        """Stop workers that don't outlive the pass."""
        self.is_open = False
        self._batches = iter(())
        base = self._source.base.__dict__
        if base.get("_get_iterator") == self._make_iterator:
            del base["_get_iterator"]
        live, self._live = self._live, None
        if live is not None and not self._source.is_persistent and hasattr(live, "_shutdown_workers"):
            live._shutdown_workers()

    # ---- the making of torch's iterator ----------------------------------------------------------------------------

    def _make_iterator(self) -> Any:
        """What torch calls to make its iterator, once in a pass; a replay that fails leaves the streams as they were."""
        try:
            return self._make_and_replay()
        except BaseException:
            if self._saved is not None:
                put_streams(self._streams_now, self._source.device_type)
            raise

    def _make_and_replay(self) -> Any:
        source, saved = self._source, self._saved
        base = source.base
        # With workers torch would take the first indices while it makes the iterator, before the offset can be set.
        self.indices.is_held = base.num_workers > 0 and (saved is not None or self._birth is not self._start)
        if self._birth is not self._start:
            source.put(self._birth)
        live = self._make_with_wrappers()
        self._live = live
        if source.is_persistent:
            source.birth = self._birth
        if self.indices.is_held:
            self.indices.is_held = False
            skipped = saved["batches_consumed"] if saved is not None else 0
            if saved is not None:
                self.indices.skip(saved, skipped)
            for _ in range(skipped % base.num_workers):
                next(live._worker_queue_idx_cycle)
            for _ in range(base.prefetch_factor * base.num_workers):
                live._try_put_index()
        elif saved is not None:
            self.indices.skip(saved, saved["batches_consumed"])
        if saved is not None:
            self._put_back(saved)
        return live

    def _make_with_wrappers(self) -> Any:
        source = self._source
        base = source.base
        own: dict[str, Any] = {source.sampler_key: self.indices}
        if base.num_workers > 0:
            counters = source.dataset_counters
            own["collate_fn"] = CarryingCollate(base.collate_fn, counters)
            own["worker_init_fn"] = WorkerStart(base.worker_init_fn, self._workers, counters, source.ignored_signals)
        # torch's loader forbids the assignment, because an iterator that lives does not follow it.
        before = {name: base.__dict__[name] for name in own}
        base.__dict__.update(own)
        try:
            live = type(base)._get_iterator(base)
        finally:
            base.__dict__.update(before)
        if base.num_workers > 0:
            _unwrap_batches(live, source)
        return live

    def _put_back(self, saved: Mapping[str, Any]) -> None:
        """The replay is done: from here on everything is as it was when the checkpoint was written."""
        if saved["ahead"]:
            self._source.put(saved["ahead"][0])
            return
        if self.indices.drawn == saved["drawn"]:
            # Only a sampler that stands where it stood: with other workers it has been asked for fewer indices, or more.
            self._source.held.put(saved["held"])
        put_streams(self._streams_now, self._source.device_type)

    def before_iteration(self, made: int) -> None:
        """Part of :class:`~hyper_resume.data.drawn_indices.IndexOwner`."""
        if made == 1 and self._birth is not self._start:
            # torch asks for the second time when the workers run: from here on it is this epoch, not the first.
            self._source.put(self._start)
            set_epoch_everywhere(self._source.loader, self._epoch)

    def before_draw(self, number: int) -> None:
        """Only for a loader that reads ahead in this process: note, or put back, what each read ahead begins with."""
        if not self._source.reads_ahead or self._source.base.num_workers > 0:
            return
        saved = self._saved
        if saved is not None:
            at = number - saved["batches_consumed"]
            if at < 0:
                return
            if at < len(saved["ahead"]):
                self._source.put(saved["ahead"][at])
            elif at == len(saved["ahead"]):
                self._source.held.put(saved["held"])
                put_streams(self._streams_now, self._source.device_type)
        self._ahead.append(self._source.start())

    def arrive(self, worker: int, state: WorkerState) -> None:
        """A worker's batch of this pass has come to this process; training gets it now or later."""
        self._arrived.append((worker, state))


def _unwrap_batches(live: Any, source: MapSource) -> None:
    """Let torch's iterator return plain batches, and note the state that came with each.

    It must not hold the source, which holds the loader, which holds the iterator (see :class:`DrawnIndices`).
    """
    live_reference, source_reference = weakref.ref(live), weakref.ref(source)

    def process(data: Any, worker: int, *further: Any) -> Any:
        iterator: Any = live_reference()
        result = type(iterator)._process_data(iterator, data, worker, *further)
        if not isinstance(result, CarriedBatch):
            return result
        owner = source_reference()
        if owner is not None:
            owner.arrive(worker, result.state)
        return result.batch

    live._process_data = process

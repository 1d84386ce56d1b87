"""One resume protocol for any loop and any loader: batches epoch by epoch, with a position that is restored exactly.

    position = ResumableLoader(loader)
    ...                                     # a restore: position.load_state_dict(state), then the random streams
    for epoch in range(position.start_epoch, epochs):
        for batch in position.batches(epoch):
            train(batch)
            save(position.state_dict())     # between any two batches

A run that was never interrupted is, bit for bit, the run of the plain loop ``for batch in loader``: the same batches, and the
same random streams before each of them. ``set_epoch(epoch)`` is called on the loader, its samplers and its dataset where they
have it.

How a position comes back depends on the loader:

* torch ``DataLoader`` over map-style data, torchdata's ``StatefulDataLoader`` over it, and both prepared by accelerate: the
  order is drawn again, consumed batches are passed over and not read, workers go on with their random streams, generators and
  counters of samplers and dataset come back.
* :class:`hyper_resume.data.DataLoader`, and other loaders with ``state_dict`` and ``load_state_dict``: their own state.
* iterable data in a torch ``DataLoader``, and every other iterable: read again and dropped up to the position.

Out of reach, and exact only if the data does not depend on it: what a dataset keeps for itself other than generators and
numbers (caches, open files, shared memory), and streams that iterable data shares with the training (see ``doubts``).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from hyper_resume.data.loader_kinds import source_of, standing_doubts, unsupported
from hyper_resume.data.other_loaders import OwnSource
from hyper_resume.data.passes import Pass, Source, length_of
from hyper_resume.data.saved_state import is_non_negative_int
from hyper_resume.errors import CheckpointMismatchError, ConfigError, UnsupportedError, describe

logger = logging.getLogger(__name__)

_VERSION = 1
_KEYS = ("version", "kind", "epoch", "batches_consumed", "finished", "loader")
# The pass that reads each loader now, by the loader's id: an older one must not go on.
_reading: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()


class ResumableLoader:
    """A loader with an exact position.

    Args:
        loader: a torch ``DataLoader``, a loader with ``state_dict`` and ``load_state_dict``, or any iterable that can be read
            once an epoch. It is not to be iterated by others while a pass over it is open.
        device_type: the kind of device ("cpu", "cuda", "npu") whose random stream is put back along with the host's.
        ignored_signals: names of signals that the workers of a torch loader over map-style data ignore, because training saves
            and ends when it receives them.

    Raises:
        UnsupportedError: the loader can't be resumed; the message says why.
    """

    def __init__(self, loader: Any, *, device_type: str = "cpu", ignored_signals: Sequence[str] = ()) -> None:
        """Find out what kind of loader it is. Nothing is read, and no stream moves."""
        if isinstance(loader, ResumableLoader):
            raise unsupported(loader, "it is a ResumableLoader already", "use it as it is")
        self.loader = loader
        self._source: Source = source_of(loader, device_type, ignored_signals)
        self._epoch = 0
        self._consumed = 0
        self._finished = False
        self._pass: Pass | None = None
        # A state that was loaded and that no pass has begun from yet.
        self._restored: dict[str, Any] | None = None
        self._trusts_length = True
        self._doubts = standing_doubts(loader, self._source)
        self._before_next_batch: Callable[[bool], None] | None = None

    def __len__(self) -> int:
        """Batches of a whole epoch.

        Raises:
            TypeError: the loader has no length.
        """
        return len(self.loader)

    @property
    def kind(self) -> str:
        """How the position comes back: "torch map-style", "hyper_resume", "stateful" or "replayed"."""
        return self._source.kind

    @property
    def epoch(self) -> int:
        """The epoch of the position, from 0."""
        return self._epoch

    @property
    def batches_consumed(self) -> int:
        """Batches of this epoch returned, in all processes that had a part in it."""
        return self._consumed

    @property
    def finished(self) -> bool:
        """Whether the epoch is known to be over. Where the length is unknown that shows only when the pass ends."""
        return self._finished

    @property
    def start_epoch(self) -> int:
        """The epoch to go on with: the next one when this one is finished."""
        return self._epoch + 1 if self._finished else self._epoch

    @property
    def sample_ids(self) -> list[int]:
        """Dataset indices of the batch last returned; empty where the loader doesn't give them."""
        return self._pass.sample_ids if self._pass is not None else []

    @property
    def doubts(self) -> list[str]:
        """Why the position that was restored, or this loader, might not be exact; empty when it is."""
        return list(self._doubts)

    def before_next_batch(self, action: Callable[[bool], None]) -> None:
        """Call ``action(within)`` once, right before the next batch is read, before anything of this loader draws.

        ``within`` is True where that batch continues an epoch, False where it is an epoch's first.
        """
        self._before_next_batch = action

    def batches(self, epoch: int) -> Generator[Any, None, None]:
        """Give the batches of ``epoch``, or of what is left of it in the first pass after :meth:`load_state_dict`.

        A pass that was left early is over: the next call reads its epoch from the start, as a plain loop does. After a restore
        in the middle of an epoch the random streams of this process are, at the first batch, those that were found when the
        pass began; they may therefore be restored before it, in any order.

        Args:
            epoch: from 0 up; after a restore not before :attr:`start_epoch`, a finished epoch gives no batch.

        Raises:
            ConfigError: ``epoch`` is no whole number from 0 up, or lies before the position that was restored.
            CheckpointMismatchError: the loader does not give again what was consumed.
            UnsupportedError: another pass over the same loader was begun while this one was open.
        """
        if not is_non_negative_int(epoch):
            raise ConfigError(describe("batches() needs an epoch from 0 up", found=repr(epoch)))
        return self._read(epoch)

    def _read(self, epoch: int) -> Generator[Any, None, None]:
        goes_on = self._restored is not None and epoch == self._epoch
        self._announce(within=goes_on and self._consumed > 0 and not self._finished)
        current = self._begin(epoch)
        if current is None:
            return
        length = length_of(self.loader)
        try:
            while True:
                if _reading.get(id(self.loader)) is not current:
                    raise _two_loops(self.loader)
                if not self._finished:
                    self._announce(within=True)
                try:
                    batch = next(current)
                except StopIteration:
                    break
                self._consumed += 1
                self._watch_length(length)
                self._finished = current.is_over(self._consumed, length if self._trusts_length else None)
                yield batch
            self._finished = True
        finally:
            current.close()

    def _announce(self, *, within: bool) -> None:
        action, self._before_next_batch = self._before_next_batch, None
        if action is not None:
            action(within)

    def state_dict(self) -> dict[str, Any]:
        """The position as of the batch last returned: plain values and tensors. Reads nothing, moves no stream.

        May be called between any two batches, before the first and after the last of an epoch.
        """
        if self._restored is not None:
            return dict(self._restored)
        inner = self._pass is not None and not self._finished
        parts = self._pass.state() if inner and self._pass is not None else self._source.between()
        if isinstance(self._source, OwnSource):
            return parts
        return {
            "version": _VERSION,
            "kind": self.kind,
            "epoch": self._epoch,
            "batches_consumed": self._consumed,
            "finished": self._finished,
            "loader": self._source.describe(),
            "begun": inner,
            **parts,
        }

    def changes_since(self, state: Mapping[str, Any]) -> list[str]:
        """Return what differs between this loader and the one that was saved, as ``name: saved -> now``."""
        if isinstance(self._source, OwnSource):
            return list(self._source.changes_since(state))
        now = self._source.describe()
        saved: Mapping[str, Any] = state["loader"]
        return [
            f"{name}: {value} -> {now[name]}" for name, value in saved.items() if name in now and now[name] != value
        ]

    def doubts_about(self, state: Mapping[str, Any]) -> list[str]:
        """Return why this loader would not go on exactly from ``state``; nothing is changed.

        Raises:
            CheckpointMismatchError: it can't go on from it at all, as :meth:`load_state_dict` would say.
        """
        changes = self.changes_since(state) if isinstance(self._source, OwnSource) else self._checked_changes(state)
        found = [f"the data loader has changed since the checkpoint ({'; '.join(changes)})"] if changes else []
        found += [
            f"the {name} stream is drawn from by the data loader and by training in turn, and the loader is read again without "
            "training: give the dataset a generator of its own, or workers"
            for name in state.get("drawn_between", ())
        ]
        return [*standing_doubts(self.loader, self._source), *found]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved position with the next call of :meth:`batches`; a pass that is open is ended. Nothing is read.

        Raises:
            CheckpointMismatchError: the state is of another kind of loader, or a position in other data. Nothing is changed.
        """
        if isinstance(self._source, OwnSource):
            self._source.load(state)
            self._end_pass()
            self._epoch, self._consumed = self._source.position()
            self._finished = self._consumed >= len(self.loader)
            self._restored = self._source.between()
            return
        self._doubts = self.doubts_about(state)
        for doubt in self._doubts:
            logger.warning("%s", doubt)
        self._end_pass()
        self._restored = dict(state)
        self._epoch, self._consumed, self._finished = state["epoch"], state["batches_consumed"], state["finished"]

    def _checked_changes(self, state: Mapping[str, Any]) -> list[str]:
        _check(state, self.kind)
        changes = self.changes_since(state)
        # The order does not depend on the workers.
        other_data = [change for change in changes if not change.startswith("num_workers:")]
        if other_data and state["begun"]:
            raise CheckpointMismatchError(
                describe(
                    "the data loader is not the one that was saved, and its position lies within an epoch",
                    where=f"epoch {state['epoch']}, {state['batches_consumed']} batches consumed",
                    found="; ".join(other_data),
                    do="build the loader as in the run that was saved, or resume from a checkpoint at an epoch's end",
                )
            )
        return changes

    def _begin(self, epoch: int) -> Pass | None:
        restored = self._restored
        if restored is not None and epoch < self._epoch:
            raise ConfigError(
                describe(
                    f"epoch {epoch} lies before the position that was restored",
                    expected=f"epoch {self.start_epoch} or a later one",
                    do="begin the loop over the epochs at start_epoch",
                )
            )
        if restored is not None and epoch == self._epoch and self._finished:
            logger.warning("epoch %d was finished before the restore: this pass has no batch", epoch)
            return None
        self._end_pass()
        older = _reading.get(id(self.loader))
        if older is not None:
            older.close()
        goes_on = restored is not None and epoch == self._epoch and restored.get("begun", True)
        self._pass = self._source.open(epoch, restored, goes_on=goes_on)
        _reading[id(self.loader)] = self._pass
        self._restored = None
        if not goes_on:
            self._epoch, self._consumed = epoch, 0
        self._finished = False
        return self._pass

    def _end_pass(self) -> None:
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    def _watch_length(self, length: int | None) -> None:
        if self._trusts_length and length is not None and self._consumed > length:
            self._trusts_length = False
            logger.warning("%s gives more batches than its length %d", type(self.loader).__name__, length)


def _check(state: Mapping[str, Any], kind: str) -> None:
    missing = [key for key in _KEYS if key not in state]
    if missing:
        found = f"no {', '.join(missing)}"
        do = "resume with the loader that was saved, without ResumableLoader if it was saved without"
        raise CheckpointMismatchError(describe("the saved data position can't be read", found=found, do=do))
    for key, expected in (("version", _VERSION), ("kind", kind)):
        if state[key] != expected:
            message = describe(
                "the saved data position is of another kind",
                where=key,
                expected=repr(expected),
                found=repr(state[key]),
                do="resume with the kind of loader that was saved",
            )
            raise CheckpointMismatchError(message)
    if not (
        is_non_negative_int(state["epoch"])
        and is_non_negative_int(state["batches_consumed"])
        and isinstance(state["finished"], bool)
    ):
        found = (
            f"epoch={state['epoch']!r}, batches_consumed={state['batches_consumed']!r}, finished={state['finished']!r}"
        )
        raise CheckpointMismatchError(describe("the saved data position can't be read", found=found))


def _two_loops(loader: Any) -> UnsupportedError:
    return UnsupportedError(
        describe(
            "a pass over this data loader goes on though another one was begun",
            where=type(loader).__name__,
            expected="one loop at a time",
            found="two",
            do="give each loop a loader of its own",
        )
    )

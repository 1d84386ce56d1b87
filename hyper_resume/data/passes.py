"""What a pass over one epoch of any loader can do, and what is common to all kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol


class Pass(Iterator[Any]):
    """One pass over an epoch, or over what is left of it. Making it makes the loader's iterator."""

    is_open: bool

    @property
    def sample_ids(self) -> list[int]:
        """Dataset indices of the batch last returned; empty where the loader doesn't give them."""
        return []

    def is_over(self, consumed: int, length: int | None) -> bool:
        """Whether batch number ``consumed`` (from 1) was the last, as far as that is known without reading on."""
        return length is not None and consumed >= length

    def state(self) -> dict[str, Any]:
        """What a resume behind the batch last returned needs, also after :meth:`close`; plain values and tensors."""
        raise NotImplementedError

    def close(self) -> None:
        """Read nothing more and end workers that the loader does not keep. May be called more than once."""
        raise NotImplementedError


class Source(Protocol):
    """One kind of loader. ``between`` and ``open`` are never called while a pass is open."""

    kind: str

    def open(self, epoch: int, restored: Mapping[str, Any] | None, *, goes_on: bool) -> Pass:
        """Begin ``epoch``.

        ``restored`` is given in the first pass after ``load_state_dict``: with ``goes_on`` this pass continues behind the
        ``batches_consumed`` of it, without it an earlier epoch was saved and this one begins afresh.
        """
        ...

    def between(self) -> dict[str, Any]:
        """What the next epoch needs when the last one is finished; plain values and tensors."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a position is a position in: name -> plain value."""
        ...


def set_epoch_everywhere(loader: Any, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` on the loader, its dataset and its samplers, once on each that has it."""
    waiting, seen = [loader], set()
    while waiting:
        item = waiting.pop(0)
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        set_epoch = getattr(item, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        waiting.extend(getattr(item, name, None) for name in ("base_dataloader", "dataset", "batch_sampler", "sampler"))


def length_of(sized: Any) -> int | None:
    """The length, None where there is none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None

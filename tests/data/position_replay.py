"""Snapshot a loader at every position, restore each snapshot in a fresh loader, compare everything that follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from hyper_resume.data import DataLoader


class Pass(Protocol):
    """One pass over an epoch: the loader's own iterator, or a HyperIter around it."""

    sample_ids: list[int]

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Handed:
    """A batch as training got it, and the state that a checkpoint would have taken then (as text: nothing is shared)."""

    batch: Any
    sample_ids: list[int]
    state: str


def read(loader: DataLoader, epochs: int, open_pass: Callable[[DataLoader], Pass]) -> Iterator[Handed]:
    """Everything from the loader's position to the end of epoch ``epochs - 1``."""
    while (loader.epoch, loader.batches_consumed) < (epochs - 1, len(loader)):
        reading = open_pass(loader)
        try:
            for batch in reading:
                yield Handed(batch, list(reading.sample_ids), json.dumps(reading.state_dict(), sort_keys=True))
        finally:
            reading.close()


def assert_resumes_exactly_at_every_position(
    make_loader: Callable[[], DataLoader], epochs: int, open_pass: Callable[[DataLoader], Pass] = iter
) -> list[Handed]:
    """Resume at each position, and once more a batch later; return the uninterrupted run."""
    whole = list(read(make_loader(), epochs, open_pass))
    assert len(whole) == epochs * len(make_loader())
    for position, stopped_at in enumerate(whole):
        resumed = make_loader()
        resumed.load_state_dict(json.loads(stopped_at.state))
        assert json.dumps(resumed.state_dict(), sort_keys=True) == stopped_at.state
        rest = read(resumed, epochs, open_pass)
        one_later = next(rest, None)
        rest.close()
        assert [one_later] == (whole[position + 1 : position + 2] or [None])
        if one_later is not None:
            again = make_loader()
            again.load_state_dict(json.loads(one_later.state))
            assert list(read(again, epochs, open_pass)) == whole[position + 2 :]
        if position % 2 == 0:
            # From the loader that was interrupted itself, in the same process.
            assert list(read(resumed, epochs, open_pass)) == whole[position + 2 :]
    return whole

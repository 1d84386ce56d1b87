"""Run a loop, stop it at every position, resume each stop with a new loader, and compare everything that follows."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hyper_resume.data.resumable import ResumableLoader
from hyper_resume.state.rng import apply_rng, collect_rng


@dataclass(frozen=True)
class Step:
    """A batch as the loop's body got it, and what the three global streams give right then."""

    epoch: int
    batch: str
    drawn: tuple[float, float, float]


@dataclass(frozen=True)
class Stop:
    """A checkpoint: how many steps were behind it, the position and the random streams, as a file holds them."""

    steps: int
    epoch: int
    content: bytes


Hook = Callable[[ResumableLoader, int, int], None]


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def draw() -> tuple[float, float, float]:
    """What a training step draws, as dropout does."""
    return (torch.rand(()).item(), random.random(), float(np.random.rand()))


def peek() -> tuple[float, float, float]:
    """What the streams would give next."""
    streams = collect_rng("cpu")
    try:
        return draw()
    finally:
        apply_rng(streams, "cpu")


def body(epoch: int, batch: Any, *, draws: bool) -> Step:
    drawn = draw() if draws else peek()
    return Step(epoch, repr(batch), drawn)


def plain_run(
    make: Callable[[], Any], epochs: int, set_epoch: Callable[[Any, int], None], *, draws: bool
) -> list[Step]:
    """The loop that everybody writes."""
    seed_everything(11)
    loader, steps = make(), []
    for epoch in range(epochs):
        set_epoch(loader, epoch)
        for batch in loader:
            steps.append(body(epoch, batch, draws=draws))
    return steps


def take(position: ResumableLoader, steps: int) -> Stop:
    before = collect_rng("cpu")
    file = io.BytesIO()
    torch.save({"position": position.state_dict(), "streams": collect_rng("cpu")}, file)
    after = collect_rng("cpu")
    assert repr(before) == repr(after), "a state_dict moved a stream"
    return Stop(steps, position.epoch, file.getvalue())


def put(position: ResumableLoader, stop: Stop) -> None:
    saved: Mapping[str, Any] = torch.load(io.BytesIO(stop.content), weights_only=True)
    position.load_state_dict(saved["position"])
    apply_rng(saved["streams"], "cpu")


def steps_of(
    position: ResumableLoader,
    epochs: int,
    *,
    draws: bool,
    stops: list[Stop] | None = None,
    done: int = 0,
    most: int = 10**6,
) -> Iterator[Step]:
    """The loop with a position; ``stops`` gets a checkpoint at every place where one can be taken."""
    for epoch in range(position.start_epoch, epochs):
        batches = position.batches(epoch)
        for number, batch in enumerate(batches):
            step = body(epoch, batch, draws=draws)
            done += 1
            if stops is not None:
                stops.append(take(position, done))
            yield step
            if number + 1 == most:
                batches.close()
                break
        if stops is not None:
            stops.append(take(position, done))


def whole_run(make: Callable[[], Any], epochs: int, *, draws: bool, most: int = 10**6) -> tuple[list[Step], list[Stop]]:
    seed_everything(11)
    position = ResumableLoader(make())
    stops = [take(position, 0)]
    return list(steps_of(position, epochs, draws=draws, stops=stops, most=most)), stops


def resumed_run(make: Callable[[], Any], stop: Stop, epochs: int, *, draws: bool, seed: int = 500) -> list[Step]:
    seed_everything(seed)
    position = ResumableLoader(make())
    put(position, stop)
    return list(steps_of(position, epochs, draws=draws))


def assert_exact(
    make: Callable[[], Any],
    *,
    epochs: int = 2,
    draws: bool = True,
    set_epoch: Callable[[Any, int], None] = lambda loader, epoch: None,
    every: int = 1,
) -> list[Step]:
    """Compare the run with the plain loop, then resume at every stop, and once more two steps behind it."""
    plain = plain_run(make, epochs, set_epoch, draws=draws)
    whole, stops = whole_run(make, epochs, draws=draws)
    assert whole == plain
    assert len(stops) == len(whole) + epochs + 1
    for number, stop in enumerate(stops):
        if number % every == 0:
            assert resumed_run(make, stop, epochs, draws=draws) == whole[stop.steps :], f"stop {number}"
    _resume_twice(make, whole, stops, epochs, draws=draws)
    return whole


def _resume_twice(make: Callable[[], Any], whole: list[Step], stops: list[Stop], epochs: int, *, draws: bool) -> None:
    first = next(stop for stop in stops if stop.steps == 2)
    seed_everything(600)
    position = ResumableLoader(make())
    put(position, first)
    between: list[Stop] = []
    reading = steps_of(position, epochs, draws=draws, stops=between, done=2)
    assert [next(reading), next(reading)] == whole[2:4]
    reading.close()
    assert resumed_run(make, between[-1], epochs, draws=draws, seed=700) == whole[4:]

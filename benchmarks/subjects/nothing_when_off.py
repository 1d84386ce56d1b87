"""A trainer that neither saves nor restores, compared with a hand-written training loop.

The measured steps lie in the middle of an epoch. Both sides take a batch, move it to the device, run forward and backward,
clip, step, clear the gradients, and read the loss and the gradient norm as numbers, as a loop that logs its progress does.
The bare loop reads with torch's ``DataLoader`` and ``DistributedSampler``, which give the same batches. The start and the end
of a training and of an epoch are in no slice (:mod:`benchmarks.contenders.sliced`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler

from benchmarks.contenders import small_training
from benchmarks.contenders.sliced import Collate, Loops
from benchmarks.contenders.small_training import LAYERS, SEED, Numbers
from benchmarks.measuring.measure import measure
from benchmarks.protocol import UNIT, Benchmark, Context, Figure, Options, Point, Role, Scenario
from benchmarks.reporting import ratios
from hyper_resume.data import DataLoader

BARE = "bare loop"
BARE_OVER_OURS = "bare loop with this library's data loader"
OFF = "trainer, saving and restoring off"
# Width -> samples per batch, and rounds. A wide step takes some milliseconds, and its weights and moments stay in the cache, so
# its time is steady. A narrow step is nearly all Python. No training has a smaller step, so the overhead of a trainer is
# largest there.
_WIDE, _NARROW = 160, 8
_BATCHES = {_WIDE: 128, _NARROW: 8}
_ROUNDS = {_WIDE: 250, _NARROW: 300}
# Steps per slice. The first one starts with the caches full of the other loops' data, unlike in a real training.
_STEPS = 10
_SMOKE_STEPS, _SMOKE_ROUNDS = 2, 3
# The target is 1; 2% is allowed for noise.
_TOLERATED = 1.02

# Trains a model on a dataset with a batch size and a collate function.
Train = Callable[[nn.Module, Numbers, int, Collate], None]


def points(options: Options) -> Sequence[Point]:
    """Two step sizes; with ``smoke`` the small one only, in few rounds."""
    if options.smoke:
        return [Point(label="narrow step", axis="width", value=_NARROW, rounds=_SMOKE_ROUNDS)]
    return [
        Point(label=label, axis="width", value=width, rounds=max(options.repeat, _ROUNDS[width]))
        for label, width in (("step of some ms", _WIDE), ("smallest step", _NARROW))
    ]


def build(point: Point, context: Context) -> Scenario:
    """Start the three loops, each held at its first batch."""
    width = int(point.value)
    batch_size = _BATCHES[width]
    steps = _SMOKE_STEPS if context.options.smoke else _STEPS
    # One slice more for the warm-up round, and one batch after the last, where the loops are held.
    samples = ((point.rounds or 0) + 2) * steps * batch_size
    loops = Loops(lambda: small_training.make_model(width), steps)
    note = f"{LAYERS} layers of width {width}, batches of {batch_size}; slices of {steps} steps, on one thread"

    def contender(name: str, role: Role, train: Train) -> Any:
        return loops.add(
            name, role, lambda model, collate: train(model, Numbers(samples, width), batch_size, collate), note
        )

    contenders = [
        contender(BARE, "limit", _bare),
        contender(BARE_OVER_OURS, "limit", _bare_over_ours),
        contender(OFF, "ours", small_training.train),
    ]
    return Scenario(payload_bytes=0, contenders=contenders, figures=_figures(width, steps), close=loops.close)


def _figures(width: int, steps: int) -> list[Figure]:
    goal: dict[str, Any] = {"relation": "at most", "bound": _TOLERATED} if width == _WIDE else {}
    return [
        Figure(text="step time with saving and restoring off / bare loop", above=(OFF,), below=BARE, **goal),
        Figure(
            text="step time with saving and restoring off / bare loop with this library's loader",
            above=(OFF,),
            below=BARE_OVER_OURS,
        ),
        Figure(text="bare loop with this library's loader / with torch's loader", above=(BARE_OVER_OURS,), below=BARE),
        *(Figure(text=f"seconds for {steps} steps: {name}", above=(name,), below=UNIT) for name in (BARE, OFF)),
    ]


def _bare(model: nn.Module, dataset: Any, batch_size: int, collate: Collate) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=1, rank=0, seed=SEED)
    _bare_loop(model, TorchDataLoader(dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate))


def _bare_over_ours(model: nn.Module, dataset: Any, batch_size: int, collate: Collate) -> None:
    _bare_loop(model, DataLoader(dataset, batch_size=batch_size, seed=SEED, collate_fn=collate))


def _bare_loop(model: nn.Module, loader: Any) -> None:
    device = torch.device("cpu")
    optimizer = small_training.make_optimizer(model)
    model.train()
    for batch in loader:
        loss = small_training.loss_of(model, batch.to(device, non_blocking=True))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), small_training.MOST_NORM)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())
        float(norm)


BENCHMARK = Benchmark(name="nothing-when-off", title="Training step with saving off", points=points, build=build)


def main() -> int:
    """Print the overhead per step in microseconds: the median over the rounds of the difference from the bare loop."""
    options = Options()
    for point in points(options):
        with tempfile.TemporaryDirectory() as folder:
            scenario = build(point, Context(options=options, folder=Path(folder)))
            try:
                found = measure(scenario, rounds=point.rounds or options.repeat, warm_up=point.warm_up)
            finally:
                scenario.close()
        for name in (BARE_OVER_OURS, OFF):
            pairs = zip(found[name].seconds, found[BARE].seconds, strict=True)
            added = ratios.spread([(ours - bare) / _STEPS * 1e6 for ours, bare in pairs])
            step = ratios.spread(found[BARE].seconds).median / _STEPS * 1e6
            quartiles = f"quartiles {added.lower_quartile:+.1f} to {added.upper_quartile:+.1f}"
            print(f"{point.label}: {name}: {added.median:+.1f} µs ({quartiles}); a bare step takes {step:.0f} µs")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A trainer that neither saves nor restores, against the loop that its user would write by hand.

Compared is a step in the middle of an epoch. Both sides take a batch, move it to the device, go forward and backward, clip,
step, clear the gradients, and read the loss and the gradient norm as numbers: a loop whose user wants to see how training
goes does that too. The bare loop reads with torch's ``DataLoader`` and ``DistributedSampler``, which give the same batches.
What a training and an epoch take once, to begin and to end, is in no slice.

All loops live through the whole measurement. Each stands still inside the reading of a batch, and a call lets it go on for
a slice of a few steps: so slices of both sides lie some milliseconds apart, and none has a beginning in it.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler

from benchmarks import ratios
from benchmarks.measure import measure
from benchmarks.protocol import (
    UNIT,
    Benchmark,
    BenchmarkError,
    Contender,
    Context,
    Figure,
    Options,
    Point,
    Role,
    Scenario,
)
from hyper_resume.config import CheckpointingConfig, DataConfig, RunConfig, TrainingConfig
from hyper_resume.data import DataLoader
from hyper_resume.trainer.base import BaseTrainer

BARE = "bare loop"
BARE_OVER_OURS = "bare loop over this library's data loader"
OFF = "trainer, saving and restoring off"
_LAYERS, _SEED = 4, 1
# Widths, with the samples of a batch and the rounds. The wide one is a step of some milliseconds whose weights and moments stay
# in the cache, so that its time is steady. In the narrow one nearly all is Python: no training has a smaller step, so that
# what a trainer adds shows most.
_WIDE, _NARROW = 160, 8
_BATCHES = {_WIDE: 128, _NARROW: 8}
_ROUNDS = {_WIDE: 250, _NARROW: 300}
# Of a slice. Its first step finds the caches full of the other loops' data, which a training never does.
_STEPS = 10
_SMOKE_STEPS, _SMOKE_ROUNDS = 2, 3
# Meant is 1. This is what the harness allows for noise.
_TOLERATED = 1.02

Collate = Callable[[list[torch.Tensor]], torch.Tensor]
# Trains a model on a dataset in batches of a size, collated by the function.
Train = Callable[[nn.Module, "_Numbers", int, Collate], None]


class _Numbers:
    """Sample i is one of the rows of a fixed matrix."""

    def __init__(self, count: int, width: int) -> None:
        self._count = count
        self._rows = torch.rand((1024, width), generator=torch.Generator().manual_seed(_SEED))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index % len(self._rows)]


class _Finished(Exception):
    """Ends a loop that nobody lets go on any more."""


class _Sliced:
    """A training loop in a thread of its own, of which each call runs a slice; it stands still in between.

    It is held where it collates a batch, which no loop can tell from a slow dataset.
    """

    def __init__(self, train: Callable[[Collate], Any], steps: int) -> None:
        """``train`` makes a loop that collates by what it is given, and runs it; a slice has ``steps`` steps."""
        self._train = train
        self._steps = steps
        self._left = 0
        self._error: BaseException | None = None
        self._is_over = False
        self._may_run, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.slices = 0

    def start(self) -> None:
        """Train up to the first batch."""
        self._thread.start()
        self._wait()

    def next_slice(self) -> None:
        """Run ``steps`` steps.

        Raises:
            BenchmarkError: the loop came to its end.
        """
        self._left = self._steps
        self._may_run.release()
        self._wait()
        self.slices += 1

    def close(self) -> None:
        """End the loop, wherever it is."""
        self._is_over = True
        self._may_run.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _wait(self) -> None:
        self._stands.acquire()
        if self._error is not None:
            raise BenchmarkError(f"a loop ended: {self._error!r}") from self._error

    def _run(self) -> None:
        # A second thread of torch's waits whenever anything else runs on the machine. The number is each thread's own.
        torch.set_num_threads(1)
        try:
            self._train(self._collate)
            self._error = StopIteration("its data was used up")
        except _Finished:
            return
        except BaseException as error:  # noqa: BLE001  whatever it is, the measuring thread must hear of it
            self._error = error
        self._stands.release()

    def _collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        if self._left == 0:
            self._stands.release()
            self._may_run.acquire()
            if self._is_over:
                raise _Finished
        self._left -= 1
        return torch.stack(samples)


def points(options: Options) -> Sequence[Point]:
    """Two sizes of a step; with ``smoke`` the small one, in few rounds."""
    if options.smoke:
        return [Point(label="narrow step", axis="width", value=_NARROW, rounds=_SMOKE_ROUNDS)]
    return [
        Point(label=label, axis="width", value=width, rounds=max(options.repeat, _ROUNDS[width]))
        for label, width in (("step of some ms", _WIDE), ("smallest step", _NARROW))
    ]


def build(point: Point, context: Context) -> Scenario:
    """The three loops, each at its first batch; after each round they hold the same parameters, bit for bit."""
    width = int(point.value)
    steps = _SMOKE_STEPS if context.options.smoke else _STEPS
    # One slice for the round that is not recorded, and one batch beyond the last, in which they are held.
    samples = ((point.rounds or 0) + 2) * steps * _BATCHES[width]
    threads = torch.get_num_threads()
    models: dict[str, nn.Module] = {}
    loops: dict[str, _Sliced] = {}

    def loop(name: str, train: Train) -> _Sliced:
        torch.manual_seed(_SEED)
        model = models[name] = _model(width)
        loops[name] = _Sliced(lambda collate: train(model, _Numbers(samples, width), _BATCHES[width], collate), steps)
        return loops[name]

    def check(_: Any) -> None:
        same_length = [name for name in loops if loops[name].slices == loops[BARE].slices]
        ends = [nn.utils.parameters_to_vector(models[name].parameters()).detach() for name in same_length]
        if not all(torch.equal(ends[0], end) for end in ends):
            raise BenchmarkError(f"{', '.join(same_length)} did not train alike, so their times can't be compared")

    def close() -> None:
        for running in loops.values():
            running.close()
        torch.set_num_threads(threads)
        check(None)

    note = f"{_LAYERS} layers of width {width}, batches of {_BATCHES[width]}; slices of {steps} steps, on one thread"
    sides: list[tuple[str, Role, Train]] = [
        (BARE, "limit", _bare),
        (BARE_OVER_OURS, "limit", _bare_over_ours),
        (OFF, "ours", _trainer),
    ]
    contenders = []
    for name, role, train in sides:
        made = loop(name, train)
        contenders.append(
            Contender(name=name, role=role, prepare=made.start, call=made.next_slice, check=check, note=note)
        )
    return Scenario(payload_bytes=0, contenders=contenders, figures=_figures(width, steps), close=close)


def _figures(width: int, steps: int) -> list[Figure]:
    goal: dict[str, Any] = {"relation": "at most", "bound": _TOLERATED} if width == _WIDE else {}
    return [
        Figure(text="a step with saving and restoring off, of the bare loop's", above=(OFF,), below=BARE, **goal),
        Figure(text="the same, of the bare loop's over this library's loader", above=(OFF,), below=BARE_OVER_OURS),
        Figure(text="this library's loader in the bare loop, of torch's loader", above=(BARE_OVER_OURS,), below=BARE),
        *(Figure(text=f"seconds of {steps} steps: {name}", above=(name,), below=UNIT) for name in (BARE, OFF)),
    ]


def _model(width: int) -> nn.Module:
    layers = [layer for _ in range(_LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch).squeeze(-1) - batch.sum(dim=-1)).square().mean()
    return loss


def _bare(model: nn.Module, dataset: Any, batch_size: int, collate: Collate) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=1, rank=0, seed=_SEED)
    _bare_loop(model, TorchDataLoader(dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate))


def _bare_over_ours(model: nn.Module, dataset: Any, batch_size: int, collate: Collate) -> None:
    _bare_loop(model, DataLoader(dataset, batch_size=batch_size, seed=_SEED, collate_fn=collate))


def _bare_loop(model: nn.Module, loader: Any) -> None:
    device = torch.device("cpu")
    optimizer = _optimizer(model)
    model.train()
    for batch in loader:
        loss = _loss(model, batch.to(device, non_blocking=True))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())
        float(norm)


def _trainer(model: nn.Module, dataset: Any, batch_size: int, collate: Collate) -> None:
    config = RunConfig(
        training=TrainingConfig(progress_bar=False, max_grad_norm=1.0),
        data=DataConfig(batch_size=batch_size),
        checkpoint=CheckpointingConfig(save_ckpt=False, restore_from=None),
    )
    BaseTrainer(
        config,
        model=model,
        optimizer=_optimizer(model),
        lr_scheduler=None,
        train_dataloader=DataLoader(dataset, batch_size=batch_size, seed=_SEED, collate_fn=collate),
        loss_function=_loss,
    ).train()


BENCHMARK = Benchmark(name="nothing-when-off", title="Nothing when off", points=points, build=build)


def main() -> int:
    """Tell what a trainer adds to a step in microseconds, which a ratio can't: the median of the rounds' differences."""
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
            print(f"{point.label}: {name}: {added.median:+.1f} µs ({quartiles}) beside a bare step of {step:.0f} µs")
    return 0


if __name__ == "__main__":
    sys.exit(main())

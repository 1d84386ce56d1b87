"""Resuming the data position far inside an epoch: no earlier sample is read, and it takes hardly any time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.protocol import (
    PAYLOAD,
    UNIT,
    Benchmark,
    BenchmarkError,
    Contender,
    Context,
    Figure,
    Options,
    Point,
    Scenario,
)
from hyper_resume.data import DataLoader

INDEX = "the epoch's index, torch.randperm"
RESTORE = "load_state_dict"
FIRST_BATCH = "load_state_dict and the first batch"
_SAMPLES, _SMOKE_SAMPLES = 100_000_000, 1_000_000
_BATCH = 100
_SECONDS = 0.2
_INDEX_BYTES = 8


class _Counted:
    """Sample i is the number i. Counts the reads."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.reads = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


def points(options: Options) -> Sequence[Point]:
    """One point: a tenth of the way into a large epoch."""
    samples = _SMOKE_SAMPLES if options.smoke else _SAMPLES
    return [Point(label=f"sample {samples // 10:,} of {samples:,}", axis="samples", value=samples)]


def build(point: Point, context: Context) -> Scenario:
    """A fresh loader per call. The payload is the epoch's index, 8 bytes per sample."""
    samples = int(point.value)
    dataset = _Counted(samples)
    position = {**_loader(dataset).state_dict(), "batches_consumed": samples // 10 // _BATCH}
    loaders: list[DataLoader] = []

    def before() -> None:
        dataset.reads = 0
        loaders[:] = [_loader(dataset)]

    def restore() -> DataLoader:
        loaders[0].load_state_dict(position)
        return loaders[0]

    def check_position(loader: DataLoader) -> None:
        if dataset.reads or loader.batches_consumed != position["batches_consumed"]:
            raise BenchmarkError(f"at batch {loader.batches_consumed}, after {dataset.reads} samples were read")

    def check_batch(batch: Any) -> None:
        # The order is documented: torch's permutation from a generator seeded with seed + epoch.
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(1))
        expected = order[samples // 10 : samples // 10 + _BATCH]
        if dataset.reads != _BATCH or not torch.equal(torch.as_tensor(batch), expected):
            raise BenchmarkError(f"the first batch is not the expected one, or {dataset.reads} samples were read")

    return Scenario(
        payload_bytes=samples * _INDEX_BYTES,
        contenders=[
            Contender(
                name=INDEX,
                role="limit",
                call=lambda: torch.randperm(samples, generator=torch.Generator().manual_seed(1)),
                is_weighed=True,
                note="every loader with this order has to build it",
            ),
            Contender(name=RESTORE, role="ours", before=before, call=restore, check=check_position),
            Contender(
                name=FIRST_BATCH,
                role="ours",
                before=before,
                call=lambda: next(iter(restore())),
                check=check_batch,
                is_weighed=True,
            ),
        ],
        figures=[
            Figure(
                text="seconds to resume",
                above=(RESTORE,),
                below=UNIT,
                relation="at most",
                bound=_SECONDS,
            ),
            Figure(text="seconds to resume and read the first batch", above=(FIRST_BATCH,), below=UNIT),
            Figure(text="resume and first batch / building the index", above=(FIRST_BATCH,), below=INDEX),
            Figure(
                text="peak extra memory with the first batch / size of the index",
                above=(FIRST_BATCH,),
                below=PAYLOAD,
                quantity="peak_bytes",
            ),
        ],
    )


def _loader(dataset: _Counted) -> DataLoader:
    return DataLoader(dataset, batch_size=_BATCH, shuffle=True, seed=1)


BENCHMARK = Benchmark(name="data-resume", title="Resuming the data position", points=points, build=build)

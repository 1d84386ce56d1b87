from __future__ import annotations

import logging
import multiprocessing
import random
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from hyper_resume.data import DataLoader as OwnLoader
from hyper_resume.data import torch_loader
from hyper_resume.data.resumable import ResumableLoader
from hyper_resume.data.streams import moved_streams, pack_streams, unpack_streams
from hyper_resume.errors import CheckpointMismatchError, ConfigError, UnsupportedError
from tests.data.datasets_for_tests import Counting, Noisy, Numbers, as_is
from tests.data.resumed_loops import (
    assert_exact,
    body,
    draw,
    put,
    resumed_run,
    seed_everything,
    steps_of,
    take,
    whole_run,
)


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    dataset = dataset if dataset is not None else Noisy(9)
    return DataLoader(dataset, **({"batch_size": 2, "collate_fn": as_is, "shuffle": True} | options))


class DrawsAsItGoes(Sampler[int]):
    """Draws each index from torch's global stream, from which training draws as well."""

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(9, ()).item()) for _ in range(9))


# ---- positions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_consumed_samples_are_not_read_again(workers: int) -> None:
    def make() -> DataLoader[Any]:
        return loader(Counting(10), num_workers=workers)

    whole, stops = whole_run(make, 1, draws=True)
    data = Counting(10)
    rest = resumed_run(lambda: loader(data, num_workers=workers), stops[3], 1, draws=True)
    assert rest == whole[3:]
    consumed = {index for step in whole[:3] for index in eval(step.batch)}
    assert {index for index, reads in enumerate(data.reads) if reads} == set(range(10)) - consumed
    assert max(data.reads) == 1


def test_loading_a_state_and_asking_for_one_read_nothing() -> None:
    _, stops = whole_run(lambda: loader(Counting(10)), 1, draws=True)
    data = Counting(10)
    position = ResumableLoader(loader(data))
    put(position, stops[3])
    position.state_dict()
    assert sum(data.reads) == 0
    assert (position.epoch, position.start_epoch, position.batches_consumed, len(position)) == (0, 0, 3, 5)


def test_the_last_batch_of_an_epoch_finishes_it() -> None:
    position = ResumableLoader(loader())
    states = [(position.start_epoch, position.finished, position.batches_consumed) for _ in position.batches(0)]
    assert states == [(0, False, 1), (0, False, 2), (0, False, 3), (0, False, 4), (1, True, 5)]


def test_a_state_taken_only_at_every_second_batch() -> None:
    seed_everything(11)
    position = ResumableLoader(loader())
    stops, steps = [], []
    for epoch in range(2):
        for number, batch in enumerate(position.batches(epoch)):
            steps.append(body(epoch, batch, draws=True))
            if number % 2:
                stops.append(take(position, len(steps)))
    for stop in stops:
        assert resumed_run(loader, stop, 2, draws=True) == steps[stop.steps :]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_a_pass_that_is_left_early_is_followed_by_the_next_epoch(options: dict[str, Any]) -> None:
    def make() -> DataLoader[Any]:
        return loader(generator=torch.Generator().manual_seed(2), **options)

    seed_everything(11)
    plain, plain_loader = [], make()
    for epoch in range(3):
        for number, batch in enumerate(plain_loader):
            plain.append(body(epoch, batch, draws=True))
            if number == 1:
                break
    whole, stops = whole_run(make, 3, draws=True, most=2)
    assert whole == plain
    between = [stop for stop in stops if stop.steps == 2][-1]
    seed_everything(500)
    position = ResumableLoader(make())
    put(position, between)
    assert [body(1, batch, draws=True) for _, batch in zip(range(2), position.batches(1), strict=False)] == whole[2:4]


def test_a_closed_pass_gives_nothing_more() -> None:
    position = ResumableLoader(loader())
    batches = position.batches(0)
    next(batches)
    batches.close()
    assert list(batches) == []
    assert (position.batches_consumed, position.finished) == (1, False)


def test_sample_ids_of_each_batch() -> None:
    position = ResumableLoader(loader(Numbers(9)))
    assert all(position.sample_ids == batch for batch in position.batches(0))
    own = ResumableLoader(OwnLoader(Numbers(9), batch_size=2, collate_fn=as_is))
    assert all(own.sample_ids == batch for batch in own.batches(0))


def test_an_older_state_of_the_same_process_comes_back() -> None:
    seed_everything(11)
    position = ResumableLoader(loader())
    stops: list[Any] = []
    whole = list(steps_of(position, 2, draws=True, stops=stops))
    put(position, stops[1])
    assert list(steps_of(position, 2, draws=True)) == whole[2:]


# ---- what would go wrong without ------------------------------------------------------------------------------------------


def test_without_putting_the_streams_back_the_comparison_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_loader.MapPass, "_put_back", lambda self, saved: None)
    with pytest.raises(AssertionError, match="stop 1"):
        assert_exact(loader)


def test_without_the_workers_streams_the_comparison_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_loader.MapSource, "arrive", lambda self, worker, state: None)
    with pytest.raises(AssertionError, match="stop"):
        assert_exact(lambda: loader(num_workers=1))


def test_without_the_generators_the_resume_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = iter(range(100))

    def make() -> DataLoader[Any]:
        return loader(generator=torch.Generator().manual_seed(next(seeds)))

    _, stops = whole_run(make, 1, draws=True)
    monkeypatch.setattr(torch_loader.HeldState, "put", lambda self, saved: None)
    with pytest.raises(CheckpointMismatchError, match="does not give the index batches that it gave"):
        resumed_run(make, stops[2], 1, draws=True)


# ---- refusals -------------------------------------------------------------------------------------------------------------


def _begun() -> DataLoader[Any]:
    made = loader(num_workers=1, persistent_workers=True)
    next(iter(made))
    return made


class Endless(DataLoader[Any]):
    """Keeps one iterator for all epochs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.kept = super().__iter__()


REFUSED: dict[str, tuple[Any, str]] = {
    "an iterator": (lambda: iter([1]), "can be read only once"),
    "a set": (lambda: {1, 2}, "a set has no order"),
    "no iterable": (lambda: 3, "can't be iterated"),
    "itself": (lambda: ResumableLoader([1]), "is a ResumableLoader already"),
    "arrival order": (lambda: loader(num_workers=1, in_order=False), "in_order=False"),
    "a sampler that is an iterator": (lambda: loader(sampler=iter([1]), shuffle=None), "its sampler is an iterator"),
    "begun persistent workers": (_begun, "_iterator is an iterator that has begun"),
    "a kept iterator": (lambda: Endless(Numbers(3)), "kept is an iterator that has begun"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_resumed_is_refused_when_it_is_given(name: str) -> None:
    make, reason = REFUSED[name]
    made = make()
    with pytest.raises(UnsupportedError, match=rf"can't be resumed; where: \w+; found: .*{reason}.*; what to do: "):
        ResumableLoader(made)


def test_a_sampler_that_shares_its_stream_with_training_is_refused_at_the_resume() -> None:
    def make() -> DataLoader[Any]:
        return loader(Numbers(9), sampler=DrawsAsItGoes(), shuffle=None)

    assert_exact(make, draws=False)
    _, stops = whole_run(make, 1, draws=True)
    seed_everything(500)
    position = ResumableLoader(make())
    put(position, stops[3])
    before = pack_streams()
    with pytest.raises(CheckpointMismatchError, match=r"BatchSampler of DrawsAsItGoes.*a generator of its own"):
        next(position.batches(0))
    assert moved_streams(before, pack_streams()) == set()


def test_two_loops_over_one_loader_are_refused() -> None:
    shared = loader()
    first, second = ResumableLoader(shared), ResumableLoader(shared)
    one, other = first.batches(0), second.batches(0)
    next(one)
    next(other)
    with pytest.raises(UnsupportedError, match=r"another one was begun.*expected: one loop at a time"):
        next(one)
    assert len(list(other)) == 4


def test_an_epoch_before_the_restored_one_is_refused() -> None:
    _, stops = whole_run(loader, 2, draws=True)
    position = ResumableLoader(loader())
    put(position, stops[-1])
    assert position.start_epoch == 2
    with pytest.raises(ConfigError, match=r"epoch 0 lies before.*expected: epoch 2.*start_epoch"):
        next(position.batches(0))


def test_a_finished_epoch_gives_no_batch_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    _, stops = whole_run(loader, 1, draws=True)
    position = ResumableLoader(loader())
    put(position, stops[-1])
    assert list(position.batches(0)) == []
    assert "epoch 0 was finished before the restore" in caplog.text
    assert len(list(position.batches(1))) == 5


@pytest.mark.parametrize("epoch", [-1, True, "0"])
def test_an_epoch_that_is_none_is_refused(epoch: Any) -> None:
    with pytest.raises(ConfigError, match="needs an epoch from 0 up"):
        ResumableLoader([1]).batches(epoch)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "samples": ({"dataset": Noisy(8)}, "samples: 9 -> 8"),
    "batch size": ({"batch_size": 3}, "batch_sampler.batch_size: 2 -> 3"),
    "sampler": ({"shuffle": False}, "BatchSampler of RandomSampler -> BatchSampler of SequentialSampler"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_position_within_an_epoch_of_other_data_is_refused_by_name(name: str) -> None:
    options, change = CHANGES[name]
    _, stops = whole_run(loader, 1, draws=True)
    position = ResumableLoader(loader(**options))
    with pytest.raises(CheckpointMismatchError, match=change):
        put(position, stops[2])
    assert position.batches_consumed == 0
    put(position, stops[-1])
    assert position.start_epoch == 1
    assert change in position.doubts[0]


def test_another_number_of_workers_keeps_the_order_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def make(**options: Any) -> DataLoader[Any]:
        return loader(Numbers(9), **options)

    whole, stops = whole_run(lambda: make(num_workers=1), 2, draws=True)
    assert resumed_run(make, stops[2], 2, draws=True) == whole[2:]
    assert "num_workers: 1 -> 0" in caplog.text


def test_a_state_of_another_kind_is_refused() -> None:
    _, stops = whole_run(lambda: [1, 2, 3], 1, draws=True)
    with pytest.raises(CheckpointMismatchError, match=r"of another kind; where: kind; .*'replayed'"):
        put(ResumableLoader(loader()), stops[1])
    with pytest.raises(CheckpointMismatchError, match="can't be read; found: no version"):
        ResumableLoader([1]).load_state_dict({"epoch": 0})


def test_a_generator_that_is_gone_is_refused() -> None:
    def make(generator: Any) -> DataLoader[Any]:
        return loader(generator=generator)

    _, stops = whole_run(lambda: make(torch.Generator()), 1, draws=True)
    position = ResumableLoader(make(None))
    put(position, stops[1])
    with pytest.raises(
        CheckpointMismatchError, match=r"can't be put back; where: generator; expected: torch.Generator on cpu"
    ):
        next(position.batches(0))


# ---- streams --------------------------------------------------------------------------------------------------------------


def test_packed_streams_come_back_with_their_cached_gaussians() -> None:
    seed_everything(3)
    random.gauss(0, 1)
    np.random.randn()
    packed = pack_streams()
    expected = draw(), random.gauss(0, 1), np.random.randn()
    assert moved_streams(packed, pack_streams()) == {"torch_cpu", "python", "numpy"}
    unpack_streams(packed)
    assert moved_streams(packed, pack_streams()) == set()
    assert (draw(), random.gauss(0, 1), np.random.randn()) == expected


def test_another_kind_of_numpy_stream_is_refused() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(UnsupportedError, match="expected: MT19937; found: PCG64"):
            next(ResumableLoader(loader()).batches(0))
    finally:
        np.random.set_bit_generator(before)


class Counted(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def test_reading_again_logs_how_much(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        return DataLoader(Counted(), batch_size=2)

    _, stops = whole_run(make, 1, draws=True)
    position = ResumableLoader(make())
    put(position, stops[3])
    with caplog.at_level(logging.INFO):
        next(position.batches(0))
    assert "DataLoader has no position: 3 batches are read again and dropped" in caplog.text


def test_a_worker_ignores_the_signals_that_are_named() -> None:
    position = ResumableLoader(loader(num_workers=1), ignored_signals=["SIGTERM"])
    batches = position.batches(0)
    before = set(multiprocessing.active_children())
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    assert len(list(batches)) == 4

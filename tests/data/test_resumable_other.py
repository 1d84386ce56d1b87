from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from hyper_resume.data import DataLoader as OwnLoader
from hyper_resume.data.resumable import ResumableLoader
from tests.data.datasets_for_tests import Noisy, as_is
from tests.data.resumed_loops import assert_exact, put, whole_run

LENGTH = 9


class Stream(IterableDataset[Any]):
    """Numbers with noise, split over the workers; its length is not known."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, LENGTH, step):
            yield index, torch.rand(()).item(), random.random(), float(np.random.rand())


class ShuffledStream(IterableDataset[Any]):
    """Shuffled by a generator of its own, which moves while it is read."""

    def __init__(self) -> None:
        self.random = random.Random(3)
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return ((self.passes, self.random.random()) for _ in range(LENGTH))


class StatefulStream(IterableDataset[Any]):
    """Iterable data with a state, as torchdata asks for."""

    def __init__(self) -> None:
        self.at = 0
        self.resumes = False

    def __iter__(self) -> Iterator[Any]:
        if not self.resumes:
            self.at = 0
        self.resumes = False
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        while self.at < LENGTH:
            self.at += 1
            yield self.at, torch.rand(()).item()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]
        self.resumes = True


class HandWritten:
    """A loader that keeps its order and its place, and whose state_dict draws, as a careless one might."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.at = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        if self.at >= len(self.order):
            self.order = torch.randperm(5).tolist()
            self.at = 0
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        while self.at < len(self.order):
            self.at += 1
            yield self.order[self.at - 1], torch.rand(()).item()

    def state_dict(self) -> dict[str, Any]:
        torch.rand(())
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.order, self.at = list(state["order"]), state["at"]


def own(**options: Any) -> OwnLoader:
    return OwnLoader(Noisy(LENGTH), batch_size=2, seed=5, collate_fn=as_is, **options)


@pytest.mark.parametrize("draws", [True, False], ids=["dropout", "no dropout"])
def test_a_list_is_read_again_up_to_the_position(draws: bool) -> None:
    assert_exact(lambda: [1, 2, 3, 4, 5], draws=draws)


def test_iterable_data_is_read_again_up_to_the_position() -> None:
    assert_exact(lambda: DataLoader(Stream(), batch_size=2, collate_fn=as_is))
    assert_exact(lambda: DataLoader(ShuffledStream(), batch_size=2, collate_fn=as_is))


def test_iterable_data_in_workers_is_read_again_up_to_the_position() -> None:
    assert_exact(lambda: DataLoader(Stream(), batch_size=2, collate_fn=as_is, num_workers=2), every=2)


def test_our_loader_keeps_its_own_state() -> None:
    def set_epoch(loader: Any, epoch: int) -> None:
        loader.set_epoch(epoch)

    assert_exact(own, epochs=3, set_epoch=set_epoch)
    assert_exact(lambda: own(num_workers=2), set_epoch=set_epoch, every=2)
    position = ResumableLoader(own())
    next(position.batches(0))
    assert position.state_dict() == position.loader.state_dict()


def test_a_hand_written_loader_whose_state_dict_draws() -> None:
    assert_exact(HandWritten, epochs=3)


def stateful(dataset: Any, **options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(dataset, **({"batch_size": 2, "collate_fn": as_is} | options))


@pytest.mark.parametrize("draws", [True, False], ids=["dropout", "no dropout"])
def test_stateful_dataloader_over_map_style_data(draws: bool) -> None:
    assert_exact(lambda: stateful(Noisy(LENGTH), shuffle=True), draws=draws)
    assert_exact(lambda: stateful(Noisy(LENGTH), shuffle=True, generator=torch.Generator().manual_seed(4)), draws=draws)


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=["", "persistent"])
def test_stateful_dataloader_over_map_style_data_with_workers(options: dict[str, Any]) -> None:
    assert_exact(lambda: stateful(Noisy(LENGTH), shuffle=True, num_workers=2, **options), every=2)


def test_stateful_dataloader_over_iterable_data() -> None:
    assert_exact(lambda: stateful(StatefulStream()))
    assert ResumableLoader(stateful(StatefulStream())).kind == "stateful"
    assert ResumableLoader(stateful(StatefulStream())).doubts == []
    assert "what its workers draw from" in ResumableLoader(stateful(StatefulStream(), num_workers=1)).doubts[0]
    assert_exact(lambda: stateful(Stream(), num_workers=2), every=3)


def test_torchdata_nodes() -> None:
    nodes = pytest.importorskip("torchdata.nodes")

    def in_order() -> Any:
        node = nodes.IterableWrapper(range(LENGTH))
        return nodes.Loader(
            nodes.Batcher(nodes.Mapper(node, lambda index: (index, torch.rand(()).item())), batch_size=2)
        )

    def shuffled() -> Any:
        data = range(LENGTH)
        node = nodes.SamplerWrapper(DistributedSampler(data, num_replicas=2, rank=1, seed=8))
        return nodes.Loader(
            nodes.Batcher(nodes.Mapper(node, lambda index: (index, random.random())), batch_size=2, drop_last=False)
        )

    assert_exact(in_order, epochs=3)
    assert_exact(shuffled, epochs=3)


def prepared(**options: Any) -> Any:
    data_loader = pytest.importorskip("accelerate.data_loader")
    pytest.importorskip("accelerate").Accelerator(cpu=True)
    options = {"batch_size": 2, "collate_fn": as_is, "shuffle": True} | options
    seedable = options.pop("use_seedable_sampler", False)
    return data_loader.prepare_data_loader(
        DataLoader(Noisy(LENGTH), **options), put_on_device=False, use_seedable_sampler=seedable, rng_types=["torch"]
    )


@pytest.mark.parametrize("draws", [True, False], ids=["dropout", "no dropout"])
@pytest.mark.parametrize("seedable", [True, False])
def test_a_loader_prepared_by_accelerate(seedable: bool, draws: bool) -> None:
    def set_epoch(loader: Any, epoch: int) -> None:
        loader.set_epoch(epoch)

    assert_exact(lambda: prepared(use_seedable_sampler=seedable), draws=draws, set_epoch=set_epoch, epochs=3)


def test_a_loader_prepared_by_accelerate_with_workers() -> None:
    assert_exact(lambda: prepared(num_workers=2), every=2)


def test_a_stream_that_loader_and_training_share_is_named_at_the_restore(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        return DataLoader(Stream(), batch_size=2, collate_fn=as_is)

    _, stops = whole_run(make, 1, draws=True)
    position = ResumableLoader(make())
    put(position, stops[3])
    assert [doubt.split()[1] for doubt in position.doubts] == ["numpy", "python", "torch_cpu"]
    assert "torch_cpu stream" in caplog.text
    _, stops = whole_run(make, 1, draws=False)
    position = ResumableLoader(make())
    put(position, stops[3])
    assert position.doubts == []


def test_a_second_resume_names_no_stream_that_training_leaves_alone() -> None:
    def make() -> Any:
        return DataLoader(Stream(), batch_size=2, collate_fn=as_is)

    _, stops = whole_run(make, 1, draws=False)
    position = ResumableLoader(make())
    put(position, stops[1])
    batches = position.batches(0)
    next(batches), next(batches), next(batches)
    # The loader has drawn from all three.
    assert position.state_dict()["drawn_between"] == []
    batches.close()


def test_a_list_that_became_shorter_than_the_position_is_refused() -> None:
    _, stops = whole_run(lambda: Unsized(range(5)), 1, draws=True)
    position = ResumableLoader(Unsized(range(2)))
    put(position, stops[4])
    with pytest.raises(RuntimeError, match=r"the data ends before the saved position.*expected: 4"):
        next(position.batches(0))


class Unsized:
    """An iterable without a length."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numbers)


def test_an_iterable_without_a_length() -> None:
    assert_exact(lambda: Unsized(range(4)))

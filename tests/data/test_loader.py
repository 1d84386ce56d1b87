from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from hyper_resume.data import DataLoader
from hyper_resume.errors import ConfigError
from tests.data.datasets_for_tests import Broken, Numbers, as_is
from tests.data.loaders_for_tests import ids, numbers_loader

# ---- arguments


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_size": 0}, "batch_size is out of range.*found: 0"),
        ({"batch_size": 2.0}, "batch_size.*2.0"),
        ({"dp_world_size": 0}, "dp_world_size.*found: 0"),
        ({"dp_world_size": 2, "dp_rank": 2}, "dp_rank.*0 to 1.*found: 2"),
        ({"dp_rank": -1}, "dp_rank.*-1"),
        ({"num_workers": -1}, "num_workers.*-1"),
        ({"prefetch_factor": 2}, "prefetch_factor"),
        ({"batch_size": 24, "drop_last": True}, "no batch.*num_samples=23"),
        ({"dp_world_size": 24, "drop_last": True}, "no batch"),
    ],
)
def test_a_bad_argument_is_refused_with_its_value(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        numbers_loader(**options)
    assert isinstance(caught.value, ValueError)


def test_the_batch_size_may_be_left_out_or_given_by_position() -> None:
    assert ids(DataLoader(Numbers(3), shuffle=False, collate_fn=as_is)) == [[0], [1], [2]]
    assert ids(DataLoader(Numbers(3), 2, shuffle=False, collate_fn=as_is)) == [[0, 1], [2]]


def test_data_that_cannot_be_indexed_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(ConfigError, match="Stream"):
        DataLoader(Stream(), batch_size=1)
    with pytest.raises(ConfigError, match="no batch"):
        DataLoader(Numbers(0), batch_size=1)


@pytest.mark.parametrize("epoch", [-1, 1.0, None, True])
def test_set_epoch_refuses_what_is_no_epoch(epoch: Any) -> None:
    with pytest.raises(ConfigError, match="set_epoch"):
        numbers_loader().set_epoch(epoch)


# ---- batches, errors, workers


def test_the_batch_is_what_the_collate_fn_made_and_default_collate_without_one() -> None:
    made: list[Any] = []

    def collate(samples: list[int]) -> object:
        made.append(object())
        return made[-1]

    loader = DataLoader(Numbers(4), batch_size=2, shuffle=False, collate_fn=collate)
    assert all(batch is made[index] for index, batch in enumerate(loader))
    assert torch.equal(next(iter(DataLoader(Numbers(4), batch_size=2, shuffle=False))), torch.tensor([0, 1]))


def test_a_dataset_that_reads_many_at_once_is_asked_for_whole_batches() -> None:
    class Batched(Numbers):
        def __getitems__(self, indices: list[int]) -> list[str]:
            return [f"many {index}" for index in indices]

    loader = DataLoader(Batched(4), batch_size=2, shuffle=False, collate_fn=as_is)
    assert list(loader) == [["many 0", "many 1"], ["many 2", "many 3"]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_failed_read_reaches_the_caller_and_does_not_move_the_position(num_workers: int) -> None:
    dataset = Broken(8, at=5, error=OSError("the disk has gone"))
    loader = DataLoader(dataset, batch_size=2, shuffle=False, num_workers=num_workers, collate_fn=as_is)
    reading = iter(loader)
    assert [next(reading), next(reading)] == [[0, 1], [2, 3]]
    workers = multiprocessing.active_children()
    with pytest.raises(OSError, match="the disk has gone"):
        next(reading)
    assert not any(worker.is_alive() for worker in workers)
    assert loader.batches_consumed == 2
    with pytest.raises(RuntimeError, match="has failed"):
        next(reading)
    dataset.at = -1
    assert ids(loader) == [[4, 5], [6, 7]]


def test_stop_iteration_from_the_dataset_is_an_error_and_not_an_early_end_of_the_epoch() -> None:
    loader = DataLoader(Broken(8, at=5, error=StopIteration()), batch_size=2, shuffle=False)
    with pytest.raises(RuntimeError, match=r"StopIteration.*epoch 0, batch 2 of 4"):
        list(loader)
    assert loader.batches_consumed == 2


def test_closing_an_iterator_stops_its_workers_and_keeps_the_position() -> None:
    others = set(multiprocessing.active_children())
    loader = numbers_loader(num_workers=2)
    reading = iter(loader)
    next(reading)
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    reading.close()
    assert not any(worker.is_alive() for worker in workers)
    assert loader.batches_consumed == 1
    with pytest.raises(RuntimeError, match="closed"):
        next(reading)

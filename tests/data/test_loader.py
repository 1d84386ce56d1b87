from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import random
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from hyper_resume.data import DataLoader
from hyper_resume.errors import CheckpointMismatchError, ConfigError
from tests.data.datasets_for_tests import Broken, Counting, Noisy, Numbers, Only, as_is
from tests.data.position_replay import assert_resumes_exactly_at_every_position


def _ids(loader: DataLoader) -> list[list[int]]:
    """One pass, with a collate_fn that leaves the samples alone and a dataset whose samples are their indices."""
    return list(loader)


def _flat(batches: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def _numbers_loader(length: int = 23, **options: Any) -> DataLoader:
    options = {"batch_size": 4, "seed": 5, "collate_fn": as_is} | options
    return DataLoader(Numbers(length), **options)


def _global_streams() -> tuple[Any, ...]:
    return (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())


# ---- exact continuation


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("world", "rank"), [(1, 0), (3, 0), (3, 2)])
def test_resume_at_every_position_of_three_epochs_equals_the_uninterrupted_run(
    world: int, rank: int, drop_last: bool
) -> None:
    def make_loader() -> DataLoader:
        return _numbers_loader(dp_world_size=world, dp_rank=rank, drop_last=drop_last)

    whole = assert_resumes_exactly_at_every_position(make_loader, epochs=3)

    expected = []
    for epoch in range(3):
        order = DistributedSampler(Numbers(23), num_replicas=world, rank=rank, seed=5, drop_last=drop_last)
        order.set_epoch(epoch)
        expected += list(BatchSampler(order, 4, drop_last))
    assert [handed.batch for handed in whole] == expected
    assert [handed.sample_ids for handed in whole] == expected
    per_epoch = len(expected) // 3
    assert [(json.loads(handed.state)["epoch"], json.loads(handed.state)["batches_consumed"]) for handed in whole] == [
        (epoch, consumed) for epoch in range(3) for consumed in range(1, per_epoch + 1)
    ]


def test_resume_with_workers_gives_the_same_batches_and_the_same_augmentations() -> None:
    def make_loader() -> DataLoader:
        return DataLoader(Noisy(5), batch_size=2, seed=5, num_workers=2, collate_fn=as_is)

    whole = assert_resumes_exactly_at_every_position(make_loader, epochs=3)
    noise = [repr(sample[1:]) for handed in whole for sample in handed.batch]
    assert len(set(noise)) == len(noise) == 15  # varies from sample to sample and from epoch to epoch


def test_augmentations_in_workers_do_not_depend_on_the_number_of_workers() -> None:
    def batches(num_workers: int) -> list[Any]:
        return list(DataLoader(Noisy(9), batch_size=2, num_workers=num_workers, collate_fn=as_is))

    assert batches(1) == batches(2)


@pytest.mark.parametrize(("option", "value"), [("seed", 6), ("dp_rank", 1)])
def test_augmentations_in_workers_depend_on_seed_and_rank(option: str, value: int) -> None:
    def noise(**changed: int) -> list[Any]:
        options = {"seed": 5, "dp_rank": 0} | changed
        loader = DataLoader(
            Noisy(4), batch_size=2, shuffle=False, dp_world_size=2, num_workers=1, collate_fn=as_is, **options
        )
        return [sample[1:] for batch in loader for sample in batch]

    assert noise() == noise()
    assert not set(map(repr, noise())) & set(map(repr, noise(**{option: value})))


def test_without_workers_the_dataset_draws_from_the_restored_streams_and_skipping_draws_nothing() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    straight = DataLoader(Noisy(20), batch_size=2, collate_fn=as_is)
    reading = iter(straight)
    for _ in range(4):
        next(reading)
    position = straight.state_dict()
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()
    expected = list(reading)

    torch.rand(5)
    resumed = DataLoader(Noisy(20), batch_size=2, collate_fn=as_is)
    torch.set_rng_state(streams[0])
    random.setstate(streams[1])
    np.random.set_state(streams[2])
    resumed.load_state_dict(position)
    assert list(resumed) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_nothing_in_the_loader_moves_a_global_stream_of_the_main_process(num_workers: int) -> None:
    before = _global_streams()
    loader = _numbers_loader(num_workers=num_workers)
    loader.load_state_dict(loader.state_dict())
    loader.set_epoch(1)
    reading = iter(loader)
    next(reading)
    loader.state_dict()
    list(reading)
    list(loader)
    assert _global_streams() == before


# ---- epochs and positions


def test_length_is_the_whole_epoch_whatever_the_position() -> None:
    loader = _numbers_loader()
    loader.load_state_dict(loader.state_dict() | {"batches_consumed": 4})
    assert len(loader) == 6
    assert len(_ids(loader)) == 2
    assert len(loader) == 6


def test_a_batch_counts_as_consumed_in_the_loop_body_that_trains_on_it() -> None:
    loader = _numbers_loader()
    assert [loader.batches_consumed for _ in loader] == [1, 2, 3, 4, 5, 6]
    assert (loader.epoch, loader.batches_consumed) == (0, 6)


def test_iterating_after_a_finished_epoch_reads_the_next_one() -> None:
    loader = _numbers_loader()
    first, second = _ids(loader), _ids(loader)
    assert first != second
    assert sorted(_flat(first)) == sorted(_flat(second)) == list(range(23))
    assert (loader.epoch, loader.batches_consumed) == (1, 6)


def test_an_interrupted_pass_is_continued_by_the_next_one() -> None:
    expected = _ids(_numbers_loader())
    loader = _numbers_loader()
    got = []
    for batch in loader:
        got.append(batch)
        if len(got) == 2:
            break
    assert got + _ids(loader) == expected


def test_set_epoch_keeps_the_position_of_the_same_epoch_and_starts_another_at_its_first_batch() -> None:
    expected = _ids(_numbers_loader())
    loader = _numbers_loader()
    next(iter(loader))
    loader.set_epoch(0)
    assert _ids(loader) == expected[1:]
    loader.set_epoch(7)
    assert (loader.epoch, loader.batches_consumed) == (7, 0)
    assert len(_ids(loader)) == 6


def test_set_epoch_to_the_running_epoch_does_not_part_the_loader_from_its_iterator() -> None:
    loader = _numbers_loader()
    for _ in loader:
        loader.set_epoch(0)
    assert loader.batches_consumed == 6
    assert len(_ids(loader)) == 0  # chosen again, and finished
    assert len(_ids(loader)) == 6
    assert loader.epoch == 1


def test_an_epoch_chosen_while_it_is_read_is_left_for_the_next_one_at_its_end() -> None:
    loader = _numbers_loader()
    reading = iter(loader)
    next(reading)
    loader.set_epoch(0)
    list(reading)
    assert len(_ids(loader)) == 6
    assert loader.epoch == 1


def test_choosing_a_finished_epoch_again_gives_an_empty_pass_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    loader = _numbers_loader()
    list(loader)
    loader.set_epoch(0)
    with caplog.at_level(logging.WARNING):
        assert _ids(loader) == []
    assert "epoch 0 has already been read to its end" in caplog.text
    assert (loader.epoch, loader.batches_consumed) == (0, 6)


def test_set_epoch_mid_loop_pattern_reads_every_epoch_whole_after_a_resume_at_an_epochs_end() -> None:
    straight = _numbers_loader()
    epochs = []
    for epoch in range(3):
        straight.set_epoch(epoch)
        epochs.append(_ids(straight))
        if epoch == 1:
            saved = straight.state_dict()
    resumed = _numbers_loader()
    resumed.load_state_dict(saved)
    resumed.set_epoch(2)
    assert _ids(resumed) == epochs[2]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_state_of_a_finished_epoch_survives_the_load_and_is_followed_by_whole_epochs(num_workers: int) -> None:
    straight = _numbers_loader(num_workers=num_workers)
    list(straight)
    saved = straight.state_dict()
    expected = [_ids(straight), _ids(straight)]
    resumed = _numbers_loader(num_workers=num_workers)
    resumed.load_state_dict(saved)
    assert resumed.state_dict() == saved
    assert [_ids(resumed), _ids(resumed)] == expected


def test_state_keeps_growing_after_a_load_and_owes_nothing_to_the_loaded_mapping() -> None:
    loader = _numbers_loader()
    state = loader.state_dict() | {"batches_consumed": 3}
    loader.load_state_dict(state)
    next(iter(loader))
    assert loader.state_dict()["batches_consumed"] == 4
    assert state["batches_consumed"] == 3
    loader.state_dict()["epoch"] = 9
    assert loader.epoch == 0


def test_load_takes_effect_for_the_next_iterator_and_leaves_a_living_one_alone() -> None:
    expected = _ids(_numbers_loader())
    loader = _numbers_loader()
    living = iter(loader)
    assert next(living) == expected[0]
    loader.load_state_dict(loader.state_dict() | {"batches_consumed": 4})
    assert next(living) == expected[1]
    assert living.state_dict()["batches_consumed"] == 2
    assert loader.batches_consumed == 4
    assert _ids(loader) == expected[4:]


def test_reading_the_state_early_changes_nothing_for_any_rank() -> None:
    union: list[int] = []
    for rank in range(2):
        loader = _numbers_loader(96, dp_rank=rank, dp_world_size=2)
        loader.state_dict()
        reading = iter(loader)
        reading.state_dict()
        loader.state_dict()
        union += _flat(reading)
    assert sorted(union) == list(range(96))


def test_state_is_plain_and_names_what_the_position_is_in() -> None:
    loader = DataLoader(Numbers(23, "f00d"), batch_size=4, seed=5, dp_world_size=2, dp_rank=1)
    next(iter(loader))
    expected = {
        "epoch": 0,
        "batches_consumed": 1,
        "dp_world_size": 2,
        "batch_size": 4,
        "num_samples": 23,
        "shuffle": True,
        "seed": 5,
        "drop_last": False,
        "fingerprint": "f00d",
    }
    assert loader.state_dict() == expected
    assert json.loads(json.dumps(loader.state_dict())) == expected


# ---- nothing is read in vain


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipped_batches_are_not_read_from_the_dataset(num_workers: int) -> None:
    dataset = Counting(23)
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=as_is)
    loader.load_state_dict(loader.state_dict() | {"epoch": 1, "batches_consumed": 4})
    rest = _flat(loader)
    assert len(rest) == 7
    assert [index for index, reads in enumerate(dataset.reads) if reads] == sorted(rest)
    assert max(dataset.reads) == 1


def test_making_an_iterator_reads_nothing() -> None:
    dataset = Counting(8)
    iter(DataLoader(dataset, batch_size=2))
    assert sum(dataset.reads) == 0


def test_resume_deep_in_an_epoch_of_ten_million_samples_reads_one_batch_and_is_quick() -> None:
    length, batch_size, consumed = 10_000_000, 8, 1_200_000
    order = torch.randperm(length, generator=torch.Generator().manual_seed(3 + 2))
    wanted = order[consumed * batch_size :][:batch_size].tolist()
    loader = DataLoader(Only(length, set(wanted)), batch_size=batch_size, seed=3, collate_fn=as_is)
    loader.load_state_dict(loader.state_dict() | {"epoch": 2, "batches_consumed": consumed})
    start = time.perf_counter()
    assert next(iter(loader)) == wanted
    assert time.perf_counter() - start < 10


# ---- changed data or topology


@pytest.mark.parametrize(
    ("field", "saved", "current"),
    [
        ("dp_world_size", "2", "4"),
        ("batch_size", "3", "4"),
        ("num_samples", "22", "23"),
        ("shuffle", "False", "True"),
        ("seed", "4", "5"),
        ("drop_last", "True", "False"),
        ("fingerprint", "'old'", "'new'"),
    ],
)
def test_a_changed_field_warns_and_replays_the_saved_epoch_from_its_first_sample(
    field: str, saved: str, current: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make_loader() -> DataLoader:
        return DataLoader(Numbers(23, "new"), batch_size=4, seed=5, dp_world_size=4, dp_rank=1, collate_fn=as_is)

    values = {"2": 2, "3": 3, "22": 22, "False": False, "4": 4, "True": True, "'old'": "old"}
    loader = make_loader()
    with caplog.at_level(logging.WARNING):
        loader.load_state_dict(
            loader.state_dict() | {"epoch": 3, "batches_consumed": 1} | {field: values[saved]},
        )
    assert f"{field} saved {saved}, current {current}" in caplog.text
    assert (loader.epoch, loader.batches_consumed) == (3, 0)
    fresh = make_loader()
    fresh.set_epoch(3)
    assert _ids(loader) == _ids(fresh)


def test_every_changed_field_is_named(caplog: pytest.LogCaptureFixture) -> None:
    loader = _numbers_loader()
    loader.load_state_dict(loader.state_dict() | {"dp_world_size": 2, "batch_size": 8})
    assert "dp_world_size saved 2, current 1; batch_size saved 8, current 4" in caplog.text


def test_a_position_past_the_new_epochs_end_is_dropped_with_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    loader = _numbers_loader()
    loader.load_state_dict(loader.state_dict() | {"batch_size": 1, "batches_consumed": 20})
    assert loader.batches_consumed == 0
    assert "20 batches consumed" in caplog.text


def test_a_state_with_only_the_oldest_keys_is_accepted_and_unknown_keys_are_ignored() -> None:
    loader = _numbers_loader()
    loader.load_state_dict({"epoch": 2, "batches_consumed": 3, "dp_world_size": 1, "batch_size": 4, "sampler": None})
    assert (loader.epoch, loader.batches_consumed) == (2, 3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"epoch": None}, "epoch=None"),
        ({"epoch": -1}, "epoch=-1"),
        ({"epoch": True}, "epoch=True"),
        ({"batches_consumed": 1.0}, "batches_consumed=1.0"),
        ({"batch_size": "4"}, "batch_size='4'"),
        ({"shuffle": 1}, "shuffle=1"),
        ({"fingerprint": 7}, "fingerprint=7"),
        ({"batches_consumed": 7}, "batches_consumed=7"),
    ],
)
def test_a_wrong_state_is_refused_by_name_and_changes_nothing(change: dict[str, Any], named: str) -> None:
    loader = _numbers_loader()
    loader.load_state_dict(loader.state_dict() | {"epoch": 1, "batches_consumed": 2})
    before = loader.state_dict()
    with pytest.raises(CheckpointMismatchError, match=named):
        loader.load_state_dict(before | change)
    assert loader.state_dict() == before


@pytest.mark.parametrize("missing", ["epoch", "batches_consumed", "dp_world_size", "batch_size"])
def test_a_state_without_a_required_key_is_refused(missing: str) -> None:
    loader = _numbers_loader()
    state = loader.state_dict()
    del state[missing]
    with pytest.raises(CheckpointMismatchError, match=f"no {missing}"):
        loader.load_state_dict(state)


def test_a_state_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(CheckpointMismatchError, match="list"):
        _numbers_loader().load_state_dict([1, 2])  # type: ignore[arg-type]


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
        _numbers_loader(**options)
    assert isinstance(caught.value, ValueError)


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
        _numbers_loader().set_epoch(epoch)


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
    assert _ids(loader) == [[4, 5], [6, 7]]


def test_stop_iteration_from_the_dataset_is_an_error_and_not_an_early_end_of_the_epoch() -> None:
    loader = DataLoader(Broken(8, at=5, error=StopIteration()), batch_size=2, shuffle=False)
    with pytest.raises(RuntimeError, match=r"StopIteration.*epoch 0, batch 2 of 4"):
        list(loader)
    assert loader.batches_consumed == 2


def test_closing_an_iterator_stops_its_workers_and_keeps_the_position() -> None:
    others = set(multiprocessing.active_children())
    loader = _numbers_loader(num_workers=2)
    reading = iter(loader)
    next(reading)
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    reading.close()
    assert not any(worker.is_alive() for worker in workers)
    assert loader.batches_consumed == 1
    with pytest.raises(RuntimeError, match="closed"):
        next(reading)

from __future__ import annotations

import json
import logging

import pytest

from hyper_resume.data import DataLoader
from tests.data.datasets_for_tests import Numbers
from tests.data.loaders_for_tests import flat, ids, numbers_loader


def test_length_is_the_whole_epoch_whatever_the_position() -> None:
    loader = numbers_loader()
    loader.load_state_dict(loader.state_dict() | {"batches_consumed": 4})
    assert len(loader) == 6
    assert len(ids(loader)) == 2
    assert len(loader) == 6


def test_a_batch_counts_as_consumed_in_the_loop_body_that_trains_on_it() -> None:
    loader = numbers_loader()
    assert [loader.batches_consumed for _ in loader] == [1, 2, 3, 4, 5, 6]
    assert (loader.epoch, loader.batches_consumed) == (0, 6)


def test_iterating_after_a_finished_epoch_reads_the_next_one() -> None:
    loader = numbers_loader()
    first, second = ids(loader), ids(loader)
    assert first != second
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(23))
    assert (loader.epoch, loader.batches_consumed) == (1, 6)


def test_an_interrupted_pass_is_continued_by_the_next_one() -> None:
    expected = ids(numbers_loader())
    loader = numbers_loader()
    got = []
    for batch in loader:
        got.append(batch)
        if len(got) == 2:
            break
    assert got + ids(loader) == expected


def test_set_epoch_keeps_the_position_of_the_same_epoch_and_starts_another_at_its_first_batch() -> None:
    expected = ids(numbers_loader())
    loader = numbers_loader()
    next(iter(loader))
    loader.set_epoch(0)
    assert ids(loader) == expected[1:]
    loader.set_epoch(7)
    assert (loader.epoch, loader.batches_consumed) == (7, 0)
    assert len(ids(loader)) == 6


def test_set_epoch_to_the_running_epoch_does_not_part_the_loader_from_its_iterator() -> None:
    loader = numbers_loader()
    for _ in loader:
        loader.set_epoch(0)
    assert loader.batches_consumed == 6
    assert len(ids(loader)) == 0  # chosen again, and finished
    assert len(ids(loader)) == 6
    assert loader.epoch == 1


def test_an_epoch_chosen_while_it_is_read_is_left_for_the_next_one_at_its_end() -> None:
    loader = numbers_loader()
    reading = iter(loader)
    next(reading)
    loader.set_epoch(0)
    list(reading)
    assert len(ids(loader)) == 6
    assert loader.epoch == 1


def test_choosing_a_finished_epoch_again_gives_an_empty_pass_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    loader = numbers_loader()
    list(loader)
    loader.set_epoch(0)
    with caplog.at_level(logging.WARNING):
        assert ids(loader) == []
    assert "epoch 0 has already been read to its end" in caplog.text
    assert (loader.epoch, loader.batches_consumed) == (0, 6)


def test_set_epoch_mid_loop_pattern_reads_every_epoch_whole_after_a_resume_at_an_epochs_end() -> None:
    straight = numbers_loader()
    epochs = []
    for epoch in range(3):
        straight.set_epoch(epoch)
        epochs.append(ids(straight))
        if epoch == 1:
            saved = straight.state_dict()
    resumed = numbers_loader()
    resumed.load_state_dict(saved)
    resumed.set_epoch(2)
    assert ids(resumed) == epochs[2]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_state_of_a_finished_epoch_survives_the_load_and_is_followed_by_whole_epochs(num_workers: int) -> None:
    straight = numbers_loader(num_workers=num_workers)
    list(straight)
    saved = straight.state_dict()
    expected = [ids(straight), ids(straight)]
    resumed = numbers_loader(num_workers=num_workers)
    resumed.load_state_dict(saved)
    assert resumed.state_dict() == saved
    assert [ids(resumed), ids(resumed)] == expected


def test_state_keeps_growing_after_a_load_and_owes_nothing_to_the_loaded_mapping() -> None:
    loader = numbers_loader()
    state = loader.state_dict() | {"batches_consumed": 3}
    loader.load_state_dict(state)
    next(iter(loader))
    assert loader.state_dict()["batches_consumed"] == 4
    assert state["batches_consumed"] == 3
    loader.state_dict()["epoch"] = 9
    assert loader.epoch == 0


def test_load_takes_effect_for_the_next_iterator_and_leaves_a_living_one_alone() -> None:
    expected = ids(numbers_loader())
    loader = numbers_loader()
    living = iter(loader)
    assert next(living) == expected[0]
    loader.load_state_dict(loader.state_dict() | {"batches_consumed": 4})
    assert next(living) == expected[1]
    assert living.state_dict()["batches_consumed"] == 2
    assert loader.batches_consumed == 4
    assert ids(loader) == expected[4:]


def test_reading_the_state_early_changes_nothing_for_any_rank() -> None:
    union: list[int] = []
    for rank in range(2):
        loader = numbers_loader(96, dp_rank=rank, dp_world_size=2)
        loader.state_dict()
        reading = iter(loader)
        reading.state_dict()
        loader.state_dict()
        union += flat(reading)
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

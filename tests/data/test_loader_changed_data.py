from __future__ import annotations

import logging
from typing import Any

import pytest

from hyper_resume.data import DataLoader
from hyper_resume.errors import CheckpointMismatchError
from tests.data.datasets_for_tests import Numbers, as_is
from tests.data.loaders_for_tests import ids, numbers_loader


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
    assert ids(loader) == ids(fresh)


def test_every_changed_field_is_named(caplog: pytest.LogCaptureFixture) -> None:
    loader = numbers_loader()
    loader.load_state_dict(loader.state_dict() | {"dp_world_size": 2, "batch_size": 8})
    assert "dp_world_size saved 2, current 1; batch_size saved 8, current 4" in caplog.text


def test_a_position_past_the_new_epochs_end_is_dropped_with_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    loader = numbers_loader()
    loader.load_state_dict(loader.state_dict() | {"batch_size": 1, "batches_consumed": 20})
    assert loader.batches_consumed == 0
    assert "20 batches consumed" in caplog.text


def test_a_state_with_only_the_oldest_keys_is_accepted_and_unknown_keys_are_ignored() -> None:
    loader = numbers_loader()
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
    loader = numbers_loader()
    loader.load_state_dict(loader.state_dict() | {"epoch": 1, "batches_consumed": 2})
    before = loader.state_dict()
    with pytest.raises(CheckpointMismatchError, match=named):
        loader.load_state_dict(before | change)
    assert loader.state_dict() == before


@pytest.mark.parametrize("missing", ["epoch", "batches_consumed", "dp_world_size", "batch_size"])
def test_a_state_without_a_required_key_is_refused(missing: str) -> None:
    loader = numbers_loader()
    state = loader.state_dict()
    del state[missing]
    with pytest.raises(CheckpointMismatchError, match=f"no {missing}"):
        loader.load_state_dict(state)


def test_a_state_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(CheckpointMismatchError, match="list"):
        numbers_loader().load_state_dict([1, 2])  # type: ignore[arg-type]

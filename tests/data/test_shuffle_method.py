"""The loader with ``shuffle_method="feistel"``, and what becomes of checkpoints that were made with the other one."""

from __future__ import annotations

import json
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from hyper_resume.config import load_config
from hyper_resume.data import DataLoader, HyperIter
from hyper_resume.errors import CheckpointMismatchError, ConfigError
from hyper_resume.state.dataloader import check_dataloader
from tests.data.datasets_for_tests import Counting, Noisy, Numbers, Only, as_is
from tests.data.feistel_model import index_at
from tests.data.loaders_for_tests import flat, ids, numbers_loader
from tests.data.position_replay import assert_resumes_exactly_at_every_position

TRILLION = 10**12
FROM_A_STATE_WITHOUT_THE_NAME = {"epoch": 3, "batches_consumed": 2, "dp_world_size": 1, "batch_size": 4}


# ---- exact continuation


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("world", "rank"), [(1, 0), (3, 0), (3, 2)])
def test_resume_at_every_position_of_three_epochs_equals_the_uninterrupted_run(
    world: int, rank: int, drop_last: bool
) -> None:
    def make_loader() -> DataLoader:
        return numbers_loader(dp_world_size=world, dp_rank=rank, drop_last=drop_last, shuffle_method="feistel")

    whole = assert_resumes_exactly_at_every_position(make_loader, epochs=3)

    expected = []
    for epoch in range(3):
        order = [index_at(position, 23, 5, epoch) for position in range(23)]
        order = order[: 23 // world * world] if drop_last else order + order[: -23 % world]
        share = order[rank::world]
        batches = [share[first : first + 4] for first in range(0, len(share), 4)]
        expected += [batch for batch in batches if len(batch) == 4 or not drop_last]
    assert [handed.batch for handed in whole] == expected
    assert [handed.sample_ids for handed in whole] == expected


@pytest.mark.parametrize("options", [{"num_workers": 2}, {}], ids=["workers", "background"])
def test_resume_with_workers_or_a_reading_thread_equals_the_uninterrupted_run(options: dict[str, Any]) -> None:
    def make_loader() -> DataLoader:
        dataset = Noisy(5) if options else Numbers(5)
        return DataLoader(dataset, batch_size=2, seed=5, collate_fn=as_is, shuffle_method="feistel", **options)

    def open_pass(loader: DataLoader) -> Any:
        return iter(loader) if options else HyperIter(loader, use_background_prefetcher=True)

    whole = assert_resumes_exactly_at_every_position(make_loader, 3, open_pass)
    read = [handed.sample_ids for handed in whole]
    assert [sorted(flat(read[epoch * 3 : epoch * 3 + 3])) for epoch in range(3)] == [list(range(5))] * 3


def test_batches_that_cross_a_computed_piece_are_whole() -> None:
    loader = numbers_loader(5000, batch_size=600, shuffle_method="feistel")
    assert flat(ids(loader)) == [index_at(position, 5000, 5, 0) for position in range(5000)]


def test_ranks_together_read_every_sample_once() -> None:
    shares = [flat(ids(numbers_loader(24, dp_rank=r, dp_world_size=3, shuffle_method="feistel"))) for r in range(3)]
    assert sorted(flat(shares)) == list(range(24))


# ---- at no cost


def test_resume_in_the_middle_of_a_trillion_samples_reads_one_batch_and_takes_no_memory() -> None:
    consumed = 25_000_000_000
    places = range(consumed * 8, consumed * 8 + 8)
    wanted = [index_at(place * 4 + 3, TRILLION, 5, 2) for place in places]
    tracemalloc.start()
    try:
        loader = numbers_loader(
            batch_size=8, dp_rank=3, dp_world_size=4, shuffle_method="feistel", dataset=Only(TRILLION, set(wanted))
        )
        loader.load_state_dict(loader.state_dict() | {"epoch": 2, "batches_consumed": consumed})
        reading = iter(loader)
        assert next(reading) == reading.sample_ids == wanted
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2_000_000
    assert loader.state_dict()["batches_consumed"] == consumed + 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipped_batches_are_not_read_from_the_dataset(num_workers: int) -> None:
    dataset = Counting(23)
    loader = numbers_loader(dataset=dataset, num_workers=num_workers, shuffle_method="feistel")
    loader.load_state_dict(loader.state_dict() | {"epoch": 1, "batches_consumed": 4})
    rest = flat(loader)
    assert rest == [index_at(position, 23, 5, 1) for position in range(16, 23)]
    assert [index for index, reads in enumerate(dataset.reads) if reads] == sorted(rest)


# ---- the name in the state


def test_state_names_the_method_and_one_without_a_name_means_randperm() -> None:
    named = numbers_loader(shuffle_method="feistel").state_dict()
    unnamed = numbers_loader().state_dict()
    assert named.pop("shuffle_method") == "feistel"
    assert named == unnamed
    assert numbers_loader(shuffle_method="randperm").state_dict() == unnamed
    assert json.loads(json.dumps(named)) == named


@pytest.mark.parametrize(
    ("saved", "current"), [("feistel", "randperm"), ("randperm", "feistel"), ("a later one", "randperm")]
)
def test_a_checkpoint_of_another_method_warns_and_replays_the_saved_epoch(
    saved: str, current: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = numbers_loader(shuffle_method=current)
    state = loader.state_dict() | {"epoch": 3, "batches_consumed": 2, "shuffle_method": saved}
    assert check_dataloader(loader, state) == [
        f"the data has changed since the checkpoint (shuffle_method saved '{saved}', current '{current}')"
    ]
    with caplog.at_level(logging.WARNING):
        loader.load_state_dict(state)
    assert f"shuffle_method saved '{saved}', current '{current}'" in caplog.text
    assert (loader.epoch, loader.batches_consumed) == (3, 0)


def test_an_old_checkpoint_is_resumed_by_randperm_and_not_by_feistel(caplog: pytest.LogCaptureFixture) -> None:
    present = numbers_loader()
    with caplog.at_level(logging.WARNING):
        present.load_state_dict(FROM_A_STATE_WITHOUT_THE_NAME)
    assert caplog.text == ""
    assert check_dataloader(present, FROM_A_STATE_WITHOUT_THE_NAME) == []
    assert (present.epoch, present.batches_consumed) == (3, 2)
    other = numbers_loader(shuffle_method="feistel")
    with caplog.at_level(logging.WARNING):
        other.load_state_dict(FROM_A_STATE_WITHOUT_THE_NAME)
    assert "shuffle_method saved 'randperm', current 'feistel'" in caplog.text
    assert (other.epoch, other.batches_consumed) == (3, 0)


@pytest.mark.parametrize("wrong", [7, None, True])
def test_a_saved_method_that_is_no_text_is_refused(wrong: Any) -> None:
    loader = numbers_loader()
    with pytest.raises(CheckpointMismatchError, match=f"shuffle_method={wrong}"):
        loader.load_state_dict(loader.state_dict() | {"shuffle_method": wrong})


# ---- choosing it


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"shuffle_method": "fiestel"}, "one of randperm, feistel; found: 'fiestel'"),
        ({"shuffle_method": None}, "found: None"),
        ({"shuffle_method": "feistel", "shuffle": False}, "needs shuffle=True.*shuffle_method='feistel'"),
    ],
)
def test_a_method_that_cannot_be_used_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        numbers_loader(**options)


def test_configuration_takes_both_methods_and_randperm_by_default(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.touch()
    assert load_config(path).data.shuffle_method == "randperm"
    assert load_config(path, ["--data.shuffle=false"]).data.shuffle_method == "randperm"
    assert load_config(path, ["--data.shuffle_method=feistel"]).data.shuffle_method == "feistel"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["--data.shuffle_method=philox"], "data.shuffle_method.*one of randperm, feistel"),
        (
            ["--data.shuffle_method=feistel", "--data.shuffle=false"],
            "only where samples are shuffled.*found: data.shuffle=false",
        ),
    ],
)
def test_configuration_refuses_a_method_that_cannot_be_used(tmp_path: Path, overrides: list[str], named: str) -> None:
    path = tmp_path / "train.yaml"
    path.touch()
    with pytest.raises(ConfigError, match=named):
        load_config(path, overrides)

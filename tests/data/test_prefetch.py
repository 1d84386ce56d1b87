from __future__ import annotations

import functools
import gc
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hyper_resume.data import BackgroundPrefetcher, DataLoader, HyperIter
from hyper_resume.errors import ConfigError, UnsupportedError
from tests.data.datasets_for_tests import Broken, Noisy, Numbers, as_is
from tests.data.position_replay import assert_resumes_exactly_at_every_position, read

IN_FRONT = functools.partial(HyperIter, use_background_prefetcher=False)
IN_BACKGROUND = functools.partial(HyperIter, use_background_prefetcher=True, prefetch_batches=2)


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    yield
    gc.collect()
    assert _prefetching_threads() == []


def _prefetching_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hyper-resume-prefetch"]


def _loader(length: int = 23, **options: Any) -> DataLoader:
    options = {"batch_size": 4, "seed": 5, "collate_fn": as_is} | options
    return DataLoader(options.pop("dataset", Numbers(length)), **options)


class Gate:
    """A source that says when it is asked for an item, and can be held at one."""

    def __init__(self, hold_at: int | None = None) -> None:
        self.asked = [threading.Event() for _ in range(100)]
        self.hold_at = hold_at
        self.release = threading.Event()

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            self.asked[number].set()
            if number == self.hold_at:
                assert self.release.wait(60)
            yield number


# ---- exact continuation


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("world", "rank"), [(1, 0), (3, 1)])
@pytest.mark.parametrize("open_pass", [IN_FRONT, IN_BACKGROUND], ids=["in-front", "in-background"])
def test_resume_at_every_position_equals_the_uninterrupted_run(
    open_pass: Any, world: int, rank: int, drop_last: bool
) -> None:
    def make_loader() -> DataLoader:
        return _loader(dp_world_size=world, dp_rank=rank, drop_last=drop_last)

    whole = assert_resumes_exactly_at_every_position(make_loader, 3, open_pass)
    assert whole == list(read(make_loader(), 3, iter))


# Every pair of values; all eight triples are tried without workers, above: each pass here starts two processes.
@pytest.mark.parametrize(
    ("open_pass", "length", "world", "rank", "drop_last"),
    [
        pytest.param(IN_FRONT, 5, 1, 0, False, id="in-front-5-1-0-False"),
        pytest.param(IN_FRONT, 7, 3, 1, True, id="in-front-7-3-1-True"),
        pytest.param(IN_BACKGROUND, 5, 1, 0, True, id="in-background-5-1-0-True"),
        pytest.param(IN_BACKGROUND, 7, 3, 1, False, id="in-background-7-3-1-False"),
    ],
)
def test_resume_with_workers_equals_the_uninterrupted_run(
    open_pass: Any, length: int, world: int, rank: int, drop_last: bool
) -> None:
    def make_loader() -> DataLoader:
        return _loader(
            dataset=Noisy(length), batch_size=2, dp_world_size=world, dp_rank=rank, drop_last=drop_last, num_workers=2
        )

    whole = assert_resumes_exactly_at_every_position(make_loader, 2, open_pass)
    assert whole == list(read(make_loader(), 2, iter))


# ---- the position is that of training


def test_saved_position_is_that_of_training_while_the_loader_has_run_ahead() -> None:
    loader = _loader(40)
    gate = threading.Event()

    def collate(samples: list[int]) -> list[int]:
        if loader.batches_consumed == 5:  # three were handed out, two lie ready, the sixth is being read
            gate.set()
        return samples

    loader.collate_fn = collate
    with IN_BACKGROUND(loader) as reading:
        handed = [next(reading) for _ in range(3)]
        assert gate.wait(60)
        assert loader.batches_consumed >= 5
        saved = reading.state_dict()
        assert saved["batches_consumed"] == 3
        assert reading.sample_ids == handed[-1]
    resumed = _loader(40)
    resumed.load_state_dict(saved)
    assert next(iter(resumed)) == list(_loader(40))[3]


def test_two_workers_that_prefetch_two_batches_do_not_run_the_saved_position_ahead() -> None:
    loader = _loader(40, num_workers=2, prefetch_factor=2)
    with IN_FRONT(loader) as reading:
        for _ in range(3):
            next(reading)
        saved = reading.state_dict()
    assert saved["batches_consumed"] == loader.batches_consumed == 3


@pytest.mark.parametrize("open_pass", [IN_FRONT, IN_BACKGROUND], ids=["in-front", "in-background"])
def test_stopping_in_mid_epoch_puts_the_loader_back_to_what_was_trained(open_pass: Any) -> None:
    expected = list(_loader())
    loader = _loader()
    with open_pass(loader) as reading:
        next(reading)
        next(reading)
    assert loader.batches_consumed == 2
    assert reading.state_dict() == loader.state_dict()
    with open_pass(loader) as rest:
        assert list(rest) == expected[2:]
    assert (loader.epoch, loader.batches_consumed) == (0, 6)


@pytest.mark.parametrize("open_pass", [IN_FRONT, IN_BACKGROUND], ids=["in-front", "in-background"])
def test_state_before_the_first_batch_is_the_loaders_and_after_the_last_the_finished_epochs(open_pass: Any) -> None:
    loader = _loader()
    loader.load_state_dict(loader.state_dict() | {"epoch": 1, "batches_consumed": 4})
    at_creation = loader.state_dict()
    with open_pass(loader) as reading:
        assert reading.state_dict() == at_creation
        assert reading.sample_ids == []
        assert len(list(reading)) == 2
        assert reading.state_dict() == loader.state_dict() == at_creation | {"batches_consumed": 6}
        with pytest.raises(StopIteration):
            next(reading)


def test_closing_does_not_move_a_loader_that_was_sent_elsewhere_meanwhile() -> None:
    loader = _loader()
    with IN_BACKGROUND(loader) as reading:
        next(reading)
        loader.load_state_dict(loader.state_dict() | {"epoch": 2, "batches_consumed": 1})
        list(reading)
        assert reading.state_dict() == loader.state_dict() | {"epoch": 0, "batches_consumed": 6}
    assert (loader.epoch, loader.batches_consumed) == (2, 1)


def test_the_handed_out_state_is_the_callers_own() -> None:
    with IN_FRONT(_loader()) as reading:
        reading.state_dict()["epoch"] = 9
        assert reading.state_dict()["epoch"] == 0


def test_making_the_iterator_reads_nothing_so_streams_restored_after_it_are_those_of_the_first_batch() -> None:
    reading = IN_FRONT(_loader(dataset=Noisy(8)))
    torch.manual_seed(11)
    expected = torch.rand(2).tolist()
    torch.manual_seed(11)
    assert next(reading)[0][1] == expected


# ---- random draws


def test_a_dataset_that_draws_in_this_process_is_refused_with_the_background_prefetcher() -> None:
    loader = _loader(dataset=Noisy(8))
    reading = IN_BACKGROUND(loader)
    with pytest.raises(UnsupportedError, match="num_workers to 1 or more"):
        next(reading)
    assert loader.batches_consumed == 0
    assert len(list(IN_FRONT(loader))) == 2


# ---- loaders of others


class ForeignStateful:
    """As a loader of another library: the position is the loader's, and its state is live."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.state = {"next": 0}

    def __iter__(self) -> Iterator[int]:
        while self.state["next"] < self.length:
            self.state["next"] += 1
            yield self.state["next"] - 1
        self.state["next"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


@pytest.mark.parametrize("open_pass", [IN_FRONT, IN_BACKGROUND], ids=["in-front", "in-background"])
def test_a_foreign_stateful_loader_is_saved_as_of_the_batch_last_handed_out(open_pass: Any) -> None:
    loader = ForeignStateful(6)
    with open_pass(loader) as reading:
        assert [next(reading), next(reading)] == [0, 1]
        assert reading.has_state
        assert reading.sample_ids == []
        assert reading.state_dict() == {"next": 2}
    assert loader.state == {"next": 2}
    with open_pass(loader) as reading:
        assert list(reading) == [2, 3, 4, 5]
        assert reading.state_dict() == {"next": 0}


@pytest.mark.parametrize("open_pass", [IN_FRONT, IN_BACKGROUND], ids=["in-front", "in-background"])
def test_a_loader_without_state_is_read_and_has_none(open_pass: Any) -> None:
    loader = torch.utils.data.DataLoader(Numbers(6), batch_size=2)
    with open_pass(loader) as reading:
        assert not reading.has_state
        assert [batch.tolist() for batch in reading] == [[0, 1], [2, 3], [4, 5]]
        assert reading.sample_ids == []
        with pytest.raises(UnsupportedError, match=r"DataLoader.*has_state"):
            reading.state_dict()


# ---- errors and ends


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("open_pass", [IN_FRONT, IN_BACKGROUND], ids=["in-front", "in-background"])
def test_a_failed_read_arrives_after_the_batches_before_it_and_the_position_stays_with_them(
    open_pass: Any, num_workers: int
) -> None:
    dataset = Broken(12, at=7, error=OSError("the disk has gone"))
    loader = _loader(dataset=dataset, batch_size=2, shuffle=False, num_workers=num_workers)
    reading = open_pass(loader)
    assert [next(reading) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(OSError, match="the disk has gone"):
        next(reading)
    assert reading.state_dict() == loader.state_dict()
    assert loader.batches_consumed == 3
    with pytest.raises(RuntimeError, match="closed"):
        next(reading)


@pytest.mark.parametrize("open_pass", [IN_FRONT, IN_BACKGROUND], ids=["in-front", "in-background"])
def test_a_closed_iterator_refuses_to_go_on_and_still_tells_its_state(open_pass: Any) -> None:
    reading = open_pass(_loader())
    next(reading)
    reading.close()
    reading.close()
    assert reading.state_dict()["batches_consumed"] == 1
    with pytest.raises(RuntimeError, match="closed"):
        next(reading)


def test_no_room_for_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prefetch_batches.*found: 0"):
        HyperIter(_loader(), use_background_prefetcher=True, prefetch_batches=0)
    with pytest.raises(ConfigError, match="found: 0"):
        BackgroundPrefetcher(iter([1]), capacity=0)


def test_prefetcher_hands_items_on_in_order_and_then_stops() -> None:
    prefetcher = BackgroundPrefetcher(iter(range(50)), capacity=3)
    assert list(prefetcher) == list(range(50))
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_prefetcher_reads_only_so_far_ahead_as_it_has_room() -> None:
    gate = Gate()
    prefetcher = BackgroundPrefetcher(iter(gate), capacity=2)
    assert gate.asked[2].wait(60)
    assert next(prefetcher) == 0
    assert gate.asked[3].wait(60)
    prefetcher.close()
    assert not gate.asked[4].is_set()


def test_prefetcher_closes_while_its_queue_is_full() -> None:
    gate = Gate()
    prefetcher = BackgroundPrefetcher(iter(gate), capacity=1)
    assert gate.asked[1].wait(60)
    prefetcher.close()
    prefetcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(prefetcher)


def test_prefetcher_closes_without_hanging_while_its_source_is_stuck(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(hold_at=0)
    prefetcher = BackgroundPrefetcher(iter(gate), close_timeout_seconds=0.05)
    (thread,) = _prefetching_threads()
    assert gate.asked[0].wait(60)
    prefetcher.close()
    assert "still reading a batch" in caplog.text
    gate.release.set()
    thread.join(60)
    assert not thread.is_alive()
    assert not gate.asked[1].is_set()


def test_a_consumer_that_waits_is_woken_by_the_error() -> None:
    gate = Gate(hold_at=0)

    def source() -> Iterator[int]:
        for number in gate:
            raise OSError(f"item {number}")
            yield number

    prefetcher = BackgroundPrefetcher(source())
    threading.Timer(0.05, gate.release.set).start()
    for _ in range(2):
        with pytest.raises(OSError, match="item 0"):
            next(prefetcher)
    prefetcher.close()


def test_a_prefetcher_that_is_forgotten_ends_its_thread() -> None:
    gate = Gate()
    prefetcher = BackgroundPrefetcher(iter(gate))
    (thread,) = _prefetching_threads()
    assert gate.asked[2].wait(60)
    del prefetcher
    gc.collect()
    assert not thread.is_alive()


def test_a_program_ends_cleanly_with_a_prefetcher_left_open() -> None:
    script = """
import json
from hyper_resume.data import DataLoader, HyperIter
class Numbers:
    def __len__(self): return 1000
    def __getitem__(self, index): return index
kept = HyperIter(DataLoader(Numbers(), batch_size=2), use_background_prefetcher=True)
next(kept)
print(json.dumps(kept.state_dict()["batches_consumed"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == 1

"""What is saved, how it is compared, and the raw limits that move it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.contenders import limits, states
from benchmarks.protocol import BenchmarkError

LAYOUT = states.Layout(count=7, shape=(5, 3))


def test_a_state_is_the_same_each_time_it_is_made_and_no_two_tensors_are() -> None:
    once, again = LAYOUT.state(), LAYOUT.state()
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert len({tensor.sum().item() for tensor in once.values()}) == LAYOUT.count


@pytest.mark.parametrize("wanted", [2e6, 5e7, 3e8])
def test_a_large_layout_holds_about_what_was_asked_for(wanted: float) -> None:
    layout = states.large(wanted)
    assert layout.bytes_in_all == pytest.approx(wanted, rel=0.05)
    assert layout.count <= 144


def test_a_restored_state_is_accepted() -> None:
    states.check_equal(LAYOUT.state(), LAYOUT)


def test_one_flipped_bit_is_found() -> None:
    found = LAYOUT.state()
    found[LAYOUT.names()[4]].view(torch.int32)[2, 1] ^= 1
    with pytest.raises(BenchmarkError, match=LAYOUT.names()[4]):
        states.check_equal(found, LAYOUT)


def test_a_missing_tensor_is_found() -> None:
    found = LAYOUT.state()
    del found[LAYOUT.names()[0]]
    with pytest.raises(BenchmarkError, match="restored 6 tensors"):
        states.check_equal(found, LAYOUT)


def test_a_poisoned_state_is_not_taken_for_a_restored_one() -> None:
    found = LAYOUT.state()
    states.poison(found)
    with pytest.raises(BenchmarkError, match="not restored"):
        states.check_equal(found, LAYOUT)


@pytest.mark.parametrize("count", [1, 700])
def test_a_raw_write_holds_the_bytes_and_a_raw_read_brings_them_back(tmp_path: Path, count: int) -> None:
    layout = states.Layout(count=count, shape=(11, 3))
    state, target = layout.state(), layout.zeros()
    limits.write(states.memory_of(state), tmp_path / "raw", [3, 5])
    expected = b"".join(tensor.numpy().tobytes() for tensor in state.values())
    assert (tmp_path / "raw" / "payload").read_bytes() == expected
    assert sorted(path.stat().st_size for path in (tmp_path / "raw").iterdir()) == sorted([3, 5, len(expected)])
    limits.read(tmp_path / "raw" / "payload", states.memory_of(target))
    states.check_equal(target, layout)


def test_a_raw_read_of_a_file_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(LAYOUT.bytes_in_all - 1))
    with pytest.raises(BenchmarkError, match="the file is too short"):
        limits.read(tmp_path / "short", states.memory_of(LAYOUT.zeros()))

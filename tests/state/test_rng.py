"""Four random streams, to the bit, and readable without running code."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hyper_resume.checkpoint.format.extra_state import encode, to_plain_state
from hyper_resume.errors import CheckpointMismatchError, UnsupportedError
from hyper_resume.state.rng import STREAMS, apply_rng, collect_rng


@pytest.fixture(autouse=True)
def streams_as_before() -> Iterator[None]:
    """Leave the streams of the test process as they were."""
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    np.random.set_state(numpy_state)


def through_bytes(state: dict[str, Any]) -> dict[str, Any]:
    read = torch.load(io.BytesIO(encode(to_plain_state({"rng_state": state}))), weights_only=True)
    return dict(read["rng_state"])


def draw() -> list[Any]:
    """Numbers of all kinds; the Gaussian ones come in pairs, of which the generators keep one back."""
    return [
        torch.rand(3).tolist(),
        torch.randn(2).tolist(),
        torch.nn.functional.dropout(torch.ones(8), 0.5).tolist(),
        random.random(),
        random.gauss(0, 1),
        random.sample(range(100), 5),
        float(np.random.randn()),
        np.random.permutation(7).tolist(),
        float(np.random.gamma(2.0)),
    ]


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@pytest.mark.parametrize("drawn_before", [0, 1, 2, 700])
def test_the_next_draws_are_those_of_the_uninterrupted_run(drawn_before: int) -> None:
    seed(5)
    for _ in range(drawn_before):
        torch.rand(())
        random.gauss(0, 1)
        np.random.randn()
    state = through_bytes(collect_rng("cpu"))
    expected = [draw() for _ in range(3)]
    seed(99)
    random.gauss(0, 1)
    np.random.randn()
    apply_rng(state, "cpu")
    assert [draw() for _ in range(3)] == expected


def test_the_gaussian_number_that_a_generator_keeps_back_comes_back() -> None:
    seed(5)
    random.gauss(0, 1)
    np.random.randn()
    state = through_bytes(collect_rng("cpu"))
    assert state["numpy"]["has_gauss"] == 1
    assert state["python"][2] is not None
    expected = (random.gauss(0, 1), np.random.randn())
    seed(99)
    apply_rng(state, "cpu")
    assert (random.gauss(0, 1), np.random.randn()) == expected


def test_collecting_draws_nothing_and_is_a_copy() -> None:
    seed(5)
    expected = draw()
    seed(5)
    state = collect_rng("cpu")
    assert draw() == expected
    apply_rng(state, "cpu")
    assert draw() == expected


def test_a_state_that_was_changed_to_lists_still_applies() -> None:
    seed(5)
    state = collect_rng("cpu")
    expected = draw()
    version, numbers, gauss = state["python"]
    apply_rng({**state, "python": [version, list(numbers), gauss]}, "cpu")
    assert draw() == expected


@pytest.mark.parametrize("stream", STREAMS)
def test_a_missing_stream_is_an_error_and_no_stream_moves(stream: str) -> None:
    state = collect_rng("cpu")
    seed(7)
    expected = draw()
    seed(7)
    with pytest.raises(CheckpointMismatchError, match=f"rng_state lacks {stream}"):
        apply_rng({name: value for name, value in state.items() if name != stream}, "cpu")
    assert draw() == expected


def test_the_device_stream_is_none_on_the_cpu() -> None:
    assert collect_rng("cpu")["torch_device"] is None


def test_another_global_generator_of_numpy_is_refused_by_name() -> None:
    numpy_random: Any = np.random  # numpy's own annotations lack the two functions
    before = numpy_random.get_bit_generator()
    numpy_random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(UnsupportedError, match=r"NumPy's global generator can't be saved.*PCG64"):
            collect_rng("cpu")
    finally:
        numpy_random.set_bit_generator(before)

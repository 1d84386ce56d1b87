"""Loops that are measured slice by slice: what they do is counted, and loops that do not do the same are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.contenders.sliced import Collate, Loops
from benchmarks.protocol import BenchmarkError
from benchmarks.subjects.trajectory import _check_records


def added(model: nn.Module, collate: Collate, amount: float, batches: int = 100) -> None:
    for _ in range(batches):
        batch = collate([torch.ones(2)])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += amount * batch.sum()


def make() -> nn.Module:
    return nn.Linear(2, 1)


def test_a_slice_is_so_many_steps_and_equal_loops_are_alike() -> None:
    loops = Loops(make, 3)
    sides = [loops.add(name, "limit", lambda model, collate: added(model, collate, 0.5)) for name in ("a", "b")]
    for side in sides:
        side.prepare()
    for side in sides:
        side.call()
        side.call()
    loops.check()
    assert (loops.steps_of("a"), loops.steps_of("b")) == (6, 6)
    loops.close()


def test_a_loop_that_trains_differently_is_an_error() -> None:
    loops = Loops(make, 3)
    for name, amount in (("a", 0.5), ("b", 0.25)):
        side = loops.add(name, "limit", lambda model, collate, amount=amount: added(model, collate, amount))
        side.prepare()
        side.call()
    with pytest.raises(BenchmarkError, match="a, b ended with different parameters"):
        loops.check()
    with pytest.raises(BenchmarkError, match="ended with different parameters"):
        loops.close()


def test_a_loop_that_ends_in_a_slice_is_an_error() -> None:
    loops = Loops(make, 3)
    side = loops.add("a", "limit", lambda model, collate: added(model, collate, 0.5, batches=4))
    side.prepare()
    side.call()
    with pytest.raises(BenchmarkError, match="no data is left"):
        side.call()
    loops.close()


@pytest.mark.parametrize(
    ("models", "has_digests"),
    [(["a", "b"], True), (["a", "a", "b"], True), ([None, None, None], True), (["a", "b", "c"], False)],
    ids=["a record too few", "a digest that stands still", "no digests", "digests that nobody asked for"],
)
def test_records_that_are_not_what_was_asked_for_give_no_figure(
    tmp_path: Path, models: list[str | None], has_digests: bool
) -> None:
    lines = [json.dumps({} if model is None else {"digests": {"model": model}}) for model in models]
    (tmp_path / "trajectory_rank_0.jsonl").write_text("\n".join(lines))
    with pytest.raises(BenchmarkError, match="digests of the model in 3 steps"):
        _check_records(tmp_path, 3, has_digests=has_digests)

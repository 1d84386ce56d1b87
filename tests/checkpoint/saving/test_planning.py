"""The plan and the names that this library makes by itself are those of ``torch.distributed.checkpoint``."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from hyper_resume.checkpoint.saving.plan_cache import CachingPlanner, PlanCache
from hyper_resume.checkpoint.tensors.flattening import flatten

BASE = torch.arange(24.0)

STATES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "an empty bucket": {"model": {}},
    "one tensor": {"model": {"w": BASE}},
    "parameters and buffers": {"model": {"w": torch.nn.Parameter(BASE.clone()), "b": BASE.clone()}},
    "types and shapes": {
        "model": {
            "bf16": BASE.bfloat16(),
            "long": BASE.long(),
            "bool": BASE > 3,
            "complex": BASE.to(torch.complex64),
            "scalar": torch.tensor(1.5),
            "empty": torch.empty(0, 3),
            "matrix": BASE.view(4, 6),
            "transposed": BASE.view(4, 6).t(),
            "a part": BASE[3:7],
            "expanded": BASE[:1].expand(5),
            "sparse": torch.tensor([0.0, 1.0, 0.0]).to_sparse(),
        }
    },
    "two names of one tensor": {"model": {"a": BASE, "b": BASE}},
    "nested": {"optimizer": {"state": {"w": {"step": torch.tensor(3.0), "more": {"deep": BASE}}}, "lr": 0.5}},
    "numbers as keys": {"optimizer": {"state": {0: {"step": 1}, 1: {"step": BASE}}}},
    "values": {"extra": {"text": "x", "none": None, "tuple": (1, BASE), "set": {1, 2}, "bytes": b"ab", "float": 1.5}},
    "lists of values": {"extra": {"betas": [0.9, 0.99], "nothing": [], "of lists": [[1, 2], [3]]}},
    "lists with tensors": {"extra": {"parts": [BASE, BASE + 1], "mixed": [1, BASE, {"k": BASE}, [BASE, 2], (BASE,)]}},
    "lists of mappings": {"groups": [{"lr": 1.0, "params": [0, 1]}, {"lr": 2.0, "params": []}]},
    "an ordered mapping": {"model": OrderedDict(b=BASE, a=OrderedDict(c=1))},
    "names with dots": {"model": {"a.b": BASE, "a": {"c": BASE}}},
    "at the top": {"w": BASE, "n": 3, "l": [BASE]},
}


@pytest.mark.parametrize("name", STATES)
def test_entries_have_the_names_the_order_and_the_paths_that_dcp_gives_them(name: str) -> None:
    flat, places = flatten(STATES[name])
    expected, paths = flatten_state_dict(STATES[name])
    assert list(flat) == list(expected)
    assert all(flat[entry] is expected[entry] for entry in expected)
    assert places == paths
    assert list(places) == list(paths)


@pytest.mark.parametrize(
    "state",
    [{"a": {"b": 1}, "a.b": 2}, {"a": {1: BASE, "1": BASE}}, {"a.0": BASE, "a": [BASE]}],
    ids=["a dot", "a number", "a list"],
)
def test_two_entries_of_one_name_are_an_error(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"two entries of the state are named a\.[b10]"):
        flatten(state)
    with pytest.raises(ValueError, match="duplicated flatten key"):
        flatten_state_dict(state)


def _planned(planner: DefaultSavePlanner, state: dict[str, Any]) -> tuple[SavePlan, SavePlan, Any]:
    planner.set_up_planner(state, None, is_coordinator=True)
    local = planner.create_local_plan()
    (whole,), metadata = planner.create_global_plan([local])
    return local, planner.finish_plan(whole), metadata


@pytest.mark.parametrize("name", STATES)
def test_one_ranks_plan_and_description_are_those_of_dcp(name: str) -> None:
    state = STATES[name]
    _, plan, metadata = _planned(CachingPlanner(PlanCache(), ((),), reuse=False), state)
    _, expected, description = _planned(DefaultSavePlanner(), state)
    assert plan.items == expected.items
    # Hints do not count in a comparison of indices.
    assert [item.index.index for item in plan.items] == [item.index.index for item in expected.items]
    assert plan.planner_data == expected.planner_data
    assert metadata.state_dict_metadata == description.state_dict_metadata
    assert list(metadata.state_dict_metadata) == list(description.state_dict_metadata)
    assert metadata.planner_data == description.planner_data


@pytest.mark.parametrize("name", STATES)
def test_what_an_item_writes_is_what_dcp_would_write(name: str) -> None:
    planner, stock = CachingPlanner(PlanCache(), ((),), reuse=False), DefaultSavePlanner()
    _, plan, _ = _planned(planner, STATES[name])
    _planned(stock, STATES[name])
    for item in plan.items:
        found, expected = planner.resolve_data(item), stock.resolve_data(item)
        if isinstance(expected, torch.Tensor):
            assert isinstance(found, torch.Tensor)
            dense = (found.to_dense(), expected.to_dense()) if found.is_sparse else (found, expected)
            assert torch.equal(*(tensor.detach() for tensor in dense))
        else:
            assert found.getvalue() == expected.getvalue()

"""Two states have one digest exactly when they are the same bits."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyper_resume.digest import digest_state
from hyper_resume.state.model import collect_model
from tests.ranks import run_ranks

NAN_BITS = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)

DIFFERENT: dict[str, Any] = {
    "zero": torch.tensor([0.0]),
    "negative zero": torch.tensor([-0.0]),
    "zero without a dimension": torch.tensor(0.0),
    "two dimensions": torch.tensor([[0.0]]),
    "double": torch.tensor([0.0], dtype=torch.float64),
    "half": torch.tensor([0.0], dtype=torch.float16),
    "bfloat16": torch.tensor([0.0], dtype=torch.bfloat16),
    "int32": torch.tensor([0], dtype=torch.int32),
    "bool": torch.tensor([False]),
    "none in it": torch.empty(0),
    "nan": torch.tensor([float("nan")]),
    "another nan": NAN_BITS,
    "smallest": torch.tensor([1e-45]),
    "two by three": torch.arange(6.0).reshape(2, 3),
    "three by two": torch.arange(6.0).reshape(3, 2),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "number": 0,
    "float": 0.0,
    "negative float": -0.0,
    "true": True,
    "one": 1,
    "text": "0",
    "bytes": b"0",
    "nothing": None,
    "empty dict": {},
    "empty list": [],
    "list": [1, 2],
    "other order": [2, 1],
    "nested list": [[1], 2],
    "nested differently": [[1, 2]],
    "one number": [12],
    "key": {"a": 1},
    "other key": {"b": 1},
    "number as key": {1: 1},
    "text of the number as key": {"1": 1},
    "inner": {"a": {"b": 1}},
    "outer": {"a": {}, "b": 1},
    "deep": {"a": {"b": {"c": 1}}},
    "less deep": {"a": {"b": {}, "c": 1}},
    "dict of lists": {"a": [], "b": [1]},
    "other dict of lists": {"a": [1], "b": []},
    "moved": {"a": torch.ones(1), "b": torch.zeros(1)},
    "swapped": {"a": torch.zeros(1), "b": torch.ones(1)},
}


def test_no_two_different_states_have_one_digest() -> None:
    for (left, left_value), (right, right_value) in itertools.combinations(DIFFERENT.items(), 2):
        assert digest_state(left_value) != digest_state(right_value), (left, right)


def test_what_is_equal_to_the_bit_has_one_digest() -> None:
    values = torch.arange(12.0).reshape(3, 4)
    pairs: list[tuple[Any, Any]] = [
        (values, values.clone()),
        (values.T, values.T.contiguous()),
        (values[1:, ::2], values[1:, ::2].clone()),
        (nn.Parameter(values), values),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1, "b": 2}, OrderedDict([("b", 2), ("a", 1)])),
        ({1: "x", "1": "y"}, {"1": "y", 1: "x"}),
        ([1, 2], (1, 2)),
    ]
    for left, right in pairs:
        assert digest_state(left) == digest_state(right), (left, right)


def test_the_digest_is_the_same_in_every_process_and_is_pinned() -> None:
    """A record of one run is held against one of another, so the digest must not depend on the process."""
    assert digest_state({"w": torch.tensor([1.0, -2.0]), "n": 3}) == "c678cde36c8c429c488d7b0d6424596f"


def test_one_flipped_bit_is_noticed_at_any_place() -> None:
    values = torch.arange(1000, dtype=torch.int32)
    seen = {digest_state(values)}
    for place in (0, 1, 499, 998, 999):
        changed = values.clone()
        changed[place] ^= 1
        seen.add(digest_state(changed))
    assert len(seen) == 6


def _digest_of_this_ranks_part() -> tuple[str, str]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    local = {name: value.to_local().clone() for name, value in collect_model(model).items()}
    return digest_state(collect_model(model)), digest_state(local)


def test_a_sharded_tensor_counts_by_this_ranks_part() -> None:
    results = run_ranks(_digest_of_this_ranks_part, 2)
    for whole, local in results:
        assert whole == local
    assert results[0] != results[1]


def test_numpy_numbers_are_told_from_pythons() -> None:
    assert digest_state(np.float64(1.0)) != digest_state(1.0)

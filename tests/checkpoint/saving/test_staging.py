"""An asynchronous save works on a copy of the state at its call, in memory that is kept from save to save and no longer."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.saving.staging import Stager
from hyper_resume.checkpoint.tensors.flattening import flatten
from tests.checkpoint.payloads import same
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# Large enough for the write to outlast what follows the call.
NUMBERS = 2_000_000


def state(value: float) -> dict[str, Any]:
    return {
        "model": {
            "large": torch.full((NUMBERS,), value),
            "small": torch.full((3,), value, dtype=torch.bfloat16),
            "transposed": torch.arange(600_000.0).reshape(1000, 600).T + value,
            "strided": torch.full((40,), value)[::4],
            "expanded": torch.tensor([value]).expand(5),
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(value),
            "grows": torch.nn.Parameter(torch.full((4,), value)),
            "list": [torch.full((2,), value), {"deep": torch.full((2,), value)}],
        },
        "optimizer": {"value": [value, {"inner": [value]}], "pair": (torch.full((2,), value), value)},
    }


def stage(stager: Stager, live: dict[str, Any]) -> dict[str, Any]:
    return stager.stage(*flatten(live)).state


def expected(value: float) -> Any:
    """The same, contiguous and without gradients."""

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: plain(inner) for name, inner in part.items()}
        if isinstance(part, (list, tuple)):
            return type(part)(plain(inner) for inner in part)
        return part.detach().clone(memory_format=torch.contiguous_format) if isinstance(part, torch.Tensor) else part

    return plain(state(value))


def tensors(part: Any) -> list[torch.Tensor]:
    if isinstance(part, dict):
        return [found for inner in part.values() for found in tensors(inner)]
    if isinstance(part, (list, tuple)):
        return [found for inner in part for found in tensors(inner)]
    return [part] if isinstance(part, torch.Tensor) else []


def spoil(part: Any) -> None:
    """Change all of a state in place."""
    with torch.no_grad():
        for tensor in tensors(part):
            # Expanded, its elements are one.
            (tensor if tensor.is_contiguous() else tensor[:1]).fill_(-1)
    if "optimizer" in part:
        part["optimizer"]["value"][1]["inner"].append(-1)
        part["optimizer"]["value"].append(-1)
        part["model"].clear()


def test_a_copy_is_equal_and_shares_nothing() -> None:
    live = state(1.0)
    staged = stage(Stager(), live)
    assert same(staged, expected(1.0))
    addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors(live) if tensor.numel()}
    assert not addresses & {tensor.untyped_storage().data_ptr() for tensor in tensors(staged) if tensor.numel()}
    assert not any(tensor.requires_grad for tensor in tensors(staged["model"]))
    spoil(live)
    assert same(staged, expected(1.0))


def test_memory_is_reused_for_what_is_as_it_was_and_written_anew() -> None:
    stager = Stager()
    first = [tensor.data_ptr() for tensor in tensors(stage(stager, state(1.0))["model"])]
    second = stage(stager, state(2.0))
    assert [tensor.data_ptr() for tensor in tensors(second["model"])] == first
    assert same(second, expected(2.0))


def test_each_name_has_memory_of_its_own_even_where_the_live_ones_share_it() -> None:
    base = torch.arange(10.0)
    staged = stage(Stager(), {"a": base, "b": base, "c": base[3:7], "d": base.view(2, 5)})
    assert len({tensor.untyped_storage().data_ptr() for tensor in staged.values()}) == 4
    base.zero_()
    whole = torch.arange(10.0)
    assert same(staged, {"a": whole, "b": whole, "c": whole[3:7].clone(), "d": whole.view(2, 5)})


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(5),
        torch.ones(2, 2),
        torch.ones(4, dtype=torch.float64),
        torch.ones(4, dtype=torch.int32),
        torch.ones(()),
    ],
    ids=["longer", "of two dimensions", "of a wider type", "of a type of equal width", "scalar"],
)
def test_another_shape_or_type_gets_other_memory(other: torch.Tensor) -> None:
    stager = Stager()
    kept = weakref.ref(stage(stager, {"a": torch.ones(4), "b": torch.ones(4)})["a"])
    staged = stage(stager, {"a": other, "b": torch.full((4,), 2.0)})
    assert same(staged, {"a": other, "b": torch.full((4,), 2.0)})
    assert kept() is None


def test_what_disappears_is_let_go_and_the_rest_is_kept() -> None:
    stager = Stager()
    staged = stage(stager, {"model": {"a": torch.ones(4), "b": torch.ones(4)}})["model"]
    gone, place = weakref.ref(staged["a"]), staged["b"].data_ptr()
    del staged
    assert gone() is not None
    staged = stage(stager, {"model": {"b": torch.ones(4)}})["model"]
    assert gone() is None
    assert staged["b"].data_ptr() == place


def test_values_are_copied_deeply_and_keep_their_places() -> None:
    live: dict[str, Any] = {"a": {"list": [1, [2]], "tuple": (torch.ones(2), [3]), "none": None}, "b": 5}
    staged = stage(Stager(), live)
    assert same(staged, {"a": {"list": [1, [2]], "tuple": (torch.ones(2), [3]), "none": None}, "b": 5})
    live["a"]["list"][1].append(9)
    live["a"]["tuple"][0].fill_(9)
    live["a"]["tuple"][1].append(9)
    assert same(staged["a"]["list"], [1, [2]])
    assert same(staged["a"]["tuple"], (torch.ones(2), [3]))


def test_a_value_with_a_tensor_of_a_graph_is_copied() -> None:
    """A synchronous save writes it; so must one in the background."""
    computed = torch.ones(2, requires_grad=True) * 2
    staged = stage(Stager(), {"a": computed, "pair": (computed, 1)})
    assert torch.equal(staged["pair"][0].detach(), torch.full((2,), 2.0))
    assert same(staged["a"], torch.full((2,), 2.0))


# ---- through the checkpointer ----------------------------------------------------------------------------------------------


def test_later_changes_do_not_reach_the_files_of_any_save(tmp_path: Path) -> None:
    checkpointer = DistributedCheckpointer()
    for step in (1, 2, 3):
        live = state(float(step))
        checkpointer.save(str(tmp_path / f"global_step_{step}"), live, global_step=step, save_async=True)
        spoil(live)
    checkpointer.maybe_wait_for_async_save()
    for step in (1, 2, 3):
        whole = expected(float(step))
        found: dict[str, Any] = {
            "model": {name: torch.zeros_like(value) for name, value in whole["model"].items() if name != "list"}
        }
        dcp_load(found, checkpoint_id=tmp_path / f"global_step_{step}", no_dist=True)
        del whole["model"]["list"]
        assert same(found["model"], whole["model"])
        own: dict[str, Any] = {"optimizer": {"value": [None, {"inner": None}], "pair": None}}
        DistributedCheckpointer().load(str(tmp_path / f"global_step_{step}"), own)
        assert same(own["optimizer"], whole["optimizer"])


def test_the_next_save_uses_the_memory_of_the_last(tmp_path: Path) -> None:
    checkpointer = DistributedCheckpointer()
    places = []
    for step in (1, 2, 3):
        checkpointer.save(
            str(tmp_path / f"global_step_{step}"), {"model": {"w": torch.ones(9)}}, global_step=step, save_async=True
        )
        checkpointer.maybe_wait_for_async_save()
        places.append({name: tensor.data_ptr() for name, tensor in checkpointer._stager._kept.items()})
    assert places[0] == places[1] == places[2]
    assert list(places[0]) == ["model.w"]


def _save_sharded(folder: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    checkpointer, stager = DistributedCheckpointer(), Stager()
    checks = []
    for step in (1, 2):
        whole = torch.arange(21.0).reshape(7, 3) + step
        live = distribute_tensor(whole.clone(), mesh, [Shard(0)])
        staged = stage(stager, {"w": live})["w"]
        assert isinstance(staged, DTensor)
        checks.append(staged.placements == live.placements and staged.shape == live.shape)
        checks.append(staged.device_mesh == mesh and staged.stride() == live.stride())
        checkpointer.save(f"{folder}/global_step_{step}", {"model": {"w": live}}, global_step=step, save_async=True)
        live.to_local().fill_(-1)
        checks.append(same(staged.full_tensor(), whole))
    checkpointer.maybe_wait_for_async_save()
    return checks


def test_sharded_tensors_are_staged_as_such(tmp_path: Path) -> None:
    assert run_ranks(_save_sharded, 2, str(tmp_path)) == [[True] * 6] * 2
    for step in (1, 2):
        found = {"model": {"w": torch.zeros(7, 3)}}
        dcp_load(found, checkpoint_id=tmp_path / f"global_step_{step}", no_dist=True)
        assert same(found["model"]["w"], torch.arange(21.0).reshape(7, 3) + step)

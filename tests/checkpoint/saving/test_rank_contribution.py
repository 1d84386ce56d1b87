"""The digests of the buckets of a save that is waited for: of the live tensors, and each byte is hashed once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hyper_resume import digest
from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.saving.plan_cache import CachingPlanner
from hyper_resume.errors import CheckpointMismatchError
from tests.ranks import run_ranks

LARGE = 50_000  # numbers: beyond 64 KiB
BLOCK_NUMBERS = digest.BLOCK_BYTES // 4


def large(seed: int, *, numbers: int = LARGE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numbers, generator=torch.Generator().manual_seed(seed)).to(dtype)


def odd_state() -> dict[str, Any]:
    """Tensors whose bytes in the file are not simply the bytes at their address, beside those of which they are."""
    tied, wide = large(1), large(2, numbers=2 * LARGE).view(2, LARGE)
    return {
        "plain": large(3),
        "tied": tied,
        "tied_again": tied,
        "half": large(4, dtype=torch.bfloat16),
        "transposed": wide.t(),
        "second_row": wide[1],
        "every_other": large(5, numbers=2 * LARGE)[::2],
        "negated": torch._neg_view(large(6)),
        "conjugated": torch.view_as_complex(large(7, numbers=2 * LARGE).view(LARGE, 2)).conj(),
        "parameter": torch.nn.Parameter(large(8)),
        "small": torch.arange(3.0),
        "empty": torch.empty(0),
    }


def buckets(directory: Path) -> Any:
    return json.loads((directory / "manifest.json").read_text())["buckets"]


def counting(sizes: list[int]) -> Callable[[Any], bytes]:
    """``digest.data_digest``, which notes how many bytes it is given."""
    original = digest.data_digest

    def counted(content: Any) -> bytes:
        sizes.append(memoryview(content).nbytes)
        return original(content)

    return counted


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes in bytes of what is hashed in one go."""
    sizes: list[int] = []
    monkeypatch.setattr(digest, "data_digest", counting(sizes))
    return sizes


def test_each_byte_of_a_large_tensor_is_hashed_once(tmp_path: Path, hashed: list[int]) -> None:
    state = {"a": large(1), "b": large(2, numbers=2 * LARGE), "c": large(3, dtype=torch.float64)}
    DistributedCheckpointer().save(str(tmp_path / "global_step_1"), {"model": state}, global_step=1)
    assert sorted(size for size in hashed if size >= 4 * LARGE) == [4 * LARGE, 8 * LARGE, 8 * LARGE]


def test_a_tensor_of_several_blocks_is_hashed_once(tmp_path: Path, hashed: list[int]) -> None:
    state = {"a": torch.zeros(BLOCK_NUMBERS + 5)}
    checkpointer = DistributedCheckpointer()
    checkpointer.save(str(tmp_path / "global_step_1"), {"model": state}, global_step=1)
    assert sum(hashed) < 1.01 * digest.BLOCK_BYTES
    checkpointer.save(str(tmp_path / "global_step_2"), {"model": state}, global_step=2, save_async=True)
    checkpointer.maybe_wait_for_async_save()
    assert buckets(tmp_path / "global_step_1") == buckets(tmp_path / "global_step_2")


def test_the_digests_are_those_that_an_asynchronous_save_takes_of_its_copy(tmp_path: Path) -> None:
    checkpointer = DistributedCheckpointer()
    for step, is_async in ((1, False), (2, True), (3, False)):
        path = str(tmp_path / f"global_step_{step}")
        checkpointer.save(path, {"model": odd_state()}, global_step=step, save_async=is_async)
    checkpointer.maybe_wait_for_async_save()
    first, second, third = (buckets(tmp_path / f"global_step_{step}") for step in (1, 2, 3))
    assert first == second == third
    entries = {f"model.{name}": digest.entry_digest(value) for name, value in odd_state().items()}
    assert first["0"]["model"] == digest.entries_digest_text(entries)


def test_what_was_written_of_other_memory_does_not_count_as_the_live_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale plan would write another tensor: the digests are of the live one, so that no load takes it."""
    original = CachingPlanner.resolve_data

    def stale(planner: CachingPlanner, item: Any) -> Any:
        found = original(planner, item)
        return found.clone() if item.index.fqn == "model.a" else found

    monkeypatch.setattr(CachingPlanner, "resolve_data", stale)
    state = {"a": large(1), "b": large(2)}
    path = str(tmp_path / "global_step_1")
    DistributedCheckpointer().save(path, {"model": state}, global_step=1)
    DistributedCheckpointer().load(path, {"model": {name: torch.zeros(LARGE) for name in state}})

    def wrong(planner: CachingPlanner, item: Any) -> Any:
        return stale(planner, item) + 1 if item.index.fqn == "model.a" else original(planner, item)

    monkeypatch.setattr(CachingPlanner, "resolve_data", wrong)
    path = str(tmp_path / "global_step_2")
    DistributedCheckpointer().save(path, {"model": state}, global_step=2)
    with pytest.raises(CheckpointMismatchError, match="model"):
        DistributedCheckpointer().load(path, {"model": {name: torch.zeros(LARGE) for name in state}})


def _save_sharded(folder: str) -> tuple[dict[str, str], list[int]]:
    mesh = init_device_mesh("cpu", (2,))
    whole = {name: large(seed, numbers=2 * LARGE).view(2, LARGE) for seed, name in enumerate(("rows", "copies"))}
    state = {
        "rows": distribute_tensor(whole["rows"], mesh, [Shard(0)]),
        "copies": distribute_tensor(whole["copies"], mesh, [Replicate()]),
    }
    sizes: list[int] = []
    original = digest.data_digest
    checkpointer = DistributedCheckpointer()
    digest.data_digest = counting(sizes)
    checkpointer.save(f"{folder}/global_step_1", {"model": state}, global_step=1)
    digest.data_digest = original
    expected = digest.entries_digest_text(
        {f"model.{name}": digest.entry_digest(value) for name, value in state.items()}
    )
    return {"found": dict(checkpointer.last_bucket_digests or {})["model"], "expected": expected}, sizes


def test_a_rank_hashes_its_shard_once_and_a_copy_that_another_one_writes_too(tmp_path: Path) -> None:
    results = run_ranks(_save_sharded, 2, str(tmp_path))
    for found, sizes in results:
        assert found["found"] == found["expected"]
        assert sorted(size for size in sizes if size >= 4 * LARGE) == [4 * LARGE, 8 * LARGE]

"""A checkpoint of 4 ranks on 2, of 2 on 4, of many on one: tensors are laid out anew, the training state is rank 0's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hyper_resume.checkpoint import DistributedCheckpointer
from tests.checkpoint.payloads import full_state, payload, restore, same, sharded_tiny, tiny, train
from tests.ranks import run_ranks


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _save(folder: str) -> dict[str, torch.Tensor]:
    """Both layouts of one state; returns it unsharded."""
    model = sharded_tiny(1)
    optimizer = adamw(model)
    train(model, optimizer, 3)
    for name, per_rank in (("files", True), ("embedded", False)):
        checkpointer = DistributedCheckpointer(extra_state_per_rank=per_rank)
        checkpointer.save(f"{folder}/{name}/global_step_3", payload(model, optimizer, 3), global_step=3)
    return full_state(model, optimizer)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _restore(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    handler = _Lines()
    logging.getLogger("hyper_resume").addHandler(handler)
    for name in ("files", "embedded"):
        model = sharded_tiny(9)
        optimizer = adamw(model)
        # Gradients and moments of another life must not survive.
        train(model, optimizer, 1)
        extra = restore(DistributedCheckpointer(), f"{folder}/{name}/global_step_3", model, optimizer)
        results[name] = {"extra": extra, "state": full_state(model, optimizer)}
    results["warnings"] = handler.lines
    return results


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (1, 2)])
def test_another_number_of_ranks_gets_the_same_tensors_and_rank_zeros_training_state(
    tmp_path: Path, before: int, after: int
) -> None:
    saved = run_ranks(_save, before, str(tmp_path))
    restored = run_ranks(_restore, after, str(tmp_path))
    assert len(restored) == after
    for result in restored:
        for name in ("files", "embedded"):
            assert same(result[name]["state"], saved[0]), name
            extra = result[name]["extra"]
            assert (extra["rank"], extra["world_size"], extra["global_step"]) == (0, before, 3)
            assert extra["train_dataloader"]["batches_consumed"] == 5
        expected = f"saved by {before} ranks and is resumed by {after}"
        assert [expected in line for line in result["warnings"]] == [True, True]


def test_one_process_reads_what_four_ranks_wrote(tmp_path: Path) -> None:
    saved = run_ranks(_save, 4, str(tmp_path))[0]
    for name in ("files", "embedded"):
        model = tiny(9)
        optimizer = adamw(model)
        extra = restore(DistributedCheckpointer(), str(tmp_path / name / "global_step_3"), model, optimizer)
        assert same(full_state(model, optimizer), saved)
        assert (extra["rank"], extra["world_size"]) == (0, 4)


def _save_smaller(folder: str) -> None:
    model = sharded_tiny(5)
    path = f"{folder}/files/global_step_3"
    DistributedCheckpointer().save(path, payload(model, adamw(model), 3), global_step=3)


def test_a_step_saved_again_by_fewer_ranks_keeps_nothing_of_the_larger_world(tmp_path: Path) -> None:
    run_ranks(_save, 4, str(tmp_path))
    run_ranks(_save_smaller, 2, str(tmp_path))
    directory = tmp_path / "files" / "global_step_3"
    assert sorted(path.name for path in (directory / "extra_state").iterdir()) == [
        "extra_state_rank_0.pt",
        "extra_state_rank_1.pt",
    ]
    assert not list(directory.glob("__[23]_*"))
    model = tiny(9)
    assert restore(DistributedCheckpointer(), str(directory), model)["world_size"] == 2
    assert same(full_state(model), full_state(tiny(5)))

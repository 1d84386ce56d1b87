"""What a look at a step directory tells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conformance.adapters.hyper_resume_disk import look_into
from hyper_resume.checkpoint import DistributedCheckpointer


@pytest.mark.parametrize("per_rank", [True, False])
def test_two_saves_of_one_state_look_the_same(tmp_path: Path, per_rank: bool) -> None:
    looks = []
    for run in ("first", "second"):
        state = {"model": {"w": torch.ones(2, 3)}, "extra_state": {"global_step": 4, "epoch": 1, "rng_state": {"a": 7}}}
        directory = tmp_path / run / "global_step_4"
        DistributedCheckpointer(extra_state_per_rank=per_rank).save(str(directory), state, global_step=4)
        looks.append(look_into(directory))
    assert looks[0] == looks[1]
    assert looks[0]["model"] == {"w": "float32[2,3]"}
    assert looks[0]["layout"] == {"per_rank" if per_rank else "embedded": "yes"}
    assert set(looks[0]["progress"]) == {"rank_0.epoch", "rank_0.global_step"}

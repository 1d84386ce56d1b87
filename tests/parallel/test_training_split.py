"""Other optimizers and adapters on a split model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_resume.config.schema import LoraConfig
from tests.parallel.training import Job, assert_same_bits, assert_same_training, train, train_twice
from tests.ranks import run_ranks

EVERY_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


def test_muon_with_adamw_for_the_rest_trains_on_tp_2_with_fsdp_2() -> None:
    job = Job(preset="tiny-qwen3-moe", optimizer="muon", overrides={"num_hidden_layers": 1})
    (whole,) = run_ranks(train, 1, job)
    results = run_ranks(train_twice, 4, replace(job, tp=2, dp=2))
    for first, second in results:
        assert_same_bits(first, second)
        assert_same_bits(first, results[0][0])
        # Muon orthogonalises in bfloat16, whose rounding depends on the order of summation.
        assert first.losses == pytest.approx(whole.losses, rel=1e-3)
        assert first.losses[-1] != first.losses[0]


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2)])
def test_lora_on_a_split_model_equals_one_process_and_trains_adapters_only(tp: int, dp: int) -> None:
    overrides = {"num_hidden_layers": 1}
    job = Job(preset="tiny-qwen3", overrides=overrides, lora=LoraConfig(rank=4, target_modules=EVERY_LINEAR))
    (whole,) = run_ranks(train, 1, job)
    for measured in run_ranks(train, tp * dp, replace(job, tp=tp, dp=dp)):
        assert_same_training(measured, whole)
        assert measured.trainable
        assert all("lora_" in name for name in measured.trainable)
        changed = {name for name, weight in measured.weights.items() if not weight.equal(measured.initial[name])}
        assert changed == measured.trainable

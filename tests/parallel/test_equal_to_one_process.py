"""A model split over four processes trains as the whole one in a single process does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parallel.training import Job, Measured, assert_same_bits, assert_same_training, train, train_twice
from tests.ranks import run_ranks

# Biases for Llama and tied embeddings for Qwen3 so that both are covered somewhere.
JOBS = {
    "llama-with-biases": Job(preset="tiny-llama", overrides={"attention_bias": True, "mlp_bias": True}),
    "qwen3-tied": Job(preset="tiny-qwen3", overrides={"tie_word_embeddings": True}),
    "qwen3-moe": Job(preset="tiny-qwen3-moe"),
    # 254 rows halve over tp to 127, which dp can't halve: shards of 64 and 63 rows, at odd places of the matrix.
    "uneven": Job(preset="tiny-qwen3", vocab_size=254, overrides={"num_hidden_layers": 1}),
}


def _whole(job: Job) -> Measured:
    (measured,) = run_ranks(train, 1, job)
    assert isinstance(measured, Measured)
    return measured


@pytest.mark.parametrize("name", JOBS)
def test_tp_2_with_fsdp_2_equals_one_process_and_repeats_bit_for_bit(name: str) -> None:
    whole = _whole(JOBS[name])
    results = run_ranks(train_twice, 4, replace(JOBS[name], tp=2, dp=2))
    for first, second in results:
        assert_same_training(first, whole)
        assert_same_bits(first, second)
        assert_same_bits(first, results[0][0])


@pytest.mark.parametrize(("tp", "dp"), [(1, 4), (2, 1)])
def test_other_shapes_of_the_mesh_equal_one_process(tp: int, dp: int) -> None:
    job = Job(
        preset="tiny-qwen3-moe", vocab_size=259
    )  # 259 rows: dp 4 has a short last shard, tp 2 leaves lm_head whole
    whole = _whole(job)
    for measured in run_ranks(train, tp * dp, replace(job, tp=tp, dp=dp)):
        assert_same_training(measured, whole)


def test_more_ranks_than_rows_leaves_some_with_empty_shards() -> None:
    job = Job(preset="tiny-qwen3-moe", overrides={"num_experts": 3, "num_hidden_layers": 1})
    whole = _whole(job)
    for measured in run_ranks(train, 4, replace(job, dp=4)):
        assert_same_training(measured, whole)

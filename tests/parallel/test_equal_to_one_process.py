"""A model split over four processes trains as the whole one in a single process does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.parallel.training import Job, Measured, assert_same_bits, assert_same_training, train
from tests.ranks import run_ranks

# Biases for Llama and tied embeddings for Qwen3 so that both are covered somewhere.
JOBS = {
    "llama-with-biases": Job(preset="tiny-llama", overrides={"attention_bias": True, "mlp_bias": True}),
    "qwen3-tied": Job(preset="tiny-qwen3", overrides={"tie_word_embeddings": True, "num_hidden_layers": 1}),
    "qwen3-moe": Job(preset="tiny-qwen3-moe"),
    # 254 rows halve over tp to 127, which dp can't halve: shards of 64 and 63 rows, at odd places of the matrix.
    "uneven": Job(preset="tiny-qwen3", vocab_size=254, overrides={"num_hidden_layers": 1}),
}


# With experts, and with shards of different sizes: what the others do is among it.
REPEATED = ("qwen3-moe", "uneven")
WHOLE = {
    **JOBS,
    # 259 rows: dp 4 has a short last shard, tp 2 leaves lm_head whole.
    "259 rows": Job(preset="tiny-qwen3-moe", vocab_size=259),
    "three experts": Job(preset="tiny-qwen3-moe", overrides={"num_experts": 3, "num_hidden_layers": 1}),
}


def _train_each(jobs: Sequence[Job]) -> list[Measured]:
    """One world for all of them: what torch learns of a mesh in its first operations it knows for the rest."""
    return [train(job) for job in jobs]


@pytest.fixture(scope="module")
def whole() -> dict[str, Measured]:
    """Each job in one process."""
    (measured,) = run_ranks(_train_each, 1, list(WHOLE.values()))
    return dict(zip(WHOLE, measured, strict=True))


@pytest.fixture(scope="module")
def on_four_ranks() -> list[dict[str, Measured]]:
    """Each job of ``JOBS`` on each of tp 2 and dp 2; with " again" behind its name, the same once more."""
    names = [*JOBS, *(f"{name} again" for name in REPEATED)]
    jobs = [replace(JOBS[name.removesuffix(" again")], tp=2, dp=2) for name in names]
    return [dict(zip(names, measured, strict=True)) for measured in run_ranks(_train_each, 4, jobs)]


@pytest.mark.parametrize("name", JOBS)
def test_tp_2_with_fsdp_2_equals_one_process_and_all_ranks_hold_the_same_bits(
    whole: dict[str, Measured], on_four_ranks: list[dict[str, Measured]], name: str
) -> None:
    for rank in on_four_ranks:
        assert_same_training(rank[name], whole[name])
        assert_same_bits(rank[name], on_four_ranks[0][name])


@pytest.mark.parametrize("name", REPEATED)
def test_tp_2_with_fsdp_2_repeats_bit_for_bit(on_four_ranks: list[dict[str, Measured]], name: str) -> None:
    for rank in on_four_ranks:
        assert_same_bits(rank[name], rank[f"{name} again"])


@pytest.mark.parametrize(("name", "tp", "dp"), [("259 rows", 1, 4), ("259 rows", 2, 1), ("three experts", 1, 4)])
def test_other_shapes_of_the_mesh_equal_one_process(whole: dict[str, Measured], name: str, tp: int, dp: int) -> None:
    # Three experts on four ranks: some shards have no row.
    for measured in run_ranks(train, tp * dp, replace(WHOLE[name], tp=tp, dp=dp)):
        assert_same_training(measured, whole[name])

"""What the plan covers, what it refuses, and what happens to replicated head norms with and without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from hyper_resume.config.schema import AcceleratorConfig, LoraConfig
from hyper_resume.errors import ConfigError, ReplicaMismatchError, UnsupportedError
from hyper_resume.parallel import apply_fsdp, apply_tensor_parallel, build_mesh, check_replicas, parallelize
from hyper_resume.parallel.tensor_parallel import make_plan
from tests.parallel.training import Job, build, run_steps
from tests.ranks import run_ranks

QWEN3 = Job(preset="tiny-qwen3", tp=2, steps=5)
HEAD_NORMS = [f"model.layers.{layer}.self_attn.{name}.weight" for layer in (0, 1) for name in ("q_norm", "k_norm")]


def _local_head_norms(job: Job) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """This rank's own copies, before and after training."""
    model = build(job)
    mesh = build_mesh(AcceleratorConfig(tp_size=job.tp), "cpu", dist.get_world_size())
    parallelize(model, mesh)

    def copies() -> dict[str, list[float]]:
        weights = {name: model.get_parameter(name) for name in HEAD_NORMS}
        return {name: weight.to_local().tolist() for name, weight in weights.items()}  # type: ignore[attr-defined]

    before = copies()
    run_steps(model, mesh, job)
    return before, copies()


def _train_without_the_plan_of_head_norms(job: Job) -> None:
    model = build(job)
    mesh = build_mesh(AcceleratorConfig(tp_size=job.tp), "cpu", dist.get_world_size())
    assert mesh is not None
    styles = make_plan(model, job.tp).styles
    parallelize_module(model, mesh.tp_mesh, {key: style for key, style in styles.items() if "_norm" not in key})
    apply_fsdp(model, mesh)
    run_steps(model, mesh, job)


def _parallelize_different_weights() -> None:
    torch.manual_seed(dist.get_rank())
    model = build(QWEN3)
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight")[0, 0] += dist.get_rank()
    parallelize(model, build_mesh(AcceleratorConfig(), "cpu", dist.get_world_size()))


def _same_model_when_alone() -> bool:
    model = build(QWEN3)
    return parallelize(model, None) is model and not any("DTensor" in type(p).__name__ for p in model.parameters())


def _one_rank_mesh() -> int:
    model = build(QWEN3)
    mesh = build_mesh(AcceleratorConfig(), "cpu", 2)
    assert mesh is not None
    before = dict(model.named_parameters())
    apply_tensor_parallel(model, mesh.tp_mesh)
    return sum(parameter is not before[name] for name, parameter in model.named_parameters())


def test_copies_of_q_norm_and_k_norm_stay_equal_over_five_adamw_steps() -> None:
    (before, first), (_, second) = run_ranks(_local_head_norms, 2, QWEN3)
    assert first == second
    assert all(before[name] != first[name] for name in HEAD_NORMS)


def test_without_their_plan_q_norm_drifts_and_the_replica_check_names_it() -> None:
    # Without clipping, because the drifting gradients also enter the norm and would set all other weights apart too.
    job = replace(QWEN3, max_norm=None)
    errors = run_ranks(_train_without_the_plan_of_head_norms, 2, job, expect_errors=True)
    assert [type(error) for error in errors] == [ReplicaMismatchError] * 2
    for error in errors:
        assert "differ in 12 of" in str(error)  # two norms in two layers: weight and both moments
        assert "model.layers.0.self_attn.q_norm.weight (rank 0 != rank 1)" in str(error)


def test_ranks_that_built_other_weights_are_refused_before_sharding() -> None:
    for error in run_ranks(_parallelize_different_weights, 2, expect_errors=True):
        assert isinstance(error, ReplicaMismatchError)
        assert "model.embed_tokens.weight (rank 0 != rank 1)" in str(error)


def test_a_single_process_keeps_its_plain_model() -> None:
    assert _same_model_when_alone()


def test_a_tp_size_of_one_changes_nothing() -> None:
    assert run_ranks(_one_rank_mesh, 2) == [0, 0]


def test_the_plan_of_a_moe_leaves_router_and_experts_whole() -> None:
    plan = make_plan(build(Job(preset="tiny-qwen3-moe")), 2)
    assert not [name for name in plan.styles if ".mlp" in name]
    assert len(plan.styles) == 2 * 6 + 1


def test_a_tied_output_layer_stays_whole_and_an_untied_one_is_split() -> None:
    tied = Job(preset="tiny-llama", overrides={"tie_word_embeddings": True})
    assert "lm_head" not in make_plan(build(tied), 2).styles
    assert "lm_head" in make_plan(build(Job(preset="tiny-llama")), 2).styles


@pytest.mark.parametrize(
    ("overrides", "tp_size", "message"),
    [
        ({}, 3, r"layers\.0\.self_attn.*4 attention heads, 2 key/value heads.*tp_size to one of 1 and"),
        ({}, 4, r"found: 2 key/value heads;"),
        ({"intermediate_size": 129}, 2, r"layers\.0\.mlp.*found: 129 intermediate size;"),
    ],
)
def test_sizes_that_cannot_be_divided_are_refused(overrides: dict[str, int], tp_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(build(Job(preset="tiny-qwen3", overrides=overrides)), tp_size)


def _add_a_gate(model: nn.Module) -> None:
    model.get_submodule("model.layers.1.self_attn").register_parameter("sinks", nn.Parameter(torch.zeros(4)))


def _add_a_norm_to_the_mlp(model: nn.Module) -> None:
    model.get_submodule("model.layers.1.mlp").add_module("inner_norm", nn.RMSNorm(128))


def _widen_q_norm(model: nn.Module) -> None:
    """A norm over all heads at once, as OLMo 2 has it."""
    model.get_submodule("model.layers.1.self_attn").add_module("q_norm", nn.RMSNorm(64))


def _rename_attention(model: nn.Module) -> None:
    attention = model.get_submodule("model.layers.1.self_attn")
    attention.add_module("out_proj", attention.get_submodule("o_proj"))
    del attention.o_proj


def _rename_layers(model: nn.Module) -> None:
    inner = model.get_submodule("model")
    inner.add_module("blocks", inner.get_submodule("layers"))
    del inner.layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_add_a_gate, r"layers\.1\.self_attn\.sinks"),
        (_add_a_norm_to_the_mlp, r"layers\.1\.mlp\.inner_norm\.weight"),
        (_widen_q_norm, r"layers\.1\.self_attn\.q_norm\.weight"),
        (_rename_attention, r"no attention module that tensor parallelism supports.*layers\.1"),
        (_rename_layers, r"can't be parallelised.*none"),
    ],
)
def test_a_parameter_that_would_see_only_a_shard_unplanned_is_refused(
    change: Callable[[nn.Module], None], message: str
) -> None:
    model = build(Job(preset="tiny-qwen3"))
    change(model)
    with pytest.raises(UnsupportedError, match=message):
        make_plan(model, 2)


def test_lora_dropout_is_refused_under_tensor_parallelism() -> None:
    model = build(Job(preset="tiny-qwen3", lora=LoraConfig(rank=2, dropout=0.1)))
    with pytest.raises(UnsupportedError, match=r"LoRA dropout.*q_proj.*model\.lora\.dropout=0"):
        make_plan(model, 2)


def test_an_adapter_with_parameters_of_its_own_kind_is_refused() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    model = peft.get_peft_model(build(Job(preset="tiny-qwen3")), config)
    with pytest.raises(UnsupportedError, match=r"q_proj\.lora_magnitude_vector"):
        make_plan(model, 2)


def test_the_check_of_copies_passes_for_a_plain_module() -> None:
    check_replicas(dict(nn.Linear(2, 2).named_parameters()))

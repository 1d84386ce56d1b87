"""Adapters: where they sit, what stays trainable, what is refused."""

from __future__ import annotations

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from hyper_resume.config.schema import LoraConfig, ModelConfig
from hyper_resume.errors import ConfigError
from hyper_resume.models import apply_lora, build_model


def _model() -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelConfig(preset="tiny-qwen3"), vocab_size=260)


def test_rank_0_is_the_model_itself() -> None:
    model = _model()
    assert apply_lora(model, LoraConfig()) is model


def test_only_the_adapters_of_the_targets_are_trainable() -> None:
    model = apply_lora(_model(), LoraConfig(rank=3, target_modules=("q_proj", "down_proj")))
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected = {
        f"base_model.model.model.layers.{layer}.{module}.lora_{matrix}.default.weight"
        for layer in (0, 1)
        for module in ("self_attn.q_proj", "mlp.down_proj")
        for matrix in "AB"
    }
    assert trainable == expected
    assert model.get_parameter(sorted(expected)[0]).shape[0] == 3


def test_a_fresh_adapter_changes_nothing() -> None:
    ids = torch.arange(20).unsqueeze(0)
    plain = _model()(input_ids=ids).logits
    adapted = apply_lora(_model(), LoraConfig(rank=2))(input_ids=ids).logits
    assert torch.equal(plain, adapted)


def test_alpha_and_dropout_reach_the_adapter() -> None:
    model = apply_lora(_model(), LoraConfig(rank=2, alpha=6, dropout=0.25))
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    assert isinstance(layer, LoraLayer)
    assert layer.scaling["default"] == 3.0
    assert layer.get_submodule("lora_dropout.default").p == 0.25


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(rank=2, target_modules=("q_proj", "query")), r"found: query"),
        (LoraConfig(rank=2, target_modules=()), r"found: no targets"),
        (LoraConfig(rank=2, target_modules=("input_layernorm",)), r"peft can't attach"),
        (LoraConfig(rank=-1), r"model\.lora\.rank.*-1"),
    ],
)
def test_a_wrong_adapter_configuration_is_refused(config: LoraConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_lora(_model(), config)

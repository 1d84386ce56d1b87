"""Models from presets and local folders: what is built, what is refused, and that nothing touches the network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hyper_resume.config.schema import ModelConfig
from hyper_resume.errors import ConfigError
from hyper_resume.models import PRESETS, build_model
from tests.ranks import run_ranks

VOCAB = 260


def _build(**fields: Any) -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelConfig(**fields), vocab_size=VOCAB)


def _folder(path: Path, **fields: Any) -> Path:
    """A model folder as transformers writes it."""
    model = _build(**{"preset": "tiny-llama", **fields})
    assert isinstance(model, transformers.PreTrainedModel)
    model.save_pretrained(path)
    return path


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _loss_and_grads(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(4)
    ids = torch.randint(VOCAB, (2, 64))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("attention_dropout", [0.0, 0.1])
def test_each_preset_gives_the_same_bits_twice(preset: str, attention_dropout: float) -> None:
    overrides = {"attention_dropout": attention_dropout}
    first = _loss_and_grads(_build(preset=preset, overrides=overrides))
    second = _loss_and_grads(_build(preset=preset, overrides=overrides))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("preset", PRESETS)
def test_attention_dropout_draws_from_the_random_stream_in_training(preset: str) -> None:
    model = _build(preset=preset, overrides={"attention_dropout": 0.5})
    ids = torch.randint(VOCAB, (1, 16))
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_fresh_preset_knows_nothing_so_its_loss_is_that_of_guessing(preset: str) -> None:
    loss = _loss_and_grads(_build(preset=preset))[0]
    assert loss.item() == pytest.approx(torch.tensor(float(VOCAB)).log().item(), abs=0.1)


def test_the_vocabulary_is_the_callers_and_embeddings_are_untied() -> None:
    model = _build(preset="tiny-qwen3-moe")
    weights = _weights(model)
    assert weights["model.embed_tokens.weight"].shape == (VOCAB, 64)
    assert weights["lm_head.weight"].shape == (VOCAB, 64)
    assert weights["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 128, 64)


def test_the_dtype_is_that_of_every_parameter() -> None:
    model = build_model(ModelConfig(preset="tiny-qwen3"), vocab_size=VOCAB, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_overrides_reach_the_model_and_its_derived_fields() -> None:
    model = _build(preset="tiny-qwen3", overrides={"num_hidden_layers": 3, "vocab_size": 300})
    weights = _weights(model)
    assert "model.layers.2.self_attn.q_proj.weight" in weights
    assert weights["lm_head.weight"].shape == (300, 64)


def test_an_implementation_can_be_chosen_by_override() -> None:
    model = _build(preset="tiny-llama", overrides={"attn_implementation": "eager"})
    assert isinstance(model, transformers.PreTrainedModel)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"exactly one of them; found: none"),
        ({"preset": "tiny-llama", "pretrained_model_name_or_path": "x"}, r"exactly one of them; found: both"),
        ({"preset": "tiny-lama"}, r"model\.preset.*tiny-llama.*'tiny-lama'"),
        (
            {"preset": "tiny-llama", "overrides": {"attention_droput": 0.1}},
            r"model\.overrides\.attention_droput.*did you mean attention_dropout\?",
        ),
        ({"preset": "tiny-llama", "overrides": {"hidden_size": "wide"}}, r"llama refuses.*hidden_size"),
        ({"preset": "tiny-llama", "overrides": {"vocab_size": 100}}, r"at least 260; found: 100"),
        ({"preset": "tiny-llama", "overrides": {"attn_implementation": "fast"}}, r"can't be built.*fast"),
        ({"pretrained_model_name_or_path": "org/name"}, r"no such folder.*org/name.*nothing is downloaded"),
    ],
)
def test_a_wrong_model_configuration_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _build(**fields)


def test_a_folder_without_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the folder has no model.*config\.json"):
        _build(pretrained_model_name_or_path=str(tmp_path))


def test_a_folder_gives_its_weights_ready_for_training(tmp_path: Path) -> None:
    folder = _folder(tmp_path, preset="tiny-qwen3-moe")
    model = build_model(ModelConfig(pretrained_model_name_or_path=str(folder)), vocab_size=VOCAB)
    saved = _weights(_build(preset="tiny-qwen3-moe"))
    assert _weights(model).keys() == saved.keys()
    assert all(torch.equal(weight, saved[name]) for name, weight in _weights(model).items())
    assert all(module.training for module in model.modules())
    assert not model.config.use_cache  # type: ignore[union-attr]


def test_a_folder_without_load_weights_gives_fresh_ones(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    torch.manual_seed(1)
    model = build_model(ModelConfig(pretrained_model_name_or_path=str(folder), load_weights=False), vocab_size=VOCAB)
    saved = _weights(_build(preset="tiny-llama"))["lm_head.weight"]
    assert not torch.equal(_weights(model)["lm_head.weight"], saved)


def test_overrides_of_a_folder_reach_the_model(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    model = _build(pretrained_model_name_or_path=str(folder), overrides={"attention_dropout": 0.25})
    assert model.get_submodule("model.layers.0.self_attn").attention_dropout == 0.25


def test_weights_that_do_not_cover_the_model_are_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    with pytest.raises(ConfigError, match=r"do not cover.*9 missing.*layers\.2"):
        _build(pretrained_model_name_or_path=str(folder), overrides={"num_hidden_layers": 3})


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    with pytest.raises(ConfigError, match=str(folder)):
        _build(pretrained_model_name_or_path=str(folder), overrides={"intermediate_size": 96})


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"weights can't be loaded"):
        _build(pretrained_model_name_or_path=str(folder))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"weights can't be loaded"):
        _build(pretrained_model_name_or_path=str(folder))


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"model_type": "no-such-model"}', '{"model_type": "bert"}'])
def test_a_broken_config_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError):
        _build(pretrained_model_name_or_path=str(tmp_path))


def test_a_vocabulary_smaller_than_the_datas_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    with pytest.raises(ConfigError, match=r"at least 1000; found: 260"):
        build_model(ModelConfig(pretrained_model_name_or_path=str(folder)), vocab_size=1000)


def _build_with_the_network_watched(folder: str) -> list[str]:
    calls: list[str] = []
    watched = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname")
    sys.addaudithook(lambda event, args: calls.append(f"{event} {args}") if event in watched else None)
    _build(preset="tiny-qwen3-moe")
    _build(pretrained_model_name_or_path=folder)
    _build(pretrained_model_name_or_path=folder, load_weights=False)
    for name in ("gpt2", "Qwen/Qwen3-0.6B"):
        with pytest.raises(ConfigError):
            _build(pretrained_model_name_or_path=name)
    return calls


def test_the_network_is_never_tried(tmp_path: Path) -> None:
    assert run_ranks(_build_with_the_network_watched, 1, str(_folder(tmp_path))) == [[]]


def test_importing_the_package_loads_neither_transformers_nor_peft() -> None:
    code = "import sys, hyper_resume.models; print(sorted({'transformers', 'peft'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

"""Builds a Hugging Face causal language model from a preset or a local folder; nothing is ever downloaded."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from hyper_resume.config.schema import ModelConfig
from hyper_resume.errors import ConfigError, UnsupportedError, describe

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

# Small enough for several processes on a laptop, with all the module types of the large models of the same family.
PRESETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "tiny-llama": {"model_type": "llama", **_TINY},
        "tiny-qwen3": {"model_type": "qwen3", **_TINY},
        "tiny-qwen3-moe": {
            "model_type": "qwen3_moe",
            **_TINY,
            "moe_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    }
)

# `sdpa` was the fastest on CPU and reproducible bit for bit, with and without dropout. `eager` experts are plain torch
# operations, the same on every device. At this size, `grouped_mm` was not faster and `batched_mm` was 8 times slower.
_IMPLEMENTATIONS = {"attn_implementation": "sdpa", "experts_implementation": "eager"}

# Models read it with getattr, and not every configuration class declares it.
_UNDECLARED = ("head_dim",)


def build_model(config: ModelConfig, *, vocab_size: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the model that ``config`` describes, on the CPU in training mode.

    Initial weights are drawn from torch's CPU random stream; use the same seed on every rank. The embedding of a preset has
    ``vocab_size`` rows, unless ``overrides`` set another number; that of a folder has its own number.

    Args:
        config: preset or folder, with overrides; adapters are added by :func:`hyper_resume.models.lora.apply_lora`.
        vocab_size: the number of different token ids in the data.
        dtype: dtype of all floating-point parameters.

    Raises:
        ConfigError: not exactly one of preset and folder is set; unknown preset or override; values that the model refuses; no
            such folder; weights that do not fit; fewer embedding rows than ``vocab_size``.
        UnsupportedError: transformers is not installed.
    """
    if (config.preset is None) == (config.pretrained_model_name_or_path is None):
        raise ConfigError(
            describe(
                "the model needs exactly one source",
                where="model.preset and model.pretrained_model_name_or_path",
                expected="exactly one of them",
                found="none" if config.preset is None else "both",
            )
        )
    transformers = _import_transformers()
    folder = None if config.pretrained_model_name_or_path is None else _folder(config.pretrained_model_name_or_path)
    values = _preset(str(config.preset), vocab_size) if folder is None else _folder_values(folder)
    implementations = {name: config.overrides.get(name, value) for name, value in _IMPLEMENTATIONS.items()}
    overrides = {name: value for name, value in config.overrides.items() if name not in _IMPLEMENTATIONS}
    model_config = _model_config(transformers, values, overrides)
    _check_vocabulary(model_config.vocab_size, vocab_size)
    if folder is not None and config.load_weights:
        model = _load(transformers, folder, model_config, dtype=dtype, **implementations)
    else:
        model = _build(transformers, model_config, dtype=dtype, **implementations)
    # A loaded model is in evaluation mode, in which dropout is off.
    return model.train()


def _import_transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UnsupportedError(
            describe("models need the transformers library", found=str(error), do="pip install 'hyper_resume[models]'")
        ) from error


def _preset(name: str, vocab_size: int) -> dict[str, Any]:
    if name not in PRESETS:
        raise ConfigError(
            describe("unknown preset", where="model.preset", expected=", ".join(PRESETS), found=repr(name))
        )
    return {**PRESETS[name], "vocab_size": vocab_size}


def _folder(name: str) -> Path:
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            describe(
                "the folder has no model" if folder.is_dir() else "no such folder",
                where=f"model.pretrained_model_name_or_path={name}",
                expected="a local folder with a config.json; nothing is downloaded",
                do="give the path of a folder, or choose a model.preset",
            )
        )
    return folder


def _folder_values(folder: Path) -> dict[str, Any]:
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            describe("the model's config.json can't be read", where=str(folder), found=str(error))
        ) from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(describe("the model's config.json names no model_type", where=str(folder)))
    return values


def _model_config(transformers: Any, values: dict[str, Any], overrides: dict[str, Any]) -> Any:
    """Return the Hugging Face configuration from ``values`` and ``overrides``; derived fields are computed from both."""
    model_type = values["model_type"]
    try:
        known = transformers.AutoConfig.for_model(model_type)
    except ValueError as error:
        raise ConfigError(describe("unknown model_type", found=repr(model_type))) from error
    names = {
        *known.to_dict(),
        *known.attribute_map,
        *(field.name for field in dataclasses.fields(known)),
        *values,
        *_UNDECLARED,
        *_IMPLEMENTATIONS,
    }
    for name in overrides:
        if name not in names:
            raise _unknown_override(name, names, model_type)
    merged = {**values, **overrides, "use_cache": False}
    del merged["model_type"]
    refusals = _refusals()
    try:
        return transformers.AutoConfig.for_model(model_type, **merged)
    except refusals as error:
        raise ConfigError(
            describe(f"{model_type} refuses its configuration", where="model.overrides", found=str(error))
        ) from error


def _unknown_override(name: str, names: Iterable[str], model_type: str) -> ConfigError:
    near = difflib.get_close_matches(name, sorted(names), n=1)
    return ConfigError(
        describe(
            f"{model_type} has no such attribute",
            where=f"model.overrides.{name}",
            do=f"did you mean {near[0]}?" if near else "see the model's configuration class in transformers",
        )
    )


def _refusals() -> tuple[type[Exception], ...]:
    """Return the errors that Hugging Face configurations and models raise for invalid values."""
    hub_errors = importlib.import_module("huggingface_hub.errors")
    return (ValueError, TypeError, hub_errors.StrictDataclassError)


def _check_vocabulary(rows: int, vocab_size: int) -> None:
    if rows < vocab_size:
        raise ConfigError(
            describe(
                "the model's vocabulary is smaller than the data's",
                where="vocab_size",
                expected=f"at least {vocab_size}",
                found=str(rows),
                do="use the tokenizer of this model, or another model",
            )
        )


def _build(transformers: Any, model_config: Any, **options: Any) -> nn.Module:
    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(model_config, **options)
    except _refusals() as error:
        raise ConfigError(describe("the model can't be built", where="model", found=str(error))) from error
    return model


def _load(transformers: Any, folder: Path, model_config: Any, **options: Any) -> nn.Module:
    safetensors = importlib.import_module("safetensors")
    refusals: tuple[type[Exception], ...] = (OSError, RuntimeError, safetensors.SafetensorError, *_refusals())
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=model_config,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except refusals as error:
        raise ConfigError(
            describe("the model's weights can't be loaded", where=str(folder), found=str(error))
        ) from error
    # Hugging Face initializes missing weights and only logs it; a partially loaded model must not be trained.
    gaps = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if gaps:
        raise ConfigError(
            describe(
                "the folder's weights do not cover the model",
                where=str(folder),
                found=f"{len(gaps)} missing or of another shape: {', '.join(gaps[:5])}",
                do="use the folder of this model, or set model.load_weights=false to start from initial weights",
            )
        )
    loaded: nn.Module = model
    return loaded

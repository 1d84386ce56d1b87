"""LoRA adapters from the peft library."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from hyper_resume.config.schema import LoraConfig
from hyper_resume.errors import ConfigError, UnsupportedError, describe


def apply_lora(model: nn.Module, config: LoraConfig) -> nn.Module:
    """Add adapters to the layers that ``config.target_modules`` names; only the adapters stay trainable.

    Call it after building and before parallelisation, so that nothing wraps or initializes an adapter after a checkpoint was
    loaded. Initial weights are drawn from torch's random stream; use the same seed on all ranks.

    Returns:
        peft's wrapper around ``model``, or ``model`` itself if ``config.rank`` is 0.

    Raises:
        ConfigError: a negative rank, or a target that is not the name of a layer.
        UnsupportedError: peft is not installed.
    """
    if config.rank == 0:
        return model
    if config.rank < 0:
        raise ConfigError(
            describe("invalid LoRA rank", where="model.lora.rank", expected="0 or more", found=str(config.rank))
        )
    peft = _import_peft()
    _check_targets(model, config.target_modules)
    adapters = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(config.target_modules),
        task_type="CAUSAL_LM",
    )
    try:
        wrapped: nn.Module = peft.get_peft_model(model, adapters)
    except ValueError as error:
        raise ConfigError(
            describe("peft can't attach its adapters", where="model.lora.target_modules", found=str(error))
        ) from error
    return wrapped


def _import_peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise UnsupportedError(
            describe("LoRA needs the peft library", found=str(error), do="pip install 'hyper_resume[models]'")
        ) from error


def _check_targets(model: nn.Module, targets: tuple[str, ...]) -> None:
    """Check that every target names a layer; peft itself accepts a list in which only one does."""
    endings = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    absent = [target for target in targets if target.rpartition(".")[2] not in endings]
    if absent or not targets:
        linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        raise ConfigError(
            describe(
                "no layer of the model has this name",
                where="model.lora.target_modules",
                expected=f"names among {', '.join(sorted(linear))}",
                found=", ".join(absent) or "no targets",
            )
        )

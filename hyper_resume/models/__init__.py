"""Hugging Face causal language models from a preset or a folder, and LoRA adapters.

Importing this package imports neither transformers nor peft; building a model does.
"""

from __future__ import annotations

from hyper_resume.models.build import PRESETS, build_model
from hyper_resume.models.lora import apply_lora

__all__ = ["PRESETS", "apply_lora", "build_model"]

"""Finds the decoder layers of a Hugging Face causal language model by its module names."""

from __future__ import annotations

from torch import nn

from hyper_resume.errors import UnsupportedError, describe


def decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (full name, module) of each decoder layer, in order.

    The layers are those of the only ``nn.ModuleList`` named ``layers``, at any depth, because wrappers such as peft nest it.

    Raises:
        UnsupportedError: there is no such list, or more than one.
    """
    stacks = [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "layers" and isinstance(module, nn.ModuleList)
    ]
    if len(stacks) != 1:
        raise UnsupportedError(
            describe(
                f"{type(model).__name__} can't be parallelised",
                expected="one stack of decoder layers, a ModuleList named 'layers'",
                found=", ".join(name for name, _ in stacks) or "none",
                do="run it in a single process, or use a Llama, Qwen3 or Qwen3-MoE model",
            )
        )
    name, stack = stacks[0]
    return [(f"{name}.{index}", layer) for index, layer in enumerate(stack)]

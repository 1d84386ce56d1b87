"""Tensor parallelism for Hugging Face decoders such as Llama, Qwen3 and Qwen3-MoE, with torch's own parallel styles.

Attention is split by heads, and a dense MLP by its intermediate size. Modules are recognised by the names of their children, so
a new model class with the same names works without changes here.

Modules that are not split get whole hidden states, which are equal on all ranks of a tp group. So their results and gradients
are equal too: embedding, layer norms, MoE router and experts, and an output layer that is tied to the embedding. Experts are
not split because their fused parameter contains gate and up projection one after the other; cut in two, one rank would get all
gates and the other all ups. This costs tp_size times the memory of the experts before FSDP2, but the result is correct.
:func:`hyper_resume.parallel.replicas.check_replicas` checks that the copies stay equal.

``q_norm`` and ``k_norm`` need special treatment: their weight has the length of one head and is copied, but each rank applies
it to its own heads only and has only a part of the gradient. Without a reduction the copies would diverge. As replicated
DTensors, their gradient is a partial sum that FSDP2 reduces over the tp group before its own reduction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hyper_resume.errors import ConfigError, UnsupportedError, describe
from hyper_resume.parallel.layers import decoder_layers

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_MLP = ("gate_proj", "up_proj", "down_proj")
_HEADS_DIM = 2  # q_norm and k_norm get (batch, sequence, heads, head_dim)


@dataclass(frozen=True, kw_only=True)
class TensorParallelPlan:
    """How each module is split, by full name.

    ``styles`` is the argument for torch's ``parallelize_module``. ``whole`` lists modules inside a split module that are
    copied, because their activations are whole.
    """

    styles: dict[str, ParallelStyle] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)


def apply_tensor_parallel(model: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Split ``model`` in place over the one-dimensional ``tp_mesh``. A collective of that mesh.

    FSDP2 must be applied afterwards, with any size, because it reduces the gradients of ``q_norm`` and ``k_norm``.

    Raises:
        ConfigError: heads, key/value heads or the intermediate size can't be divided by the mesh's size.
        UnsupportedError: a split module has a parameter that the plan does not cover.
    """
    if tp_mesh.size() == 1:
        return
    plan = make_plan(model, tp_mesh.size())
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    parallelize_module(model, tp_mesh, dict(plan.styles))
    # SequenceParallel creates new parameters, which are trainable: a frozen q_norm would be trained.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable[name])


def make_plan(model: nn.Module, tp_size: int) -> TensorParallelPlan:
    """Return the plan for ``model``; only names and shapes are read.

    Raises:
        ConfigError: heads, key/value heads or the intermediate size can't be divided by ``tp_size``.
        UnsupportedError: see :func:`apply_tensor_parallel`.
    """
    plan = TensorParallelPlan()
    for layer_name, layer in decoder_layers(model):
        split = [(name, module) for name, module in layer.named_modules() if _has_children(module, _ATTENTION)]
        if not split:
            raise UnsupportedError(
                describe(
                    "the layer has no attention module that tensor parallelism supports",
                    where=layer_name,
                    expected=f"a module with {', '.join(_ATTENTION)}",
                    do="set accelerator.tp_size=1",
                )
            )
        for name, attention in split:
            _plan_attention(plan, f"{layer_name}.{name}", attention, tp_size)
        for name, module in layer.named_modules():
            if _has_children(module, _MLP):
                _plan_mlp(plan, f"{layer_name}.{name}", module, tp_size)
    _plan_output_layer(plan, model, tp_size)
    return plan


def _has_children(module: nn.Module, names: tuple[str, ...]) -> bool:
    children = dict(module.named_children())
    return all(name in children for name in names)


def _plan_attention(plan: TensorParallelPlan, name: str, attention: nn.Module, tp_size: int) -> None:
    head_dim = getattr(attention, "head_dim", None)
    if not isinstance(head_dim, int):
        raise UnsupportedError(
            describe("the size of a head is unknown", where=name, expected="an integer attribute head_dim")
        )
    sizes = {
        "attention heads": _weight(attention.get_submodule("q_proj")).shape[0] // head_dim,
        "key/value heads": _weight(attention.get_submodule("k_proj")).shape[0] // head_dim,
    }
    _check_divisible(name, sizes, tp_size)
    for child in ("q_proj", "k_proj", "v_proj"):
        _plan_linear(plan, f"{name}.{child}", attention.get_submodule(child), ColwiseParallel())
    _plan_linear(plan, f"{name}.o_proj", attention.get_submodule("o_proj"), RowwiseParallel())
    for child, module in attention.named_children():
        # A norm over all heads together (with the length of the projection) would need a sum over ranks in its forward.
        if child in _HEAD_NORMS and [tuple(p.shape) for p in module.parameters()] == [(head_dim,)]:
            plan.styles[f"{name}.{child}"] = SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True)
    _check_covered(plan, name, attention)


def _plan_mlp(plan: TensorParallelPlan, name: str, mlp: nn.Module, tp_size: int) -> None:
    _check_divisible(name, {"intermediate size": _weight(mlp.get_submodule("down_proj")).shape[1]}, tp_size)
    for child in ("gate_proj", "up_proj"):
        _plan_linear(plan, f"{name}.{child}", mlp.get_submodule(child), ColwiseParallel())
    _plan_linear(plan, f"{name}.down_proj", mlp.get_submodule("down_proj"), RowwiseParallel())
    _check_covered(plan, name, mlp)


def _plan_output_layer(plan: TensorParallelPlan, model: nn.Module, tp_size: int) -> None:
    """Split ``lm_head`` by vocabulary and gather its logits; it stays whole if it is tied or can't be divided."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "lm_head":
            continue
        weight = _weight(module)
        owners = [parameter for _, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight]
        if len(owners) == 1 and weight.shape[0] % tp_size == 0:
            _plan_linear(plan, name, module, ColwiseParallel(output_layouts=Replicate()))


def _plan_linear(plan: TensorParallelPlan, name: str, module: nn.Module, style: ParallelStyle) -> None:
    """Plan one linear layer, plain or wrapped by a peft LoRA adapter (``base_layer``, ``lora_A``, ``lora_B``).

    The adapter is split like its layer. By columns: ``lora_A`` gets the whole input, and ``lora_B`` computes the rank's
    columns. By rows: ``lora_A`` gets the rank's part of the input, its result is summed over ranks, and ``lora_B`` is whole.
    """
    children = dict(module.named_children())
    if "base_layer" not in children:
        plan.styles[name] = style
        return
    for dropout in children["lora_dropout"].modules():
        if isinstance(dropout, nn.Dropout) and dropout.p > 0:
            raise UnsupportedError(
                describe(
                    "LoRA dropout can't be combined with tensor parallelism: each rank would drop different inputs",
                    where=name,
                    do="set model.lora.dropout=0 or accelerator.tp_size=1",
                )
            )
    split, whole = ("lora_A", "lora_B") if isinstance(style, RowwiseParallel) else ("lora_B", "lora_A")
    plan.styles[f"{name}.base_layer"] = style
    for adapter, _ in children[split].named_children():
        plan.styles[f"{name}.{split}.{adapter}"] = style
    plan.whole.update(f"{name}.{whole}.{adapter}" for adapter, _ in children[whole].named_children())


def _check_divisible(name: str, sizes: Mapping[str, int], tp_size: int) -> None:
    wrong = [f"{size} {what}" for what, size in sizes.items() if size % tp_size]
    if wrong:
        # Only divisors of tp_size are sure to divide the number of processes too.
        common = gcd(tp_size, *sizes.values())
        fitting = [str(size) for size in range(1, common + 1) if common % size == 0]
        raise ConfigError(
            describe(
                f"the model can't be divided among accelerator.tp_size={tp_size} ranks",
                where=name,
                expected=f"multiples of {tp_size}",
                found=", ".join(wrong),
                do=f"set accelerator.tp_size to one of {', '.join(fitting)} and accelerator.dp_shard_size=-1",
            )
        )


def _check_covered(plan: TensorParallelPlan, name: str, module: nn.Module) -> None:
    """Refuse a parameter below ``module`` that the plan does not cover: it would be copied, but used on a shard only."""
    for parameter, _ in module.named_parameters(prefix=name):
        owner = parameter.rpartition(".")[0]
        if owner not in plan.styles and owner not in plan.whole:
            raise UnsupportedError(
                describe(
                    "tensor parallelism does not support this parameter; its copies would diverge",
                    where=parameter,
                    do="set accelerator.tp_size=1",
                )
            )


def _weight(module: nn.Module) -> Tensor:
    return module.get_submodule("base_layer" if hasattr(module, "base_layer") else "").get_parameter("weight")

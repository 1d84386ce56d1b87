"""Builds models, optimizers and schedules from ``given``. Data and other objects are in data_components.py.

To add a kind: add the word to :mod:`conformance.matrix.given`, and a function or branch here. Every process must build the
same objects, so they depend on the seeds that the leg has set and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler as schedules

from conformance.adapters.hyper_resume.holding_optimizers import Container, Lookahead, Sam
from conformance.matrix.given import ModelGiven, OptimizerGiven, SchedulerGiven
from hyper_resume.optim import ChainedOptimizer

VOCABULARY = 64
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TroubleError(Exception):
    """The leg can't be built: an error of the case or of the adapter, not of the trainer."""


# ---- models ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Input ids of shape [n], output of shape [n]; the parameter names let Muon find its hidden matrix."""

    def __init__(self, given: ModelGiven) -> None:
        """Build the common layers and those of ``given.kind``."""
        super().__init__()
        self.kind = given.kind
        self.embed_tokens = nn.Embedding(VOCABULARY, given.width)
        self.hidden: nn.Module = nn.Linear(given.width, given.width)
        self.norm = nn.LayerNorm(given.width)
        self.dropout = nn.Dropout(given.dropout)
        if given.kind == "tied":
            self.lm_head = nn.Linear(given.width, VOCABULARY, bias=False)
            self.lm_head.weight = self.embed_tokens.weight
        else:
            self.lm_head = nn.Linear(given.width, 1)
        if given.kind == "buffers":
            self.register_buffer("mean", torch.zeros(given.width))
            self.register_buffer("scratch", torch.zeros(given.width), persistent=False)
        if given.kind == "running":
            self.register_buffer("mean", torch.zeros(given.width), persistent=False)
        if given.kind == "branch":
            self.branch = nn.Linear(given.width, given.width)
        if given.kind == "extra-state":
            self.counter = ForwardCounter()
        if given.kind == "adapter":
            for parameter in self.parameters():
                parameter.requires_grad_(False)
            self.adapter_down = nn.Linear(given.width, 2, bias=False)
            self.adapter_up = nn.Linear(2, given.width, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The output for each id."""
        embedded = self.embed_tokens(ids)
        hidden = self.hidden(embedded)
        if self.kind == "adapter":
            hidden = hidden + self.adapter_up(self.adapter_down(embedded))
        hidden = self.dropout(torch.tanh(hidden))
        if self.kind in ("buffers", "running"):
            hidden = self._with_buffers(hidden)
        if self.kind == "extra-state":
            hidden = self.counter(hidden)
        output: torch.Tensor = self.lm_head(self.norm(hidden))
        return output.float().mean(-1) if self.kind == "tied" else output.float().squeeze(-1)

    def _with_buffers(self, hidden: torch.Tensor) -> torch.Tensor:
        # A running mean that the output depends on, like a batch norm's; the scratch buffer must not matter.
        assert isinstance(self.mean, torch.Tensor)
        with torch.no_grad():
            self.mean.lerp_(hidden.detach().mean(0), 0.1)
            if self.kind == "buffers":
                assert isinstance(self.scratch, torch.Tensor)
                self.scratch.copy_(hidden.detach().mean(0))
        return hidden - self.mean


class ForwardCounter(nn.Module):
    """Counts forwards and scales by the count; its state is no tensor, so it is saved by ``get_extra_state``."""

    count = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scale ``hidden``."""
        self.count += 1
        return hidden * (1.0 + 1.0 / self.count)

    def get_extra_state(self) -> dict[str, int]:
        """The count."""
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        """Take the count back."""
        self.count = state["count"]


class CompiledLike(nn.Module):
    """Prefixes every parameter name with ``_orig_mod.``, as torch.compile does, without compiling."""

    def __init__(self, module: nn.Module) -> None:
        """Wrap ``module``."""
        super().__init__()
        self._orig_mod = module

    def forward(self, ids: torch.Tensor) -> Any:
        """The output of the wrapped module."""
        return self._orig_mod(ids)


def build_model(given: ModelGiven) -> nn.Module:
    """Build the model with its wrappers; returns the outermost."""
    net = Net(given)
    model: nn.Module = net.to(_DTYPES[given.dtype])
    for name, parameter in model.named_parameters():
        if any(name.startswith(prefix) for prefix in given.freeze):
            parameter.requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if given.base and not parameter.requires_grad:
                parameter.add_(given.base)
    if given.kind == "lora":
        model = _with_lora(model)
    for wrapper in given.wrap:
        if wrapper == "compile":
            model = CompiledLike(model)
        elif wrapper == "data-parallel":
            model = nn.DataParallel(model)
        else:
            net.hidden = checkpoint_wrapper(net.hidden)
    return model


def _with_lora(model: nn.Module) -> nn.Module:
    import peft  # here, because it takes seconds and few cases need it

    wrapped: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["hidden"]))
    return wrapped


# ---- optimizers -----------------------------------------------------------------------------------------------------


class LowBitAdamW(torch.optim.AdamW):
    """AdamW that keeps its moments in bfloat16 between steps, whatever its parameters are."""

    def step(self, closure: Any = None) -> Any:
        """Widen, step, narrow."""
        self._cast(torch.float32)
        result = super().step(closure)
        self._cast(torch.bfloat16)
        return result

    def _cast(self, dtype: torch.dtype) -> None:
        for entries in self.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                if key in entries:
                    entries[key] = entries[key].to(dtype)


class Wrapper:
    """A wrapper with its optimizer as ``.optimizer``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Wrap ``optimizer``."""
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped one's."""
        return self.optimizer.param_groups

    def step(self) -> None:
        """Step the wrapped one."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Clear the wrapped one's gradients."""
        self.optimizer.zero_grad()


class OpaqueWrapper:
    """A wrapper of an unknown kind: no attribute leads to its optimizer, and it exposes only its groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Wrap ``optimizer``."""
        inner: Any = optimizer
        self._groups: Callable[[], list[dict[str, Any]]] = lambda: inner.param_groups
        self.step = lambda: inner.step()
        self.zero_grad = lambda: inner.zero_grad()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped one's."""
        return self._groups()


def build_outside(given: OptimizerGiven) -> nn.ParameterDict | None:
    """Return the parameters of one number each that the model does not have; None where the case has none."""
    if given.groups not in ("outside", "outside-reversed"):
        return None
    return nn.ParameterDict(
        {name: nn.Parameter(torch.tensor(value)) for name, value in (("gain", 0.5), ("bend", -0.5))}
    )


def build_optimizer(
    model: nn.Module, given: OptimizerGiven, outside: nn.ParameterDict | None = None
) -> tuple[Any, list[torch.optim.Optimizer]]:
    """Return the trainer's optimizer, and the plain optimizers inside it."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = [parameter for _, parameter in named]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    if given.kind == "sam":
        sam = Sam(parameters, lambda groups: _adamw(groups, given))
        return sam, [sam.base_optimizer]
    if given.kind == "lookahead":
        inner = _adamw(parameters, given)
        return Lookahead(inner), [inner]
    if given.kind in ("chain", "two", "container"):
        pair = [_adamw(matrices, given), _adamw(vectors, given, lr=2 * given.lr)]
        if given.kind == "container":
            return Container(dict(zip(("matrices", "vectors"), pair, strict=True))), pair
        return (ChainedOptimizer(pair) if given.kind == "chain" else list(pair)), pair
    if given.kind == "muon":
        hidden = [parameter for name, parameter in named if name.endswith("hidden.weight")]
        rest = [parameter for parameter in parameters if not any(parameter is other for other in hidden)]
        muon = torch.optim.Muon(hidden, lr=given.lr, weight_decay=given.weight_decay)
        members: list[torch.optim.Optimizer] = [muon, _adamw(rest, given)]
        return ChainedOptimizer(members), members
    if given.kind == "decay":
        groups = [{"params": matrices, "weight_decay": given.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        plain: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=given.lr, foreach=False)
    elif given.kind in ("wrapper", "opaque"):
        plain = _adamw(parameters, given)
        return (Wrapper(plain) if given.kind == "wrapper" else OpaqueWrapper(plain)), [plain]
    else:
        plain = _PLAIN[given.kind](_groups(named, given, list((outside or {}).values())), given)
    return plain, [plain]


def _adamw(parameters: Any, given: OptimizerGiven, *, lr: float | None = None) -> torch.optim.Optimizer:
    betas = (0.9, given.beta2)
    return torch.optim.AdamW(parameters, lr=lr or given.lr, betas=betas, weight_decay=given.weight_decay, foreach=False)


_PLAIN: Mapping[str, Callable[[Any, OptimizerGiven], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": lambda groups, given: torch.optim.SGD(
        groups, lr=given.lr, momentum=0.9, weight_decay=given.weight_decay, foreach=False
    ),
    "rmsprop": lambda groups, given: torch.optim.RMSprop(groups, lr=given.lr, weight_decay=given.weight_decay),
    "adagrad": lambda groups, given: torch.optim.Adagrad(groups, lr=given.lr, weight_decay=given.weight_decay),
    "lowbit": lambda groups, given: LowBitAdamW(groups, lr=given.lr, weight_decay=given.weight_decay, foreach=False),
}


def _groups(
    named: list[tuple[str, nn.Parameter]], given: OptimizerGiven, outside: list[nn.Parameter]
) -> list[dict[str, Any]]:
    parameters = [parameter for _, parameter in named]
    embedding = [parameter for name, parameter in named if "embed_tokens" in name]
    rest = [parameter for name, parameter in named if "embed_tokens" not in name]
    # Two groups that differ in their lr only, so that a swap shows.
    split: list[dict[str, Any]] = [{"params": embedding, "lr": 2 * given.lr}, {"params": rest}]
    layouts: dict[str, list[dict[str, Any]]] = {
        "one": [{"params": parameters}],
        "reversed": [{"params": parameters[::-1]}],
        "empty": [{"params": parameters}, {"params": []}],
        "split": split,
        "split-reversed": split[::-1],
        "outside": [{"params": [*parameters, *outside]}],
        "outside-reversed": [{"params": [*parameters, *outside[::-1]]}],
    }
    return layouts[given.groups]


# ---- schedules ------------------------------------------------------------------------------------------------------


def build_schedulers(optimizers: list[torch.optim.Optimizer], given: SchedulerGiven) -> list[Any]:
    """One schedule for each plain optimizer; ``two`` puts two on the first."""
    if given.kind == "none":
        return []
    if given.kind == "two":
        first = optimizers[0]
        linear = schedules.LinearLR(first, 1.0, 0.5, total_iters=given.total)
        return [linear, schedules.ExponentialLR(first, 0.97)]
    return [_scheduler(optimizer, given) for optimizer in optimizers]


def _scheduler(optimizer: torch.optim.Optimizer, given: SchedulerGiven) -> Any:
    if given.kind == "constant":
        return schedules.LambdaLR(optimizer, _one)
    if given.kind == "linear":
        return schedules.LinearLR(optimizer, 1.0, 0.1, total_iters=given.total)
    if given.kind == "warmup":
        return schedules.LinearLR(optimizer, 0.1, 1.0, total_iters=given.warmup)
    if given.kind == "lambda":
        return schedules.LambdaLR(optimizer, _falling)
    if given.kind == "onecycle":
        peaks = [float(group["lr"]) for group in optimizer.param_groups]
        return schedules.OneCycleLR(optimizer, max_lr=peaks, total_steps=given.total + 1)
    if given.kind == "cosine":
        return schedules.CosineAnnealingLR(optimizer, T_max=given.total)
    if given.kind == "multistep":
        milestones = list(range(given.warmup, given.total, given.warmup))
        return schedules.MultiStepLR(optimizer, milestones, gamma=0.5)
    if given.kind == "exponential":
        return schedules.ExponentialLR(optimizer, 0.95)
    warmup = schedules.LinearLR(optimizer, 0.1, 1.0, total_iters=given.warmup)
    cosine = schedules.CosineAnnealingLR(optimizer, T_max=max(1, given.total - given.warmup))
    return schedules.SequentialLR(optimizer, [warmup, cosine], milestones=[given.warmup])


def _one(step: int) -> float:
    return 1.0


def _falling(step: int) -> float:
    return 1.0 / (1.0 + step)

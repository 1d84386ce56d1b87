"""A checkpoint of about 12 KB: what is saved, the expected values of a load, and live state that a failed load must not change.

Values depend on (name, step, variant) only and are computed here, so that loaded values are compared with values that never
went through the library. ``variant`` distinguishes two saves of the same step.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

Layout = Literal["per_rank", "embedded"]
LAYOUTS: tuple[Layout, ...] = ("per_rank", "embedded")
# An odd number of rows for two ranks; a dtype of two bytes; a scalar.
_SHAPES: Mapping[str, tuple[tuple[int, ...], str]] = {
    "embed.weight": ((5, 6), "float32"),
    "up.weight": ((4, 6), "bfloat16"),
    "norm.weight": ((6,), "float32"),
    "seen": ((), "int64"),
}
_TRAINED = ("embed.weight",)
_SHARDED = "embed.weight"
TRAINING_STATE_KEYS = ("epoch", "lr_scheduler", "train_dataloader", "rng_state")


def tensors(step: int, variant: int = 0) -> dict[str, Any]:
    """Every tensor, whole, by its flat name (``model.embed.weight``, ``optimizer.0.state.embed.weight.exp_avg``)."""
    import torch

    found = {
        f"model.{name}": _values(f"model.{name}", shape, kind, step, variant) for name, (shape, kind) in _SHAPES.items()
    }
    for name in _TRAINED:
        shape, kind = _SHAPES[name]
        for part in ("exp_avg", "exp_avg_sq"):
            full_name = f"optimizer.0.state.{name}.{part}"
            found[full_name] = _values(full_name, shape, kind, step, variant)
        found[f"optimizer.0.state.{name}.step"] = torch.tensor(float(step))
    return found


def _values(name: str, shape: tuple[int, ...], kind: str, step: int, variant: int) -> Any:
    import torch

    seed = int.from_bytes(hashlib.sha256(f"{name}/{step}/{variant}".encode()).digest()[:7], "big")
    generator = torch.Generator().manual_seed(seed)
    if kind == "int64":
        return torch.randint(0, 1 << 40, shape, generator=generator)
    return torch.randn(shape, generator=generator).to(getattr(torch, kind))


def training_state(step: int, rank: int, variant: int = 0) -> dict[str, Any]:
    """The training state of one rank; its random streams are small placeholders that differ by rank."""
    return {
        "epoch": 1 + variant,
        "lr_scheduler": [{"last_epoch": step, "_last_lr": [0.1 / (step + 1)]}],
        "train_dataloader": {"batches_consumed": 5 * step + rank},
        "rng_state": {"python": [step, rank, variant]},
    }


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The payload's ``model`` and ``optimizer`` from flat names; learning rates are plain values next to the tensors."""
    state: dict[str, Any] = {"model": {}, "optimizer": {"0": {"state": {}, "lr": 0.0}}}
    for name, value in flat.items():
        bucket, _, rest = name.partition(".")
        if bucket == "model":
            state["model"][rest] = value
        elif rest == "0.lr":
            state["optimizer"]["0"]["lr"] = value
        else:
            parameter, _, part = rest.removeprefix("0.state.").rpartition(".")
            state["optimizer"]["0"]["state"].setdefault(parameter, {})[part] = value
    return state


def flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`nested`."""
    found = {f"model.{name}": value for name, value in state["model"].items()}
    part = state["optimizer"]["0"]
    for parameter, entries in part["state"].items():
        found.update({f"optimizer.0.state.{parameter}.{name}": value for name, value in entries.items()})
    return {**found, "optimizer.0.lr": part["lr"]}


def expected(step: int, variant: int = 0) -> dict[str, Any]:
    """The expected values of a load of that save, by flat name."""
    return {**tensors(step, variant), "optimizer.0.lr": _learning_rate(step, variant)}


def _learning_rate(step: int, variant: int) -> float:
    return 0.1 / (1 + step + variant)


def payload(step: int, variant: int = 0) -> dict[str, Any]:
    """This rank's payload. In a group of ranks the embedding and its optimizer state are sharded by rows."""
    import torch.distributed as dist

    whole = expected(step, variant)
    rank = 0
    if dist.is_initialized():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        for name, value in whole.items():
            if _SHARDED in name and getattr(value, "ndim", 0) == 2:
                whole[name] = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
    return {**nested(whole), "extra_state": training_state(step, rank, variant)}


def destination() -> dict[str, Any]:
    """Live state that equals no save, for a load in a single process to fill."""
    import torch

    whole = {name: torch.full_like(value, 7) for name, value in tensors(0).items()}
    return nested({**whole, "optimizer.0.lr": -1.0})


def sharded_destination() -> dict[str, Any]:
    """The same on each rank of a group."""
    import torch

    state = payload(0)
    state.pop("extra_state")
    with torch.no_grad():
        for value in flat(state).values():
            if isinstance(value, torch.Tensor):
                value.fill_(7)
    state["optimizer"]["0"]["lr"] = -1.0
    return state


def live_digest(state: Mapping[str, Any]) -> str:
    """A digest of every byte of the live state and of the process's random streams (torch, Python, NumPy)."""
    import numpy as np
    import torch

    hasher = hashlib.sha256()
    for name, value in sorted(flat(state).items()):
        hasher.update(name.encode())
        hasher.update(_bytes_of(value))
    hasher.update(_bytes_of(torch.get_rng_state()))
    _, keys, *rest = np.random.get_state()
    hasher.update(np.asarray(keys).tobytes())
    hasher.update(repr((random.getstate(), rest)).encode())
    return hasher.hexdigest()


def _bytes_of(value: Any) -> bytes:
    import torch
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)}".encode() + content
    return repr(value).encode()


def difference(state: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The first name whose value differs, bit for bit; "" if none does."""
    from torch.distributed.tensor import DTensor

    found = flat(state)
    if found.keys() != wanted.keys():
        return f"names: {sorted(found.keys() ^ wanted.keys())}"
    for name, value in sorted(found.items()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if _bytes_of(whole) != _bytes_of(wanted[name]):
            return name
    return ""


def local_difference(state: Mapping[str, Any], step: int, variant: int = 0) -> str:
    """As :func:`difference`, for this rank's shards only: no rank waits for another."""
    wanted = flat(payload(step, variant))
    for name, value in sorted(flat(state).items()):
        if _bytes_of(value) != _bytes_of(wanted[name]):
            return name
    return ""


def training_state_difference(found: Mapping[str, Any], step: int, rank: int, variant: int = 0) -> str:
    """The first part of the training state that differs from the saved one; "" if none does."""
    for key, value in training_state(step, rank, variant).items():
        if found.get(key) != value:
            return f"extra_state.{key}"
    return ""


def save(
    checkpointer: Any, root: Path, step: int, variant: int = 0, *, save_async: bool = False, name: str = ""
) -> None:
    """Save one step; collective. ``name`` is its directory's, if that is not ``global_step_N``."""
    path = str(root / (name or f"global_step_{step}"))
    checkpointer.save(path, payload(step, variant), global_step=step, save_async=save_async)


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect the library's warnings."""
    messages: list[str] = []

    class WarningCollector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    collector = WarningCollector(logging.WARNING)
    logger = logging.getLogger("hyper_resume")
    logger.addHandler(collector)
    before, logger.propagate = logger.propagate, False
    try:
        yield messages
    finally:
        logger.removeHandler(collector)
        logger.propagate = before

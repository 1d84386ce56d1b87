"""The device of a job (CPU, CUDA or Ascend NPU), its process group, its random stream.

No other module refers to ``torch_npu``. Accelerators are used through ``torch.get_device_module``, where every backend,
Ascend's included, registers the same functions.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from hyper_resume.errors import ConfigError, UnsupportedError, describe

DeviceName = Literal["auto", "cpu", "cuda", "npu"]

# Gloo is needed in addition to the accelerator's backend: checkpoints and the functions of `collective` use CPU tensors.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


@dataclass(frozen=True, kw_only=True)
class DeviceContext:
    """The device of this process.

    ``type`` is cpu, cuda or npu; ``device`` is this process's device (its index is LOCAL_RANK); ``backend`` is the argument
    for ``torch.distributed.init_process_group``.
    """

    type: str
    device: torch.device
    backend: str


def resolve_device(name: DeviceName) -> DeviceContext:
    """Choose the device of this process; ``auto`` prefers an NPU to CUDA, and CUDA to the CPU.

    The only side effect: ``torch_npu`` is imported if ``name`` is ``npu``, or if it is ``auto`` and ``torch_npu`` is installed.

    Raises:
        ConfigError: an unknown name, or a LOCAL_RANK for which this machine has no device.
        UnsupportedError: the requested accelerator can't be used; the message says why.
    """
    if name not in ("auto", *_BACKENDS):
        raise ConfigError(
            describe(
                "unknown device",
                where="accelerator.device",
                expected=", ".join(("auto", *_BACKENDS)),
                found=repr(name),
            )
        )
    if name == "auto":
        return _device_context(
            next(kind for kind in ("npu", "cuda", "cpu") if _why_unusable(kind, asked=False) is None)
        )
    reason = _why_unusable(name, asked=True)
    if reason is not None:
        raise UnsupportedError(
            describe(
                f"no {name} device can be used",
                where="accelerator.device",
                found=reason,
                do="set accelerator.device=cpu, or auto to use an available device",
            )
        )
    return _device_context(name)


def _why_unusable(kind: str, *, asked: bool) -> str | None:
    """Return why a device of this type can't be used here; None if it can."""
    if kind == "cpu":
        return None
    if kind == "cuda":
        if torch.cuda.is_available():
            return None
        build = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
        return f"torch.cuda.is_available() is False ({build})"
    if not asked and importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        # Without CANN, torch_npu can't load a shared library; that is an ImportError or an OSError.
        return f"torch_npu can't be imported; it needs CANN, Ascend's toolkit, on this machine ({error})"
    if torch.get_device_module("npu").is_available():
        return None
    return "torch_npu is installed and torch.npu.is_available() is False (no driver, no device, or no CANN environment)"


def _device_context(kind: str) -> DeviceContext:
    if kind == "cpu":
        return DeviceContext(type=kind, device=torch.device("cpu"), backend=_BACKENDS[kind])
    local_rank = _environment_integer("LOCAL_RANK", default=0)
    count = torch.get_device_module(kind).device_count()
    if not 0 <= local_rank < count:
        raise ConfigError(
            describe(
                "there is no device for this process",
                where=f"LOCAL_RANK={local_rank}",
                expected=f"at most {count} processes on this machine, one for each {kind} device",
                do="start fewer processes on this machine",
            )
        )
    return DeviceContext(type=kind, device=torch.device(kind, local_rank), backend=_BACKENDS[kind])


def init_process_group(context: DeviceContext, timeout_seconds: float) -> None:
    """Make ``context.device`` current, and create the default process group from the environment variables.

    A process that was started alone (no RANK, and WORLD_SIZE unset or 1) gets no group. An existing group is kept.

    Args:
        context: the result of :func:`resolve_device`.
        timeout_seconds: how long a collective waits for the other ranks.

    Raises:
        ConfigError: RANK is set or WORLD_SIZE is greater than 1, but a variable of the rendezvous is missing.
    """
    if context.type != "cpu":
        torch.get_device_module(context.type).set_device(context.device)
    world_size = _environment_integer("WORLD_SIZE", default=1)
    if dist.is_initialized() or (world_size == 1 and "RANK" not in os.environ):
        return
    absent = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise ConfigError(
            describe(
                "the processes of this job can't find each other",
                where=f"environment, WORLD_SIZE={world_size}",
                expected="RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                found=f"no {', '.join(absent)}",
                do="start the job with torchrun (python -m torch.distributed.run)",
            )
        )
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    # torchrun keeps one store over all restarts of its ranks. With a prefix per restart, restarted ranks don't find the
    # addresses of the previous ones.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        context.backend,
        store=PrefixStore(f"restart_{restart}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def destroy_process_group() -> None:
    """Destroy the default process group and all its subgroups; does nothing without one.

    Objects in reference cycles that still hold a group (an unused trainer) are collected at once. If a gloo group is deleted
    only at the exit of the interpreter, the process sometimes aborts ("terminate called without an active exception"), and a
    successful training would count as failed.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def get_device_rng_state(device_type: str) -> torch.Tensor | None:
    """Return the state of the accelerator's random stream, a CPU uint8 tensor; None on cpu, which has no such stream."""
    if device_type == "cpu":
        return None
    state: torch.Tensor = torch.get_device_module(device_type).get_rng_state()
    return state


def set_device_rng_state(device_type: str, state: torch.Tensor | None) -> None:
    """Restore the state that :func:`get_device_rng_state` returned on the same type of device.

    Raises:
        UnsupportedError: there is a state on cpu, or none on an accelerator, so the stream can't be continued.
    """
    if (state is None) != (device_type == "cpu"):
        raise UnsupportedError(
            describe(
                "the device random stream can't be continued on another kind of device",
                expected="no device stream" if device_type == "cpu" else f"a stream of {device_type}",
                found="none, as a cpu job saves" if state is None else f"a device stream of {state.numel()} bytes",
                do="resume on the type of device that wrote the checkpoint",
            )
        )
    if state is not None:
        torch.get_device_module(device_type).set_rng_state(state)


def seed_device(device_type: str, seed: int) -> None:
    """Seed the accelerator's random stream; does nothing on cpu (use ``torch.manual_seed``)."""
    if device_type != "cpu":
        torch.get_device_module(device_type).manual_seed(seed)


def synchronize(device_type: str) -> None:
    """Wait until the accelerator has finished all submitted work; returns at once on cpu."""
    if device_type != "cpu":
        torch.get_device_module(device_type).synchronize()


def _environment_integer(name: str, *, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            describe("not a number", where=f"environment variable {name}", expected="an integer", found=repr(text))
        ) from None

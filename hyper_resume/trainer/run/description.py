"""What a run is made of, as plain values: the ``run`` section of a manifest, described before the first step and any restore.

Described is what the live objects hold, not only what a file says: a program without a configuration has options too. State
that moves is no part of it; the buckets hold that.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hyper_resume import digest
from hyper_resume.checkpoint.tensors.threads import map_in_threads
from hyper_resume.config.schema import CheckpointingConfig
from hyper_resume.state.held_optimizers import innermost, names_of
from hyper_resume.state.model import collect_model
from hyper_resume.state.names import naming, without_data_parallel
from hyper_resume.state.plain_values import is_plain, plain, qualified_name
from hyper_resume.state.planned_schedule import schedule_options
from hyper_resume.trainer.payload import as_list, device_type, names_in, reachable_optimizers

_MOST_DIGESTED = 5_000
_LAYER_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)|^[0-9]+(?=\.)")
# Names of what differs between processes of one run, or is no option of a computation.
_NO_OPTION = frozenset(
    {"training", "rank", "local_rank", "world_size", "device", "name_or_path", "gradient_checkpointing"}
)
_SECRET = re.compile(r"(?:^|_)(?:api_?key|token|secret|password|credentials?)$", re.IGNORECASE)
_GROUP_NO_OPTION = frozenset({"params", "param_names", "initial_lr"})


def describe_run(trainer: Any, config: CheckpointingConfig) -> dict[str, Any]:
    """Return the description of a run on this rank; changes nothing and enters no collective."""
    return {
        "configuration": _configuration(getattr(trainer, "config", None)),
        "model": _model(trainer.model),
        "frozen": _digests(_not_saved(trainer.model, trainable_only=config.is_peft)),
        "optimizer": _optimizers(trainer),
        "lr_scheduler": {str(i): schedule_options(one) for i, one in enumerate(as_list(trainer.lr_scheduler))},
        "train_dataloader": _data(trainer.train_dataloader),
        "precision": _precision(trainer),
        "versions": {
            "hyper_resume": _own_version(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "threads": torch.get_num_threads(),
    }


def _own_version() -> str:
    try:
        return version("hyper_resume")
    except PackageNotFoundError:
        return "not installed"


def _configuration(config: Any) -> dict[str, Any]:
    found = plain(config)
    return _without_secrets(found) if isinstance(found, dict) else {}


def _without_secrets(found: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_secrets(value) if isinstance(value, dict) else value
        for key, value in found.items()
        if not _SECRET.search(key)
    }


# ---- model ----------------------------------------------------------------------------------------------------------


def _model(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {"modules": _modules(model)}
    inner = without_data_parallel(model)
    configuration = getattr(inner, "config", None)
    if hasattr(configuration, "to_dict"):
        found["config"] = _hugging_face(configuration)
    adapters = getattr(inner, "peft_config", None)
    if isinstance(adapters, Mapping):
        found["peft"] = {str(name): _hugging_face(one) for name, one in adapters.items() if hasattr(one, "to_dict")}
    return found


def _hugging_face(configuration: Any) -> dict[str, Any]:
    """Return a configuration of transformers or peft without paths and versions."""
    implementation = getattr(configuration, "_attn_implementation", None)
    return {
        **({} if implementation is None else {"attn_implementation": plain(implementation)}),
        **{
            key: value
            for key, value in plain(configuration.to_dict()).items()
            if not (key.startswith("_") or key.endswith(("_version", "_path", "_mapping", "_class")))
        },
    }


def _modules(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return module name -> its class and its plain public attributes (the probability of a dropout).

    Modules of numbered layers are described together under ``*``: a value that they do not share is a list.
    """
    # A wrapper has the name of what it wraps, which comes later and replaces it.
    canonical = naming(model)
    modules = {canonical(name): module for name, module in model.named_modules()}
    together: dict[str, dict[str, list[Any]]] = {}
    for name, module in modules.items():
        of_all = together.setdefault(_LAYER_NUMBER.sub("*", name), {})
        for key, value in _module_options(module).items():
            of_all.setdefault(key, []).append(value)
    return {
        name: {key: values[0] if all(one == values[0] for one in values) else values for key, values in options.items()}
        for name, options in together.items()
    }


def _module_options(module: nn.Module) -> dict[str, Any]:
    return {"class": qualified_name(_own_class(module)), **_plain_attributes(module)}


def _own_class(module: nn.Module) -> type:
    """Return the module's class; FSDP2 puts a class of its own in front of it."""
    kind = type(module)
    return kind.__bases__[-1] if kind.__bases__[0].__name__ == "FSDPModule" else kind


def _plain_attributes(thing: Any) -> dict[str, Any]:
    return {
        name: plain(value)
        for name, value in getattr(thing, "__dict__", {}).items()
        if not name.startswith("_") and name not in _NO_OPTION and _is_option(value)
    }


def _is_option(value: Any) -> bool:
    if isinstance(value, str):
        # A path is no option: the same data may lie elsewhere.
        return len(value) < 200 and "/" not in value
    return is_plain(value) or (isinstance(value, tuple) and len(value) < 20 and all(map(_is_option, value)))


def _not_saved(model: nn.Module, *, trainable_only: bool) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that no save holds: frozen ones of an adapter run, and non-persistent buffers."""
    saved = collect_model(model, trainable_only=trainable_only)
    canonical = naming(model)
    found = {canonical(name): one for name, one in [*model.named_parameters(), *model.named_buffers()]}
    return {name: tensor for name, tensor in found.items() if name not in saved and not tensor.is_meta}


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return name -> digest; of a sharded tensor, this rank's part, which its name then states."""
    names = list(tensors)[:_MOST_DIGESTED]
    digests = map_in_threads(lambda name: digest.entry_digest(tensors[name].detach()).hex(), names)
    return {f"{name}{_part(tensors[name])}": found for name, found in zip(names, digests, strict=True)}


def _part(tensor: torch.Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return ""
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    spans = ", ".join(f"{begin}:{begin + size}" for begin, size in zip(offsets, sizes, strict=True))
    return f"[{spans}]"


# ---- everything else ------------------------------------------------------------------------------------------------


def _optimizers(trainer: Any) -> dict[str, Any]:
    names, optimizers = names_in(trainer), reachable_optimizers(trainer.optimizer)
    return {
        name: {
            "class": qualified_name(type(innermost(optimizers, optimizer))),
            "groups": {
                group_name(group, names, place): _group(group) for place, group in enumerate(optimizer.param_groups)
            },
        }
        for name, optimizer in zip(names_of(optimizers), optimizers, strict=True)
    }


def group_name(group: Mapping[str, Any], names: Mapping[int, str], place: int) -> str:
    """Return the first name among a group's parameters, whatever their order; its place where they have no names."""
    return min((names[id(one)] for one in group["params"] if id(one) in names), default=f"#{place}")


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new group's options; a schedule has moved its lr already, and keeps the configured one in another field."""
    options = {key: plain(value) for key, value in group.items() if key not in _GROUP_NO_OPTION}
    return {**options, "lr": plain(group["initial_lr"])} if "initial_lr" in group else options


def _data(loader: Any) -> dict[str, Any]:
    dataset = getattr(loader, "dataset", None)
    found: dict[str, Any] = {"batches": _length(loader), "class": qualified_name(type(loader))}
    for name in ("batch_size", "drop_last", "num_workers"):
        if is_plain(getattr(loader, name, None)):
            found[name] = getattr(loader, name, None)
    to_state = getattr(getattr(loader, "order", None), "to_state", None)
    if to_state is not None:
        found["order"] = plain(to_state())
    if dataset is not None:
        fingerprint = getattr(dataset, "fingerprint", None)
        found["dataset"] = {
            **_plain_attributes(dataset),
            "samples": _length(dataset),
            "class": qualified_name(type(dataset)),
            **({"fingerprint": fingerprint} if isinstance(fingerprint, str) else {}),
        }
    return found


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except Exception:  # noqa: BLE001  any loader or data set of a user: it has no length
        return None


def _precision(trainer: Any) -> dict[str, Any]:
    kind = device_type(trainer)
    is_bf16 = bool(getattr(getattr(getattr(trainer, "config", None), "training", None), "bf16", False))
    autocast = torch.bfloat16 if is_bf16 else None
    if autocast is None and torch.is_autocast_enabled(kind):
        autocast = torch.get_autocast_dtype(kind)
    return {
        "device": kind,
        "default_dtype": str(torch.get_default_dtype()),
        "autocast": str(autocast).removeprefix("torch.") if autocast is not None else None,
        "float32_matmul": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
    }

"""What a path holds that is no checkpoint of DCP: the formats of other tools, by their files, and how each is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_HEAD_BYTES = 16
_IMPORT = (
    "make a checkpoint of its weights once: DistributedCheckpointer().save('<dir>/global_step_0', {'model': <state dict>}, "
    "global_step=0), and resume from that with checkpoint.restore_optimizer=false and checkpoint.restore_train_state=false"
)
_LOAD = "{load} reads it; "


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """``what`` it is, and what to ``do`` to resume from it."""

    what: str
    do: str


def _known(what: str, load: str = "") -> Foreign:
    return Foreign(what=what, do=(_LOAD.format(load=load) if load else "") + _IMPORT)


# What a directory is, by a file in it; the first that fits.
_DIRECTORIES: tuple[tuple[str, Foreign], ...] = (
    ("trainer_state.json", _known("a checkpoint of the Hugging Face Trainer", "from_pretrained")),
    ("adapter_config.json", _known("an adapter of peft", "PeftModel.from_pretrained")),
    ("*_model_states.pt", _known("a checkpoint of DeepSpeed", "its zero_to_fp32.py")),
    ("*/*_model_states.pt", _known("a checkpoint of DeepSpeed", "its zero_to_fp32.py")),
    ("zero_to_fp32.py", _known("a checkpoint of DeepSpeed", "its zero_to_fp32.py")),
    ("*/model_optim_rng.pt", _known("a checkpoint of Megatron-LM", "Megatron's own converter")),
    ("latest_checkpointed_iteration.txt", _known("a checkpoint directory of Megatron-LM", "Megatron's own converter")),
    ("random_states_*.pkl", _known("a checkpoint of accelerate", "torch.load or safetensors")),
    (".snapshot_metadata", _known("a snapshot of torchsnapshot", "torchsnapshot")),
    ("model.safetensors*", _known("a model of Hugging Face", "from_pretrained")),
    ("model-*-of-*.safetensors", _known("a model of Hugging Face", "from_pretrained")),
    ("pytorch_model*.bin*", _known("a model of Hugging Face", "from_pretrained")),
    ("*.safetensors", _known("a directory of safetensors", "safetensors.torch.load_file")),
    ("*.ckpt", _known("a directory with files that torch.save wrote", "torch.load(..., weights_only=True)")),
    ("*.pt", _known("a directory with files that torch.save wrote", "torch.load(..., weights_only=True)")),
    ("*.pth", _known("a directory with files that torch.save wrote", "torch.load(..., weights_only=True)")),
)


def recognise(path: Path) -> Foreign | None:
    """Return what another tool has written at ``path``; None if it is not known, or nothing is there. Runs nothing of it.

    It looks at names, and at the first bytes of a file.
    """
    try:
        if path.is_file():
            with path.open("rb") as file:
                return _of_file(file.read(_HEAD_BYTES))
        if path.is_dir():
            return next((found for pattern, found in _DIRECTORIES if any(path.glob(pattern))), None)
    except OSError:
        pass
    return None


def _of_file(head: bytes) -> Foreign:
    if head.startswith(b"PK\x03\x04"):
        return _known("one file, an archive as torch.save writes it", "torch.load(..., weights_only=True)")
    # The magic number of the format before torch 1.6, as a pickle of protocol 2 to 5 writes it.
    if head[:1] == b"\x80" and b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19" in head:
        return _known("one file, as torch.save wrote it before torch 1.6", "torch.load(..., weights_only=True)")
    if head[:1] == b"\x80" and head[1:2] <= b"\x05":
        return _known("one file, a pickle")
    if len(head) > 9 and head[8:9] == b"{":
        return _known("one file of safetensors", "safetensors.torch.load_file")
    return Foreign(what="a file", do="name a step directory, global_step_N, or LATEST")

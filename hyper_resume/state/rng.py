"""The rng_state bucket: the random streams of torch (CPU and device), Python and NumPy on this rank.

The state consists of tensors and plain values, so that it can be read with ``weights_only=True``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hyper_resume.device import get_device_rng_state, seed_device, set_device_rng_state
from hyper_resume.errors import CheckpointMismatchError, UnsupportedError, describe

STREAMS = ("torch_cpu", "torch_device", "python", "numpy")
_NUMPY_GENERATOR = "MT19937"
_NUMPY_WORDS = 624


def collect_rng(device_type: str) -> dict[str, Any]:
    """Return the state of every random stream of this process; ``torch_device`` is None on the CPU.

    Raises:
        UnsupportedError: NumPy's global generator was replaced by one of another type.
    """
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)  # legacy=False
    if numpy_state["bit_generator"] != _NUMPY_GENERATOR:
        raise UnsupportedError(
            describe(
                "NumPy's global generator can't be saved",
                expected=_NUMPY_GENERATOR,
                found=str(numpy_state["bit_generator"]),
                do="do not replace NumPy's global generator; use a generator of your own, and save it with your own state",
            )
        )
    return {
        "torch_cpu": torch.get_rng_state(),
        "torch_device": get_device_rng_state(device_type),
        "python": random.getstate(),
        "numpy": {
            "bit_generator": str(numpy_state["bit_generator"]),
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
    }


def check_rng(saved: Mapping[str, Any], device_type: str) -> list[str]:
    """Return why the streams would not be continued exactly; changes nothing.

    Raises:
        CheckpointMismatchError: a stream is missing, or is none that its generator takes.
    """
    _refuse_missing(saved)
    complaint = _form_complaint(saved)
    if complaint:
        raise CheckpointMismatchError(
            describe(
                "rng_state does not have the form that a save writes",
                expected="the state of every stream, as its generator gave it",
                found=complaint,
                do="resume from another checkpoint, or set checkpoint.restore_train_state=false",
            )
        )
    # The opposite case is refused by apply_rng.
    if saved["torch_device"] is None and get_device_rng_state(device_type) is not None:
        return [f"no device stream was saved, and this run uses one ({device_type})"]
    return []


def _refuse_missing(saved: Mapping[str, Any]) -> None:
    missing = [stream for stream in STREAMS if stream not in saved]
    if missing:
        raise CheckpointMismatchError(
            describe(
                f"rng_state lacks {', '.join(missing)}",
                expected=", ".join(STREAMS),
                found=", ".join(sorted(map(str, saved))),
                do="resume from another checkpoint, or set checkpoint.restore_train_state=false",
            )
        )


def _form_complaint(saved: Mapping[str, Any]) -> str:
    """Return why a generator would not take its stream; tries each on a generator of its own."""
    trials: Mapping[str, Callable[[Any], object]] = {
        "torch_cpu": torch.Generator().set_state,
        "python": lambda state: random.Random().setstate(_as_tuple(state)),
        "numpy": lambda state: np.random.RandomState().set_state(_numpy_state(state)),
    }
    for stream, take in trials.items():
        try:
            take(saved[stream])
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError, IndexError) as error:
            return f"{stream}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    device = saved["torch_device"]
    return "" if device is None or isinstance(device, torch.Tensor) else f"torch_device: {type(device).__name__}"


def _numpy_state(saved: Mapping[str, Any]) -> dict[str, Any]:
    # NumPy reads the word at this place without looking whether there is one.
    if saved["key"].shape != (_NUMPY_WORDS,) or type(saved["pos"]) is not int or not 0 <= saved["pos"] <= _NUMPY_WORDS:
        raise ValueError(f"expected {_NUMPY_WORDS} words and a place in them")
    return {
        "bit_generator": saved["bit_generator"],
        "state": {"key": saved["key"].numpy().astype(np.uint32), "pos": saved["pos"]},
        "has_gauss": saved["has_gauss"],
        "gauss": saved["gauss"],
    }


def apply_rng(saved: Mapping[str, Any], device_type: str) -> None:
    """Set every random stream of this process. It must be the last step of a restore, because any later draw moves a stream.

    Raises:
        CheckpointMismatchError: a stream is missing.
    """
    _refuse_missing(saved)
    np.random.set_state(_numpy_state(saved["numpy"]))
    random.setstate(_as_tuple(saved["python"]))
    torch.set_rng_state(saved["torch_cpu"])
    if saved["torch_device"] is not None:
        set_device_rng_state(device_type, saved["torch_device"])


@contextmanager
def streams_kept(device_type: str) -> Iterator[None]:
    """Put the random streams of this process back at the end of the block: a ``state_dict`` that it calls may draw."""
    streams = collect_rng(device_type)
    try:
        yield
    finally:
        apply_rng(streams, device_type)


def derive_streams(seed: int, global_step: int, coordinate: int, device_type: str) -> None:
    """Set every random stream of this process anew, as a function of the arguments alone.

    Ranks with the same data-parallel coordinate get the same streams, ranks with different ones streams that are independent
    (by ``numpy.random.SeedSequence``), and another step gives others.
    """
    words = np.random.SeedSequence((seed % 2**64, global_step, coordinate)).generate_state(1, np.uint64)
    # Not negative, which not every stream accepts.
    seed_streams(int(words[0] >> np.uint64(1)), device_type)


def seed_streams(seed: int, device_type: str) -> None:
    """Seed every stream of this process: torch's CPU and device, Python's, NumPy's."""
    torch.manual_seed(seed)
    seed_device(device_type, seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _as_tuple(state: Any) -> Any:
    """Convert nested lists to tuples: ``random.setstate`` requires tuples, and some encoders return lists."""
    return tuple(_as_tuple(item) for item in state) if isinstance(state, (list, tuple)) else state

"""The random streams of a process in a compact form: to note them with every batch, and to put them back.

The host's streams (torch CPU, Python, NumPy) are packed into some 10 kB of bytes, in about 30 microseconds. Nothing here draws.
"""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from hyper_resume.device import get_device_rng_state, set_device_rng_state
from hyper_resume.errors import CheckpointMismatchError, UnsupportedError, describe

STREAMS: Final = ("torch_cpu", "python", "numpy")
"""The host's streams, in the order in which they are packed."""

_MT19937: Final = "MT19937"
_WORDS: Final = 624
_PYTHON_VERSION: Final = 3
# Python: position, has a cached Gaussian, the Gaussian; NumPy: the same.
_TAIL: Final = struct.Struct("<iBd")


def pack_streams() -> bytes:
    """Return the state of the host's streams of this process.

    Raises:
        UnsupportedError: NumPy's global generator was replaced by one of another kind.
    """
    return b"".join(_parts())


def moved_streams(before: bytes, after: bytes) -> set[str]:
    """Return the names of the streams that differ between two results of :func:`pack_streams`."""
    if before == after:
        return set()
    return {name for name, one, other in zip(STREAMS, _split(before), _split(after), strict=True) if one != other}


def unpack_streams(packed: bytes) -> None:
    """Set the host's streams to what :func:`pack_streams` returned.

    Raises:
        CheckpointMismatchError: ``packed`` has another size, so it was packed by another version of torch.
    """
    torch_part, python_part, numpy_part = _split(packed)
    torch.set_rng_state(torch.frombuffer(bytearray(torch_part), dtype=torch.uint8))
    random.setstate(python_state(python_part))
    position, has_gauss, gauss = _TAIL.unpack(numpy_part[4 * _WORDS :])
    np.random.set_state((_MT19937, np.frombuffer(numpy_part, np.uint32, _WORDS), position, has_gauss, gauss))


def read_streams(device_type: str) -> dict[str, Any]:
    """Return the state of all streams of this process: ``host`` (bytes) and ``device`` (a tensor, None on the CPU)."""
    return {"host": pack_streams(), "device": get_device_rng_state(device_type)}


def put_streams(saved: Mapping[str, Any], device_type: str) -> None:
    """Set all streams of this process to what :func:`read_streams` returned.

    Raises:
        CheckpointMismatchError: they were packed by another version of torch.
        UnsupportedError: they are of another kind of device.
    """
    set_device_rng_state(device_type, saved["device"])
    unpack_streams(saved["host"])


def moved_since(before: Mapping[str, Any], device_type: str) -> list[str]:
    """Return the names of the streams that are no longer as :func:`read_streams` returned them, and torch_device."""
    now = read_streams(device_type)
    moved = sorted(moved_streams(before["host"], now["host"]))
    is_moved = now["device"] is not None and not torch.equal(now["device"], before["device"])
    return [*moved, *(["torch_device"] if is_moved else [])]


def python_bytes(state: tuple[Any, ...]) -> bytes:
    """Pack what ``random.Random.getstate()`` returns."""
    _, words, gauss = state
    return array("I", words[:-1]).tobytes() + _TAIL.pack(words[-1], gauss is not None, gauss or 0.0)


def python_state(packed: bytes) -> tuple[Any, ...]:
    """Return for ``random.Random.setstate()`` what :func:`python_bytes` packed."""
    position, has_gauss, gauss = _TAIL.unpack(packed[4 * _WORDS :])
    words = array("I", packed[: 4 * _WORDS])
    return (_PYTHON_VERSION, (*words, position), gauss if has_gauss else None)


def _parts() -> tuple[bytes, bytes, bytes]:
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)  # legacy=False
    if numpy_state["bit_generator"] != _MT19937:
        raise UnsupportedError(
            describe(
                "NumPy's global generator can't be saved",
                expected=_MT19937,
                found=str(numpy_state["bit_generator"]),
                do="leave np.random as it is, and keep a generator of another kind as an attribute of your sampler or dataset",
            )
        )
    tail = _TAIL.pack(numpy_state["state"]["pos"], numpy_state["has_gauss"], numpy_state["gauss"])
    return (
        torch.get_rng_state().numpy().tobytes(),
        python_bytes(random.getstate()),
        numpy_state["state"]["key"].tobytes() + tail,
    )


def _split(packed: bytes) -> tuple[bytes, bytes, bytes]:
    size = 4 * _WORDS + _TAIL.size
    at_python, at_numpy = len(packed) - 2 * size, len(packed) - size
    expected = torch.get_rng_state().numel()
    if at_python != expected:
        message = describe(
            "the saved random streams can't be put back",
            expected=f"{expected + 2 * size} bytes",
            found=f"{len(packed)} bytes",
            do="resume with the version of torch that wrote the checkpoint",
        )
        raise CheckpointMismatchError(message)
    return packed[:at_python], packed[at_python:at_numpy], packed[at_numpy:]

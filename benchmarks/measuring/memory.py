"""The peak memory of a call.

Measured is the growth of the process's resident set above its size right before the first call: ``VmHWM`` of
/proc/self/status, reset to the current size with ``/proc/self/clear_refs``. Pages of mapped files count too. Freed memory is
returned to the system first, so that an earlier peak does not hide a later one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

from benchmarks.protocol import BenchmarkError

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def why_not() -> str:
    """Return why peaks can't be measured here, or an empty text."""
    try:
        _reset_peak()
        resident_bytes()
    except (OSError, BenchmarkError) as error:
        return f"the peak of resident memory can't be read here: {error}"
    return ""


def resident_bytes() -> int:
    """Return the resident bytes."""
    return _read("VmRSS")


def start() -> int:
    """Return free memory to the system, reset the peak, and return the resident bytes."""
    gc.collect()
    # Only glibc has malloc_trim. With another C library the memory that it keeps counts.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    _reset_peak()
    return resident_bytes()


def peak_since(base: int) -> int:
    """Return how far the peak of the resident set since :func:`start` lies above ``base``, in bytes."""
    return max(0, _read("VmHWM") - base)


def available_bytes() -> int:
    """Return the bytes that are available without swapping."""
    return _read("MemAvailable", Path("/proc/meminfo"))


def _reset_peak() -> None:
    _CLEAR.write_text(_RESET_PEAK)


def _read(name: str, path: Path = _STATUS) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise BenchmarkError(f"{path} has no line {name}")

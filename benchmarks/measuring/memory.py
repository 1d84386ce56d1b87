"""How much memory a call takes at its peak.

Measured is the growth of the process's resident set (``VmHWM`` of /proc/self/status, put back to the present size by
``/proc/self/clear_refs``) over what was resident right before the first call. Pages of mapped files count too. Freed memory is
given back to the system before, so that an earlier peak does not hide a later one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

from benchmarks.protocol import BenchmarkError

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_PUT_PEAK_BACK = "5"


def why_not() -> str:
    """Why peaks can't be measured here; empty where they can."""
    try:
        _put_peak_back()
        resident_bytes()
    except (OSError, BenchmarkError) as error:
        return f"the peak of resident memory can't be read here: {error}"
    return ""


def resident_bytes() -> int:
    """Bytes that are resident now."""
    return _read("VmRSS")


def start() -> int:
    """Give back what is free, forget earlier peaks, and return the bytes that are resident now."""
    gc.collect()
    # Another C library than glibc has its own way of keeping memory, which then counts as it is.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    _put_peak_back()
    return resident_bytes()


def peak_since(base: int) -> int:
    """Bytes by which the resident set has risen above ``base`` at its peak since :func:`start`."""
    return max(0, _read("VmHWM") - base)


def available_bytes() -> int:
    """Bytes that the system can still give out without swapping."""
    return _read("MemAvailable", Path("/proc/meminfo"))


def _put_peak_back() -> None:
    _CLEAR.write_text(_PUT_PEAK_BACK)


def _read(name: str, path: Path = _STATUS) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise BenchmarkError(f"{path} has no line {name}")

"""Where a run's results come from: the source, the machine, what is installed, and the settings that change bits."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

# The variables that may change a result; no others are recorded.
_SETTINGS = (
    "CI",
    "CUBLAS_WORKSPACE_CONFIG",
    "GLOO_SOCKET_IFNAME",
    "HF_HUB_OFFLINE",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_DETERMINISTIC",
    "HCCL_DETERMINISTIC",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
)


def source_version() -> str:
    """The commit of this checkout, with ``+`` behind it when files differ from it; empty where there is no git."""
    here = Path(__file__).resolve().parent
    output = []
    for words in (["rev-parse", "HEAD"], ["status", "--porcelain"]):
        try:
            done = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=True, timeout=20)
        except (OSError, subprocess.SubprocessError):
            return ""
        output.append(done.stdout.strip())
    return output[0] + ("+" if output[1] else "")


def machine(folder: Path) -> dict[str, str]:
    """The machine as text: ``cpu``, ``cores``, ``memory_bytes``, and the ``file_system`` that ``folder`` lies on."""
    return {
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "memory_bytes": str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "file_system": _file_system(folder),
    }


def packages_digest() -> str:
    """A digest of every installed distribution and its version: equal digests, equal installations."""
    found = sorted({f"{item.metadata['Name']}=={item.version}".lower() for item in importlib.metadata.distributions()})
    return hashlib.blake2b("\n".join(found).encode(), digest_size=8).hexdigest()


def settings() -> dict[str, str]:
    """The variables of the environment that may change a result."""
    return {name: os.environ[name] for name in _SETTINGS if name in os.environ}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(folder: Path) -> str:
    """The type of the mount that ``folder`` is below: the longest mount point that leads to it."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    place = folder.resolve()
    mounts: Mapping[str, str] = {line.split()[1]: line.split()[2] for line in lines}
    fitting = [point for point in mounts if place.is_relative_to(point)]
    return mounts[max(fitting, key=len)] if fitting else "unknown"

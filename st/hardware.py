"""Detects whether a platform's devices exist, in other processes, so that the tests never import a device's libraries.

The answer lists what was searched for and what was found: "skipped" alone does not say what is missing.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from conformance.matrix.platforms import Platform

_SECONDS = 120
_COUNTS = {
    "cuda": "import torch; print(torch.cuda.device_count())",
    # Its own library first: if that is missing, torch is not imported.
    "npu": "import torch_npu, torch; print(torch.npu.device_count())",
}
_CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_CANN_FOLDER = Path("/usr/local/Ascend")


def missing_hardware(platform: Platform) -> str | None:
    """Why scenarios of ``platform`` can't run on this machine, in one line; None when they can."""
    if platform.device == "cpu":
        return None
    count, text = device_count(platform.device)
    if count >= platform.ranks:
        return None
    findings = [f"torch.{platform.device}.device_count(): {text}"]
    if platform.device == "npu":
        findings = [f"npu-smi: {_which('npu-smi')}", f"CANN: {_cann()}", *findings]
    else:
        findings = [f"nvidia-smi: {_which('nvidia-smi')}", *findings]
    wanted = f"{platform.ranks} {platform.device.upper()} device{'s' if platform.ranks > 1 else ''}"
    return f"{platform.id} needs {wanted}; looked for {', '.join(findings)}"


@functools.cache
def device_count(device: str) -> tuple[int, str]:
    """The number of devices that torch sees in a process of its own, and its output."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COUNTS[device]], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return 0, f"no answer in {_SECONDS} s"
    if done.returncode == 0:
        text = done.stdout.split()[-1]
        return int(text), text
    lines = done.stderr.strip().splitlines()
    return 0, lines[-1] if lines else f"exit code {done.returncode}"


def _which(program: str) -> str:
    return "found" if shutil.which(program) else "not found"


def _cann() -> str:
    named = [name for name in _CANN_VARIABLES if os.environ.get(name)]
    if named:
        return f"by {named[0]}"
    return (
        f"in {_CANN_FOLDER}" if _CANN_FOLDER.is_dir() else f"not found ({', '.join(_CANN_VARIABLES)}, {_CANN_FOLDER})"
    )

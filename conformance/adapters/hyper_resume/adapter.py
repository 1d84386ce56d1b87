"""The adapter class. Imports neither torch nor hyper_resume: ranks run process.py or, with a configuration file, program.py."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from conformance.processes.launching import Launch
from conformance.running.adapter import ABILITIES, Description, Job

LEG_MODULE = "conformance.adapters.hyper_resume.process"
TEXT_MODULE = "conformance.adapters.hyper_resume.program"
# Ranks connect over loopback only, and download no models.
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_VERSIONS = ("hyper_resume", "torch", "numpy", "transformers")


class HyperResumeAdapter:
    """Runs every leg warm: forked from a process that has imported torch and hyper_resume."""

    def describe(self) -> Description:
        """All abilities. Devices are found by their drivers, since torch is not imported here."""
        versions = {name: _version(name) for name in _VERSIONS}
        return Description(name="hyper_resume", versions=versions, abilities=ABILITIES, devices=_devices())

    def launch(self, job: Job, rank: int) -> Launch:
        """The same for every rank: rank and world size come from the environment."""
        module = LEG_MODULE if job.given.config is None else TEXT_MODULE
        return Launch(argv=(sys.executable, "-m", module), environment=_ENVIRONMENT, preload=module)

    def collect(self, job: Job, folder: Path) -> None:
        """Nothing to do: the leg writes records itself."""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "from the checkout"


def _devices() -> tuple[str, ...]:
    devices = ["cpu"]
    if Path("/dev/nvidia0").exists():
        devices.append("cuda")
    if Path("/dev/davinci0").exists() and importlib.util.find_spec("torch_npu") is not None:
        devices.append("npu")
    return tuple(devices)

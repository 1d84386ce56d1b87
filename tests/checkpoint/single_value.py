"""Checkpoints of one value, which weights and training state must agree on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hyper_resume.checkpoint import DistributedCheckpointer
from tests.checkpoint.payloads import same


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((8,), value)}, "extra_state": {"value": value}}


def save(
    root: Path,
    step: int,
    value: float,
    *,
    save_async: bool = False,
    by: DistributedCheckpointer | None = None,
    **options: Any,
) -> Path:
    """Save by a checkpointer of its own, as a new run would, or by a given one; returns the step directory."""
    checkpointer = by or DistributedCheckpointer()
    directory = root / f"global_step_{step}"
    checkpointer.save(str(directory), state(value), global_step=step, save_async=save_async, **options)
    checkpointer.maybe_wait_for_async_save()
    return directory


def value_of(directory: Path) -> float:
    """The one value that weights and training state agree on."""
    parts = {"model": {"w": torch.zeros(8)}}
    extra = DistributedCheckpointer().load(str(directory), parts, extra_state_skeleton={"value": None})
    assert same(parts["model"]["w"], torch.full((8,), extra["value"]))
    return float(extra["value"])


def steps(root: Path) -> list[int]:
    """The steps that stand in a root, sorted."""
    return sorted(int(path.name.removeprefix("global_step_")) for path in root.glob("global_step_*"))


def manifest_content(directory: Path) -> dict[str, Any]:
    """What the manifest says, as plain JSON."""
    found: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    return found


def damage(directory: Path, name: str = "__0_0.distcp") -> None:
    """Change one bit in the middle of a file; its size stays."""
    content = bytearray((directory / name).read_bytes())
    content[len(content) // 2] ^= 1
    (directory / name).write_bytes(content)

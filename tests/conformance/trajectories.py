"""Trajectories computed from formulas, for checks whose right outcome is known in advance."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from conformance.records.trajectory import Trajectory, parse_line

RANKS = 2
STREAMS = ("torch_cpu", "python", "numpy")


def line(rank: int, step: int, **changes: Any) -> dict[str, Any]:
    """A record in which every column moves with the step, and samples and streams differ between ranks."""
    rng: dict[str, str | None] = {name: f"{name}-{rank}-{step}" for name in STREAMS}
    record: dict[str, Any] = {
        "global_step": step,
        "epoch": (step - 1) // 10,
        "batch_index": (step - 1) % 10,
        "loss": 6.0 / math.sqrt(step),
        "lr": 1e-4 / step,
        "group_lrs": [1e-4 / step, 2e-4 / step],
        "grad_norm": 1.0 + 1.0 / step,
        "sample_ids": [2 * step + rank, 100 + step],
        "seconds": 0.1,
        "digests": {"model": f"m{step}", "optimizer": f"o{step}", "rng": {**rng, "torch_device": None}},
    }
    record.update(changes)
    return record


Change = Callable[[dict[str, Any], int, int], None]


def trajectory(steps: Iterable[int], change: Change | None = None, ranks: int = RANKS) -> Trajectory:
    """Records of ``steps`` on every rank; ``change(record, rank, step)`` may alter each before it is read."""
    records = {}
    wanted = list(steps)
    for rank in range(ranks):
        lines = []
        for step in wanted:
            record = line(rank, step)
            if change is not None:
                change(record, rank, step)
            lines.append(parse_line(json.dumps(record).encode(), rank=rank, where="made up"))
        records[rank] = tuple(lines)
    return Trajectory(records=records)


def write_rank_file(folder: Path, rank: int, records: Iterable[dict[str, Any]], end: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"trajectory_rank_{rank}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + end)
    return path

"""What the made-up runs hold: every value follows from its step and rank, so what a report must show is known."""

from __future__ import annotations

import struct
from typing import Any

EPOCH = 6  # steps
BATCH = 4


def single(value: float) -> float:
    (back,) = struct.unpack("<f", struct.pack("<f", value))
    return float(back)


def loss(step: int, rank: int = 0) -> float:
    return single(3.0 / (1 + 0.1 * step) + 0.01 * rank + 0.05 * (step * 7 % 5))


def lr(step: int) -> float:
    return 1e-3 * (1 - step / 97)


def samples(step: int, rank: int = 0) -> list[int]:
    first = (step - 1) % EPOCH * BATCH + 1000 * rank
    return list(range(first, first + BATCH))


def record(step: int, rank: int = 0) -> dict[str, Any]:
    """One line of a trajectory."""
    return {
        "global_step": step,
        "epoch": (step - 1) // EPOCH,
        "batch_index": (step - 1) % EPOCH,
        "loss": loss(step, rank),
        "lr": lr(step),
        "group_lrs": [lr(step)],
        "grad_norm": single(1 + 1 / step),
        "sample_ids": samples(step, rank),
        "seconds": 0.25,
        "digests": {
            "model": f"aa{step:04x}{rank:02x}",
            "optimizer": f"bb{step:04x}{rank:02x}",
            "rng": {"torch_cpu": f"cc{step:04x}{rank:02x}", "torch_device": None, "python": f"dd{step:04x}{rank:02x}"},
        },
    }


def state(step: int, rank: int = 0) -> dict[str, dict[str, str]]:
    """What an event records of the six buckets."""
    return {
        "model": {"weight": f"float32[2] {step:08x}"},
        "optimizer": {"weight.exp_avg": f"float32[2] {step + 7:08x}"},
        "progress": {"global_step": str(step), "epoch": str(step // EPOCH)},
        "lr_scheduler": {"last_epoch": str(step)},
        "train_dataloader": {"batches_consumed": str(step % EPOCH)},
        "rng_state": {"torch_cpu": f"{step:04x}{rank:02x}", "python": f"{step + 1:04x}{rank:02x}"},
    }


KILL: dict[str, Any] = {
    "mode": "demo",
    "moment": "after_step",
    "step": 7,
    "rank": None,
    "operation": None,
    "what": "SIGKILL to all ranks after step 7",
    "victims": "all",
    "last_step": 7,
    "resumed_at": 5,
    "lost_steps": 2,
    "outcome": "pass",
    "reason": "",
    "divergence": None,
    "seconds": 9.5,
}

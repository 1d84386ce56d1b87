"""A trainer without a model: one rank of it, under a real torchrun, for the supervisor's own tests.

Every value is computed from (rank, step) alone, so the right trajectory is known without running anything. It writes
the records and the pointer as the real trainer does and keeps its ranks in step through their record files.
``--defect`` breaks it in one way; ``--hold-after`` makes it wait for the supervisor's kill instead of racing it.

    torchrun ... stand_in.py CONFIG --checkpoint.checkpoint_dir=D --trajectory.dir=T [--checkpoint.restore_from=LATEST]
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LAST_STEP = 25
SAVE_STEPS = 10
STEPS_PER_EPOCH = 13
PACE_SECONDS = 0.002


def values(rank: int, step: int) -> dict[str, Any]:
    """The record of one step: losses fall, every rank has its own samples and random streams."""

    def digest(name: str) -> str:
        return hashlib.sha256(f"{name} {rank} {step}".encode()).hexdigest()[:16]

    rng = {name: digest(name) for name in ("torch_cpu", "python", "numpy")}
    lr = 1e-4 * math.cos(step / LAST_STEP * math.pi / 2)
    batch = (step - 1) % STEPS_PER_EPOCH
    return {
        "global_step": step,
        "epoch": (step - 1) // STEPS_PER_EPOCH,
        "batch_index": batch,
        "loss": 6.0 / math.sqrt(step),
        "lr": lr,
        "group_lrs": [lr, lr],
        "grad_norm": 1.0 + 1.0 / step,
        "sample_ids": [rank * 100 + 2 * batch, rank * 100 + 2 * batch + 1],
        "seconds": PACE_SECONDS,
        "digests": {"model": digest("model"), "optimizer": digest("optimizer"), "rng": {**rng, "torch_device": None}},
    }


def broken(record: dict[str, Any], rank: int, defect: str) -> dict[str, Any]:
    """``record`` as a trainer with the defect would have written it."""
    step = record["global_step"]
    if defect == "rng-of-another-rank" and rank == 2:
        record["digests"]["rng"]["python"] = values(1, step)["digests"]["rng"]["python"]
    if defect == "last-bit-of-loss" and step == 17 and rank == 0:
        record["loss"] = math.nextafter(record["loss"], math.inf)
    return record


def option(name: str, default: str = "") -> str:
    prefix = f"--{name}="
    return next((item.removeprefix(prefix) for item in sys.argv if item.startswith(prefix)), default)


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    directory, checkpoints = Path(option("trajectory.dir")), Path(option("checkpoint.checkpoint_dir"))
    defect, hold_after = option("defect"), int(option("hold-after", "0"))
    pointer = checkpoints / "latest_checkpoint_iteration.txt"
    start = int(pointer.read_text()) if option("checkpoint.restore_from") == "LATEST" else 0
    if defect == "one-step-late":
        start += 1
    if defect == "ignores-sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if defect == "has-a-child" and rank == 1:
        # A loader worker, say: a session of its own, so no signal to the rank's group reaches it.
        child = [sys.executable, "-c", "import time; time.sleep(600)", str(directory)]
        subprocess.Popen(child, start_new_session=True)
    path = directory / f"trajectory_rank_{rank}.jsonl"
    for step in range(start + 1, LAST_STEP + 1):
        if defect == "dies-early" and rank == 3 and step == 5:
            print("rank 3 meets its end", flush=True)
            os._exit(7)
        if defect == "stops-early" and step == LAST_STEP:
            return
        with path.open("a") as file:
            file.write(json.dumps(broken(values(rank, step), rank, defect)) + "\n")
        wait_for_all(directory, world, step - start)
        if rank == 0 and (step % SAVE_STEPS == 0 or step == LAST_STEP):
            temporary = pointer.with_suffix(".tmp")
            temporary.write_text(f"{step}\n")
            temporary.replace(pointer)
        if hold_after == step or (defect == "never-ends" and step == LAST_STEP and rank == 2):
            signal.pause()


def wait_for_all(directory: Path, world: int, lines: int) -> None:
    """A barrier: no rank begins a step before every rank has recorded the one before."""
    for rank in range(world):
        path = directory / f"trajectory_rank_{rank}.jsonl"
        while not path.exists() or path.read_bytes().count(b"\n") < lines:
            time.sleep(PACE_SECONDS)


if __name__ == "__main__":
    main()

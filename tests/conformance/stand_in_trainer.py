"""A trainer without a model that imports only probe.py: every value follows from a number that each step hashes on.

DEFECT in the environment breaks it in one way; so the right outcome of every case is known without running anything.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conformance.probe import Probe

DEFECT = os.environ.get("DEFECT", "")


def value(text: str) -> float:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32


def restore(job: Mapping[str, Any]) -> int:
    if job["restore_from"] is None:
        return 0
    directory = Path(job["checkpoint_dir"])
    path = Path(job["restore_from"])
    if job["restore_from"] == "LATEST":
        path = directory / f"global_step_{(directory / 'latest_checkpoint_iteration.txt').read_text().strip()}"
    return int((path / ".metadata").read_text())


def save(job: Mapping[str, Any], probe: Probe, step: int) -> None:
    directory = Path(job["checkpoint_dir"]) / f"global_step_{step}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ".metadata").write_text(str(step))
    (directory.parent / "latest_checkpoint_iteration.txt").write_text(f"{step}\n")
    buckets = {"rng_state": {"python": f"{value(f'stream {step}')}"}}
    probe.event("saved", global_step=step, epoch=0, directory=directory.name, save_async=False, buckets=buckets)


def train(probe: Probe) -> None:
    job = probe.job
    start = restore(job)
    probe.event("built", buckets={"rng_state": {"python": "fresh"}})
    if job["restore_from"] is not None:
        restored = "fresh" if DEFECT == "forgets-rng" else f"{value(f'stream {start}')}"
        buckets = {"rng_state": {"python": restored}}
        probe.event("restored", global_step=start, epoch=0, path="", lrs=[], buckets=buckets)
    probe.event("begin", global_step=start, epoch=0, start_epoch=0, start_step=start, buckets={})
    if DEFECT == "hangs" or (DEFECT == "hangs-after-resume" and start):
        time.sleep(600)
    stream = "other" if DEFECT == "forgets-rng" and start else "stream"
    for step in range(start + 1, job["until_step"] + 1):
        if DEFECT == "segfaults" and step == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        noise = random.SystemRandom().random() if DEFECT == "not-reproducible" else 0.0
        digests = {
            "model": f"{value(f'{stream} model {step}'):.9f}",
            "optimizer": f"{step:04d}",
            "rng": {"python": f"{value(f'{stream} {step}'):.9f}"},
        }
        probe.step(
            global_step=step,
            epoch=0,
            batch_index=step - 1,
            loss=value(f"{stream} loss {step}") + noise,
            lr=0.1 if DEFECT == "constant-lr" else 0.1 / step,
            grad_norm=value(f"norm {step}"),
            sample_ids=[step],
            digests=digests,
        )
        if step % 5 == 0:
            save(job, probe, step)
        if DEFECT != "ignores-fault":
            probe.moment("after_step", step)
    probe.event("end", global_step=job["until_step"], epoch=0, buckets={})


def main() -> int:
    if DEFECT == "says-nothing":
        print("no line to the runner")
        return 0
    probe = Probe.from_environment()
    if DEFECT == "never-starts":
        return 0
    probe.event("start", versions={})
    if DEFECT == "gives-up":
        probe.event("trouble", message="the stand-in gives up")
        return 70
    if DEFECT == "garbage-events":
        (probe.folder / f"events_rank_{probe.rank}.jsonl").write_text("what?\n")
        return 0
    if probe.job["sabotage"] == "met":
        probe.event("sabotage_fired", id="met")
    try:
        train(probe)
    except Exception as error:  # noqa: BLE001  whatever ends it is told
        probe.error(error)
        return 1
    if DEFECT == "garbage-records":
        with (probe.folder / f"trajectory_rank_{probe.rank}.jsonl").open("a") as file:
            file.write('{"global_step": "soon"}\n')
    return 3 if DEFECT == "wrong-exit" else 0


if __name__ == "__main__":
    sys.exit(main())

"""A trainer without a model that imports only probe.py: every value is derived from a number that each step hashes.

DEFECT in the environment breaks it in one way, so the right outcome of every case is known in advance. A warm server can
fork it as a module.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conformance.running.probe import Probe

FORGETS_RNG = ("forgets-rng", "certifies-falsely", "certifies-honestly")


def defect() -> str:
    return os.environ.get("DEFECT", "")


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
    if probe.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ".metadata").write_text(str(step))
        (directory.parent / "latest_checkpoint_iteration.txt").write_text(f"{step}\n")
    buckets = {"rng_state": {"python": f"{value(f'stream {step}')}"}}
    probe.event("saved", global_step=step, epoch=0, directory=directory.name, save_async=False, buckets=buckets)


def hang_here(probe: Probe) -> None:
    (probe.folder / f"hangs_rank_{probe.rank}").touch()
    while True:
        time.sleep(1)


def meet_the_others(probe: Probe) -> None:
    """Return when every rank of the leg has called this."""
    (probe.folder / f"here_rank_{probe.rank}").touch()
    while len(list(probe.folder.glob("here_rank_*"))) < probe.job["world_size"]:
        time.sleep(0.002)


def meet_defect_at_begin(probe: Probe, start: int) -> None:
    if defect() == "hangs-deaf":
        signal.signal(signal.SIGABRT, signal.SIG_IGN)
    if defect() in ("hangs", "hangs-deaf") or (defect() == "hangs-after-resume" and start):
        hang_here(probe)
    if defect() == "fails-together":
        meet_the_others(probe)
        os._exit(10 + probe.rank)
    if defect() == "has-a-child" and probe.rank == probe.job["world_size"] - 1:
        # A loader worker, say: a session of its own, so no signal to the rank's group reaches it.
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    if defect() == "forks-a-child" and os.fork() == 0:
        os.setsid()
        time.sleep(600)


def meet_defect_after_step(probe: Probe, step: int) -> None:
    is_spared = (probe.folder / "go").exists()
    if (defect() == "hangs-when-spared" and is_spared) or (defect() == "never-ends" and step == 3):
        hang_here(probe)
    if defect() == "fails-when-spared" and is_spared:
        raise ConnectionError("the others are gone")
    if defect() == "renames-on-disk" and probe.rank == 1:
        for number, what in ((7, "write"), (8, "rename")):
            probe.event("operation", save=step, number=number + step, what=what, where=f"global_step_{step}")
        probe.moment("file_operation", step)


def certify(probe: Probe, path: str) -> None:
    """Log a certificate; the honest one says what was forgotten."""
    if defect() in ("certifies", "certifies-falsely", "certifies-honestly"):
        rng = "degraded (it is fresh)" if defect() == "certifies-honestly" else "exact (saved = loaded = live)"
        lines = ["model  exact (saved = loaded = live)", f"rng_state  {rng}", "stateful  absent (neither has any)"]
        probe.event("log", level="INFO", message=f"Restore certificate of {path}:\n  " + "\n  ".join(lines))


def train(probe: Probe) -> None:
    job = probe.job
    start = restore(job)
    probe.event("built", buckets={"rng_state": {"python": "fresh"}})
    if job["restore_from"] is not None:
        restored = "fresh" if defect() in FORGETS_RNG else f"{value(f'stream {start}')}"
        buckets = {"rng_state": {"python": restored}}
        path = f"{job['checkpoint_dir']}/global_step_{start}"
        certify(probe, path)
        probe.event("restored", global_step=start, epoch=0, path=path, lrs=[], buckets=buckets)
    probe.event("begin", global_step=start, epoch=0, start_epoch=0, start_step=start, buckets={})
    meet_defect_at_begin(probe, start)
    stream = "other" if defect() in FORGETS_RNG and start else "stream"
    for step in range(start + 1, job["until_step"] + 1):
        if defect() == "segfaults" and step == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        noise = random.SystemRandom().random() if defect() == "not-reproducible" else 0.0
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
            lr=0.1 if defect() == "constant-lr" else 0.1 / step,
            grad_norm=value(f"norm {step}"),
            sample_ids=[step],
            digests=digests,
        )
        if step % 5 == 0:
            save(job, probe, step)
        if defect() != "ignores-fault":
            probe.moment("after_step", step)
        meet_defect_after_step(probe, step)
    probe.event("end", global_step=job["until_step"], epoch=0, buckets={})


def main(arguments: Sequence[str] = ()) -> int:
    print(f"rank {os.environ.get('RANK', '0')} speaks", flush=True)
    if defect() == "says-nothing":
        print("no line to the runner")
        return 0
    probe = Probe.from_environment()
    if defect() == "never-starts":
        return 0
    probe.event("start", versions={})
    if defect() == "gives-up":
        probe.event("trouble", message="the stand-in gives up")
        return 70
    if defect() == "garbage-events":
        (probe.folder / f"events_rank_{probe.rank}.jsonl").write_text("what?\n")
        return 0
    if probe.job["sabotage"] == "met":
        probe.event("sabotage_fired", id="met")
    try:
        train(probe)
    except Exception as error:  # noqa: BLE001  whatever ends it is told
        probe.error(error)
        return 1
    if defect() == "garbage-records":
        with (probe.folder / f"trajectory_rank_{probe.rank}.jsonl").open("a") as file:
            file.write('{"global_step": "soon"}\n')
    return 3 if defect() == "wrong-exit" else 0


if __name__ == "__main__":
    sys.exit(main())

"""Defects in restored state: random streams, moments, step and epoch that are not restored or wrong."""

from __future__ import annotations

from typing import Any

from conformance.sabotages.saboteur import Saboteur, sabotage

_RESTORE = "hyper_resume.trainer.restore"
_MESH = "hyper_resume.trainer.run.mesh"


@sabotage("rng-not-restored")
def _rng_not_restored(put: Saboteur) -> None:
    put.replace(f"{_MESH}:apply_rng", lambda original, *args: None)


@sabotage("moments-zeroed")
def _moments_zeroed(put: Saboteur) -> None:
    def apply(original: Any, optimizers: Any, names: Any, loaded: Any, **how: Any) -> None:
        original(optimizers, names, loaded, **how)
        for optimizer in optimizers:
            for entries in optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                    if key in entries:
                        entries[key].zero_()

    put.replace(f"{_RESTORE}:apply_optimizers", apply)


@sabotage("start-step-off-by-one")
def _start_step_off_by_one(put: Saboteur) -> None:
    def resume_point(original: Any, trainer: Any, *, positioned: bool) -> tuple[int, int]:
        epoch, step = original(trainer, positioned=positioned)
        return epoch, step + 1

    put.replace(f"{_RESTORE}:resume_point", resume_point)


@sabotage("epoch-not-restored")
def _epoch_not_restored(put: Saboteur) -> None:
    """The step within the epoch is right, and the epoch is the first one again."""

    def resume_point(original: Any, trainer: Any, *, positioned: bool) -> tuple[int, int]:
        epoch, step = original(trainer, positioned=positioned)
        if epoch:
            put.fired()
        return 0, step

    put.replace(f"{_RESTORE}:resume_point", resume_point, fires=False)


@sabotage("load-writes-a-mark")
def _load_writes_a_mark(put: Saboteur) -> None:
    def load(original: Any, storage: Any, path: str, state: Any, **options: Any) -> Any:
        from pathlib import Path

        (Path(path) / "restored").touch()
        return original(storage, path, state, **options)

    put.replace("hyper_resume.checkpoint.dcp:DistributedCheckpointer.load", load)

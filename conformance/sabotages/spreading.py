"""Defects that only several ranks, or several kinds of optimizer, can show."""

from __future__ import annotations

from typing import Any

from conformance.sabotage import Saboteur, sabotage

_PAYLOAD = "hyper_resume.trainer.payload"


@sabotage("streams-of-rank-0-for-all")
def _streams_of_rank_0_for_all(put: Saboteur) -> None:
    def apply(original: Any, saved: Any, device_type: str) -> None:
        from hyper_resume import collective

        original(collective.on_rank_zero(lambda: saved), device_type)

    put.replace(f"{_PAYLOAD}:apply_rng", apply)


@sabotage("muon-momentum-left-behind")
def _muon_momentum_left_behind(put: Saboteur) -> None:
    def apply(original: Any, optimizers: Any, names: Any, loaded: Any) -> None:
        original(optimizers, names, loaded)
        for optimizer in optimizers:
            for entries in optimizer.state.values():
                if "momentum_buffer" in entries:
                    put.fired()
                    entries["momentum_buffer"].zero_()

    put.replace(f"{_PAYLOAD}:apply_optimizers", apply, fires=False)

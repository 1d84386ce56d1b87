"""Defects in storage: what is written, what is read, what is refused."""

from __future__ import annotations

from typing import Any

from conformance.sabotages.saboteur import Saboteur, sabotage


@sabotage("missing-key-tolerated")
def _missing_key_tolerated(put: Saboteur) -> None:
    def check(original: Any, wanted: Any, metadata: Any, *, strict: bool, where: str) -> None:
        original(wanted, metadata, strict=False, where=where)

    put.replace("hyper_resume.checkpoint.loading.buffers:check_model_entries", check)

"""Results folders made up from formulas: what a page must show is known without running a training."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from conformance.proof_record import (
    SCHEMA,
    ColumnResult,
    Comparison,
    Divergence,
    FaultRecord,
    LegComparison,
    LegRecord,
    ProcessEnd,
    ProofRecord,
    write_proof,
)

RANKS = 4
IDENTICAL = "identical, steps 11..25, 4 ranks: loss, lr, grad_norm, samples, model, optimizer, rng"
COLUMNS = ("samples", "lr", "rng", "loss", "grad_norm", "optimizer", "model")


def loss(step: int) -> float:
    return 5.56 - 0.9 * math.log(step) / 3 + 0.06 * math.sin(step * 1.7)


def lr(step: int, last: int = 25) -> float:
    return 1e-4 * min(step, 1 + math.cos(math.pi * step / last)) / 2


def write_trajectory(
    folder: Path, first: int, last: int, *, end: int, ranks: int = RANKS, shift_from: int | None = None
) -> None:
    """Records of steps ``first`` to ``last``; from ``shift_from`` on the loss wanders off."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        lines = []
        for step in range(first, last + 1):
            shift = 0.0 if shift_from is None or step < shift_from else 1e-7 * 3.0 ** (step - shift_from) * (-1) ** step
            record = {
                "global_step": step,
                "epoch": (step - 1) // 13,
                "batch_index": (step - 1) % 13,
                "loss": loss(step) + shift,
                "lr": lr(step, end),
                "group_lrs": [lr(step, end)],
                "grad_norm": 1.0 + 1 / step,
                "sample_ids": [step, step + 50],
                "seconds": 0.2,
            }
            lines.append(json.dumps(record) + "\n")
        (folder / f"trajectory_rank_{rank}.jsonl").write_text("".join(lines))


def leg_record(
    kind: Literal["reference", "interrupted", "resumed"],
    label: str,
    index: int,
    first: int,
    last: int,
    *,
    resumes_at: int | None = None,
    pointer: int | None = None,
    killed: bool = False,
) -> LegRecord:
    end = ProcessEnd(pid=100, signal="SIGKILL") if killed else ProcessEnd(pid=100, exit_code=0)
    fault = FaultRecord(
        kind="kill", moment="after_step", step=last, observed_steps=(last,) * RANKS, observed_pointer=pointer
    )
    return LegRecord(
        leg=kind,
        label=label,
        command=("torchrun",),
        trajectory=f"legs/{index}-{label}",
        log=f"logs/{index}-{label}.log",
        started_at="2026-03-01T10:00:00+00:00",
        seconds=17.25,
        resumes_at=resumes_at,
        first_steps=(first,) * RANKS,
        last_steps=(last,) * RANKS,
        agent=end,
        ranks=(end,) * RANKS,
        fault=fault if killed else None,
        failure=None,
    )


def results_folder(
    folder: Path,
    *,
    kills: Sequence[tuple[int, int]] = ((13, 10),),
    last: int = 25,
    divergence: Divergence | None = None,
    title: str = "TP 2 x FSDP2 2, Qwen3-MoE, dropout, AdamW, cosine with warm-up",
) -> ProofRecord:
    """Write a whole results folder; ``kills`` are pairs of (last step before the kill, step of the checkpoint)."""
    legs = [leg_record("reference", "reference", 0, 1, last)]
    start = 0
    for index, (step, pointer) in enumerate([*kills, (last, -1)], start=1):
        kind: Literal["interrupted", "resumed"] = "interrupted" if index == 1 else "resumed"
        label = kind if index == 1 or len(kills) == 1 else f"{kind}-{index - 1}"
        killed = pointer >= 0
        resumes_at = None if index == 1 else start
        legs.append(
            leg_record(kind, label, index, start + 1, step, resumes_at=resumes_at, pointer=pointer, killed=killed)
        )
        start = pointer
    for leg in legs:
        first, end = leg.first_steps[0], leg.last_steps[0]
        assert first is not None
        assert end is not None
        broken = divergence.step if divergence is not None and leg is legs[-1] else None
        write_trajectory(folder / leg.trajectory, first, end, end=last, shift_from=broken)
    columns = tuple(
        ColumnResult(
            name=name,
            compared=60,
            different=20 if divergence is not None and divergence.column.startswith(name) else 0,
            first=divergence if divergence is not None and divergence.column.startswith(name) else None,
        )
        for name in COLUMNS
    )
    comparison = Comparison(
        first_step=11,
        last_step=last,
        ranks=RANKS,
        columns=columns,
        divergence=divergence,
        unmoved_streams=("rng.numpy", "rng.python"),
    )
    record = ProofRecord(
        schema=SCHEMA,
        id="demo",
        title=title,
        outcome="identical" if divergence is None else "different",
        verdict=IDENTICAL if divergence is None else _verdict(divergence),
        ranks=RANKS,
        divergence=divergence,
        legs=tuple(legs),
        comparisons=tuple(LegComparison(label=leg.label, comparison=comparison) for leg in legs[1:]),
        config_name="demo.yaml",
        config_text="model:\n  preset: tiny-qwen3-moe\n",
        overrides=("--checkpoint.save_steps=10",),
        versions={"python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.24.0"},
        reproduce="python -m st prove examples/training_demo/proofs/demo.yaml",
        started_at="2026-03-01T10:00:00+00:00",
        seconds=52.5,
    )
    write_proof(record, folder)
    return record


def failed_folder(folder: Path) -> ProofRecord:
    """A run whose interrupted leg failed before its first step."""
    record = results_folder(folder)
    failure = "failed: torchrun ended with exit code 1"
    broken = replace(
        record.legs[1], failure=failure, fault=None, first_steps=(None,) * RANKS, last_steps=(None,) * RANKS
    )
    broken = replace(broken, ranks=(), agent=ProcessEnd(pid=100, exit_code=1), trajectory="legs/never")
    error = replace(
        record,
        outcome="error",
        verdict=f"ERROR: leg interrupted: {failure}",
        legs=(record.legs[0], broken),
        comparisons=(),
    )
    write_proof(error, folder)
    return error


def _verdict(divergence: Divergence) -> str:
    return (
        f"DIFFERENT: first at step {divergence.step}, rank {divergence.rank}, bucket {divergence.bucket} "
        f"(column {divergence.column}): reference {divergence.reference}, resumed {divergence.resumed}"
    )

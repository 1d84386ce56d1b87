"""The page of one proof: from ``proof.json`` and the trajectories to one HTML file that opens anywhere, offline.

The verdict comes first, then what a reader asks next: did the curves go on as if nothing had happened, what was done to
the legs, what exactly was compared, and with which versions and configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from conformance.proof_record import ColumnResult, Divergence, LegRecord, ProcessEnd, ProofRecord, read_proof
from conformance.record import RecordError, read_trajectory
from reports.charts import Band, Chart, Mark, Series, draw, swatch

_TEMPLATES = Path(__file__).with_name("templates")
_WORDS = {"identical": "Identical", "different": "Different", "error": "Not judged"}
_ICONS = {"identical": "✓", "different": "✕", "error": "?"}
# (class of the style sheet, marker, in words) for the reference, the interrupted leg, and each resumed leg in turn.
_STYLES = (
    ("reference", "dot", "wide solid line"),
    ("interrupted", "ring", "short dashes, rings"),
    ("resumed-a", "cross", "long dashes, crosses"),
    ("resumed-b", "triangle", "dash-dot, triangles"),
    ("resumed-c", "square", "dots, squares"),
    ("resumed-d", "plus", "thin line, pluses"),
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """How one leg is drawn and called."""

    label: str
    style: str
    marker: str
    words: str
    swatch: Markup


def build_page(folder: Path) -> str:
    """The page's HTML.

    Args:
        folder: a results folder of ``python -m st prove``.

    Raises:
        RecordError: ``proof.json`` or a trajectory that it names is missing or malformed.
    """
    proof = read_proof(folder)
    frame = read_frame(proof, folder)
    rank = proof.divergence.rank if proof.divergence else 0
    drawn = set(frame["leg"])
    curves = [_curve(index, leg) for index, leg in enumerate(proof.legs) if leg.label in drawn]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("resume_page.html.j2").render(
        proof=proof,
        word=_WORDS[proof.outcome],
        icon=_ICONS[proof.outcome],
        story=_story(proof),
        kills=[_kill_text(index, proof) for index in _killed(proof)],
        curves=curves,
        rank=rank,
        charts=_charts(proof, frame, curves, rank),
        divergence=_divergence_rows(proof.divergence) if proof.divergence else [],
        legs=[_leg_row(leg) for leg in proof.legs],
        columns=_column_rows(proof),
        unmoved=sorted({name for item in proof.comparisons for name in item.comparison.unmoved_streams}),
    )


def read_frame(proof: ProofRecord, folder: Path) -> pd.DataFrame:
    """All records of all legs: one row a leg, rank and step, with ``loss``, ``lr`` and ``grad_norm``.

    Raises:
        RecordError: a trajectory is malformed, or missing though the proof was judged.
    """
    rows: list[dict[str, Any]] = []
    for leg in proof.legs:
        try:
            trajectory = read_trajectory(folder / leg.trajectory)
        except RecordError:
            # A leg that failed before its first step has nothing to draw, and says so elsewhere.
            if leg.failure is None:
                raise
            continue
        for rank, records in trajectory.records.items():
            rows += [
                {
                    "leg": leg.label,
                    "rank": rank,
                    "step": record.global_step,
                    "loss": record.loss,
                    "lr": record.lr,
                    "grad_norm": record.grad_norm,
                }
                for record in records
            ]
    return pd.DataFrame(rows, columns=["leg", "rank", "step", "loss", "lr", "grad_norm"])


def _curve(index: int, leg: LegRecord) -> Curve:
    style, marker, words = _STYLES[index] if index < len(_STYLES) else _STYLES[2 + (index - 2) % (len(_STYLES) - 2)]
    return Curve(label=leg.label, style=style, marker=marker, words=words, swatch=Markup(swatch(style, marker)))


def _charts(proof: ProofRecord, frame: pd.DataFrame, curves: list[Curve], rank: int) -> dict[str, Markup]:
    rows = frame[frame["rank"] == rank]
    marks, bands = _marks(proof)

    losses, rates = _series(rows, curves, "loss"), _series(rows, curves, "lr")
    differences = _difference_series(rows, curves)
    has_lower = any(series.steps for series in differences)
    charts = {
        "loss": Chart(
            title="Loss by step", unit="loss", series=losses, marks=marks, bands=bands, height=320, is_upper=has_lower
        ),
        "difference": Chart(
            title="Loss of each leg minus loss of the reference, by step",
            unit="loss − reference",
            series=differences,
            marks=marks,
            bands=bands,
            height=210,
            differences=True,
        ),
        "lr": Chart(
            title="Learning rate by step", unit="learning rate", series=rates, marks=marks, bands=bands, height=230
        ),
    }
    return {name: Markup(draw(chart, name=name)) for name, chart in charts.items()}


def _series(rows: pd.DataFrame, curves: list[Curve], column: str) -> list[Series]:
    series = []
    for curve in curves:
        own = rows[rows["leg"] == curve.label]
        series.append(
            Series(
                label=curve.label,
                style=curve.style,
                marker=curve.marker,
                steps=own["step"].tolist(),
                values=own[column].tolist(),
            )
        )
    return series


def _difference_series(rows: pd.DataFrame, curves: list[Curve]) -> list[Series]:
    """Each leg minus the reference, at the steps that both have. Where both are the same NaN the difference is none."""
    losses = {curve.label: rows[rows["leg"] == curve.label].set_index("step")["loss"] for curve in curves}
    series = []
    for curve in curves[1:]:
        reference, own = losses[curves[0].label], losses[curve.label]
        common = own.index.intersection(reference.index)
        difference = own[common] - reference[common]
        difference[own[common].isna() & reference[common].isna()] = 0.0
        series.append(
            Series(
                label=f"{curve.label} − reference",
                style=curve.style,
                marker=curve.marker,
                steps=[int(step) for step in common],
                values=difference.tolist(),
            )
        )
    return series


def _killed(proof: ProofRecord) -> list[int]:
    return [index for index, leg in enumerate(proof.legs) if leg.fault is not None]


def _marks(proof: ProofRecord) -> tuple[list[Mark], list[Band]]:
    """Kills and the first difference, and the steps between checkpoint and kill, which were lost and done again."""
    killed = _killed(proof)
    marks, bands = [], []
    for number, index in enumerate(killed, start=1):
        fault = proof.legs[index].fault
        assert fault is not None  # _killed chose it for that
        step = max(fault.observed_steps)
        # A kill "after step 13" lies between 13 and 14.
        marks.append(Mark(at=step + 0.5, text="kill" if len(killed) == 1 else f"kill {number}", style="kill"))
        resumes_at = fault.observed_pointer or 0
        if resumes_at < step:
            bands.append(Band(first=resumes_at + 1, last=step))
    if proof.divergence is not None:
        marks.append(Mark(at=proof.divergence.step, text="first difference", style="parting"))
    return sorted(marks, key=lambda mark: mark.at), bands


def _kill_text(index: int, proof: ProofRecord) -> str:
    leg = proof.legs[index]
    assert leg.fault is not None  # _killed chose it for that
    step, pointer = max(leg.fault.observed_steps), leg.fault.observed_pointer
    moment = "every rank had finished" if leg.fault.moment == "after_step" else "the pointer named"
    text = f"{leg.label.capitalize()} leg: SIGKILL to torchrun and all {len(leg.ranks)} ranks"
    text += f" once {moment} step {leg.fault.step}"
    if leg.fault.step != step:
        text += f"; the last finished step was {step}"
    if pointer is None:
        return f"{text}; there was no checkpoint yet."
    if pointer >= step:
        return f"{text}; the newest checkpoint held step {pointer}, so no step was lost."
    lost = f"step {step} was" if pointer + 1 == step else f"steps {pointer + 1} to {step} were"
    return f"{text}; the newest checkpoint held step {pointer}, so {lost} lost and done again."


def _story(proof: ProofRecord) -> str:
    kills = len(_killed(proof))
    times = "once" if kills == 1 else "twice" if kills == 2 else f"{kills} times"
    start = f"One training on {proof.ranks} ranks was killed {times} and resumed each time"
    if kills == 1:
        start = f"One training on {proof.ranks} ranks was killed and resumed"
    if proof.outcome == "identical":
        return f"{start}. From its first resumed step on it did exactly what an uninterrupted run did, to the last bit."
    if proof.divergence is not None:
        return f"{start}. It did not go on as the uninterrupted run did: they part at step {proof.divergence.step}."
    return "The run did not come to a judgement: this says nothing for or against the trainer."


def _divergence_rows(divergence: Divergence) -> list[tuple[str, str]]:
    rows = [
        ("step", str(divergence.step)),
        ("rank", str(divergence.rank)),
        ("state bucket to look at", divergence.bucket),
        ("column", divergence.column),
        ("reference", divergence.reference),
        ("resumed", divergence.resumed),
    ]
    numbers = _as_floats(divergence)
    if numbers is not None:
        rows += [("reference, hexadecimal", numbers[0].hex()), ("resumed, hexadecimal", numbers[1].hex())]
        rows.append(("resumed − reference", repr(numbers[1] - numbers[0])))
    return rows


def _as_floats(divergence: Divergence) -> tuple[float, float] | None:
    if divergence.column not in ("loss", "lr", "grad_norm"):
        return None
    try:
        pair = float(divergence.reference), float(divergence.resumed)
    except ValueError:
        return None
    return pair if all(map(math.isfinite, pair)) else None


def _leg_row(leg: LegRecord) -> dict[str, str]:
    firsts = [step for step in leg.first_steps if step is not None]
    lasts = [step for step in leg.last_steps if step is not None]
    return {
        "label": leg.label,
        "start": "step 0" if leg.resumes_at is None else f"checkpoint of step {leg.resumes_at}",
        "steps": f"{min(firsts)} to {max(lasts)}" if firsts and lasts else "none",
        "agent": _end(leg.agent),
        "ranks": _ends(leg.ranks),
        "seconds": f"{leg.seconds:.1f}",
        "failure": leg.failure or "",
    }


def _ends(ranks: tuple[ProcessEnd, ...]) -> str:
    ends = [_end(end) for end in ranks]
    if not ends:
        return "not known"
    if len(set(ends)) == 1:
        return f"all {len(ends)}: {ends[0]}"
    return ", ".join(f"rank {rank}: {end}" for rank, end in enumerate(ends))


def _end(end: ProcessEnd | None) -> str:
    if end is None:
        return "not known"
    return end.signal or f"exit {end.exit_code}"


def _column_rows(proof: ProofRecord) -> list[dict[str, Any]]:
    """For each column, over all legs after the reference: cells compared, cells that differ, where first."""
    rows: dict[str, list[ColumnResult]] = {}
    for item in proof.comparisons:
        for column in item.comparison.columns:
            rows.setdefault(column.name, []).append(column)
    return [
        {
            "name": name,
            "compared": sum(column.compared for column in columns),
            "different": sum(column.different for column in columns),
            "first": min(
                (column.first for column in columns if column.first), key=lambda item: item.step, default=None
            ),
        }
        for name, columns in rows.items()
    ]

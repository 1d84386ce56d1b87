"""``python -m st prove PROOF.yaml``: run legs of a real training, kill, resume, compare, judge."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from conformance.proof_record import LegRecord, ProcessEnd, ProofRecord
from st.proof import Proof, ProofError, load_proof
from st.prove import new_results_folder, prove

IDENTICAL, DIFFERENT, USAGE, TROUBLE = 0, 1, 2, 4
_EXIT_CODES = {"identical": IDENTICAL, "different": DIFFERENT, "error": TROUBLE}
_CHECKOUT = Path(__file__).resolve().parent.parent


def add(verbs: Any, program: tuple[str, ...]) -> None:
    """Add ``prove``; ``program`` is what each rank runs."""
    verb = verbs.add_parser("prove", help="prove that a killed and resumed training equals an uninterrupted one")
    verb.add_argument("proof", nargs="?", type=Path, help="a proof's YAML file")
    verb.add_argument("--all", type=Path, metavar="FOLDER", help="run every *.yaml of a folder instead")
    verb.add_argument("--results", type=Path, default=Path("results"), metavar="DIR", help="default: results")
    verb.add_argument(
        "--repeat", type=_positive, default=1, metavar="N", help="run it N times; all verdicts must agree"
    )
    verb.add_argument("--limit-seconds", type=float, default=300.0, metavar="S", help="limit of one leg; default 300")
    verb.add_argument("--keep-checkpoints", action="store_true", help="keep them after an identical run too")
    verb.add_argument("--no-page", action="store_true", help="write no HTML page")
    verb.set_defaults(
        do=lambda options, _: _prove_all([load_proof(path) for path in _paths(options)], options, program)
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _paths(options: argparse.Namespace) -> list[Path]:
    if (options.proof is None) == (options.all is None):
        raise ProofError("give either one proof file or --all FOLDER")
    if options.proof is not None:
        return [options.proof]
    paths = sorted(options.all.glob("*.yaml"))
    if not paths:
        raise ProofError(f"--all {options.all}: no *.yaml there; an empty run proves nothing")
    return paths


def _prove_all(proofs: list[Proof], options: argparse.Namespace, program: tuple[str, ...]) -> int:
    codes: list[int] = []
    lines: list[str] = []
    for proof in proofs:
        verdicts = []
        for _ in range(options.repeat):
            record, has_page = _prove_once(proof, options, program)
            verdicts.append(record.verdict)
            codes += [_EXIT_CODES[record.outcome]] if has_page else [_EXIT_CODES[record.outcome], TROUBLE]
        lines += [f"{proof.id}: {verdict}" for verdict in verdicts]
        if len(set(verdicts)) > 1:
            codes.append(DIFFERENT)
            lines.append(f"{proof.id}: the {len(verdicts)} verdicts are NOT all the same")
        elif len(verdicts) > 1:
            lines.append(f"{proof.id}: all {len(verdicts)} verdicts are the same")
    if len(lines) > 1:
        print("\n".join(["", "all verdicts:", *lines]), flush=True)
    # A proved difference outranks trouble: it is the finding that a reader must not miss.
    return DIFFERENT if DIFFERENT in codes else max(codes)


def _prove_once(proof: Proof, options: argparse.Namespace, program: tuple[str, ...]) -> tuple[ProofRecord, bool]:
    folder = new_results_folder(options.results, proof.id)
    print(f"{proof.id}: {proof.title}\nresults: {_relative(folder)}", flush=True)
    record = prove(
        proof,
        folder,
        program=program,
        limit_seconds=options.limit_seconds,
        keep_checkpoints=options.keep_checkpoints,
        say=lambda line: print(line, flush=True),
    )
    print(table(record))
    for line in _remarks(record):
        print(line)
    print(record.verdict, flush=True)
    return record, options.no_page or _write_page(folder)


def table(record: ProofRecord) -> str:
    """The legs, one a line: steps, how each process ended, seconds."""
    rows = [("leg", "steps", "fault", "agent", "ranks", "seconds")]
    for leg in record.legs:
        ranks = [_end(end) for end in leg.ranks]
        fault = f"kill {leg.fault.moment} {leg.fault.step}" if leg.fault else "-"
        each = f"{len(ranks)} x {ranks[0]}" if len(set(ranks)) == 1 else ", ".join(ranks) or "?"
        rows.append((leg.label, _steps(leg), fault, _end(leg.agent), each, f"{leg.seconds:.1f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _remarks(record: ProofRecord) -> list[str]:
    unmoved = sorted({name for item in record.comparisons for name in item.comparison.unmoved_streams})
    if not unmoved:
        return []
    return [f"not shown by this run: the restore of {', '.join(unmoved)} (never moved in the reference leg)"]


def _steps(leg: LegRecord) -> str:
    firsts = [step for step in leg.first_steps if step is not None]
    lasts = [step for step in leg.last_steps if step is not None]
    return f"{min(firsts)}..{min(lasts)}" if firsts and lasts else "none"


def _end(end: ProcessEnd | None) -> str:
    if end is None:
        return "?"
    return end.signal or f"exit {end.exit_code}"


def _write_page(folder: Path) -> bool:
    """Render the page in a process of its own: the rooms meet in records only."""
    paths = [str(_CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "reports", str(folder)]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    has_page = done.returncode == 0
    print(f"page: {_relative(folder / 'index.html')}" if has_page else f"no page:\n{done.stderr}", flush=True)
    return has_page


def _relative(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)

"""Running a proof: its legs in order, the judgement, and the results folder that tells it all."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from conformance.proof_record import SCHEMA, LegRecord, ProofRecord, write_proof
from conformance.record import RecordError, read_trajectory
from st.judge import Judgement, NotJudgedError, judge, require_pointer
from st.proof import LegScript, Proof
from st.supervisor import Leg, LegError, run_leg

_DISTRIBUTIONS = ("hyper_resume", "torch", "transformers", "peft", "numpy")


def new_results_folder(root: Path, proof_id: str) -> Path:
    """Create ``<root>/<proof id>-<UTC time>``; a number is added when two proofs start within one second."""
    name = f"{proof_id}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    number = 1
    while True:
        folder = root.resolve() / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return folder


def prove(
    proof: Proof,
    folder: Path,
    *,
    program: tuple[str, ...],
    limit_seconds: float,
    keep_checkpoints: bool,
    say: Callable[[str], None],
) -> ProofRecord:
    """Run one proof and write ``proof.json``; it comes back (and is written) whatever the outcome.

    Args:
        proof: what to run.
        folder: the results folder, new and empty.
        program: what each rank runs, see :data:`st.launcher.TRAINER`.
        limit_seconds: how long one leg may take.
        keep_checkpoints: keep them also after an identical run; after any other they always stay.
        say: told a line at a time what is going on.

    Raises:
        KeyboardInterrupt: the user gave up; nothing is left running, and no ``proof.json`` is written.
    """
    started_at, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    legs: list[LegRecord] = []
    judgement: Judgement | None = None
    try:
        _run_legs(proof, folder, legs, program, limit_seconds, say)
        judgement = judge(
            proof, {leg.label: read_trajectory(folder / leg.trajectory, ranks=proof.ranks) for leg in legs}
        )
        verdict = judgement.verdict
    except LegError as error:
        legs.append(error.record)
        verdict = f"ERROR: {error}"
        say(error.log_tail)
    except (NotJudgedError, RecordError) as error:
        verdict = f"ERROR: {error}"
    is_identical = judgement is not None and judgement.divergence is None
    record = ProofRecord(
        schema=SCHEMA,
        id=proof.id,
        title=proof.title,
        outcome="error" if judgement is None else "identical" if is_identical else "different",
        verdict=verdict,
        ranks=proof.ranks,
        divergence=judgement.divergence if judgement else None,
        legs=tuple(legs),
        comparisons=judgement.comparisons if judgement else (),
        config_name=proof.config.name,
        config_text=proof.config.read_text(encoding="utf-8"),
        overrides=proof.overrides,
        versions=_versions(),
        reproduce=f"python -m st prove {_shown(proof.path)}",
        started_at=started_at,
        seconds=time.monotonic() - clock,
    )
    write_proof(record, folder)
    if is_identical and not keep_checkpoints:
        shutil.rmtree(folder / "checkpoints")
    return record


def _run_legs(
    proof: Proof,
    folder: Path,
    legs: list[LegRecord],
    program: tuple[str, ...],
    limit_seconds: float,
    say: Callable[[str], None],
) -> None:
    """Run the script, appending each finished leg to ``legs``."""
    for index, script in enumerate(proof.script):
        if script.resumes_at is not None:
            require_pointer(legs[-1], script.resumes_at)
        say(f"leg {index + 1} of {len(proof.script)}: {script.label} ...")
        legs.append(run_leg(_leg(proof, script, index, folder, program, limit_seconds)))


def _leg(
    proof: Proof, script: LegScript, index: int, folder: Path, program: tuple[str, ...], limit_seconds: float
) -> Leg:
    # The reference saves too, but into a directory of its own: nobody must resume from it by accident.
    checkpoints = folder / "checkpoints" / ("reference" if script.leg == "reference" else "run")
    trajectory = folder / "legs" / f"{index}-{script.label}"
    arguments = [
        str(proof.config),
        *proof.overrides,
        *script.overrides,
        f"--checkpoint.checkpoint_dir={checkpoints}",
        f"--trajectory.dir={trajectory}",
        "--trajectory.digests=true",
    ]
    if script.restore_from is not None:
        arguments.append(f"--checkpoint.restore_from={script.restore_from}")
    return Leg(
        leg=script.leg,
        label=script.label,
        ranks=proof.ranks,
        program=program,
        arguments=tuple(arguments),
        results=folder,
        trajectory=trajectory,
        checkpoints=checkpoints,
        log=folder / "logs" / f"{index}-{script.label}.log",
        fault=script.fault,
        resumes_at=script.resumes_at,
        limit_seconds=limit_seconds,
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform(), "cpus": str(os.cpu_count())}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _shown(path: Path) -> str:
    """The path as one would type it in the checkout."""
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return str(path)

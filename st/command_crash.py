"""``python -m st soak`` and ``python -m st sweep``: hundreds of kills at drawn or enumerated moments."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.matrix.platforms import find_platform
from conformance.records.results import KillRecord, Outcome, ResultRecord
from conformance.running.adapter import build_adapter
from conformance.running.session import Session
from st import running
from st.command_scenarios import exit_code
from st.soak import WORKLOADS, Kill, Soak
from st.sweep import MODES, PointRequest, Sweep

_RESULTS = Path("results")
_PLATFORM = "cpu4"


def add(verbs: Any) -> None:
    """Add both subcommands."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--seed", type=int, default=1, help="seed of the random choices; default 1")
    common.add_argument("--results", type=Path, help="the run's folder; default results/VERB-TIME")
    common.add_argument(
        "--sabotage", metavar="NAME", help="install this defect of the matrix in every attempt: the run must fail"
    )
    soak = verbs.add_parser(
        "soak", parents=[common], help="kill one training again and again; its end must equal the uninterrupted run"
    )
    soak.add_argument("--kills", type=_positive, default=100, metavar="N", help="default 100")
    soak.add_argument("--workload", choices=sorted(WORKLOADS), default="demo", help="default demo")
    soak.add_argument("--launcher", choices=["torchrun", "warm"], default="warm", help="default warm")
    soak.set_defaults(do=_soak)
    sweep = verbs.add_parser(
        "sweep", parents=[common], help="kill a save before each of its file operations, on every rank"
    )
    sweep.add_argument("--mode", action="append", choices=sorted(MODES), default=[], help="repeatable; default all")
    sweep.add_argument(
        "--share",
        type=_share,
        default=1.0,
        metavar="X",
        help="share of the points to try, drawn by the seed; default 1",
    )
    sweep.add_argument(
        "--point",
        type=_point,
        metavar="RANK:OPERATION",
        help="only this point: an operation's number, or a pattern for its first ('0:* global_step_6')",
    )
    sweep.add_argument("--jobs", type=int, default=2, help="points at a time; default 2")
    sweep.add_argument("--keep", action="store_true", help="keep the files of points that pass")
    sweep.set_defaults(do=_sweep)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("1 or more")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("more than 0, at most 1")
    return value


def _point(text: str) -> PointRequest:
    rank, _, operation = text.partition(":")
    is_number = operation.isdigit()
    if not rank.isdigit() or not (is_number or " " in operation):
        raise argparse.ArgumentTypeError("expected RANK:OPERATION, for example 0:17 or '0:* global_step_6'")
    return int(rank), int(operation) if is_number else operation


def _soak(options: argparse.Namespace, words: Sequence[str]) -> int:
    workload = WORKLOADS[options.workload]
    begun = time.monotonic()
    with _session(options, words) as session:
        print(f"{workload.title}; {options.kills} kills, seed {options.seed}: {session.folder}", flush=True)
        launcher, reference_launcher = session.launchers[options.launcher], session.launchers["warm"]
        soak = Soak(
            session.folder,
            build_adapter("hyper_resume"),
            launcher,
            reference_launcher=reference_launcher,
            sabotage=options.sabotage,
        )

        def on_kill(record: KillRecord, kill: Kill) -> None:
            print(_line(record, options.kills), flush=True)

        soaked = soak.run(options.workload, kills=options.kills, seed=options.seed, on_kill=on_kill)
        again = ["soak", "--workload", options.workload, "--kills", str(options.kills), "--seed", str(options.seed)]
        again += ["--launcher", options.launcher]
        result = _result(
            options, f"soak.{options.workload}", workload.title, soaked.outcome, soaked.reason, again, begun
        )
        session.add(soaked.kills, _blaming(result, soaked.kills))
        session.finish()
        print(soaked.summary)
        return _ended(session)


def _sweep(options: argparse.Namespace, words: Sequence[str]) -> int:
    with _session(options, words) as session:
        print(f"every change on disk that a save makes: {session.folder}", flush=True)
        launcher, adapter = session.launchers["warm"], build_adapter("hyper_resume")
        sweep = Sweep(session.folder, adapter, launcher, sabotage=options.sabotage, keep=options.keep)
        tried = 0
        for mode in options.mode or MODES:
            begun = time.monotonic()
            swept = sweep.run(
                mode,
                share=options.share,
                seed=options.seed,
                jobs=options.jobs,
                only=options.point,
                on_point=_report_point,
            )
            tried += len(swept.kills)
            reason = "" if swept.outcome == "pass" else swept.summary
            again = ["sweep", "--mode", mode, "--share", str(options.share), "--seed", str(options.seed)]
            result = _result(options, f"sweep.{mode}", MODES[mode].title, swept.outcome, reason, again, begun)
            session.add(swept.kills, _blaming(result, swept.kills))
            print(f"{mode}: {swept.summary}; {result.seconds:.0f} s", flush=True)
        session.finish()
        print(f"{tried} points in all")
        return _ended(session)


def _line(record: KillRecord, of: int) -> str:
    text = f"kill {record.number:>{len(str(of))}} of {of}: {record.what}"
    if record.outcome != "pass":
        return f"{text}: {record.outcome.upper()}: {record.reason}"
    resumed = f"{record.last_step} finished, resumed at {record.resumed_at}, {record.lost_steps} lost"
    return f"{text}; {resumed}; {record.seconds:.1f} s"


def _report_point(record: KillRecord) -> None:
    if record.outcome != "pass":
        print(f"{record.outcome.upper()} {record.mode}, rank {record.rank}, {record.what}: {record.reason}")
        print(
            f"    python -m st sweep --mode {record.mode} --point {record.rank}:{record.operation} --keep", flush=True
        )


def _result(
    options: argparse.Namespace, key: str, title: str, outcome: Outcome, reason: str, again: list[str], begun: float
) -> ResultRecord:
    again += ["--sabotage", options.sabotage] if options.sabotage else []
    return ResultRecord(
        key=key + (f"@{options.sabotage}" if options.sabotage else ""),
        case=key,
        title=title,
        level="must",
        outcome=outcome,
        reason=reason,
        blamed=None,
        checks=(),
        sabotage=options.sabotage,
        repeat=0,
        reproduce=shlex.join(["python", "-m", "st", *again]),
        seconds=time.monotonic() - begun,
    )


def _blaming(result: ResultRecord, kills: Sequence[KillRecord]) -> ResultRecord:
    """The result, attributed to the bucket of the first divergence after a kill."""
    found = next((kill.divergence for kill in kills if kill.divergence is not None), None)
    return replace(result, blamed=found.bucket if found else None)


def _session(options: argparse.Namespace, words: Sequence[str]) -> Session:
    folder = options.results or _RESULTS / time.strftime(f"{options.verb}-%Y%m%d-%H%M%S")
    return running.session(folder, find_platform(_PLATFORM, running.platforms()), suite=options.verb, argv=words)


def _ended(session: Session) -> int:
    return exit_code(session.results)

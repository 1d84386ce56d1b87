"""Results folders written line by line from formulas: what a report must show is known without running a training.

The lines are written here, not by the writer of the conformance room, so that what old runs left behind stays readable: in
schema 1, which knows no suite, unless the run is made with one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.reports.formulas import KILL, record, single, state

CHECKOUT = Path(__file__).parents[2]
OUTCOMES = ("pass", "false_exact", "fail", "error", "unsupported", "skipped", "known_fail", "unexpected_pass", "note")

Change = Callable[[dict[str, Any], int], None]


class RunFolder:
    """A run in the making. ``finish`` writes ``results.jsonl``."""

    def __init__(
        self,
        folder: Path,
        *,
        platform: str = "all",
        run_id: str = "run-1",
        argv: Sequence[str] = ("run",),
        suite: str | None = None,
        required: Sequence[str] = (),
        source: str = "0123456789abcdef0123456789abcdef01234567+",
    ):
        """``suite`` makes it a run of schema 2, for whose platform ``required`` was required."""
        folder.mkdir(parents=True)
        self.folder = folder
        self.suite = suite
        self._clock = datetime(2026, 3, 1, 10, 1, 0, 250_000, tzinfo=UTC)
        self.lines: list[dict[str, Any]] = [
            {
                "record": "header",
                "schema": "hyper_resume.results/1",
                "run_id": run_id,
                "platform": platform,
                "adapter": "hyper_resume",
                "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
                "system": "Linux x86_64",
                "argv": list(argv),
                "started_at": "2026-03-01T10:00:00+00:00",
            }
        ]
        if suite is not None:
            self.lines[0] |= {
                "schema": "hyper_resume.results/2",
                "suite": suite,
                "required": list(required),
                "machine": {"cpu": "A CPU", "cores": "2", "memory_bytes": str(3 * 2**30), "file_system": "ext4"},
                "packages_digest": "feedfacefeedface",
                "environment": {"OMP_NUM_THREADS": "1", "HF_TOKEN": "s3cret", "SURPRISE": "x"},
                "source": source,
            }
        self.outcomes: list[tuple[str | None, str]] = []

    def case(
        self,
        name: str,
        outcome: str = "pass",
        *,
        reason: str = "",
        sabotage: str | None = None,
        repeat: int = 0,
        checks: Sequence[dict[str, Any]] = (),
        title: str | None = None,
        level: str = "must",
        given: dict[str, Any] | None = None,
        suite: str = "conformance",
    ) -> str:
        """A case that needs no legs; its key. Both suites may have the same ids, so a system test has another key here."""
        key = name + (f"@{sabotage}" if sabotage else "") + (f"#{repeat}" if repeat else "")
        key += "~st" if suite == "st" else ""
        shown = title if title is not None else f"what {name} does"
        self.lines.append(
            {
                "record": "case",
                "key": key,
                "case": {"id": name, "title": shown, "spec": "8.2", "why": "harm", "given": given or {}},
            }
        )
        self._result(key, name, shown, outcome, reason, sabotage, repeat, checks, level, suite)
        return key

    def system_cases(self, *bases: str) -> None:
        """Every system test of this checkout (of these ids) passes."""
        for name in system_ids():
            if not bases or name.partition(".")[0] in bases:
                self.case(name, suite="st")

    def resumed_case(
        self,
        name: str,
        *,
        ranks: int = 1,
        last: int = 12,
        kill: int = 8,
        resume: int = 5,
        change: Change | None = None,
        restored: Change | None = None,
        outcome: str = "pass",
        reason: str = "",
        sabotage: str | None = None,
        divergence: dict[str, Any] | None = None,
        given: dict[str, Any] | None = None,
        configured: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> str:
        """A case with reference, interrupted and resumed leg. ``change`` edits each record (and rank) of the resumed leg."""
        key = name + (f"@{sabotage}" if sabotage else "")
        shown = given if given is not None else ({"world_size": ranks, "parallel": "fsdp"} if ranks > 1 else {})
        self.lines.append(
            {
                "record": "case",
                "key": key,
                "case": {"id": name, "title": f"{name} goes on", "spec": "8.2", "why": "harm", "given": shown},
            }
        )
        kill_end = {"exit_code": None, "signal": "SIGKILL"}
        reported = configured or {}
        self.leg(key, "reference", 1, last, ranks, configured=reported.get("reference"))
        self.leg(
            key,
            "interrupted",
            1,
            kill,
            ranks,
            ends=kill_end,
            saves=[resume],
            killed_at=kill,
            configured=reported.get("interrupted"),
        )
        self.leg(
            key,
            "resumed",
            resume + 1,
            last,
            ranks,
            restores=resume,
            change=change,
            restored=restored,
            sabotage=sabotage,
            configured=reported.get("resumed"),
        )
        check = {
            "check": "trajectory_equals",
            "parameters": {"leg": "resumed", "against": "reference", "steps": [resume + 1, last]},
            "status": "passed" if divergence is None else "failed",
            "expected": "as in reference",
            "observed": "identical" if divergence is None else "different",
            "divergence": divergence,
            "blames": divergence["bucket"] if divergence else None,
        }
        suite = "st" if self.suite == "st" else "conformance"
        self._result(key, name, f"{name} goes on", outcome, reason, sabotage, 0, [check], "must", suite)
        return key

    def soak(self, name: str, kills: Sequence[dict[str, Any]], outcome: str = "pass", reason: str = "") -> None:
        """The kills of a soak (or sweep), each as it differs from one that was survived, and what they come to."""
        for number, kill in enumerate(kills, start=1):
            self.lines.append({"record": "kill", "key": name, **KILL, "number": number, **kill})
        self._result(name, name, "killed again and again", outcome, reason, None, 0, (), "must", "st")

    def leg(
        self,
        key: str,
        leg: str,
        first: int,
        last: int,
        ranks: int = 1,
        *,
        ends: dict[str, Any] | None = None,
        saves: Sequence[int] = (),
        restores: int | None = None,
        killed_at: int | None = None,
        change: Change | None = None,
        restored: Change | None = None,
        sabotage: str | None = None,
        configured: Mapping[str, Any] | None = None,
    ) -> None:
        """One leg with its files. ``configured`` is field -> [value, source], as its program reported."""
        name = f"{key}/legs/{leg}"
        path = self.folder / name
        path.mkdir(parents=True)
        for rank in range(ranks):
            rows = [record(step, rank) for step in range(first, last + 1)]
            for row in rows if change else ():
                change(row, rank)  # type: ignore[misc]  # there is one
            (path / f"trajectory_rank_{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            events = self._events(first, rank, saves, restores, restored)
            if configured is not None:
                values = {name: {"value": value, "source": source} for name, (value, source) in configured.items()}
                events.insert(1, {"kind": "configuration", "at": 0.02, "values": values})
            (path / f"events_rank_{rank}.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        end = ends or {"exit_code": 0, "signal": None}
        fault = {"kind": "kill", "after_step": killed_at, "moment": "after_step", "reached_by": list(range(ranks))}
        if self.suite is not None:
            fault |= {"rank": None, "operation": None, "victims": "all"}
            fault |= {"awaited": list(range(ranks)), "struck": list(range(ranks))}
        self.lines.append(
            {
                "record": "leg",
                "key": key,
                "leg": leg,
                "folder": name,
                "argv": ["python", "train.py"],
                "until_step": last,
                "restore_from": None if restores is None else "LATEST",
                "checkpoint_dir": "checkpoints",
                "sabotage": sabotage,
                "shared": False,
                "ranks": [end] * ranks,
                "first_steps": [first] * ranks,
                "last_steps": [last] * ranks,
                "fault": fault if killed_at is not None else None,
                "timed_out": False,
                "trouble": None,
                "seconds": 3.0,
            }
        )
        if self.suite is not None:
            # Each leg takes 3 s, and 1.5 s later the next one begins.
            self.lines[-1] |= {"launcher": "torchrun", "agents": [], "started_at": self._clock.isoformat()}
            self._clock += timedelta(seconds=4.5)

    def _events(
        self, first: int, rank: int, saves: Sequence[int], restores: int | None, restored: Change | None
    ) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = [{"kind": "start", "at": 0.01, "versions": {}}]
        if restores is not None:
            buckets = state(restores, rank)
            if restored:
                restored(buckets, rank)
            events.append({"kind": "restored", "at": 0.5, "global_step": restores, "epoch": 0, "buckets": buckets})
        events.append(
            {"kind": "begin", "at": 0.75, "global_step": first - 1, "start_epoch": 0, "start_step": first - 1}
        )
        for step in saves:
            message = f"Saving checkpoint: global_step={step}, epoch=0, dir=x, save_async=False"
            events.append({"kind": "log", "at": 1.5, "level": "INFO", "logger": "x", "message": message})
            events.append({"kind": "saved", "at": 2 + step / 100, "global_step": step, "buckets": state(step, rank)})
        return events

    def sabotage(self, name: str, case: str, *, caught: bool = True, bucket: str = "rng_state") -> None:
        """A defect that was put in, with the red case that shows it."""
        self.case(case, "fail" if caught else "pass", sabotage=name)
        self.lines.append(
            {
                "record": "sabotage",
                "id": name,
                "title": f"{name} is put in",
                "caught": caught,
                "outcomes": {case: "fail" if caught else "pass"},
                "caught_by": "trajectory_equals" if caught else None,
                "expected_bucket": bucket,
                "blamed_bucket": bucket if caught else None,
                "right_bucket": caught,
                "reason": "" if caught else f"{case}: pass",
            }
        )

    def calibration(self, *, equal: bool = True, problem: str | None = None) -> None:
        """Two reference legs compared with each other."""
        self.lines.append(
            {
                "record": "calibration",
                "signature": "0123456789ab",
                "folders": ["a", "b"],
                "steps": 9,
                "equal": equal,
                "divergence": None,
                "spread": {},
                "problem": problem,
            }
        )

    def _result(
        self,
        key: str,
        name: str,
        title: str,
        outcome: str,
        reason: str,
        sabotage: str | None,
        repeat: int,
        checks: Sequence[dict[str, Any]],
        level: str,
        suite: str = "conformance",
    ) -> None:
        self.outcomes.append((sabotage, outcome))
        self.lines.append(
            {
                "record": "result",
                "key": key,
                "case": name,
                "title": title,
                "level": level,
                "outcome": outcome,
                "reason": reason,
                "blamed": None,
                "checks": list(checks),
                "sabotage": sabotage,
                "repeat": repeat,
                "reproduce": f"python -m {suite} run {'--case ' if suite == 'conformance' else ''}{name} --keep",
                "seconds": 0.5,
            }
        )

    def finish(self, *, accepted: bool | None = None, reasons: Sequence[str] = ()) -> Path:
        """Write ``results.jsonl`` with its footer; the folder."""
        clean = [outcome for sabotage, outcome in self.outcomes if sabotage is None]
        good = all(outcome in ("pass", "note") for outcome in clean) if accepted is None else accepted
        self.lines.append(
            {
                "record": "footer",
                "counts": {name: clean.count(name) for name in OUTCOMES},
                "accepted": good,
                "reasons": list(reasons),
                "seconds": 60.0,
            }
        )
        self.write()
        return self.folder

    def write(self) -> None:
        """Write ``results.jsonl`` as it is now."""
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        (self.folder / "results.jsonl").write_text(text, encoding="utf-8")


def every_id() -> list[str]:
    """Every case id of the matrix, found by its line in the YAML."""
    return _ids(CHECKOUT / "conformance" / "cases")


def system_ids() -> list[str]:
    """Every id of the system tests; none in a checkout that has no scenarios."""
    return _ids(CHECKOUT / "st" / "scenarios")


def _ids(folder: Path) -> list[str]:
    paths = sorted(folder.glob("*.yaml"))
    return [found for path in paths for found in re.findall(r"(?m)^- id: (\S+)", path.read_text())]


def whole_run(folder: Path, *, leave_out: Sequence[str] = (), **resumed: Any) -> RunFolder:
    """All cases pass; D1 has four ranks and its legs, C9 has legs too. ``resumed`` goes to D1."""
    run = RunFolder(folder)
    for name in sorted(every_id()):
        if name in leave_out:
            continue
        if name == "D1":
            run.resumed_case(name, ranks=4, **resumed)
        elif name == "C9":
            run.resumed_case(name)
        else:
            run.case(name)
    run.system_cases()
    run.calibration()
    return run


def wrong_stream(row: dict[str, Any], rank: int) -> None:
    """The resumed leg's rank 2 has rank 0's random stream, and its loss follows."""
    if rank == 2:
        row["digests"]["rng"]["torch_cpu"] = f"cc{row['global_step']:04x}00"
        row["loss"] = single(row["loss"] + 2**-20)


WRONG_STREAM = {
    "step": 6,
    "rank": 2,
    "bucket": "rng_state",
    "column": "rng.torch_cpu",
    "reference": "cc000602",
    "resumed": "cc000600",
}


def refused_run(folder: Path) -> RunFolder:
    """A whole run in which D1 went on with the random stream of another rank."""
    return whole_run(
        folder,
        change=wrong_stream,
        restored=lambda buckets, rank: buckets["rng_state"].update(torch_cpu="000500") if rank == 2 else None,
        outcome="fail",
        reason="trajectory_equals: expected as in reference; found different",
        divergence=WRONG_STREAM,
    )

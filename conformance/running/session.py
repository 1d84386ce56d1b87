"""One run: many cases on a few threads, one ``results.jsonl`` in the order of the cases, whichever finishes first."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from conformance.matrix.case import Case
from conformance.matrix.platforms import Platform
from conformance.processes.launching import Launcher
from conformance.processes.local import LocalLauncher
from conformance.records import provenance
from conformance.records.results import (
    OUTCOMES,
    SCHEMA,
    FooterRecord,
    HeaderRecord,
    Record,
    ResultRecord,
    ResultsWriter,
    SabotageRecord,
)
from conformance.running.adapter import Adapter
from conformance.running.runner import CaseRun, Runner

GOOD: tuple[str, ...] = ("pass", "known_fail", "note", "unsupported", "skipped")


@dataclass(frozen=True, kw_only=True)
class Work:
    """One case to be run."""

    case: Case
    sabotage: str | None = None
    repeat: int = 0


def warm_launchers(folder: Path) -> Mapping[str, Launcher]:
    """The launchers of the matrix: every leg is forked from a process that has the trainer imported."""
    return {"warm": LocalLauncher(folder)}


class Session:
    """A run with its folder, its records and its threads. Use it as a context manager."""

    def __init__(
        self,
        adapter: Adapter,
        folder: Path,
        *,
        suite: str = "conformance",
        platform: Platform | None = None,
        jobs: int = 2,
        keep: bool = False,
        argv: Sequence[str] = (),
        command: str = "python -m conformance run --case",
        extra: str = "",
        launchers: Callable[[Path], Mapping[str, Launcher]] = warm_launchers,
        on_result: Callable[[ResultRecord, int, int], None] = lambda result, number, total: None,
    ) -> None:
        """Begin the run in ``folder``, which is made; it must hold no results yet.

        Args:
            adapter: the trainer.
            folder: of this run.
            suite: what kind of run it is, for the records: ``conformance``, ``st``, ``soak``, ``sweep``.
            platform: the platform that the run is for; None for the CPU.
            jobs: cases at a time.
            keep: keep the checkpoints of cases that passed too.
            argv: the command line, for the records.
            command: the command that runs a case again when the id is appended.
            extra: options that such a command repeats.
            launchers: returns the launchers by name, for the run's folder. ``warm`` must be among them; a case that names a
                launcher which is not there is started by ``warm``.
            on_result: called with each result in order, its number from 1, and how many are being run.
        """
        self.folder = folder.resolve()
        self._writer = ResultsWriter(self.folder)
        extra = (f" --platform {platform.id}" if platform else "") + extra
        device = platform.device if platform else "cpu"
        self._runner = Runner(adapter, self.folder, device=device, keep=keep, command=command, extra=extra)
        self._on_result = on_result
        self._platform = platform
        self._begun = time.monotonic()
        self.launchers = launchers(self.folder)
        self._pool = ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="conformance")
        self.results: list[ResultRecord] = []
        self.sabotages: list[SabotageRecord] = []
        self._is_stopped = False
        self._writer.write([self._header(suite, argv)])

    def _header(self, suite: str, argv: Sequence[str]) -> HeaderRecord:
        described = self._runner.description
        return HeaderRecord(
            schema=SCHEMA,
            run_id=self.folder.name,
            suite=suite,
            platform=self._platform.id if self._platform else "all",
            required=self._platform.requires if self._platform else (),
            adapter=described.name,
            versions={"python": platform.python_version(), **described.versions},
            system=f"{platform.system()} {platform.machine()}",
            machine=provenance.machine(self.folder),
            packages_digest=provenance.packages_digest(),
            environment=provenance.settings(),
            source=provenance.source_version(),
            argv=tuple(argv),
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def __enter__(self) -> Session:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the processes and close the file; without :meth:`finish` there is no footer, so the file is no report."""
        if kind is not None:
            self.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for launcher in self.launchers.values():
            launcher.close()
        self._writer.close()

    def run(self, work: Sequence[Work]) -> list[ResultRecord]:
        """Run all of ``work``; the records of each item are written together, in the order of ``work``."""
        futures: list[Future[CaseRun]] = [self._pool.submit(self._run_one, item) for item in work]
        results = []
        try:
            for number, future in enumerate(futures, start=1):
                done = future.result()
                self._writer.write(done.records)
                self._on_result(done.result, number, len(futures))
                results.append(done.result)
        except (KeyboardInterrupt, SystemExit):
            self.stop()
            raise
        self.results += results
        return results

    def stop(self) -> None:
        """Interrupt the run: kill every running leg and start no more. No footer is written then, so it is no report."""
        self._is_stopped = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for launcher in self.launchers.values():
            launcher.stop()

    def _run_one(self, item: Work) -> CaseRun:
        warm = self.launchers["warm"]
        launcher = self.launchers.get(item.case.launcher, warm)
        return self._runner.run_case(
            item.case, launcher, reference_launcher=warm, sabotage=item.sabotage, repeat=item.repeat
        )

    def add(self, records: Sequence[Record], result: ResultRecord) -> None:
        """Write the records and the result of something that is not a case (a soak, a sweep)."""
        self._writer.write([*records, result])
        self._on_result(result, 1, 1)
        self.results.append(result)

    def add_sabotages(self, records: Sequence[SabotageRecord]) -> None:
        """Write the outcomes of the sabotages."""
        self._writer.write(records)
        self.sabotages += records

    def finish(self, missing: Sequence[str] = ()) -> FooterRecord:
        """Write the footer. ``missing`` are ids that the platform requires and no case has."""
        footer = make_footer(self.results, self.sabotages, missing, seconds=time.monotonic() - self._begun)
        if not self._is_stopped:
            self._writer.write([footer])
        return footer


def make_footer(
    results: Sequence[ResultRecord],
    sabotages: Sequence[SabotageRecord],
    missing: Sequence[str],
    *,
    seconds: float,
) -> FooterRecord:
    """Count the outcomes, and list why the run is not accepted. An empty run is not accepted."""
    clean = [result for result in results if result.sabotage is None]
    counts: Mapping[str, int] = Counter(result.outcome for result in clean)
    reasons = [f"{result.key}: {result.outcome}: {result.reason}" for result in clean if result.outcome not in GOOD]
    reasons += [f"{name}: required, and there is no such case" for name in missing]
    reasons += [f"sabotage {record.id} was not caught: {record.reason}" for record in sabotages if not record.caught]
    reasons += [
        f"sabotage {record.id} was attributed to {record.blamed_bucket}, expected {record.expected_bucket}"
        for record in sabotages
        if record.caught and not record.right_bucket
    ]
    if not clean:
        reasons.append("nothing was run without a sabotage" if results else "nothing was run")
    return FooterRecord(
        counts={name: counts.get(name, 0) for name in OUTCOMES},
        accepted=not reasons,
        reasons=tuple(reasons),
        seconds=seconds,
    )

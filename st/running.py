"""Scenarios, platforms, launchers and runs: shared by the command line and pytest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from conformance.matrix.case import Case, load_cases
from conformance.matrix.platforms import Platform, load_platforms
from conformance.processes.launching import Launcher
from conformance.processes.local import LocalLauncher
from conformance.processes.torchrun import Torchrun
from conformance.records.results import ResultRecord
from conformance.running.adapter import build_adapter
from conformance.running.session import Session

SCENARIOS = Path(__file__).with_name("scenarios")
PLATFORMS = Path(__file__).with_name("platforms.yaml")


def scenarios(folder: Path | None = None) -> tuple[Case, ...]:
    """All scenarios of ``folder``, by default :data:`SCENARIOS`, in the order of their ids.

    Raises:
        CaseError: one is malformed.
    """
    return load_cases(folder or SCENARIOS)


def platforms() -> tuple[Platform, ...]:
    """The platforms of the system tests."""
    return load_platforms(PLATFORMS)


def by(launcher: str | None, case: Case) -> Case:
    """The scenario with ``launcher`` instead of its own; None keeps its own."""
    if launcher not in (None, "torchrun", "warm"):
        raise ValueError(launcher)
    return case if launcher is None else replace(case, launcher=launcher)  # type: ignore[arg-type]


def launchers(folder: Path) -> Mapping[str, Launcher]:
    """Both launchers; ``folder`` gets the logs of the warm servers."""
    return {"warm": LocalLauncher(folder), "torchrun": Torchrun()}


def session(
    folder: Path,
    platform: Platform,
    *,
    suite: str = "st",
    launcher: str | None = None,
    jobs: int = 1,
    keep: bool = False,
    argv: Sequence[str] = (),
    on_result: Callable[[ResultRecord, int, int], None] = lambda result, number, total: None,
) -> Session:
    """Begin a run of scenarios on a platform; ``launcher`` is named in the lines that run one again."""
    return Session(
        build_adapter("hyper_resume"),
        folder,
        suite=suite,
        platform=platform,
        jobs=jobs,
        keep=keep,
        argv=argv,
        command="python -m st run",
        extra=f" --launcher {launcher}" if launcher else "",
        launchers=launchers,
        on_result=on_result,
    )

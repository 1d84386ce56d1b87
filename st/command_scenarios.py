"""``python -m st list``, ``run`` and ``sabotage``: scenarios from the command line."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.matrix.case import Case
from conformance.matrix.platforms import Platform, find_platform
from conformance.matrix.selection import add_selection, selected, wanted
from conformance.plain_data.serial import SerialError
from conformance.plain_data.yaml_lines import load_yaml
from conformance.records.results import LegRecord, RankEnd, ResultRecord, read_results
from conformance.running.progress import print_result
from conformance.running.session import GOOD, Session, Work
from conformance.sabotages.catalogue import (
    SabotageEntry,
    judge_sabotage,
    load_sabotages,
    require_known,
    sabotage_table,
)
from st import running
from st.hardware import missing_hardware

TROUBLE = 4
# Up to this many scenarios are printed leg by leg.
_MOST_DETAILED = 3
_RESULTS = Path("results")
_CHECKOUT = Path(__file__).resolve().parent.parent
SABOTAGES = Path(__file__).with_name("sabotages.yaml")


def add(verbs: Any) -> None:
    """Add the three subcommands."""
    listing = verbs.add_parser("list", help="print ids, titles, platforms and sabotages")
    listing.add_argument(
        "--check",
        action="store_true",
        help="report scenarios, platforms and sabotages that do not match",
    )
    add_selection(listing, default="every scenario")
    listing.set_defaults(do=_list)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--platform", default="cpu4", help="run on this one of platforms.yaml; default cpu4")
    common.add_argument(
        "--launcher", choices=["torchrun", "warm"], help="start every scenario by this launcher instead of its own"
    )
    common.add_argument("--results", type=Path, help="the run's folder; default results/st-TIME")
    common.add_argument("--jobs", type=int, default=1, help="scenarios at a time; default 1")
    common.add_argument("--keep", action="store_true", help="keep the checkpoints of scenarios that pass")
    run = verbs.add_parser("run", parents=[common], help="run and judge scenarios")
    add_selection(run, default="every scenario that the platform requires")
    run.add_argument("--sabotage", metavar="NAME", help="install this defect in every leg except the references")
    run.add_argument("--repeat", type=int, default=1, help="how often to run each scenario; default 1")
    run.add_argument(
        "--scenarios", type=Path, default=running.SCENARIOS, metavar="DIR", help="folder of scenario files"
    )
    run.add_argument("--page", action="store_true", help="build the report page of the run, and print its path")
    run.set_defaults(do=_run)
    sabotage = verbs.add_parser(
        "sabotage", parents=[common], help="install each defect and verify that its scenarios catch it"
    )
    sabotage.add_argument("names", nargs="*", metavar="NAME", help="default: all of sabotages.yaml")
    sabotage.set_defaults(do=_sabotage)


def _list(options: argparse.Namespace, words: Sequence[str]) -> int:
    everything, platforms = running.scenarios(), running.platforms()
    cases = selected(everything, options)
    width = max(len(case.id) for case in cases)
    for case in cases:
        where = " ".join(platform.id for platform in platforms if platform.takes(case))
        print(f"{case.id:{width}}  {case.title}")
        print(
            f"{'':{width}}  {case.launcher}; on: {where or 'no platform'}; sabotages: {', '.join(case.sabotages) or 'none'}"
        )
    print(f"{len(cases)} scenarios")
    problems = _problems(everything, platforms) if options.check else []
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _problems(cases: Sequence[Case], platforms: Sequence[Platform]) -> list[str]:
    problems = [
        f"platform {platform.id}: requires {name}, and there is no such scenario"
        for platform in platforms
        for name in platform.missing(cases)
    ]
    for case in cases:
        takers = [platform for platform in platforms if platform.takes(case)]
        if not takers:
            problems.append(f"scenario {case.id}: no platform requires it")
        problems += [
            f"scenario {case.id}: has {case.world_size} ranks, and {platform.id} takes {platform.ranks}"
            for platform in takers
            if case.world_size > platform.ranks
        ]
    known = {case.id: case for case in cases}
    defects = {entry.id: entry for entry in load_sabotages()}
    for name, ids in sabotages().items():
        if name not in defects:
            problems.append(f"sabotage {name}: the matrix has none of this name")
        problems += [f"sabotage {name}: there is no scenario {wanted}" for wanted in ids if wanted not in known]
        problems += [
            f"scenario {wanted}: its sabotages do not name {name}"
            for wanted in ids
            if wanted in known and name not in known[wanted].sabotages
        ]
    for case in cases:
        problems += [
            f"sabotage {name}: does not list scenario {case.id}, which names it"
            for name in case.sabotages
            if case.id not in sabotages().get(name, ())
        ]
    return problems


def _run(options: argparse.Namespace, words: Sequence[str]) -> int:
    platform = find_platform(options.platform, running.platforms())
    cases = selected(running.scenarios(options.scenarios), options)
    require_known(filter(None, [options.sabotage]), (entry.id for entry in load_sabotages()))
    if not wanted(options) and options.scenarios == running.SCENARIOS:
        cases = tuple(case for case in cases if platform.takes(case))
    reason = missing_hardware(platform)
    if reason is not None:
        print(f"unsupported: {reason}", file=sys.stderr)
        return 1
    with _session(options, platform, words, launcher=options.launcher) as session:
        chosen = [running.by(options.launcher, case) for case in cases]
        numbers = range(options.repeat)
        session.run(
            [Work(case=case, sabotage=options.sabotage, repeat=number) for number in numbers for case in chosen]
        )
        footer = session.finish([] if wanted(options) else platform.missing(cases))
    for result in session.results if len(session.results) <= _MOST_DETAILED else ():
        print(f"\n{result.key}\n{legs_table(session.folder, result.key)}\n")
    counts = ", ".join(f"{count} {name}" for name, count in footer.counts.items() if count)
    print(f"{counts or 'no clean run'} in {footer.seconds:.1f} s: {shown(session.folder)}")
    has_page = not options.page or _write_page(session.folder)
    code = exit_code(session.results)
    return code or (0 if footer.accepted and has_page else 1)


def exit_code(results: Sequence[ResultRecord]) -> int:
    """0 if all passed, 1 if something failed, 4 if nothing failed but something could not be judged."""
    bad = {result.outcome for result in results if result.outcome not in GOOD}
    return 0 if not bad else TROUBLE if bad == {"error"} else 1


def legs_table(folder: Path, key: str) -> str:
    """The legs of one scenario, one per line (steps, fault, how each process ended), and the outcomes of its checks."""
    results = read_results(folder)
    rows = [("leg", "launcher", "steps", "fault", "agents", "ranks", "seconds")]
    for leg in results.of(LegRecord, key):
        fault = f"{leg.fault.kind} {leg.fault.moment} {leg.fault.after_step}" if leg.fault else "-"
        agents = ", ".join(_end(end) for end in leg.agents) or "-"
        rows.append((leg.leg, leg.launcher, _steps(leg), fault, agents, _ends(leg), f"{leg.seconds:.1f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    (result,) = results.of(ResultRecord, key)
    lines += [f"{check.status} {check.check}: {check.expected}: {check.observed}" for check in result.checks]
    return "\n".join(lines)


def _steps(leg: LegRecord) -> str:
    firsts = [step for step in leg.first_steps if step is not None]
    lasts = [step for step in leg.last_steps if step is not None]
    return f"{min(firsts)}..{min(lasts)}" if firsts and lasts else "none"


def _ends(leg: LegRecord) -> str:
    ends = [_end(end) for end in leg.ranks]
    return f"{len(ends)} x {ends[0]}" if len(set(ends)) == 1 else ", ".join(ends)


def _end(end: RankEnd) -> str:
    return end.signal or ("?" if end.exit_code is None else f"exit {end.exit_code}")


def _write_page(folder: Path) -> bool:
    """Build the page in another process (st does not import reports). True when there is one."""
    command = [sys.executable, "-m", "reports", "build", str(folder), "--profile", "selection"]
    done = subprocess.run(command, cwd=_CHECKOUT, check=False, capture_output=True, text=True)
    page = folder / "report" / "index.html"
    print(f"page: {shown(page)}" if page.exists() else f"no page:\n{done.stderr}", flush=True)
    return page.exists()


def shown(path: Path) -> str:
    """A path relative to the working directory, if it is below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def sabotages() -> dict[str, tuple[str, ...]]:
    """The scenarios that must fail under each defect of the matrix.

    Raises:
        SerialError: the file is malformed.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, ids in load_yaml(SABOTAGES).items():
        if not isinstance(ids, list) or not ids or not all(isinstance(item, str) for item in ids):
            raise SerialError(f"{SABOTAGES.name}: {name}: a list of scenario ids")
        found[str(name)] = tuple(ids)
    return found


def _sabotage(options: argparse.Namespace, words: Sequence[str]) -> int:
    platform = find_platform(options.platform, running.platforms())
    entries = _entries(options.names)
    # These are many legs, and none depends on its launcher.
    launcher = options.launcher or "warm"
    cases = {case.id: running.by(launcher, case) for case in running.scenarios()}
    work = [Work(case=cases[case_id], sabotage=entry.id) for entry in entries for case_id in entry.cases]
    clean_work = [Work(case=cases[case_id]) for case_id in sorted({item.case.id for item in work})]
    with _session(options, platform, words, launcher=launcher) as session:
        print(f"{len(clean_work)} clean runs, then {len(work)} with a sabotage: {session.folder}", flush=True)
        clean = session.run(clean_work)
        by_key = {(result.sabotage, result.case): result for result in session.run(work)}
        records = [
            judge_sabotage(entry, {case_id: by_key[entry.id, case_id] for case_id in entry.cases}) for entry in entries
        ]
        session.add_sabotages(records)
        footer = session.finish()
    alarms = [result.key for result in clean if result.outcome not in GOOD]
    print(sabotage_table(records, clean=len(clean), false_alarms=alarms))
    print(f"{footer.seconds:.1f} s: {session.folder}")
    return 0 if footer.accepted else 1


def _entries(names: Sequence[str]) -> list[SabotageEntry]:
    """The matrix's entries, with scenarios in place of its cases."""
    here = sabotages()
    require_known(names, here)
    known = {entry.id: entry for entry in load_sabotages()}
    return [replace(known[name], cases=ids) for name, ids in here.items() if not names or name in names]


def _session(options: argparse.Namespace, platform: Platform, words: Sequence[str], *, launcher: str | None) -> Session:
    folder = options.results or _RESULTS / time.strftime("st-%Y%m%d-%H%M%S")
    return running.session(
        folder, platform, launcher=launcher, jobs=options.jobs, keep=options.keep, argv=words, on_result=print_result
    )

"""``python -m conformance list | run | recheck | sabotage``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from conformance.judging.recheck import recheck
from conformance.matrix.case import CASES_FOLDER, Case, CaseError, load_cases, select
from conformance.matrix.platforms import Platform, find_platform, load_platforms
from conformance.matrix.selection import add_selection, selected, wanted
from conformance.plain_data.serial import SerialError
from conformance.records.trajectory import RecordError
from conformance.running.adapter import ADAPTERS, build_adapter
from conformance.running.progress import print_result
from conformance.running.session import GOOD, Session, Work
from conformance.sabotages.catalogue import (
    SabotageEntry,
    judge_sabotage,
    lint_sabotages,
    load_sabotages,
    require_known,
    sabotage_table,
)

_RESULTS = Path("results")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns 0 if all passed, 1 if something failed, 2 for a usage error or a malformed file."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
    try:
        code: int = arguments.do(arguments, words)
    except (CaseError, SerialError, RecordError, yaml.YAMLError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m conformance", description="the conformance matrix")
    commands = parser.add_subparsers(required=True)
    chosen = argparse.ArgumentParser(add_help=False)
    add_selection(chosen, default="every case, or every one that --platform requires")
    chosen.add_argument("--platform", help="only what this platform requires")
    chosen.add_argument("--cases", type=Path, default=CASES_FOLDER, metavar="DIR", help="folder of case files")
    running = argparse.ArgumentParser(add_help=False)
    running.add_argument("--results", type=Path, help="the run's folder; default results/conformance-TIME")
    running.add_argument("--jobs", type=int, default=2, help="cases at a time; default 2")
    running.add_argument("--repeat", type=int, default=1, help="how often to run each case; default 1")
    running.add_argument("--keep", action="store_true", help="keep the checkpoints of cases that pass")
    running.add_argument("--adapter", choices=sorted(ADAPTERS), default="hyper_resume", help="the trainer")
    listing = commands.add_parser("list", parents=[chosen], help="ids, titles, platforms, sabotages")
    listing.add_argument(
        "--check",
        action="store_true",
        help="report cases, platforms and sabotages that do not match",
    )
    listing.set_defaults(do=_list)
    run = commands.add_parser("run", parents=[chosen, running], help="run and judge cases")
    run.add_argument("--sabotage", metavar="ID", help="install this defect in every leg except the references")
    run.set_defaults(do=_run)
    again = commands.add_parser("recheck", help="judge a run again from its records")
    again.add_argument("folder", type=Path)
    again.set_defaults(do=_recheck)
    sabotage = commands.add_parser(
        "sabotage", parents=[running], help="install each defect and verify that its cases catch it"
    )
    sabotage.add_argument("ids", nargs="*", metavar="SABOTAGE", help="default: all")
    sabotage.add_argument(
        "--part", type=_part, default=(1, 1), metavar="K/N", help="every N-th sabotage, beginning with the K-th"
    )
    sabotage.add_argument("--cases", type=Path, default=CASES_FOLDER, metavar="DIR", help="folder of case files")
    sabotage.set_defaults(do=_sabotage)
    return parser


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError("K/N, a part from 1 and the number of parts")
    return int(number), int(parts)


def _selection(arguments: argparse.Namespace) -> tuple[tuple[Case, ...], Platform | None, list[str]]:
    """The selected cases, the platform, and the ids that it requires and no case has."""
    cases = load_cases(arguments.cases)
    if arguments.platform is None:
        return selected(cases, arguments), None, []
    platform = find_platform(arguments.platform, load_platforms())
    taken = [case for case in cases if platform.takes(case)]
    missing = [] if wanted(arguments) else platform.missing(cases)
    return selected(taken, arguments), platform, missing


def _list(arguments: argparse.Namespace, words: list[str]) -> int:
    cases, _, _ = _selection(arguments)
    platforms = load_platforms()
    width = max(len(case.id) for case in cases)
    for case in cases:
        where = " ".join(platform.id for platform in platforms if platform.takes(case))
        print(f"{case.id:{width}}  {case.title}")
        print(f"{'':{width}}  [{case.level}] {case.spec}{' ' + ' '.join(case.bugs) if case.bugs else ''}")
        print(f"{'':{width}}  on: {where or 'no platform'}; sabotages: {', '.join(case.sabotages) or 'none'}")
    print(f"{len(cases)} cases")
    if not arguments.check:
        return 0
    everything = load_cases(arguments.cases)
    problems = [
        f"platform {platform.id}: requires {name}, and there is no such case"
        for platform in platforms
        for name in platform.missing(everything)
    ]
    problems += [
        f"case {case.id}: no platform requires it"
        for case in everything
        if not any(platform.takes(case) for platform in platforms)
    ]
    problems += lint_sabotages(load_sabotages(), everything)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _run(arguments: argparse.Namespace, words: list[str]) -> int:
    cases, platform, missing = _selection(arguments)
    require_known(filter(None, [arguments.sabotage]), (entry.id for entry in load_sabotages()))
    with _session(arguments, platform, words) as session:
        repeats = range(arguments.repeat)
        session.run([Work(case=case, sabotage=arguments.sabotage, repeat=n) for n in repeats for case in cases])
        footer = session.finish(missing)
    for reason in footer.reasons:
        print(reason, file=sys.stderr)
    counts = ", ".join(f"{count} {name}" for name, count in footer.counts.items() if count)
    print(f"{counts or 'no clean run'} in {footer.seconds:.1f} s: {session.folder}")
    bad = [result for result in session.results if result.outcome not in GOOD]
    return 0 if footer.accepted and not bad else 1


def _recheck(arguments: argparse.Namespace, words: list[str]) -> int:
    found = recheck(arguments.folder)
    for item in found:
        outcome = (
            item.now
            if item.agrees
            else f"{item.now}, was {item.then} (bucket {item.blamed_now}, was {item.blamed_then})"
        )
        print(f"{item.key}: {outcome}{': ' + item.reason if item.reason else ''}")
    different = sum(not item.agrees for item in found)
    print(f"{len(found)} judged again, {different} differ")
    return 1 if different else 0


def _sabotage(arguments: argparse.Namespace, words: list[str]) -> int:
    entries = _entries(arguments.ids, *arguments.part)
    cases = {case.id: case for case in load_cases(arguments.cases)}
    for entry in entries:
        select(cases.values(), entry.cases)
    guarded = sorted({case_id for entry in entries for case_id in entry.cases})
    work = [Work(case=cases[case_id], repeat=n) for n in range(arguments.repeat) for case_id in guarded]
    with _session(arguments, None, words) as session:
        sabotaged = [Work(case=cases[case_id], sabotage=entry.id) for entry in entries for case_id in entry.cases]
        print(f"{len(work)} clean runs, then {len(sabotaged)} with a sabotage: {session.folder}", flush=True)
        clean = session.run(work)
        records = []
        by_key = {(result.sabotage, result.case): result for result in session.run(sabotaged)}
        for entry in entries:
            results = {case_id: by_key[entry.id, case_id] for case_id in entry.cases}
            records.append(judge_sabotage(entry, results))
        session.add_sabotages(records)
        footer = session.finish()
    alarms = [result.key for result in clean if result.outcome not in GOOD]
    print(sabotage_table(records, clean=len(clean), false_alarms=alarms))
    print(f"{footer.seconds:.1f} s: {session.folder}")
    return 0 if footer.accepted else 1


def _entries(ids: Sequence[str], number: int = 1, parts: int = 1) -> tuple[SabotageEntry, ...]:
    entries = load_sabotages()
    require_known(ids, (entry.id for entry in entries))
    chosen = tuple(entry for entry in entries if not ids or entry.id in ids)[number - 1 :: parts]
    if not chosen:
        raise SerialError(f"part {number} of {parts} is empty: only {number - 1} sabotages or fewer are selected")
    return chosen


def _session(arguments: argparse.Namespace, platform: Platform | None, words: list[str]) -> Session:
    folder = arguments.results or _RESULTS / time.strftime("conformance-%Y%m%d-%H%M%S")
    return Session(
        build_adapter(arguments.adapter),
        folder,
        platform=platform,
        jobs=arguments.jobs,
        keep=arguments.keep,
        argv=words,
        on_result=print_result,
    )


if __name__ == "__main__":
    sys.exit(main())

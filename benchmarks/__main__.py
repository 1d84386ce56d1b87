"""``python -m benchmarks run | list | report``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.measuring import registry, running
from benchmarks.reporting import page, table
from benchmarks.reporting.records import RecordsError, Report, read_records

N = TypeVar("N", int, float)
PAGE_NAME = "report.html"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns:
        0 when everything ran; 1 when a benchmark failed, or with ``--require-goals`` when a goal was not met or not
        measured; 2 on wrong arguments.
    """
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.do(arguments)
    except (ValueError, FileExistsError, RecordsError) as error:
        print(error, file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure what saving, loading and skipping cost."
    )
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="measure, print a table, write records and a page")
    run.add_argument(
        "--sizes", type=_numbers(float), metavar="GB,...", help="payload of the large tensors; default 0.25,1"
    )
    run.add_argument("--smoke", action="store_true", help="small sizes, to see that everything runs")
    run.add_argument("--repeat", type=_positive, default=5, help="rounds; at least 5 for figures that count")
    run.add_argument("--only", default="", metavar="NAME,...", help="benchmarks by name")
    run.add_argument("--worlds", type=_numbers(int), metavar="N,...", help="world sizes that planning is simulated for")
    run.add_argument(
        "--ranks", type=_numbers(int), metavar="N,...", help="world sizes with real processes; default 1,2,4"
    )
    run.add_argument(
        "--results", type=Path, help="folder of the run, on the disk to measure; default results/bench/TIME"
    )
    run.add_argument("--require-goals", action="store_true", help="fail when a goal is not met or not measured")
    run.set_defaults(do=_run)
    commands.add_parser("list", help="list the benchmarks").set_defaults(do=_list)
    report = commands.add_parser("report", help="make page and table again from the records of a run")
    report.add_argument("records", type=Path)
    report.add_argument("-o", "--output", type=Path, required=True)
    report.set_defaults(do=_report)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    names = [name for name in arguments.only.split(",") if name]
    benchmarks = [registry.find(name) for name in names] if names else registry.all_benchmarks()
    folder: Path = arguments.results or Path("results") / "bench" / time.strftime("%Y%m%d-%H%M%S")
    report: Report | None = None
    for item in running.run(benchmarks, running.as_options(arguments), folder):
        if isinstance(item, str):
            print(item, flush=True)
        else:
            report = item
    assert report is not None  # a run yields it last
    (folder / PAGE_NAME).write_text(page.render(report), encoding="utf-8")
    print("\n".join(["", *table.lines(report), f"{folder / PAGE_NAME}"]))
    return exit_code(report, require_goals=arguments.require_goals)


def exit_code(report: Report, *, require_goals: bool) -> int:
    """Return 0 when everything ran, 1 when something failed or a required goal was not met or not measured."""
    counts = report.footer.counts
    missed = counts["not met"] + counts["not measured"]
    return 1 if counts["failures"] or (require_goals and missed) else 0


def _list(_: argparse.Namespace) -> int:
    for benchmark in registry.all_benchmarks():
        print(f"{benchmark.name:18} {benchmark.title}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    report = read_records(arguments.records)
    arguments.output.write_text(page.render(report), encoding="utf-8")
    print("\n".join(table.lines(report)))
    return 0


def _numbers(kind: Callable[[str], N]) -> Callable[[str], tuple[N, ...]]:
    def parse(text: str) -> tuple[N, ...]:
        found = tuple(kind(part) for part in text.split(",") if part)
        if not found or any(value <= 0 for value in found):
            raise argparse.ArgumentTypeError(f"expected numbers above 0, found {text!r}")
        return found

    return parse


def _positive(text: str) -> int:
    return _numbers(int)(text)[0]


if __name__ == "__main__":
    sys.exit(main())

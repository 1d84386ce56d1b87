"""``python -m reports build | compare``: results folders become pages, and the files that machines read."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.plain_data.serial import SerialError
from conformance.records.trajectory import RecordError
from reports.comparing.compare import compare, text_of
from reports.comparing.compare_page import render_comparison
from reports.judging.assemble import ReportError, assemble
from reports.judging.history import append_run, line_of, make_trend, read_history, with_run
from reports.output.machine_files import PAGE, built_profile, make_files, write_files
from reports.reading.read import read_run

# The folder of the report, in the first results folder.
REPORT = "report"
# 0: accepted, a selection passed, or the two runs agree. 2: wrong usage, or the records can't be trusted.
EXIT_CODES = {"accepted": 0, "passed": 0, "refused": 1, "incomplete": 3}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; see :data:`EXIT_CODES`."""
    options = _parser().parse_args(arguments)
    # Millions of small objects are made, and none of them is garbage before the end.
    gc.disable()
    try:
        code: int = options.do(options)
    except (RecordError, ReportError, SerialError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        gc.enable()
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m reports", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(required=True)
    build = verbs.add_parser("build", help="the acceptance report of one run", allow_abbrev=False)
    build.add_argument("results", type=Path, nargs="+", help="results folders, or folders that hold several")
    build.add_argument("-o", "--output", type=Path, help="default: report/ in the first folder")
    build.add_argument(
        "--profile", default="accept", help="what must be complete: accept (default), nightly, npu, selection"
    )
    build.add_argument("--title", help="default: the trainer's name")
    build.add_argument("--history", type=Path, metavar="FILE", help="JSON lines of earlier runs; this run is added")
    build.set_defaults(do=_build)
    comparing = verbs.add_parser("compare", help="two runs side by side", allow_abbrev=False)
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("-o", "--output", type=Path, help="the page; default: none, only the text")
    comparing.add_argument("--profile", help="what must be complete; default: what each run was made for")
    comparing.set_defaults(do=_compare)
    return parser


def _build(options: argparse.Namespace) -> int:
    assembled = assemble(read_run(options.results), profile=options.profile, title=options.title)
    verdict = assembled.report.verdict
    trend = None
    line = line_of(assembled.report)
    if options.history is not None:
        trend = make_trend(with_run(read_history(options.history), line))
    output = options.output or options.results[0] / REPORT
    write_files(make_files(assembled, trend), output)
    if options.history is not None:
        append_run(options.history, line)
    print(f"{verdict.state.upper()}: {verdict.sentence.en}")
    print(f"page: {output / PAGE}")
    return EXIT_CODES[verdict.state]


def _compare(options: argparse.Namespace) -> int:
    before, after = (
        assemble(read_run([side]), profile=options.profile or built_profile(side / REPORT))
        for side in (options.before, options.after)
    )
    found = compare(before, after)
    print(text_of(found), end="")
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(render_comparison(found), encoding="utf-8")
        print(f"page: {options.output}")
    return 1 if found.flips else 0


if __name__ == "__main__":
    sys.exit(main())

"""``hyper-resume verify | diff | prune | doctor``: what they print and how they exit."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from hyper_resume.errors import ConfigError

FOUND_SOMETHING = 1
_MOST_DIFFERENCES = 50


def add_commands(commands: Any) -> None:
    """Add the four commands to ``hyper-resume``'s."""
    verify = commands.add_parser(
        "verify", help="hold a step directory, or all of a root, against digests", allow_abbrev=False
    )
    verify.add_argument("path", help="a step directory (also one of stock DCP), or a checkpoint_dir")
    verify.add_argument("--size-only", action="store_true", help="look at names and sizes, read no file")
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(run=run_verify)
    diff = commands.add_parser("diff", help="where two step directories differ, bit for bit", allow_abbrev=False)
    diff.add_argument("first", help="a step directory")
    diff.add_argument("second", help="another")
    diff.add_argument("--all", action="store_true", help=f"print all differences, not the first {_MOST_DIFFERENCES}")
    diff.add_argument("--json", action="store_true", help="print one JSON object a line")
    diff.set_defaults(run=run_diff)
    prune = commands.add_parser("prune", help="delete outdated step directories", allow_abbrev=False)
    prune.add_argument("checkpoint_dir")
    prune.add_argument("--keep-last", type=int, metavar="N", help="keep the N newest saves")
    prune.add_argument("--keep-every", type=int, metavar="N", help="keep every step that N divides")
    prune.add_argument("--keep-best", type=int, default=0, metavar="N", help="keep the N best saves")
    prune.add_argument("--metric", default="loss", help="what is best by (default: loss)")
    prune.add_argument("--mode", choices=("min", "max"), default="min", help="which way is better (default: min)")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    prune.set_defaults(run=run_prune)
    doctor = commands.add_parser(
        "doctor", help="try out whether machine and directory can keep what a save promises", allow_abbrev=False
    )
    doctor.add_argument("checkpoint_dir", nargs="?", help="where checkpoints are, or will be, saved")
    doctor.set_defaults(run=run_doctor)


def run_verify(arguments: argparse.Namespace) -> int:
    """Print one line a step directory; returns 1 when one is not good."""
    from hyper_resume.checkpoint.commands.verification import verify_path

    found = verify_path(arguments.path, digests=not arguments.size_only)
    if arguments.json:
        print(json.dumps({**found.as_plain(), "is_good": found.is_good}, indent=2))
        return 0 if found.is_good else FOUND_SOMETHING
    for step in found.steps:
        verdict = "good   " if step.is_good else "DAMAGED"
        print(f"{verdict}  {step.path}: {step.files} files, {step.size_bytes:,} bytes; checked {step.checked}")
        for complaint in step.complaints:
            print(f"         {_one_line(complaint)}")
        for note in step.notes:
            print(f"         note: {note}")
    for note in found.notes:
        print(f"note: {note}")
    if len(found.steps) > 1 or found.notes:
        print(f"LATEST: {found.latest or 'nothing that is good'}")
    return 0 if found.is_good else FOUND_SOMETHING


def run_diff(arguments: argparse.Namespace) -> int:
    """Print a line for each entry that differs; returns 1 when one does."""
    from hyper_resume.checkpoint.commands.difference import Difference, compare

    def show(one: Difference) -> str:
        rank = "" if one.rank is None else f" of rank {one.rank}"
        where = f" {one.where}" if one.where else ""
        count = "" if one.differing is None else f"; {one.differing:,} of {one.elements:,} elements differ"
        return f"{one.bucket}: {one.entry}{rank}{where}: {one.first} | {one.second}{count}"

    differences = compare(arguments.first, arguments.second)
    shown = list(differences if arguments.all else itertools.islice(differences, _MOST_DIFFERENCES))
    for one in shown:
        print(json.dumps(one.as_plain()) if arguments.json else show(one))
    more = sum(1 for _ in differences)
    if not arguments.json:
        if more:
            print(f"... and {more} more (--all)")
        print(f"{len(shown) + more} entries differ" if shown else "equal, bit for bit")
    return FOUND_SOMETHING if shown else 0


def run_prune(arguments: argparse.Namespace) -> int:
    """Delete what is not kept, one line each.

    Raises:
        ConfigError: nothing says what to keep.
        CheckpointLockedError: a run saves there now.
    """
    from hyper_resume.checkpoint.disk import lock
    from hyper_resume.checkpoint.history import retention
    from hyper_resume.checkpoint.history.retention import Retention

    keep = Retention(
        keep_last=arguments.keep_last,
        keep_every=arguments.keep_every,
        keep_best=arguments.keep_best,
        best_metric=arguments.metric,
        best_mode=arguments.mode,
    )
    too_small = [n for n in (keep.keep_last, keep.keep_every) if n is not None and n < 1]
    if keep.keeps_all or too_small or keep.keep_best < 0:
        raise ConfigError(
            "prune needs at least one of --keep-last N, --keep-every N, --keep-best N, with N of at least 1"
        )
    root = Path(arguments.checkpoint_dir)
    if not root.is_dir():
        raise ConfigError(f"no such directory: {root}")
    if not arguments.dry_run:
        lock.acquire(root)
    doomed = retention.find_outdated(keep, root)
    for one in doomed:
        print(f"{'would delete' if arguments.dry_run else 'deleting'} {one.path}")
    if not arguments.dry_run:
        retention.prune(root, doomed)
    if not doomed:
        print("nothing to delete")
    return 0


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print what was found; returns 1 when there is a problem."""
    from hyper_resume.checkpoint.commands.doctor import run_checks

    findings = run_checks(None if arguments.checkpoint_dir is None else Path(arguments.checkpoint_dir))
    for finding in findings:
        print(f"{finding.kind:<8} {_one_line(finding.what)}" + (f"; what to do: {finding.do}" if finding.do else ""))
    return FOUND_SOMETHING if any(finding.kind == "problem" for finding in findings) else 0


def _one_line(text: str) -> str:
    return " ".join(text.split())

"""``hyper-resume inspect | verify | diff | prune | doctor``: what they print and how they exit."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_resume.errors import ConfigError, describe, printable
from hyper_resume.local_path import local_path

if TYPE_CHECKING:
    from hyper_resume.checkpoint.commands.inspect import Inspection
    from hyper_resume.checkpoint.commands.root_listing import RootListing
    from hyper_resume.checkpoint.history.lineage import Candidate

EXIT_FOUND = 1
_MOST_DIFFERENCES = 50
_MOST_OF_A_NAME = 200


def add_commands(commands: Any) -> None:
    """Add the five commands to the parser's ``commands``."""
    inspect = commands.add_parser(
        "inspect",
        help="show what a step directory holds, or list the step directories of a root, without reading tensors",
        allow_abbrev=False,
    )
    inspect.add_argument("path", help="a step directory (global_step_N), or a root (checkpoint_dir)")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=run_inspect)
    verify = commands.add_parser(
        "verify", help="verify a step directory, or all of a root, by the digests that were saved", allow_abbrev=False
    )
    verify.add_argument("path", help="a step directory (also one of stock DCP), or a checkpoint_dir")
    verify.add_argument("--size-only", action="store_true", help="check names and sizes only, read no file")
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(run=run_verify)
    diff = commands.add_parser("diff", help="show where two step directories differ, bit for bit", allow_abbrev=False)
    diff.add_argument("first", help="a step directory")
    diff.add_argument("second", help="another")
    diff.add_argument("--all", action="store_true", help=f"print all differences, not the first {_MOST_DIFFERENCES}")
    diff.add_argument("--json", action="store_true", help="print one JSON object per line")
    diff.set_defaults(run=run_diff)
    prune = commands.add_parser(
        "prune", help="delete the step directories that are not kept, of all runs in a root", allow_abbrev=False
    )
    prune.add_argument("checkpoint_dir", help="the root that holds the step directories")
    prune.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N saves")
    prune.add_argument("--keep-every", type=int, metavar="N", help="keep the steps that N divides")
    prune.add_argument("--keep-best", type=int, metavar="N", help="keep the N best saves, and those without the metric")
    prune.add_argument("--metric", default="loss", help="the metric that ranks the saves (default: loss)")
    prune.add_argument(
        "--mode",
        choices=("min", "max"),
        default="min",
        help="which value is better (default: min)",
    )
    prune.add_argument("--dry-run", action="store_true", help="print what would be deleted, delete nothing")
    prune.set_defaults(run=run_prune)
    doctor = commands.add_parser(
        "doctor", help="test whether this machine and directory can store checkpoints safely", allow_abbrev=False
    )
    doctor.add_argument("checkpoint_dir", nargs="?", help="the root where checkpoints are, or will be, saved")
    doctor.set_defaults(run=run_doctor)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print what a step directory holds, or the step directories of a root.

    Raises:
        CheckpointNotFoundError: neither of the two, or an incomplete step directory.
        CheckpointMismatchError: a step directory whose metadata can't be read.
    """
    from hyper_resume.checkpoint.commands.inspect import Inspection, inspect_step_directory
    from hyper_resume.checkpoint.commands.root_listing import is_root, list_root

    path = local_path(arguments.path)
    found: RootListing | Inspection = list_root(path) if is_root(path) else inspect_step_directory(path)
    if arguments.json:
        print(json.dumps(found.as_plain(), indent=2))
    elif isinstance(found, Inspection):
        _print_step_directory(found)
    else:
        _print_root(found)
    return 0


def _print_root(root: RootListing) -> None:
    _print(f"{root.path}: a root (checkpoint_dir), with one step directory, global_step_N, per saved step")
    print(f"\n{'step':>12}{'files':>8}{'bytes':>18}  state")
    for one in root.steps:
        _print(f"{one.step:>12}{one.files:>8}{one.size_bytes:>18,}  {_one_line(one.reason) or 'complete'}")
    print()
    _print(f"LATEST: {root.latest or 'none, no step directory is complete'}")
    if root.steps:
        path = root.latest or root.steps[-1].path
        _print(f"one of them: hyper-resume inspect {path}; their digests: hyper-resume verify")


def _print_step_directory(found: Inspection) -> None:
    _print(f"{found.path}: step {found.step}, {found.files} files, {found.size_bytes:,} bytes on disk")
    print(f"\n{'bucket':<14}{'tensors':>9}{'others':>8}{'bytes':>16}  types")
    for bucket in found.buckets:
        sizes = f"{bucket.tensors:>9}{bucket.others:>8}{bucket.size_bytes:>16,}"
        _print(f"{_name(bucket.name):<14}{sizes}  {', '.join(bucket.dtypes)}")
    print(f"\ntraining state: {found.layout}")
    for rank in found.ranks:
        _print(
            f"  rank {rank.rank} of {rank.world_size}: global_step={rank.global_step}, epoch={rank.epoch}; "
            f"{_names(rank.buckets)}; random streams: {_names(rank.rng_streams)}"
        )
        if rank.uncovered:
            _print(f"    moves and is not saved: {_names(rank.uncovered)}")
    if found.run:
        versions = ", ".join(f"{_name(name)} {_name(version)}" for name, version in _versions(found.run))
        _print(f"made by {versions}; all that the run was made of: hyper-resume inspect --json")
    for missing in found.missing_ranks:
        print(f"  rank {missing}: missing, so the training state can't be restored")


def _versions(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = run.get("versions")
    return [(name, str(version)) for name, version in found.items()] if isinstance(found, dict) else []


def run_verify(arguments: argparse.Namespace) -> int:
    """Print one line per step directory; returns 1 when one is damaged, or can't be read now."""
    from hyper_resume.checkpoint.commands.verification import verify_path

    found = verify_path(arguments.path, digests=not arguments.size_only)
    if arguments.json:
        print(json.dumps({**found.as_plain(), "is_good": found.is_good}, indent=2))
        return 0 if found.is_good else EXIT_FOUND
    for step in found.steps:
        verdict = "good   " if step.is_good else "DAMAGED" if step.is_readable else "UNREAD "
        _print(f"{verdict}  {step.path}: {step.files} files, {step.size_bytes:,} bytes; checked {step.checked}")
        for complaint in step.complaints:
            _print(f"         {_one_line(complaint)}")
        for note in step.notes:
            _print(f"         note: {note}")
    for note in found.notes:
        _print(f"note: {note}")
    if len(found.steps) > 1 or found.notes:
        _print(f"LATEST: {found.latest or 'nothing that is good'}")
    return 0 if found.is_good else EXIT_FOUND


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
        print(json.dumps(one.as_plain()) if arguments.json else printable(show(one)))
    more = sum(1 for _ in differences)
    if not arguments.json:
        if more:
            print(f"... and {more} more (--all)")
        print(f"{len(shown) + more} entries differ" if shown else "equal, bit for bit")
    return EXIT_FOUND if shown else 0


def run_prune(arguments: argparse.Namespace) -> int:
    """Delete the step directories that are not kept, of all runs that saved there; print one line for each first.

    Raises:
        ConfigError: no option says what to keep, or one keeps less than 1, or no save holds the metric.
        CheckpointLockedError: a run saves into this root now.
    """
    from hyper_resume.checkpoint.disk import lock
    from hyper_resume.checkpoint.history import lineage, retention
    from hyper_resume.checkpoint.history.retention import Retention

    keep = Retention(
        keep_last=arguments.keep_last,
        keep_every=arguments.keep_every,
        keep_best=arguments.keep_best or 0,
        best_metric=arguments.metric,
        best_mode=arguments.mode,
    )
    _refuse_counts(arguments)
    root = local_path(arguments.checkpoint_dir)
    if not root.is_dir():
        raise ConfigError(describe("no such directory", where=str(root), do="give the root that holds global_step_N"))
    if keep.keep_best:
        _refuse_unknown_metric(root, keep.best_metric)
    outdated_steps = retention.find_outdated(keep, root, lineage.resume_order(root).readable[:1])
    if not outdated_steps:
        print("nothing to delete")
    elif arguments.dry_run:
        _announce(root, outdated_steps, "would delete")
    else:
        with lock.held(root):
            # Again: until the lock was held, a run may have saved here.
            outdated_steps = retention.find_outdated(keep, root, lineage.resume_order(root).readable[:1])
            _announce(root, outdated_steps, "deleting")
            retention.prune(root, outdated_steps)
    return 0


def _announce(root: Path, outdated: Sequence[Candidate], what: str) -> None:
    """Print one line for each step directory, before the first is deleted, and say that other runs' are among them."""
    from hyper_resume.checkpoint.history import retention

    of_others = {one.path for one in retention.not_of_latest(root, outdated)}
    if of_others:
        _print(f"prune counts and deletes across runs: LATEST does not continue {len(of_others)} of these")
    for one in outdated:
        _print(f"{what} {one.path}{' (of another run, or abandoned)' if one.path in of_others else ''}")


def _refuse_unknown_metric(root: Path, metric: str) -> None:
    """Raise if there are saves and none of them holds the metric: by rank, nothing could be said of any."""
    from hyper_resume.checkpoint.history import retention

    saves, names = retention.metrics_in(root)
    if saves and metric not in names:
        raise ConfigError(
            describe(
                "no save holds the metric by which to keep the best",
                where=str(root),
                expected=f"--metric with one of {', '.join(names)}" if names else "saves that were made with keep_best",
                found=f"--metric {metric}, which none of {saves} saves holds",
                do="correct --metric; nothing was deleted"
                if names
                else "use --keep-last or --keep-every; nothing was deleted",
            )
        )


def _refuse_counts(arguments: argparse.Namespace) -> None:
    """Raise for options that keep nothing, with the values that were given."""
    given = {
        "--keep-last": arguments.keep_last,
        "--keep-every": arguments.keep_every,
        "--keep-best": arguments.keep_best,
    }
    given = {option: count for option, count in given.items() if count is not None}
    too_small = [f"{option} {count}" for option, count in given.items() if count < 1]
    if too_small or not given:
        raise ConfigError(
            describe(
                "prune does not know what to keep" if not given else "prune can't keep so few",
                expected="at least one of --keep-last N, --keep-every N and --keep-best N, each N at least 1",
                found=", ".join(too_small) or "none of them",
                do="write for example --keep-last 3",
            )
        )


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the result of each test; returns 1 when one is a problem."""
    from hyper_resume.checkpoint.commands.doctor import run_checks

    findings = run_checks(None if arguments.checkpoint_dir is None else local_path(arguments.checkpoint_dir))
    for finding in findings:
        _print(f"{finding.kind:<8} {_one_line(finding.what)}" + (f"; what to do: {finding.do}" if finding.do else ""))
    return EXIT_FOUND if any(finding.kind == "problem" for finding in findings) else 0


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _print(line: str) -> None:
    """Print one line that may hold names out of a checkpoint, which may be forged."""
    print(printable(line), flush=True)


def _name(text: str) -> str:
    return printable(text, _MOST_OF_A_NAME)


def _names(texts: Sequence[str]) -> str:
    return ", ".join(map(_name, texts))

"""``python -m conformance.storage run | replay | observe | list``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from conformance.storage import proofs
from conformance.storage.records import Corruption, Storage, corruption_violations, write_storage

_SMOKE_SHARE = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns 0 when every promise held, 1 when one was broken, 2 for a usage error."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.do(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.storage",
        description="proofs of the storage: crashes, damage, failing operations, hostile input",
    )
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run the proofs, print a table, write storage.json")
    run.add_argument("--smoke", action="store_true", help="a small, fixed part of each proof")
    run.add_argument(
        "--share",
        type=float,
        help=f"share of the states and operations, chosen by their ids; with --smoke {_SMOKE_SHARE}",
    )
    run.add_argument("--only", default="", metavar="NAME,...", help="proofs by name or tier (crash or t1, ...)")
    run.add_argument("--results", type=Path, help="the run's folder; default results/storage-TIME")
    run.add_argument("--seed", type=int, default=0, help="seed of the random choices")
    run.add_argument("--workers", type=int, default=2, help="number of processes")
    run.set_defaults(do=_run)
    again = commands.add_parser("replay", help="rebuild one case and judge it again")
    again.add_argument("id")
    again.add_argument("--seed", type=int, default=0, help="the seed of a hostile case")
    again.add_argument(
        "--subject", choices=("library", "stock"), default="library", help="the subject of a crash state"
    )
    again.set_defaults(do=_replay)
    watch = commands.add_parser(
        "observe", help="let every command look at a root while a process saves and deletes there"
    )
    watch.add_argument("--rounds", type=int, default=500, help="how often each of them looks (default 500)")
    watch.set_defaults(do=_observe)
    commands.add_parser("list", help="the proofs").set_defaults(do=_list)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    share = arguments.share if arguments.share is not None else _SMOKE_SHARE if arguments.smoke else 1.0
    if not 0 < share <= 1:
        raise ValueError("--share: expected more than 0, at most 1")
    extent = proofs.Extent(smoke=arguments.smoke, share=share, seed=arguments.seed, workers=arguments.workers)
    wanted = [name for name in arguments.only.split(",") if name]
    found = Storage(facts={"seed": str(extent.seed), "share": str(extent.share), "smoke": str(extent.smoke).lower()})
    for proof in proofs.chosen(wanted):
        one = proofs.prove(proof, extent)
        found += one
        print("\n".join([*_table(one), ""]), flush=True)
    folder = arguments.results or Path("results") / f"storage-{time.strftime('%Y%m%d-%H%M%S')}"
    complaints = found.complaints()
    print(f"{write_storage(folder, found)}")
    for line in complaints:
        print(f"BROKEN  {line}")
    print("every promise held" if not complaints else f"{len(complaints)} complaints")
    return 1 if complaints else 0


def _table(one: Storage) -> Iterable[str]:
    for part in one.parts:
        yield f"{part.name}: {part.status}, {part.seconds:.1f} s{f': {part.reason}' if part.reason else ''}"
    for name, value in one.facts.items():
        yield f"  {name}: {value}"
    for state in one.crash_states:
        yield (
            f"  {state.protocol:32} points {state.crash_points:4} states {state.states:6} distinct {state.distinct:5} "
            f"loaded {state.loaded:4}  {_verdict(state.violations)}{_beside(state.baseline, state.baseline_distinct)}"
        )
    for cut in one.power_cuts:
        if not cut.skipped:
            text = f"{_verdict(cut.violations)}{_beside(cut.baseline, cut.baseline_trials)}"
            yield f"  {cut.scenario:32} trials {cut.trials:6}  {text}"
    for damage in one.corruption:
        yield f"  {damage.kind:32} tried {damage.tried:6} refused {damage.refused:6}  {_damage(damage)}"
    for error in one.operation_errors:
        form = "for good" if error.persistent else "once"
        yield f"  {error.scenario:24} {error.error:14} {form:8} runs {error.runs:4}  {_verdict(error.violations)}"
    for hostile in one.hostile:
        yield f"  {hostile.kind:32} tried {hostile.tried:6} refused {hostile.refused:6}  {_verdict(hostile.violations)}"
    for mutant in one.mutants:
        yield f"  {mutant.id:32} {mutant.killed_by or f'ALIVE: {mutant.explanation}'}"


def _damage(damage: Corruption) -> str:
    return f"{_verdict(corruption_violations(damage))}{_beside(damage.baseline, damage.baseline_tried)}"


def _verdict(violations: Mapping[str, int]) -> str:
    bad = [f"{name} {count}" for name, count in violations.items() if count]
    return "ok" if not bad else f"BROKEN {', '.join(bad)}"


def _beside(baseline: int | None, of: int | None) -> str:
    return "" if baseline is None else f"   (stock DCP: {baseline} of {of})"


def _replay(arguments: argparse.Namespace) -> int:
    from conformance.storage import replay

    text, is_good = replay.replay(arguments.id, seed=arguments.seed, subject=arguments.subject)
    print(text)
    return 0 if is_good else 1


def _observe(arguments: argparse.Namespace) -> int:
    from conformance.storage import observers

    found = observers.observe(arguments.rounds)
    for name, said in found.bad:
        print(f"BROKEN  {name} of a healthy root:\n{said}\n")
    gone = ", ".join(f"{name} {count}" for name, count in found.gone.items() if count)
    print(f"{found.rounds} rounds beside {found.saves} saves; a step was gone: {gone or 'never'}")
    print(f"{len(found.bad)} of {found.rounds * len(observers.OBSERVERS)} looks found a healthy root bad")
    return 1 if found.bad or not found.saves else 0


def _list(_: argparse.Namespace) -> int:
    for proof in proofs.PROOFS:
        print(f"{proof.tier}  {proof.name:18} {proof.title}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

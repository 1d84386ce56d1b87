"""``hyper-resume train CONFIG [--dotted.path=value ...]``; inspect, verify, diff, prune and doctor look at checkpoints."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from hyper_resume.errors import ConfigError, HyperResumeError, PreemptedError
from hyper_resume.storage_commands import add_commands

if TYPE_CHECKING:
    from hyper_resume.trainer.text_trainer import TextTrainer

EXIT_ERROR = 1
EXIT_USAGE = 2
# EX_TEMPFAIL of sysexits.h: try again later. Training was preempted, has saved, and wants to be resumed.
EXIT_PREEMPTED = 75


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors of the library are printed as one line, without a traceback.

    Returns:
        0, or 1 for an error, or 2 for a wrong command line or configuration, or 75 for a training that was preempted and saved.
    """
    arguments, overrides = _parser().parse_known_args(argv)
    logging.basicConfig(
        level=logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    if arguments.command == "train":
        return _guarded(lambda: train(arguments.config, overrides))
    if overrides:
        _parser().error(f"unrecognized arguments: {' '.join(overrides)}")
    return _guarded(lambda: _look(arguments))


def _look(arguments: argparse.Namespace) -> int | None:
    """Run a command that prints what it finds, to somebody who may stop reading (``| head``)."""
    try:
        found: int | None = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still to be flushed at the exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    return found


def _parser() -> argparse.ArgumentParser:
    # No abbreviations: a mistyped option must be an error, not another option.
    parser = argparse.ArgumentParser(prog="hyper-resume", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train", help="train from a YAML configuration (under torchrun: on every rank)", allow_abbrev=False
    )
    train.add_argument("config", help="the YAML file; any field is overridden as --dotted.path=value")
    inspect = commands.add_parser(
        "inspect", help="what a step directory holds, without loading tensors", allow_abbrev=False
    )
    inspect.add_argument("step_dir", help="a global_step_N directory")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=lambda arguments: _inspect(arguments.step_dir, as_json=arguments.json))
    add_commands(commands)
    return parser


def _guarded(action: Callable[[], int | None]) -> int:
    try:
        return action() or 0
    except ConfigError as error:
        # One line for each mistake.
        print(f"hyper-resume: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except PreemptedError as error:
        print(f"hyper-resume: preempted: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_PREEMPTED
    except HyperResumeError as error:
        # The texts of torch's own errors, which some messages quote, run over several lines.
        print(f"hyper-resume: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR


def train(config_path: str, overrides: Sequence[str]) -> None:
    """Train as ``hyper-resume train`` does, its process group included; under torchrun every rank calls it.

    Args:
        config_path: the YAML file.
        overrides: words of the form ``--dotted.path=value``.

    Raises:
        HyperResumeError: what the command prints as one line; all ranks raise it, and the process group is closed.
        PreemptedError: a signal asked to stop, and the last step is saved; from now on this process ignores those signals.
    """
    from hyper_resume.config import load_config

    config = load_config(config_path, overrides)
    # After the configuration, so that a mistake in it is told within a fraction of a second.
    from hyper_resume.device import destroy_process_group, init_process_group, resolve_device
    from hyper_resume.trainer.text_trainer import TextTrainer

    init_process_group(resolve_device(config.accelerator.device), config.accelerator.timeout_seconds)
    trainer = TextTrainer(config)
    _outlast_signals(trainer, config.checkpoint.preemption_signals)
    try:
        trainer.train()
    except HyperResumeError as error:
        if isinstance(error, PreemptedError) and threading.current_thread() is threading.main_thread():
            # The process leaves by itself. A launcher that sees one rank gone signals the others, and asks them twice: without
            # this, that would take the exit code from a rank that has saved.
            for name in config.checkpoint.preemption_signals:
                signal.signal(signal.Signals[name], signal.SIG_IGN)
        # All ranks share it, so none is in a collective. A process that leaves its group behind may abort at its exit, and
        # the exit code would be lost.
        destroy_process_group()
        raise
    destroy_process_group()


def _outlast_signals(trainer: TextTrainer, names: Sequence[str]) -> None:
    """Let a signal do what it does by default, but to a training that is leaving because of one already.

    The training puts back, on its way out, what handled its signals before; whatever was the default there would then take the
    exit code from a rank that has saved, if its launcher asked twice.
    """
    if threading.current_thread() is not threading.main_thread():
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if not trainer.base.is_leaving:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for name in names:
        if signal.getsignal(signal.Signals[name]) is signal.SIG_DFL:
            signal.signal(signal.Signals[name], handle)


def _inspect(step_dir: str, *, as_json: bool) -> None:
    from hyper_resume.checkpoint.commands.inspect import inspect_step_directory

    inspection = inspect_step_directory(step_dir)
    if as_json:
        print(json.dumps(inspection.as_plain(), indent=2))
        return
    print(
        f"{inspection.path}: step {inspection.step}, {inspection.files} files, {inspection.size_bytes:,} bytes on disk"
    )
    print(f"\n{'bucket':<14}{'tensors':>9}{'others':>8}{'bytes':>16}  types")
    for bucket in inspection.buckets:
        print(
            f"{bucket.name:<14}{bucket.tensors:>9}{bucket.others:>8}{bucket.size_bytes:>16,}  {', '.join(bucket.dtypes)}"
        )
    print(f"\ntraining state: {inspection.layout}")
    for rank in inspection.ranks:
        print(
            f"  rank {rank.rank} of {rank.world_size}: global_step={rank.global_step}, epoch={rank.epoch}; "
            f"{', '.join(rank.buckets)}; random streams: {', '.join(rank.rng_streams)}"
        )
    for missing in inspection.missing_ranks:
        print(f"  rank {missing}: missing, so the training state can't be restored")


if __name__ == "__main__":
    sys.exit(main())

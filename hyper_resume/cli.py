"""``hyper-resume train CONFIG [--dotted.path=value ...]``, and inspect, verify, diff, prune and doctor for checkpoints."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from hyper_resume import __version__
from hyper_resume.errors import ConfigError, HyperResumeError, PreemptedError, describe, printable
from hyper_resume.log_output import configure_logging
from hyper_resume.storage_commands import add_commands

if TYPE_CHECKING:
    from hyper_resume.trainer.text_trainer import TextTrainer

EXIT_ERROR = 1
EXIT_USAGE = 2
# EX_TEMPFAIL of sysexits.h: try again later. Training was preempted and saved; start it again to resume.
EXIT_PREEMPTED = 75
# As shells report a process that SIGINT ended.
EXIT_INTERRUPTED = 128 + signal.SIGINT

_DESCRIPTION = "Train exactly resumable, and inspect, verify, compare and prune checkpoints."
_EXIT_CODES = """\
exit codes: 0 success; 1 error, or something was found (verify, diff, doctor); 2 wrong command line or configuration;
75 training was preempted and has saved; 130 training was interrupted by Ctrl-C"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors of the library are printed as one line, without a traceback.

    Returns:
        0, or 1 for an error, or 2 for a wrong command line or configuration, or 75 for a training that was preempted and saved,
        or 130 for one that was interrupted by Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser, commands = _parser()
    if words and not words[0].startswith("-") and words[0] not in commands:
        parser.error(_unknown_command(words[0], commands))
    arguments, overrides = parser.parse_known_args(words)
    configure_logging()
    if arguments.command == "train":
        return _guarded(lambda: train(arguments.config, overrides))
    if overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    return _guarded(lambda: _print_results(arguments))


def _print_results(arguments: argparse.Namespace) -> int | None:
    """Run a command whose reader may close the pipe before the end (``| head``).

    Raises:
        HyperResumeError: also for a file that can't be read or written, and for one that does not fit into memory.
    """
    try:
        code: int | None = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is flushed at exit then goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except HyperResumeError:
        raise
    except (OSError, MemoryError) as error:
        where = getattr(error, "filename", None) or getattr(arguments, "path", "") or ""
        found = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error or 'not enough memory'}"
        what = f"{arguments.command} could not go on"
        raise HyperResumeError(
            describe(what, where=str(where), found=found, do="fix the cause, and run it again")
        ) from error
    return code


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser, and the names of the commands."""
    # No abbreviations: a mistyped option must be an error, not another option.
    parser = argparse.ArgumentParser(
        prog="hyper-resume",
        description=_DESCRIPTION,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hyper-resume {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train", help="train from a YAML configuration (under torchrun: on every rank)", allow_abbrev=False
    )
    train.add_argument("config", help="the YAML file; any field is overridden as --dotted.path=value")
    train.add_argument("--help-config", action=_HelpConfig, help="show every field of the configuration and exit")
    add_commands(commands)
    return parser, list(commands.choices)


class _HelpConfig(argparse.Action):
    """``--help-config``: print the configuration reference and exit, as ``--help`` does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from hyper_resume.config.reference import reference_text

        try:
            print(reference_text(), flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        parser.exit()


def _unknown_command(word: str, commands: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, commands, n=1)
    if near:
        return f"unknown command {word!r}; did you mean {near[0]!r}?"
    if word.endswith((".yaml", ".yml")):
        return f"unknown command {word!r}; did you mean 'train {word}'?"
    return f"unknown command {word!r}; the commands are {', '.join(commands)}"


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
        # Some messages quote errors of torch, which have several lines, and names out of a checkpoint, which may be forged.
        print(f"hyper-resume: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt as interrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"hyper-resume: interrupted{f': {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
        return EXIT_INTERRUPTED


def train(config_path: str, overrides: Sequence[str]) -> None:
    """Train as ``hyper-resume train`` does, its process group included; under torchrun every rank calls it.

    Args:
        config_path: the YAML file.
        overrides: words of the form ``--dotted.path=value``.

    Raises:
        HyperResumeError: what the command prints as one line; all ranks raise it, and the process group is closed.
        PreemptedError: a signal asked to stop, and the last step is saved; from now on this process ignores those signals.
        KeyboardInterrupt: Ctrl-C; its message says what was saved last and how to resume.
    """
    from hyper_resume.config import load_config

    config = load_config(config_path, overrides)
    # After the configuration, so that a mistake in it is reported before torch is imported, which takes seconds.
    from hyper_resume.device import destroy_process_group, init_process_group, resolve_device
    from hyper_resume.trainer.text_trainer import TextTrainer

    init_process_group(resolve_device(config.accelerator.device), config.accelerator.timeout_seconds)
    trainer = TextTrainer(config)
    _ignore_signals_when_leaving(trainer, config.checkpoint.preemption_signals)
    try:
        trainer.train()
    except HyperResumeError as error:
        if isinstance(error, PreemptedError) and threading.current_thread() is threading.main_thread():
            # The process exits by itself. A launcher that sees one rank exit signals the others, twice: without this, the
            # second signal would end a rank that has saved with another exit code.
            for name in config.checkpoint.preemption_signals:
                signal.signal(signal.Signals[name], signal.SIG_IGN)
        # All ranks raise it, so none is in a collective. A process that exits without closing its group may abort, and the
        # exit code would be lost.
        destroy_process_group()
        raise
    except KeyboardInterrupt:
        destroy_process_group()
        raise KeyboardInterrupt(_interruption(trainer)) from None
    destroy_process_group()


def _interruption(trainer: TextTrainer) -> str:
    """What was saved last, and how to resume."""
    base = trainer.base
    saved = next((path for one in base.callbacks if (path := getattr(one, "last_saved", None))), None)
    again = "start the same command again"
    return describe(
        f"training was stopped by Ctrl-C after global_step {base.state.global_step} of {base.train_steps}",
        found=f"the last checkpoint is {saved}" if saved else "no checkpoint of this run",
        do=f"{again} with --checkpoint.restore_from=LATEST (or {saved})" if saved else again,
    )


def _ignore_signals_when_leaving(trainer: TextTrainer, names: Sequence[str]) -> None:
    """Handle these signals as Python does by default, except in a training that is already leaving because of one.

    On its way out the training puts the earlier handlers back. With the default ones, a launcher that signals twice would then
    end a rank that has saved with another exit code than 75.
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


if __name__ == "__main__":
    sys.exit(main())

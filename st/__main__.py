"""``python -m st list | run | sabotage | sweep | soak | chaos``.

Exit codes: 0 all passed, 1 something failed, 2 usage error or malformed file, 4 error of the harness, 130 interrupted.
"""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType

import yaml

from conformance.matrix.case import CaseError
from conformance.plain_data.serial import SerialError
from conformance.records.trajectory import RecordError
from st import chaos, command_crash, command_scenarios
from st.attempts import InconclusiveError

USAGE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        arguments: the command line; None takes the process's own.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m st", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    command_scenarios.add(verbs)
    command_crash.add(verbs)
    chaos.add(verbs)
    options = parser.parse_args(words)
    # SIGTERM must end the running legs too, as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        code: int = options.do(options, words)
    except (CaseError, SerialError, RecordError, yaml.YAMLError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except InconclusiveError as error:
        print(f"error: no verdict is possible: {error}", file=sys.stderr)
        return command_scenarios.TROUBLE
    except KeyboardInterrupt:
        print("interrupted; every process of the running legs is dead", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
    return code


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

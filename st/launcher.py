"""Starting a leg: one torchrun agent that starts the ranks, on the loopback interface of this machine."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from st import processes

# What each rank runs. Tests put a stand-in here.
TRAINER = ("-m", "hyper_resume.cli", "train")
_CHECKOUT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class StartedLeg:
    """A running leg: torchrun's agent and the mark that all of the leg's processes carry."""

    agent: subprocess.Popen[bytes]
    command: tuple[str, ...]
    token: str


def torchrun_command(*, ranks: int, port: int, program: tuple[str, ...], arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The command that runs ``program`` with ``arguments`` as ``ranks`` processes of one node, without restarts."""
    return (
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(ranks), "--max-restarts", "0"),
        *("--master-addr", "127.0.0.1", "--master-port", str(port)),
        *program,
        *arguments,
    )


def free_port() -> int:
    """A port of the loopback interface that nothing listens on.

    It lies below Linux's range of ephemeral ports (32768 up): between this check and the agent's bind, no outgoing
    connection of another process can be given it.
    """
    for port in random.SystemRandom().sample(range(20000, 32000), 200):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port on 127.0.0.1 between 20000 and 32000")


def start(command: tuple[str, ...], *, log: Path, token: str) -> StartedLeg:
    """Start a leg in a session of its own, its output in ``log``.

    Args:
        command: from :func:`torchrun_command`.
        log: file for stdout and stderr of the agent and all ranks; created.
        token: value of the mark, unique to this leg.
    """
    environment = dict(os.environ)
    paths = [str(_CHECKOUT), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {
        processes.MARK: token,
        "PYTHONPATH": os.pathsep.join(paths),
        # Several ranks share the machine's cores; and one thread has one order of summation.
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with log.open("wb") as output:
        agent = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            # A Ctrl-C at the terminal reaches the supervisor alone, which then ends the leg in its own way.
            start_new_session=True,
        )
    return StartedLeg(agent=agent, command=command, token=token)

"""Observers beside a run: while a process saves and deletes, every command that reads must find its healthy root healthy.

One process saves small checkpoints as fast as it can and keeps the last two; this one calls ``verify``, ``inspect``, ``doctor``
and a load of LATEST on the root, again and again. A step that is gone may be reported as gone. Everything else that is not
praise is wrong: a traceback, "DAMAGED", a problem, an error, or a load of other values than were saved.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from hyper_resume import cli
from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.history.retention import Retention
from hyper_resume.errors import CheckpointNotFoundError

_ELEMENTS = 300
_GONE = re.compile(r"was deleted while it was read|found: no such directory")
_BAD_WORDS = re.compile(r"DAMAGED|^problem|nothing that is good|none, no step|incomplete|does not exist")
_START_SECONDS = 30.0
_MOST_LOADS = 20


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What the observers saw.

    Attributes:
        rounds: how often each observer looked.
        saves: how many checkpoints the writer saved meanwhile.
        gone: observer -> how often it said that a step was deleted while it was read.
        bad: observer, and what it said that is wrong of a healthy root.
    """

    rounds: int
    saves: int
    gone: Counter[str]
    bad: tuple[tuple[str, str], ...]


def observe(rounds: int, folder: Path | None = None) -> Observed:
    """Let every observer look ``rounds`` times at a root in ``folder`` (by default in memory) while a process saves there."""
    root = Path(tempfile.mkdtemp(prefix="observed-", dir=folder or _memory()))
    gone: Counter[str] = Counter()
    bad: list[tuple[str, str]] = []
    try:
        with _writer(root):
            first = _newest(root)
            for _ in range(rounds):
                for name, look in OBSERVERS.items():
                    said = look(root)
                    gone[name] += bool(_GONE.search(said))
                    if wrong := _wrong(said):
                        bad.append((name, wrong))
            saves = _newest(root) - first
        return Observed(rounds=rounds, saves=saves, gone=gone, bad=tuple(bad))
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _wrong(said: str) -> str:
    lines = [line for line in said.splitlines() if not _GONE.search(line)]
    return next((said for line in lines if _BAD_WORDS.search(line) or line.startswith(("exit", "Traceback"))), "")


def _command(*words: str) -> str:
    """Return all that a command prints, and its exit code if that isn't 0; an error that it does not catch is printed, too."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            code = cli.main(words)
        except Exception:  # noqa: BLE001  a user would see it as a traceback
            traceback.print_exc()
            code = 1
    said = text.getvalue()
    return said if not code or _GONE.search(said) else f"{said}exit {code}"


def _load_latest(root: Path) -> str:
    """Load LATEST, as a job does that evaluates what another one trains; return what was wrong."""
    try:
        for _ in range(_MOST_LOADS):
            checkpointer = DistributedCheckpointer()
            path = checkpointer.find_latest_checkpoint(str(root))
            if path is None:
                return "exit: LATEST is nothing"
            state = {"model": {"weight": torch.zeros(_ELEMENTS)}}
            try:
                found = checkpointer.load(path, state, extra_state_skeleton={"global_step": None})
            except CheckpointNotFoundError as error:
                if _GONE.search(str(error)):
                    continue
                raise
            step = int(path.rpartition("_")[2])
            is_right = found["global_step"] == step and bool((state["model"]["weight"] == step).all())
            return "" if is_right else f"exit: other values than were saved, in {path}"
        return f"exit: {_MOST_LOADS} times deleted while it was read"
    except Exception:  # noqa: BLE001  as above
        return traceback.format_exc()


OBSERVERS: dict[str, Callable[[Path], str]] = {
    "verify": lambda root: _command("verify", str(root)),
    "verify --size-only": lambda root: _command("verify", "--size-only", str(root)),
    "verify of a step": lambda root: _command("verify", str(_a_step(root))),
    "inspect": lambda root: _command("inspect", str(root)),
    "inspect of a step": lambda root: _command("inspect", str(_a_step(root))),
    "diff": lambda root: _command("diff", str(_a_step(root)), str(_a_step(root))),
    "doctor": lambda root: _command("doctor", str(root)),
    "a load of LATEST": _load_latest,
}


def _a_step(root: Path) -> Path:
    """The oldest step directory that is there now: the one that goes next."""
    while not (found := sorted(root.glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))):
        pass
    return found[0]


def _newest(root: Path) -> int:
    return int((root / "latest_checkpoint_iteration.txt").read_text())


# ---- the run that saves -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _writer(root: Path) -> Iterator[None]:
    """A process that saves to ``root`` until the context ends; entered once it has saved."""
    child = os.fork()
    if child == 0:
        _save_without_end(root)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not (root / "latest_checkpoint_iteration.txt").exists():
            if time.monotonic() > deadline or os.waitpid(child, os.WNOHANG) != (0, 0):
                raise RuntimeError("the process that saves has not saved")
            time.sleep(0.01)
        yield
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            raise RuntimeError("the process that saves has ended before the observers")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _save_without_end(root: Path) -> NoReturn:
    parent = os.getppid()
    try:
        checkpointer = DistributedCheckpointer(retention=Retention(keep_last=2))
        step = 0
        while os.getppid() == parent:
            step += 1
            checkpointer.save(str(root / f"global_step_{step}"), _state(step), global_step=step)
    except BaseException:  # noqa: BLE001  the parent sees that it has ended
        traceback.print_exc()
    os._exit(1)


def _state(step: int) -> dict[str, Any]:
    state = {"global_step": step, "epoch": 0, "rank": 0, "world_size": 1}
    return {"model": {"weight": torch.full((_ELEMENTS,), float(step))}, "extra_state": state}


def _memory() -> Path | None:
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else None

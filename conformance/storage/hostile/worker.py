"""The process that reads hostile files: forked, with a memory limit, monitored from inside and outside.

Inside, an audit hook records what Python does while a reader runs. Outside, the parent kills a worker that hangs, names its
case (also of one that died), and goes on after it with a new worker.
"""

from __future__ import annotations

import codecs
import os
import pickle
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn

from conformance.storage.hostile.material import MARKER
from conformance.storage.hostile.opening import LiveStateTouched
from conformance.storage.hostile.readers import Reader, library_readers

# Audit events that a reader must not cause. "import" is the import of a module that was not imported before.
_FORBIDDEN = (
    "exec",
    "compile",
    "import",
    "os.",
    "subprocess.",
    "socket.",
    "ctypes.",
    "shutil.",
    "builtins.input",
    "pty.",
    "webbrowser.",
    "tempfile.",
    "code.__new__",
    "function.__new__",
    "marshal.",
    "sys.addaudithook",
)
_OUT_OF_MEMORY = ("MemoryError", "alloc", "Cannot allocate")
_LAST_WORDS = "stderr.txt"
# Wall time, for a case that neither computes nor ends.
_STUCK_SECONDS = 60.0


# A message about a wrong field reads the schema's annotations, which Python evaluates once, as code.
_WRONG_CONFIGURATIONS = (b"moddel: {x: 1}", b"model: {preset: [1]}\ntraining: {seed: x}\ncheckpoint: {verify: 1}")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one case; ``seconds`` are CPU time, ``violations`` are (what, detail)."""

    number: int
    how: str
    seconds: float = 0.0
    grown_bytes: int = 0
    violations: tuple[tuple[str, str], ...] = ()


def feed(
    numbers: Sequence[int],
    make: Callable[[int], tuple[str, bytes]],
    readers: Mapping[str, Reader],
    *,
    good: Mapping[str, bytes],
    folder: Path,
    seconds_each: float,
    memory_each: int,
) -> list[Outcome]:
    """Read every case in workers, one after the other; ``make`` gives the reader's name and the bytes."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(numbers):
        rest = numbers[len(outcomes) :]
        home = Path(tempfile.mkdtemp(prefix="worker-", dir=folder))
        worker = _Worker(rest, make, readers, good, home, memory_each)
        with _started(worker, seconds_each) as (pid, pipe):
            outcomes += _collect(pid, pipe, rest, home / _LAST_WORDS)
    return outcomes


@contextmanager
def _started(worker: _Worker, seconds_each: float) -> Iterator[tuple[int, BinaryIO]]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        worker.main(writing, seconds_each)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        try:
            yield pid, pipe
        finally:
            # Not reaped yet, so the process id is still its own.
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _collect(pid: int, pipe: BinaryIO, numbers: Sequence[int], last_words: Path) -> list[Outcome]:
    """The outcomes up to the last case, or up to the one that ended the worker."""
    outcomes: list[Outcome] = []
    buffered = b""
    while len(outcomes) < len(numbers):
        ready, _, _ = select.select([pipe], [], [], _STUCK_SECONDS)
        chunk = pipe.read(1 << 16) if ready else b""
        if not chunk:
            what = _why_it_ended(pid, last_words) if ready else ("time", "it stands still")
            return [*outcomes, Outcome(number=numbers[len(outcomes)], how="broken", violations=(what,))]
        buffered += chunk
        *lines, buffered = buffered.split(b"\n")
        outcomes += [pickle.loads(bytes.fromhex(line.decode())) for line in lines]
    return outcomes


def _why_it_ended(pid: int, last_words: Path) -> tuple[str, str]:
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if ended is not None and ended.si_status == signal.SIGXCPU:
        return "time", "it computes where nothing can interrupt it"
    output = last_words.read_text(errors="replace")[-500:] if last_words.exists() else ""
    return "died", f"the process that read it is dead, status {ended and ended.si_status} {output}"


class _Worker:
    """One worker. ``main`` runs in the child and never returns."""

    def __init__(
        self,
        numbers: Sequence[int],
        make: Callable[[int], tuple[str, bytes]],
        readers: Mapping[str, Reader],
        good: Mapping[str, bytes],
        home: Path,
        memory_each: int,
    ) -> None:
        self._numbers = numbers
        self._make = make
        self._readers = readers
        self._good = good
        self._home = home
        self._memory_each = memory_each
        self._is_armed = False
        self._was_late = False
        self._seen: list[str] = []
        self._may_open: frozenset[str] = frozenset()

    def main(self, writing: int, seconds_each: float) -> NoReturn:
        """Read all cases and report each; an error of the harness ends the process, which the parent detects."""
        try:
            os.chdir(self._home)
            self._keep_quiet()
            # Printing a warning reads the source file of its line.
            warnings.simplefilter("ignore")
            sys.addaudithook(self._audit)
            self._warm_up()
            limit = _memory_now("VmSize") + self._memory_each
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            signal.signal(signal.SIGPROF, self._too_late)
            for number in self._numbers:
                outcome = self._read_one(number, seconds_each)
                os.write(writing, pickle.dumps(outcome).hex().encode() + b"\n")
        except BaseException:  # noqa: BLE001  the child must never return into the parent's code
            os.write(2, traceback.format_exc().encode())
        os._exit(0)

    def _keep_quiet(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(os.open(_LAST_WORDS, os.O_WRONLY | os.O_CREAT, 0o600), 2)

    def _warm_up(self) -> None:
        """Read good and damaged files, so that imports on first use are done before monitoring begins."""
        # zipfile uses it for names that are not marked as UTF-8.
        codecs.lookup("cp437")
        for name, reader in library_readers().items():
            good = self._good[name]
            for content in (good, good[: len(good) // 2], b"", b"\x80\x02cos\nsystem\n.", *_WRONG_CONFIGURATIONS):
                if reader.put:
                    reader.put(self._home, content)
                try:
                    reader.doubt(content, reader.read(content))
                except Exception:  # noqa: BLE001  a refusal
                    traceback.format_exc()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_armed:
            return
        if event == "open":
            path, mode, flags = (*arguments, None, None, None)[:3]
            is_writing = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if is_writing or not self._may_be_opened(path):
                self._seen.append(f"open {path!r} {mode!r}"[:200])
        elif event in ("os.scandir", "os.listdir") and self._may_be_opened(*arguments):
            return
        elif event.startswith(_FORBIDDEN) and event != "os.fspath":
            self._seen.append(f"{event} {arguments[:1]!r}"[:200])

    def _may_be_opened(self, path: Any) -> bool:
        # A number is the descriptor of a file that was opened by name before.
        return type(path) is int or (isinstance(path, (str, os.PathLike)) and os.fspath(path) in self._may_open)

    def _read_one(self, number: int, seconds_each: float) -> Outcome:
        name, content = self._make(number)
        reader = self._readers[name]
        if reader.put:
            reader.put(self._home, content)
        self._may_open = reader.may_open
        before = _memory_now("VmRSS")
        _forget_peak()
        value, error, seconds = self._watched(reader, content, seconds_each)
        grown = max(0, _memory_now("VmHWM") - before)
        violations = self._judge(reader, content, value, error)
        # The timer's clock may be a tick ahead of the one that is read here.
        if self._was_late or seconds > seconds_each:
            violations.append(("time", f"{seconds:.2f} s for {len(content)} bytes"))
        if grown > self._memory_each or (error and any(word in str(error) for word in _OUT_OF_MEMORY)):
            violations.append(("memory", f"{grown >> 20} MiB for {len(content)} bytes; {str(error)[-200:]}"))
        how = "broken" if violations else "refused" if error else "read"
        return Outcome(number=number, how=how, seconds=seconds, grown_bytes=grown, violations=tuple(violations))

    def _watched(self, reader: Reader, content: bytes, seconds_each: float) -> tuple[Any, BaseException | None, float]:
        value, error = None, None
        self._seen = []
        self._was_late = False
        # CPU time, because it does not depend on the load of the machine.
        started = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, seconds_each)
        resource.setrlimit(resource.RLIMIT_CPU, (int(started + 2 * seconds_each) + 1, resource.RLIM_INFINITY))
        self._is_armed = True
        try:
            value = reader.read(content)
        except BaseException as caught:  # noqa: BLE001  any error is looked at
            error = caught
        self._is_armed = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        return value, error, time.process_time() - started

    def _too_late(self, number: int, frame: FrameType | None) -> NoReturn:
        self._was_late = True
        raise TimeoutError("the reader took too long")

    def _judge(self, reader: Reader, content: bytes, value: Any, error: BaseException | None) -> list[tuple[str, str]]:
        violations = [("code run", action) for action in self._seen if not action.startswith("open ")]
        violations += [("file touched", action) for action in self._seen if action.startswith("open ")]
        marker = self._home / MARKER
        if marker.exists():
            violations.append(("code run", "the payload left its mark"))
            marker.rmdir() if marker.is_dir() else marker.unlink()
        if isinstance(error, LiveStateTouched):
            violations.append(("touched live state", str(error)[:200]))
        elif error is not None and not isinstance(error, reader.refusals):
            violations.append(("other error", f"{type(error).__name__}: {str(error)[:200]}"))
        if error is None and not violations:
            try:
                doubt = reader.doubt(content, value)
            except Exception as caught:  # noqa: BLE001  a value that can't even be looked at
                doubt = f"verifying it raised {type(caught).__name__}: {str(caught)[:200]}"
            if doubt:
                violations.append(("wrong value", doubt))
        return violations


def _memory_now(name: str) -> int:
    """``VmSize``, ``VmRSS`` or ``VmHWM`` (its peak) of this process, in bytes."""
    with open("/proc/self/status", "rb") as file:  # noqa: PTH123  called 30,000 times
        for line in file:
            if line.startswith(name.encode()):
                return int(line.split()[1]) << 10
    return 0


def _forget_peak() -> None:
    """Let ``VmHWM`` start again from what is used now."""
    with open("/proc/self/clear_refs", "wb") as file:  # noqa: PTH123  as above
        file.write(b"5")

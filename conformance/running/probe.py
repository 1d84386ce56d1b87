"""The one file that a trainer under test imports: it reads the job, records events and steps, and pauses at the job's fault.

It imports the standard library only. Every line is flushed, so that what a leg recorded before it was killed is on disk.

    probe = Probe.from_environment()
    probe.event("start", versions={"mine": "1.0"})
    ...
    probe.step(global_step=1, epoch=0, batch_index=0, loss=0.5, lr=0.01, sample_ids=[3, 4])
    probe.moment("after_step", 1)
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from conformance.records.evidence import JOB_VARIABLE

RANK_VARIABLE = "RANK"
_POLL_SECONDS = 0.005
_TRACE_LINES = 12


class PlannedStopError(Exception):
    """The error that a job's fault of kind ``raise`` demands."""


class Probe:
    """One rank's reports to the runner. ``job`` is the job as plain data; files are written into its folder."""

    def __init__(self, job: Mapping[str, Any], folder: Path, rank: int) -> None:
        """Open the files of ``rank``; the clock of ``at`` starts now."""
        self.job = job
        self.folder = folder
        self.rank = rank
        self._begun = time.monotonic()
        # A save in the background reports from its own thread.
        self._lock = threading.Lock()
        self._events = (folder / f"events_rank_{rank}.jsonl").open("a", encoding="utf-8")
        self._steps = folder / f"trajectory_rank_{rank}.jsonl"

    @classmethod
    def from_environment(cls) -> Probe:
        """Find the job by CONFORMANCE_JOB (a path) and the rank by RANK (default 0)."""
        path = Path(os.environ[JOB_VARIABLE]).resolve()
        job = json.loads(path.read_text(encoding="utf-8"))
        return cls(job, path.parent, int(os.environ.get(RANK_VARIABLE, "0")))

    def event(self, kind: str, **data: Any) -> None:
        """Record an event. The kinds and their fields:

        ``start`` versions · ``configuration`` values (of each field by its dotted name: value, source) · ``built`` buckets
        (before anything is restored) · ``callbacks`` names · ``log`` level, logger, message · ``begin`` global_step, epoch,
        start_epoch, start_step, buckets · ``restored`` global_step, epoch, path, lrs, buckets · ``refused`` buckets
        (an error came before training began) · ``saved`` global_step, epoch,
        directory, save_async, buckets · ``error`` class, bases, message · ``end`` global_step, epoch, buckets · ``value`` name,
        value · ``operation`` save, number, what, where · ``trouble`` message (the leg itself is broken, not the trainer) ·
        ``sabotage_fired`` id. ``buckets`` is bucket -> entry -> text, see :func:`describe`.
        """
        line = json.dumps({"kind": kind, "at": round(time.monotonic() - self._begun, 4), **data})
        with self._lock:
            self._events.write(line + "\n")
            self._events.flush()

    def step(
        self,
        *,
        global_step: int,
        epoch: int,
        batch_index: int,
        loss: float,
        lr: float,
        sample_ids: Iterable[int],
        group_lrs: Iterable[float] | None = None,
        grad_norm: float | None = None,
        seconds: float = 0.0,
        digests: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a finished optimizer step (counted from 1; ``epoch`` and ``batch_index`` from 0).

        ``digests``: ``model`` and ``optimizer`` as hex text, ``rng`` and ``extras`` by name, see :func:`digest`.
        """
        record: dict[str, Any] = {
            "global_step": global_step,
            "epoch": epoch,
            "batch_index": batch_index,
            "loss": loss,
            "lr": lr,
            "group_lrs": list(group_lrs) if group_lrs is not None else [lr],
            "grad_norm": grad_norm,
            "sample_ids": list(sample_ids),
            "seconds": seconds,
        }
        if digests is not None:
            record["digests"] = digests
        with self._steps.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def moment(self, name: str, global_step: int) -> None:
        """Report that training is at a moment (``after_step``, ``before_save``...). If the job's fault is here, pause for it.

        For a ``kill`` this never returns. For a ``terminate`` it returns if the process handles SIGTERM.

        Raises:
            PlannedStopError: the fault is of kind ``raise``.
        """
        fault = self.job.get("fault")
        if not fault or fault["moment"] != name or fault["after_step"] != global_step:
            return
        if fault["kind"] == "raise":
            self.event("fault", step=global_step, moment=name)
            raise PlannedStopError(f"stopped on purpose after step {global_step}")
        self.event("paused", step=global_step, moment=name)
        (self.folder / f"paused_rank_{self.rank}").touch()
        while not (self.folder / "go").exists():
            time.sleep(_POLL_SECONDS)

    def error(self, error: BaseException) -> None:
        """Record an error: its class, its base classes (nearest first), its message."""
        trace = traceback.format_exception(error)
        print("".join(trace), file=sys.stderr, flush=True)
        self.event(
            "error",
            **{"class": type(error).__name__},
            bases=[base.__name__ for base in type(error).__mro__[1:] if base is not object],
            message=str(error),
            trace="".join(trace[-_TRACE_LINES:]),
        )

    def capture_logs(self, logger: str) -> None:
        """Record every line of this logger and its children (INFO and up), and every Python warning, as events."""
        handler = _EventHandler(self)
        for name in (logger, "py.warnings"):
            logging.getLogger(name).addHandler(handler)
        logging.getLogger(logger).setLevel(logging.INFO)
        logging.captureWarnings(True)
        warnings.simplefilter("default")


class _EventHandler(logging.Handler):
    def __init__(self, probe: Probe) -> None:
        super().__init__(logging.INFO)
        self._probe = probe

    def emit(self, record: logging.LogRecord) -> None:
        self._probe.event("log", level=record.levelname, logger=record.name, message=record.getMessage())


def digest(value: Any) -> str:
    """A digest of nested state: names, types, shapes and bytes. Equal only if all bits are equal; dict order is ignored."""
    hasher = hashlib.blake2b(digest_size=8)
    _feed(hasher, value)
    return hasher.hexdigest()


def describe(value: Any) -> str:
    """One entry as text: ``float32[8,8] DIGEST`` for a tensor (and ``zero`` if all elements are), otherwise a short repr."""
    if _is_array(value):
        array = _array(value)
        kind = str(value.dtype).removeprefix("torch.")
        zero = " zero" if array.size and not array.any() else ""
        return f"{kind}[{','.join(map(str, value.shape))}] {digest(value)}{zero}"
    text = repr(value)
    return text if len(text) <= 40 and not isinstance(value, (list, tuple, dict)) else digest(value)


def flatten(state: Any, prefix: str = "") -> dict[str, str]:
    """Nested dicts and lists as dotted name -> :func:`describe` of each leaf; long lists of numbers are one leaf."""
    if isinstance(state, Mapping):
        items: Iterable[tuple[Any, Any]] = state.items()
    elif isinstance(state, (list, tuple)) and len(state) <= 16 and any(_is_nested(item) for item in state):
        items = enumerate(state)
    else:
        return {prefix: describe(state)}
    found: dict[str, str] = {}
    for key, value in items:
        found.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return found


def _is_nested(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple)) or _is_array(value)


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _array(value: Any) -> Any:
    """The bytes of a tensor or numpy array; of a sharded tensor this rank's shard."""
    if hasattr(value, "to_local"):
        value = value.to_local()
    if hasattr(value, "detach"):
        torch = sys.modules["torch"]
        # As bytes, because numpy knows no bfloat16.
        return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return value


def _feed(hasher: Any, value: Any) -> None:
    if _is_array(value):
        array = _array(value)
        hasher.update(f"array {value.dtype} {tuple(value.shape)} ".encode())
        hasher.update(array.tobytes())
    elif isinstance(value, Mapping):
        hasher.update(f"mapping {len(value)} ".encode())
        for key in sorted(value, key=repr):
            hasher.update(f"key {key!r} ".encode())
            _feed(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        # One repr for a flat list, for speed: a random stream is a list of 625 numbers.
        if any(_is_nested(item) for item in value):
            hasher.update(f"sequence {len(value)} ".encode())
            for item in value:
                _feed(hasher, item)
        else:
            hasher.update(f"sequence {list(value)!r} ".encode())
    else:
        hasher.update(f"{type(value).__name__} {value!r} ".encode())

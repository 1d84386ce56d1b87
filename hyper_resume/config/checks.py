"""The rules about values that have the right type, as a table: a new rule is a new row of ``CHECKS``."""

from __future__ import annotations

import functools
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hyper_resume.config.annotations import FieldPath, allows_null, hint_at
from hyper_resume.config.schema import RunConfig
from hyper_resume.config.yaml_source import Located, Problem
from hyper_resume.errors import describe
from hyper_resume.local_path import DO, EXPECTED, scheme_of


@dataclass(frozen=True, kw_only=True)
class Check:
    """One rule about values that have the right type.

    Attributes:
        fields: the dotted fields that the rule is about.
        holds: called with their values, in that order, as YAML gives them (a list for a tuple); returns whether they are right.
        expected: the right values in words; the error adds "or null" where the field allows null.
        do: what the user can do, where ``expected`` does not say it.
    """

    fields: tuple[str, ...]
    holds: Callable[..., bool]
    expected: str
    do: str = ""


def _at_least(minimum: int, *names: str) -> tuple[Check, ...]:
    """The same lower bound for several fields; null, where a field allows it, means no value to check."""
    expected = f"at least {minimum}"
    return tuple(
        Check(fields=(name,), holds=lambda v: v is None or minimum <= v < math.inf, expected=expected) for name in names
    )


def _above_zero(*names: str) -> tuple[Check, ...]:
    """A finite number above zero for several fields."""
    return tuple(
        Check(fields=(name,), holds=lambda v: v is None or 0 < v < math.inf, expected="a finite number above 0")
        for name in names
    )


def _local(*names: str) -> tuple[Check, ...]:
    """A path, or a list of paths, without a scheme, for several fields."""

    def holds(value: str | list[str] | None) -> bool:
        paths = value if isinstance(value, list) else [value or ""]
        return not any(map(scheme_of, paths))

    return tuple(Check(fields=(name,), holds=holds, expected=EXPECTED, do=DO) for name in names)


_CATCHABLE = {name for name in signal.Signals.__members__ if name not in ("SIGKILL", "SIGSTOP")}

CHECKS: tuple[Check, ...] = (
    *_at_least(0, "checkpoint.save_steps", "checkpoint.save_epochs", "data.num_workers", "lr_scheduler.warmup_steps"),
    *_at_least(0, "optimizer.lr", "optimizer.muon_lr", "optimizer.weight_decay", "model.lora.rank"),
    *_at_least(1, "data.seq_length", "data.batch_size", "data.max_samples", "data.prefetch_batches"),
    *_at_least(1, "training.num_train_epochs", "training.max_steps", "training.gradient_accumulation_steps"),
    *_at_least(1, "accelerator.tp_size", "lr_scheduler.decay_steps"),
    *_at_least(1, "checkpoint.keep_last", "checkpoint.keep_every"),
    *_at_least(0, "checkpoint.keep_best"),
    Check(
        fields=("checkpoint.preemption_signals",),
        holds=lambda names: all(name in _CATCHABLE for name in names),
        expected="names of signals that a process can catch, such as SIGTERM or SIGUSR1",
    ),
    Check(
        fields=("checkpoint.initial_restore_from", "checkpoint.restore_from"),
        holds=lambda initial, source: initial is None or (str(source).lower() == "latest" != initial.lower()),
        expected="initial_restore_from (a step directory) only beside restore_from: LATEST",
        do="set checkpoint.restore_from to LATEST; a start from that step directory at each start is restore_from itself",
    ),
    *_local("checkpoint.checkpoint_dir", "checkpoint.restore_from", "checkpoint.initial_restore_from"),
    *_local("checkpoint.staging_dir", "trajectory.dir"),
    *_local("model.pretrained_model_name_or_path", "data.paths", "data.tokenizer"),
    *_above_zero("accelerator.timeout_seconds", "optimizer.eps", "training.max_grad_norm"),
    Check(fields=("data.token_noise",), holds=lambda share: 0 <= share < 1, expected="at least 0 and below 1"),
    Check(
        fields=("data.shuffle", "data.shuffle_method"),
        holds=lambda shuffle, method: shuffle or method == "randperm",
        expected="a method only where samples are shuffled",
        do="set data.shuffle to true, or remove data.shuffle_method",
    ),
    Check(
        fields=("accelerator.dp_shard_size",),
        holds=lambda size: size == -1 or size >= 1,
        expected="at least 1, or -1 for all ranks that tp_size leaves",
    ),
    Check(
        fields=("accelerator.pp_size",),
        holds=lambda size: size == 1,
        expected="1",
        do="pipeline parallel is not built: use accelerator.tp_size and accelerator.dp_shard_size",
    ),
    Check(
        fields=("optimizer.betas",),
        holds=lambda betas: all(0 <= beta < 1 for beta in betas),
        expected="numbers of at least 0 and below 1",
    ),
    Check(
        fields=("model.preset", "model.pretrained_model_name_or_path"),
        holds=lambda preset, folder: preset is None or folder is None,
        expected="one of the two",
        do="remove one, or set it to null",
    ),
)


@functools.cache
def _default() -> RunConfig:
    return RunConfig()


def run_checks(root: Located, wrong: Sequence[FieldPath]) -> list[Problem]:
    """Problems of the rules in ``CHECKS``; a rule about a field whose type is already wrong is left out."""
    default = _default()
    problems = []
    for check in CHECKS:
        paths = [tuple(field.split(".")) for field in check.fields]
        if any(path[: len(bad)] == bad[: len(path)] for path in paths for bad in wrong):
            continue
        nodes = [_find(root, path) for path in paths]
        values = [
            functools.reduce(getattr, path, default) if node is None else node.plain()
            for path, node in zip(paths, nodes, strict=True)
        ]
        written = [(field, node) for field, node in zip(check.fields, nodes, strict=True) if node is not None]
        if written and not check.holds(*values):
            problems.append(_broken(check, written))
    return problems


def _broken(check: Check, written: Sequence[tuple[str, Located]]) -> Problem:
    """The problem of a broken rule, at the place of its first field that was written."""
    expected = check.expected
    if len(check.fields) == 1 and allows_null(hint_at(check.fields[0].split("."))):
        expected += " or null"
    found = " and ".join(f"{field}={node.show()} at {node.origin}" for field, node in written)
    if len(written) == 1:
        found = written[0][1].show()
    message = describe(f"{', '.join(check.fields)}: wrong value", expected=expected, found=found, do=check.do)
    return Problem(origin=written[0][1].origin, message=message)


def _find(node: Located, path: FieldPath) -> Located | None:
    """The value that was written at ``path``, or None."""
    for name in path:
        if not isinstance(node.value, dict) or name not in node.value:
            return None
        node = node.value[name]
    return node

"""Whether the run that resumes is made of the same things as the run that was saved (``checkpoint.override_on_restore``)."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hyper_resume import collective
from hyper_resume.checkpoint.format.extra_state import RUN
from hyper_resume.config.schema import CheckpointingConfig
from hyper_resume.errors import CheckpointMismatchError, ConfigError, describe
from hyper_resume.state.held_optimizers import names_of
from hyper_resume.state.planned_schedule import Replay, replay
from hyper_resume.state.scheduler import collect_schedulers
from hyper_resume.trainer.payload import as_list, names_in, reachable_optimizers
from hyper_resume.trainer.run.description import describe_run, group_name
from hyper_resume.trainer.run.differences import (
    Difference,
    Holder,
    concerns_weights,
    find_differences,
    known_names,
    with_values,
)

logger = logging.getLogger(__name__)

_LR = "optimizer.lr"
# With the configured lr come the fields of a group that a schedule computes its own from.
_LR_FIELDS = ("lr", "initial_lr", "max_lr", "min_lr")
_MOST_REASONS = 20


@dataclass(kw_only=True)
class RunComparison:
    """The result of a comparison, before anything is changed.

    ``reasons``: bucket -> why it is not the same thing. ``overridden``: bucket -> what differs and was declared.
    ``harmless``: what differs and changes no bits. ``payload`` and ``extra_state``: what a restore applies.
    """

    payload: Mapping[str, Any]
    extra_state: Mapping[str, Any]
    reasons: dict[str, list[str]] = field(default_factory=dict)
    overridden: dict[str, list[str]] = field(default_factory=dict)
    harmless: list[str] = field(default_factory=list)


class RunFingerprint:
    """The description of this run on this rank, as it holds; see :mod:`hyper_resume.trainer.run.description`."""

    def __init__(self, trainer: Any, config: CheckpointingConfig) -> None:
        """Describe the new trainer, before anything is restored or trained.

        Raises:
            ConfigError: ``checkpoint.override_on_restore`` has a name that this run has not.
        """
        self._trainer = trainer
        self._config = config
        self._now = describe_run(trainer, config)
        self._holding = self._now
        self._declared = tuple(config.override_on_restore)
        _refuse_unknown(self._declared, known_names(self._now))

    @property
    def description(self) -> dict[str, Any]:
        """What holds in this run: its own values, and those of the checkpoint that a restore has set instead."""
        return self._holding

    def compare(
        self, payload: Mapping[str, Any], extra_state: Mapping[str, Any], described: Mapping[str, Any] | None = None
    ) -> RunComparison:
        """Compare with what was read; changes nothing. A checkpoint without a description has no differences.

        Args:
            payload: model and optimizer as they were read.
            extra_state: this rank's training state as it was read; empty where none was requested.
            described: what the run that saved is made of, where no training state was requested. Only what concerns the weights
                is compared then: another training of them is wanted.
        """
        saved = extra_state.get(RUN) if self._config.restore_train_state else described
        if not isinstance(saved, Mapping) or not saved:
            return RunComparison(payload=payload, extra_state=extra_state)
        differences = [one for one in find_differences(saved, self._now) if self._is_restored(one)]
        wanted = [one for one in differences if self._is_declared(one.name)]
        schedulers, states = as_list(self._trainer.lr_scheduler), extra_state.get("lr_scheduler") or []
        is_other = any(one.bucket == "lr_scheduler" for one in differences)
        is_wanted = any(one.bucket == "lr_scheduler" or one.name == _LR for one in wanted)
        later = replay(schedulers, states) if is_other or is_wanted else None
        if later is None and any(one.bucket == "lr_scheduler" for one in wanted):
            raise _no_later_step(schedulers)
        is_replaced = later is not None and is_wanted
        result = RunComparison(payload=payload, extra_state=extra_state)
        held: list[Difference] = []
        for one in differences:
            holder = self._holder(one, is_replaced=is_replaced)
            if holder == "saved" and one not in wanted:
                held.append(one)
            if one.bucket is None:
                result.harmless.append(one.text(holder))
            elif one in wanted:
                result.overridden.setdefault(one.bucket, []).append(one.change())
            else:
                result.reasons.setdefault(one.bucket, []).append(one.text(holder))
        self._add_next_lr(result, states, later, is_replaced=is_replaced)
        result.reasons = {bucket: _shortened(reasons) for bucket, reasons in result.reasons.items()}
        self._override(result, wanted, later if is_replaced else None)
        self._holding = with_values(self._now, held)
        return result

    def _is_restored(self, one: Difference) -> bool:
        if not self._config.restore_train_state:
            return concerns_weights(one, self._now)
        return one.bucket != "optimizer" or self._config.restore_optimizer

    def _is_declared(self, name: str) -> bool:
        return any(name == wanted or name.startswith(f"{wanted}.") for wanted in self._declared)

    def _holder(self, one: Difference, *, is_replaced: bool) -> Holder:
        """Return whose value holds: a restore sets the options of optimizers and the fields that a scheduler saves."""
        if is_replaced and (one.bucket == "lr_scheduler" or one.name == _LR):
            return "now"
        if one.bucket == "optimizer":
            return "now" if one.name.endswith(".class") else "saved"
        if one.bucket == "lr_scheduler":
            return "saved" if all(self._is_saved_field(path) for path in one.paths) else "now"
        return "now"

    def _is_saved_field(self, path: Sequence[str]) -> bool:
        schedulers = as_list(self._trainer.lr_scheduler)
        one = schedulers[int(path[1])] if int(path[1]) < len(schedulers) else None
        fields = getattr(one, "__dict__", {})
        return path[2] != "class" and (path[2] == "schedulers" or path[2] in fields or f"_{path[2]}" in fields)

    def _add_next_lr(
        self, result: RunComparison, states: Sequence[Any], later: Replay | None, *, is_replaced: bool
    ) -> None:
        """Add to the first reason of another schedule which lr the next step has, and how to get this run's."""
        reasons = result.reasons.get("lr_scheduler")
        if not reasons or is_replaced:
            return
        text = f"{reasons[0]}; the next step has lr {_lrs(states)}"
        if later is not None:
            planned = collect_schedulers(later.schedulers)
            text += f", as saved; planned by this run's configuration it has lr {_lrs(planned)}"
            text += "; to take this run's schedule, set checkpoint.override_on_restore=[lr_scheduler]"
        reasons[0] = text

    def _override(self, result: RunComparison, wanted: Sequence[Difference], later: Replay | None) -> None:
        """Put this run's values in the place of those that were read, where they are declared and a restore sets them."""
        names = names_in(self._trainer)
        options = {one.name.removeprefix("optimizer.") for one in wanted if one.bucket == "optimizer"}
        fields = [*options, *(_LR_FIELDS if later is not None or "lr" in options else ())]
        if not fields:
            return
        saved = result.extra_state.get("lr_scheduler") or []
        if later is not None:
            saved = collect_schedulers(later.schedulers, names)
        elif "lr" in options:
            saved = self._states_with_lr(saved, names)
        result.extra_state = {**result.extra_state, "lr_scheduler": saved}
        if "optimizer" not in result.payload:
            return
        parts = dict(result.payload["optimizer"])
        optimizers = reachable_optimizers(self._trainer.optimizer)
        for name, optimizer in zip(names_of(optimizers), optimizers, strict=True):
            own = (None if later is None else later.groups_of(optimizer)) or optimizer.param_groups
            if name in parts:
                groups = parts[name]["param_groups"]
                parts[name] = {
                    **parts[name],
                    "param_groups": tuple(_with_options(groups, _by_name(own, names), fields)),
                }
        result.payload = {**result.payload, "optimizer": parts}

    def _states_with_lr(self, states: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> list[Mapping[str, Any]]:
        """Return the saved states with this run's lr: of a schedule that follows a metric, the rest goes on as it was."""
        result = []
        for scheduler, state in zip(as_list(self._trainer.lr_scheduler), states, strict=False):
            own = _by_name(getattr(getattr(scheduler, "optimizer", None), "param_groups", ()), names)
            result.append({**state, "group_options": _with_options(state.get("group_options") or (), own, ("lr",))})
        return [*result, *states[len(result) :]]

    def log(self, comparison: RunComparison) -> None:
        """Log what differs and is no mismatch; mismatches are logged by the restore."""
        if collective.rank() != 0:
            return
        for text in _shortened(comparison.harmless):
            logger.info("differs from the run that was saved, which changes no bits: %s", text)
        for texts in comparison.overridden.values():
            for text in texts:
                logger.info("overridden, as checkpoint.override_on_restore declares: %s", text)


def _by_name(groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> dict[str, Mapping[str, Any]]:
    return {group_name(group, names, place): group for place, group in enumerate(groups)}


def _with_options(
    saved: Sequence[Mapping[str, Any]], own: Mapping[str, Mapping[str, Any]], fields: Sequence[str]
) -> list[dict[str, Any]]:
    """Return saved groups with the ``fields`` of this run's; a group without a name in common is that of the same place."""
    groups = []
    for place, group in enumerate(saved):
        mine = own.get(min(group.get("params", ()), default="")) or dict(enumerate(own.values())).get(place, {})
        taken = {name: mine[name] for name in fields if name in mine and name in group}
        groups.append({**group, **{name: _plain_number(value) for name, value in taken.items()}})
    return groups


def _plain_number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _no_later_step(schedulers: Sequence[Any]) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        describe(
            "the schedule of this run can't be computed for the step of the checkpoint",
            where="checkpoint.override_on_restore",
            expected="as many schedulers as were saved, whose lr depends on the number of steps alone",
            found=", ".join(type(one).__name__ for one in schedulers) or "no scheduler",
            do="remove lr_scheduler from it, or resume with the schedule that was saved",
        )
    )


def _lrs(states: Sequence[Mapping[str, Any]]) -> str:
    """Return the learning rates of the next step, each once."""
    found = [options["lr"] for state in states for options in state.get("group_options") or () if "lr" in options]
    return " and ".join(f"{float(lr):.6g}" for lr in dict.fromkeys(found)) or "unknown"


def _shortened(texts: list[str]) -> list[str]:
    more = len(texts) - _MOST_REASONS
    return texts if more <= 0 else [*texts[:_MOST_REASONS], f"and {more} more differences of this kind"]


def _refuse_unknown(declared: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in declared if name not in known]
    if not unknown:
        return
    near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.5)
    raise ConfigError(
        describe(
            f"unknown name {unknown[0]!r}",
            where="checkpoint.override_on_restore",
            expected="names of what this run is made of, such as optimizer.lr, lr_scheduler or model.config",
            found=", ".join(unknown),
            do=f"did you mean {near[0]}?" if near else f"choose among {', '.join(known[:20])}",
        )
    )

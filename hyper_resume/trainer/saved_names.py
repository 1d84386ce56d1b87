"""Parameter names as the checkpoint has them, where an earlier version of this library named parameters in another way.

It kept the part ``module`` of DistributedDataParallel and DataParallel, and named a parameter outside the model by its place
in its group (``unnamed/0/1``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hyper_resume.state.held_optimizers import names_of
from hyper_resume.state.names import OUTSIDE, canonical_name, naming
from hyper_resume.state.optimizer import UNNAMED, named_parameters
from hyper_resume.state.scheduler import rename_schedulers

_MODEL = "model."


class SavedNames:
    """The names of one checkpoint, and back to those of this run.

    Attributes:
        names: id(parameter) -> its name in this run.
        entries: the checkpoint's flattened entries; None where the backend does not provide them.
        parameters: id(parameter) -> its name in the checkpoint's optimizer bucket.
        by_place: the checkpoint names parameters by their place.
    """

    def __init__(self, model: nn.Module, names: Mapping[int, str], entries: Mapping[str, Any] | None) -> None:
        """Compare the names of this run with those of the checkpoint.

        Args:
            model: the live model.
            names: id(parameter) -> name in this run.
            entries: of the checkpoint.
        """
        self.names, self.entries = names, entries
        entries = entries or {}
        self._saved: dict[str, str] = {}
        canonical = naming(model)
        # All of it, or `module` is a name that the model itself uses.
        below = all(name.startswith(f"{_MODEL}module.") for name in entries if name.startswith(_MODEL))
        for raw in [*model.state_dict(), *(name for name, _ in model.named_parameters())]:
            now = canonical(raw)
            for earlier in (canonical_name(raw), *([f"module.{now}"] if below else [])):
                if earlier != now and f"{_MODEL}{now}" not in entries and f"{_MODEL}{earlier}" in entries:
                    self._saved[now] = earlier
        self.by_place = any(f".state.{UNNAMED}" in name for name in entries)
        self.parameters = {
            key: self._saved.get(name, name)
            for key, name in names.items()
            if not (self.by_place and name.startswith(OUTSIDE))
        }
        self._now = {earlier: now for now, earlier in self._saved.items()}

    def entries_now(self) -> Mapping[str, Any]:
        """Return the checkpoint's entries with the model's names of this run."""
        entries = self.entries or {}
        return {self._entry_now(name): value for name, value in entries.items()} if self._now else entries

    def _entry_now(self, entry: str) -> str:
        name = entry.removeprefix(_MODEL)
        return f"{_MODEL}{self._now[name]}" if name != entry and name in self._now else entry

    def as_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a payload, or a part of one, with the model's names of the checkpoint."""
        return self._model_renamed(state, self._saved)

    def as_now(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a payload, or a part of one, with the model's names of this run."""
        return self._model_renamed(state, self._now)

    def _model_renamed(self, state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        if "model" not in state:
            return dict(state)
        return {**state, "model": {names.get(name, name): value for name, value in state["model"].items()}}

    def optimizers_now(self, optimizers: Sequence[Any], loaded: Mapping[str, Any]) -> dict[str, Any]:
        """Return a loaded bucket of these optimizers with the parameter names of this run."""
        result = dict(loaded)
        for name, optimizer in zip(names_of(optimizers), optimizers, strict=True):
            earlier = [each for each, _ in named_parameters(optimizer, self.parameters)]
            now = [each for each, _ in named_parameters(optimizer, self.names)]
            if name in result and earlier != now:
                result[name] = _renamed(result[name], dict(zip(earlier, now, strict=True)))
        return result

    def rename_schedulers(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Give the schedulers' saved states the parameter names of this run, in place."""
        if self._now:
            rename_schedulers(saved, self._now)


def _renamed(part: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return one optimizer's loaded state with other parameter names: saved name -> name."""

    def by_name(state: Mapping[str, Any]) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in state.items()}

    groups = tuple(
        {
            **group,
            "params": [names.get(name, name) for name in group["params"]],
            "state_keys": by_name(group.get("state_keys", {})),
        }
        for group in part["param_groups"] or ()
    )
    return {"state": by_name(part["state"]), "param_groups": groups}

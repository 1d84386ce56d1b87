"""What a trainer moves and no save holds: observed at the start, after the first step and at every save."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from hyper_resume.config.schema import CheckpointingConfig
from hyper_resume.state.coverage import Coverage, Payload
from hyper_resume.state.own_state import OwnState
from hyper_resume.state.rng import streams_kept
from hyper_resume.trainer.payload import as_list, collect_payload, device_type, reachable_optimizers, stateful_of

logger = logging.getLogger(__name__)

_MOST_STORED = 1_000
_REASON = "moves and is not saved: {}"
_MOST_SHOWN = 5
# The first part of a path below the trainer -> the bucket that is incomplete without it; all others are `stateful`.
_BUCKETS = {
    "model": "model",
    "optimizer": "optimizer",
    "lr_scheduler": "lr_scheduler",
    "train_dataloader": "train_dataloader",
    "data_iterator": "train_dataloader",
    "rng_state": "rng_state",
}


class UncoveredState:
    """The coverage of one run's saves on this rank. With ``checkpoint.check_coverage: false`` it sees nothing."""

    def __init__(self, trainer: Any, config: CheckpointingConfig) -> None:
        """Observe nothing yet."""
        self._trainer = trainer
        self._config = config
        self._coverage = Coverage(config.not_saved) if config.check_coverage and config.save_ckpt else None
        self._is_first_step = True
        self._named: set[str] = set()

    def begin(self) -> None:
        """Observe the trainer before its first step, so that the first save has something to compare with."""
        self._observe_alone()

    def after_step(self) -> None:
        """Observe it once more after the first step: what only appears then is seen to move at the first save."""
        if self._is_first_step:
            self._is_first_step = False
            self._observe_alone()

    def at_save(self, payload: Mapping[str, Any]) -> list[str]:
        """Return the paths of all that moves and is not in ``payload``; log those that are new."""
        self._is_first_step = False
        found = self._observe(payload)
        new = [path for path in found if path not in self._named]
        if new:
            self._named.update(new)
            logger.warning(
                "state that moves during training is not saved, so a resume would not be exact: %s; give its owner a "
                "state_dict and load_state_dict and make it an attribute of the trainer, or name it in "
                "checkpoint.not_saved if it is no state",
                _listed(new),
            )
        return list(found[:_MOST_STORED])

    def _observe_alone(self) -> None:
        """Observe where no save has collected the payload."""
        if self._coverage is not None:
            self._observe(collect_payload(self._trainer, self._config))

    def _observe(self, payload: Mapping[str, Any]) -> tuple[str, ...]:
        if self._coverage is None:
            return ()
        with streams_kept(device_type(self._trainer)):
            return self._coverage.observe({"trainer": self._trainer}, self._payload(payload))

    def _payload(self, payload: Mapping[str, Any]) -> Payload:
        trainer, covered = self._trainer, Payload()
        covered.add_live({name: part for name, part in payload.items() if name in ("model", "optimizer")})
        if self._config.save_optimizer:
            for optimizer in reachable_optimizers(trainer.optimizer):
                options = [
                    {key: item for key, item in group.items() if key != "params"} for group in optimizer.param_groups
                ]
                covered.add_state_of(optimizer, options)
        if not self._config.save_train_state:
            return covered
        for scheduler in as_list(trainer.lr_scheduler):
            covered.add_state_of(scheduler, scheduler.state_dict())
        for owner in stateful_of(trainer).values():
            state = owner.get_state() if not hasattr(owner, "state_dict") else owner.state_dict()
            covered.add_state_of(owner.holder if isinstance(owner, OwnState) else owner, state)
        return covered


def reasons_of(uncovered: Iterable[str]) -> dict[str, str]:
    """Return bucket -> why it is incomplete, of the paths that a save named."""
    found: dict[str, list[str]] = {}
    for path in uncovered:
        parts = path.split(".")
        found.setdefault(_BUCKETS.get(parts[1] if len(parts) > 1 else "", "stateful"), []).append(path)
    return {bucket: _REASON.format(_listed(paths)) for bucket, paths in found.items()}


def _listed(paths: list[str]) -> str:
    more = f" and {len(paths) - _MOST_SHOWN} more" if len(paths) > _MOST_SHOWN else ""
    return ", ".join(paths[:_MOST_SHOWN]) + more

"""Everything of a trainer that a failed restore must leave as it was."""

from __future__ import annotations

import copy
from typing import Any

from tests.trainer.custom_trainer import as_list, plain_optimizers
from tests.trainer.tiny_training import live_state


def live_snapshot(trainer: Any) -> dict[str, Any]:
    """Digests of tensors and streams, and copies of all plain state."""
    return copy.deepcopy(
        {
            "live": live_state(trainer.model, plain_optimizers(trainer)),
            "parameters with state": [len(optimizer.state) for optimizer in plain_optimizers(trainer)],
            "extra state": {
                name: value for name, value in trainer.model.state_dict().items() if name.endswith("_extra_state")
            },
            "schedulers": [
                scheduler.state_dict() for scheduler in as_list(trainer.lr_scheduler) if scheduler is not None
            ],
            "loader": trainer.train_dataloader.state_dict()
            if hasattr(trainer.train_dataloader, "state_dict")
            else None,
            "progress": (trainer.state.global_step, trainer.state.epoch, trainer.state.epoch_ended),
            "place": (trainer.start_epoch, trainer.start_step),
            "others": {
                name: value.state_dict()
                for name, value in vars(trainer).items()
                if name in ("scaler", "average") and hasattr(value, "state_dict")
            },
        }
    )

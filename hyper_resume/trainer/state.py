"""The counters and last values of the training loop, which callbacks read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class TrainerState:
    """The running counters and the last step's values.

    ``global_step`` counts FINISHED optimizer steps; ``epoch`` and ``batch_index`` count from 0, ``batch_index`` being the
    last micro-batch's index in its epoch; ``epoch_ended`` is True from ``on_epoch_end`` to the next epoch's start. ``lrs``
    are the learning rates that the last step used, one per parameter group; ``next_lrs`` those that the next step will use.
    ``loss`` is averaged over micro-batches and data-parallel ranks; ``sample_ids`` are this rank's dataset indices of the
    last step. ``grad_norm`` is the norm before clipping; NaN where nothing clips and no callback but
    the progress bar exists.
    """

    global_step: int = 0
    epoch: int = 0
    epoch_ended: bool = False
    batch_index: int = -1
    loss: float = float("nan")
    grad_norm: float = float("nan")
    lrs: list[float] = field(default_factory=list)
    next_lrs: list[float] = field(default_factory=list)
    sample_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0

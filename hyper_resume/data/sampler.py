"""Which dataset indices a data-parallel rank reads in an epoch, as pure functions of numbers.

Everything here is a function of (dataset length, epoch, seed, rank, world size, ...) and of nothing else: the shuffle
comes from a private generator, the global random streams are neither read nor moved. That is what makes a position of
the form (epoch, batches consumed) enough to resume: the rest of the order can be computed again.

The order is that of :class:`torch.utils.data.DistributedSampler` with ``set_epoch(epoch)``, which for one rank is
``randperm`` from ``Generator().manual_seed(seed + epoch)``. It is computed on tensors here, because torch's sampler
makes Python lists, some 40 bytes an index where 8 do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch


def samples_per_rank(num_samples: int, *, dp_world_size: int, drop_last: bool) -> int:
    """Samples a rank reads in an epoch: rounded down with ``drop_last``, else up (the order's start fills the gap)."""
    if drop_last:
        return num_samples // dp_world_size
    return -(-num_samples // dp_world_size)


def batches_per_epoch(num_samples: int, *, batch_size: int, dp_world_size: int, drop_last: bool) -> int:
    """Batches every rank reads in an epoch; a short last batch counts unless ``drop_last``."""
    on_rank = samples_per_rank(num_samples, dp_world_size=dp_world_size, drop_last=drop_last)
    return on_rank // batch_size if drop_last else -(-on_rank // batch_size)


def epoch_indices(
    num_samples: int,
    *,
    epoch: int,
    seed: int,
    shuffle: bool,
    drop_last: bool,
    dp_rank: int,
    dp_world_size: int,
) -> torch.Tensor:
    """Dataset indices of one rank in one epoch, in reading order.

    Returns:
        int64 tensor of shape ``[samples_per_rank(...)]``. Rank r takes every ``dp_world_size``-th index of the epoch's
        order, starting at r. Without ``drop_last`` the order is continued from its own start until it divides evenly.
    """
    if not shuffle:
        order = torch.arange(num_samples, dtype=torch.int64)
    else:
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(num_samples, generator=generator, dtype=torch.int64)
    if dp_world_size == 1:
        return order
    on_rank = samples_per_rank(num_samples, dp_world_size=dp_world_size, drop_last=drop_last)
    places = torch.arange(on_rank, dtype=torch.int64).mul_(dp_world_size).add_(dp_rank)
    return order[places.remainder_(num_samples)]


def batch_of(indices: torch.Tensor, batch_size: int, batch_index: int) -> list[int]:
    """Dataset indices of the batch ``batch_index`` (from 0) out of a rank's ``indices`` of shape ``[n]``."""
    start = batch_index * batch_size
    batch: list[int] = indices[start : start + batch_size].tolist()
    return batch


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """Everything that the order of an epoch follows from, the same on all ranks; part of the loader's saved state."""

    dp_world_size: int
    batch_size: int
    num_samples: int
    shuffle: bool
    seed: int
    drop_last: bool
    fingerprint: str | None

    def count_batches(self) -> int:
        """Batches a rank reads in an epoch."""
        return batches_per_epoch(
            self.num_samples,
            batch_size=self.batch_size,
            dp_world_size=self.dp_world_size,
            drop_last=self.drop_last,
        )

    def indices(self, epoch: int, dp_rank: int) -> torch.Tensor:
        """int64 tensor of the dataset indices that ``dp_rank`` reads in ``epoch``, in order."""
        return epoch_indices(
            self.num_samples,
            epoch=epoch,
            seed=self.seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            dp_rank=dp_rank,
            dp_world_size=self.dp_world_size,
        )

    def changes_since(self, state: Mapping[str, Any]) -> list[str]:
        """One text for each field whose saved value differs; a field that ``state`` lacks isn't compared."""
        current = asdict(self)
        return [
            f"{name} saved {state[name]!r}, current {value!r}"
            for name, value in current.items()
            if name in state and state[name] != value
        ]

"""Which dataset indices a data-parallel rank reads in an epoch, as pure functions of numbers.

Everything here is a function of (dataset length, epoch, seed, rank, world size, ...) and of nothing else: the shuffle
comes from a private generator, the global random streams are neither read nor moved. That is what makes a position of
the form (epoch, batches consumed) enough to resume: the rest of the order can be computed again.

There are two shuffles, ``shuffle_method``:

* ``randperm``: the order of :class:`torch.utils.data.DistributedSampler` with ``set_epoch(epoch)``, which for one rank is
  ``randperm`` from ``Generator().manual_seed(seed + epoch)``. Making it takes time and memory for every sample, on every
  rank; a rank then keeps only its own share of it.
* ``feistel``: another order, each index computed where it is asked for (see :mod:`hyper_resume.data.permutation`).

Ranks share out either order, and fill it up, as torch's sampler does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hyper_resume.data.indices import ComputedIndices, Indices
from hyper_resume.data.permutation import KeyedPermutation, Positions

SHUFFLE_METHODS = ("randperm", "feistel")

# The one that there was before a state could name it.
_UNNAMED_METHOD = "randperm"


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
    shuffle_method: str = "randperm",
) -> Indices:
    """Dataset indices of one rank in one epoch, in reading order.

    Returns:
        ``samples_per_rank(...)`` indices. Rank r takes every ``dp_world_size``-th index of the epoch's order, starting at r.
        Without ``drop_last`` the order is continued from its own start until it divides evenly. ``randperm`` gives a tensor
        (int32 below 2**31 samples, else int64), the rest is computed when it is read.
    """
    on_rank = samples_per_rank(num_samples, dp_world_size=dp_world_size, drop_last=drop_last)
    if shuffle and shuffle_method == "randperm":
        order = _random_order(num_samples, seed + epoch)
        return torch.from_numpy(_keep_share(order, on_rank, dp_rank, dp_world_size))
    order_at = KeyedPermutation(num_samples, seed=seed, epoch=epoch) if shuffle else _ascending
    return ComputedIndices(on_rank, functools.partial(_index_at, order_at, num_samples, dp_rank, dp_world_size))


def _random_order(num_samples: int, seed: int) -> NDArray[Any]:
    """torch's permutation of all samples; the same one in both types, and int32 takes half the memory."""
    order = np.empty(num_samples, dtype=np.int32 if num_samples <= np.iinfo(np.int32).max else np.int64)
    torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed), out=torch.from_numpy(order))
    return order


def _keep_share(order: NDArray[Any], on_rank: int, dp_rank: int, dp_world_size: int) -> NDArray[Any]:
    """``order`` cut down to a rank's part of it, in place: a copy would take its time and memory at every resume."""
    taken = min(on_rank, len(range(dp_rank, len(order), dp_world_size)))
    # All that filling up ever adds to a rank is one index, its last.
    filling = order[(dp_rank + taken * dp_world_size) % len(order)]
    # Onto itself: NumPy promises the same result as if the two did not overlap, and copies forwards to keep it.
    order[:taken] = order[dp_rank::dp_world_size][:taken]
    order[taken:on_rank] = filling
    # Unchecked, because a debugger's references to the array would count; no other array or tensor looks at it.
    order.resize(on_rank, refcheck=False)
    return order


def _ascending(positions: Positions) -> Positions:
    return positions


def _index_at(
    order_at: Callable[[Positions], Positions], num_samples: int, dp_rank: int, dp_world_size: int, places: Positions
) -> Positions:
    """Indices at ``places`` of a rank's share, by their positions in the whole order."""
    positions = places * np.uint64(dp_world_size) + np.uint64(dp_rank)
    return order_at(positions % np.uint64(num_samples))


def batch_indices(indices: Indices, batch_size: int, batch_index: int) -> list[int]:
    """Dataset indices of the batch ``batch_index`` (from 0) out of a rank's ``indices``."""
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
    shuffle_method: str = "randperm"

    def count_batches(self) -> int:
        """Batches a rank reads in an epoch."""
        return batches_per_epoch(
            self.num_samples,
            batch_size=self.batch_size,
            dp_world_size=self.dp_world_size,
            drop_last=self.drop_last,
        )

    def indices(self, epoch: int, dp_rank: int) -> Indices:
        """The dataset indices that ``dp_rank`` reads in ``epoch``, in order."""
        return epoch_indices(
            self.num_samples,
            epoch=epoch,
            seed=self.seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            dp_rank=dp_rank,
            dp_world_size=self.dp_world_size,
            shuffle_method=self.shuffle_method,
        )

    def to_state(self) -> dict[str, Any]:
        """The fields for a saved state. One that names no ``shuffle_method`` means ``randperm``, as the oldest ones do."""
        # Not written, so that what is saved and what a restored loader says of itself stay equal, in both directions,
        # between this version and those that know no other method.
        return {
            name: value
            for name, value in asdict(self).items()
            if not (name == "shuffle_method" and value == _UNNAMED_METHOD)
        }

    def changes_since(self, state: Mapping[str, Any]) -> list[str]:
        """One text for each field whose saved value differs; a field that ``state`` lacks isn't compared.

        But for ``shuffle_method``, which ``state`` lacks where it is ``randperm``.
        """
        saved = {"shuffle_method": _UNNAMED_METHOD, **state}
        return [
            f"{name} saved {saved[name]!r}, current {value!r}"
            for name, value in asdict(self).items()
            if name in saved and saved[name] != value
        ]

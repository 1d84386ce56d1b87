"""The order of an epoch: which dataset indices a data-parallel rank reads, as pure functions.

Everything here depends only on (dataset length, epoch, seed, rank, world size, ...): the shuffle uses its own generator, and
the global random streams are neither read nor moved. So the position (epoch, batches consumed) is enough to resume, because
the rest of the order can be computed again.

There are two shuffles, ``shuffle_method``:

* ``randperm``: the order of :class:`torch.utils.data.DistributedSampler` with ``set_epoch(epoch)``, which for one rank is
  ``randperm`` from ``Generator().manual_seed(seed + epoch)``. Computing it takes time and memory for every sample, on every
  rank; a rank then keeps only its own share.
* ``feistel``: another order, whose indices are computed on demand (see :mod:`hyper_resume.data.permutation`).

Either order is divided among the ranks, and padded, as in torch's sampler.
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

# The method of saved states without this field, which are older than the field.
_UNNAMED_METHOD = "randperm"


def samples_per_rank(num_samples: int, *, dp_world_size: int, drop_last: bool) -> int:
    """Samples that a rank reads in an epoch: rounded down with ``drop_last``, otherwise up (padded from the order's start)."""
    if drop_last:
        return num_samples // dp_world_size
    return -(-num_samples // dp_world_size)


def batches_per_epoch(num_samples: int, *, batch_size: int, dp_world_size: int, drop_last: bool) -> int:
    """Batches that every rank reads in an epoch; a short last batch counts unless ``drop_last``."""
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
        ``samples_per_rank(...)`` indices. Rank r reads every ``dp_world_size``-th index of the epoch's order, starting at r.
        Without ``drop_last`` the order is padded from its own start until it divides evenly. With ``randperm`` the result is a
        tensor (int32 below 2**31 samples, otherwise int64); otherwise the indices are computed when they are read.
    """
    on_rank = samples_per_rank(num_samples, dp_world_size=dp_world_size, drop_last=drop_last)
    if shuffle and shuffle_method == "randperm":
        order = _random_order(num_samples, seed + epoch)
        return torch.from_numpy(_keep_share(order, on_rank, dp_rank, dp_world_size))
    order_at = KeyedPermutation(num_samples, seed=seed, epoch=epoch) if shuffle else _ascending
    return ComputedIndices(on_rank, functools.partial(_index_at, order_at, num_samples, dp_rank, dp_world_size))


def _random_order(num_samples: int, seed: int) -> NDArray[Any]:
    """torch's permutation of all samples. Both dtypes give the same order, and int32 takes half the memory."""
    order = np.empty(num_samples, dtype=np.int32 if num_samples <= np.iinfo(np.int32).max else np.int64)
    torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed), out=torch.from_numpy(order))
    return order


def _keep_share(order: NDArray[Any], on_rank: int, dp_rank: int, dp_world_size: int) -> NDArray[Any]:
    """``order`` reduced to a rank's share, in place, because a copy would take time and memory at every resume."""
    taken = min(on_rank, len(range(dp_rank, len(order), dp_world_size)))
    # Padding adds at most one index to a rank, its last.
    filling = order[(dp_rank + taken * dp_world_size) % len(order)]
    # The two overlap. NumPy guarantees the same result as without overlap.
    order[:taken] = order[dp_rank::dp_world_size][:taken]
    order[taken:on_rank] = filling
    # Without the check for references, because a debugger's would count. No other array or tensor uses this memory.
    order.resize(on_rank, refcheck=False)
    return order


def _ascending(positions: Positions) -> Positions:
    return positions


def _index_at(
    order_at: Callable[[Positions], Positions], num_samples: int, dp_rank: int, dp_world_size: int, places: Positions
) -> Positions:
    """The indices at ``places`` in a rank's share, computed from their positions in the whole order."""
    positions = places * np.uint64(dp_world_size) + np.uint64(dp_rank)
    return order_at(positions % np.uint64(num_samples))


def batch_indices(indices: Indices, batch_size: int, batch_index: int) -> list[int]:
    """Dataset indices of the batch with number ``batch_index`` (from 0) in a rank's ``indices``."""
    start = batch_index * batch_size
    batch: list[int] = indices[start : start + batch_size].tolist()
    return batch


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """All parameters of the order of an epoch, equal on all ranks; part of the loader's saved state."""

    dp_world_size: int
    batch_size: int
    num_samples: int
    shuffle: bool
    seed: int
    drop_last: bool
    fingerprint: str | None
    shuffle_method: str = "randperm"

    def count_batches(self) -> int:
        """Batches that a rank reads in an epoch."""
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
        """The fields for a saved state, without ``shuffle_method`` if it is ``randperm``, as in the oldest saved states."""
        # Left out, so that saved and restored states are equal in this version and in older ones, which lack the field.
        return {
            name: value
            for name, value in asdict(self).items()
            if not (name == "shuffle_method" and value == _UNNAMED_METHOD)
        }

    def changes_since(self, state: Mapping[str, Any]) -> list[str]:
        """One text for each field whose saved value differs. A field that is missing in ``state`` is not compared.

        The exception is ``shuffle_method``, which is ``randperm`` if ``state`` does not have it.
        """
        saved = {"shuffle_method": _UNNAMED_METHOD, **state}
        return [
            f"{name} saved {saved[name]!r}, current {value!r}"
            for name, value in asdict(self).items()
            if name in saved and saved[name] != value
        ]

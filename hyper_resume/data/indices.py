"""The dataset indices of a rank in an epoch: an array, or computed a piece at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from hyper_resume.data.permutation import Positions

# Large enough that NumPy's cost of a call, some 100 calls a piece, is nothing beside a sample's.
_PIECE = 1024


class Indices(Protocol):
    """What reading needs of a rank's indices; an integer tensor of shape ``[n]`` is one."""

    def __len__(self) -> int:
        """Samples that the rank reads in the epoch."""
        ...

    def __getitem__(self, places: slice, /) -> torch.Tensor:
        """Dataset indices at consecutive places of the rank's order, as an integer tensor."""
        ...


class ComputedIndices:
    """Indices that are computed in pieces when they are asked for; the last two pieces are kept.

    Args:
        length: samples that the rank reads in the epoch.
        index_at: gives the dataset indices at some places of the rank's order, both of shape ``[n]``.
    """

    def __init__(self, length: int, index_at: Callable[[Positions], Positions]) -> None:
        """Compute nothing yet."""
        self._length = length
        self._index_at = index_at
        # Two, because a batch is asked for twice: when it is planned for reading, and later when it is handed out.
        self._piece = functools.lru_cache(maxsize=2)(self._compute_piece)

    def __len__(self) -> int:
        """Samples that the rank reads in the epoch."""
        return self._length

    def __getitem__(self, places: slice, /) -> torch.Tensor:
        """Dataset indices at the places of a slice, as an int64 tensor; its step must be 1."""
        start, stop, step = places.indices(self._length)
        if step != 1:
            raise IndexError(f"only consecutive places can be read; found: a step of {step}")
        first = start // _PIECE
        pieces = [self._piece(number) for number in range(first, max(first + 1, -(-stop // _PIECE)))]
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return joined[start - first * _PIECE : max(start, stop) - first * _PIECE]

    def _compute_piece(self, number: int) -> torch.Tensor:
        places = np.arange(number * _PIECE, min((number + 1) * _PIECE, self._length), dtype=np.uint64)
        return torch.from_numpy(self._index_at(places).view(np.int64))

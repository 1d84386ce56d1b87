"""The dataset indices that a rank reads in an epoch: the protocol, and a version that computes them in pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from hyper_resume.data.permutation import Positions

# Large enough that NumPy's overhead (about 100 calls per piece) is negligible compared with reading the samples.
_PIECE = 1024


class Indices(Protocol):
    """A sequence of dataset indices; an integer tensor of shape ``[n]`` satisfies this protocol."""

    def __len__(self) -> int:
        """Samples that the rank reads in the epoch."""
        ...

    def __getitem__(self, places: slice, /) -> torch.Tensor:
        """Dataset indices at consecutive positions of the rank's order, as an integer tensor."""
        ...


class ComputedIndices:
    """Indices that are computed in pieces on demand; the last two pieces are cached.

    Args:
        length: samples that the rank reads in the epoch.
        index_at: returns the dataset indices at given positions of the rank's order, both of shape ``[n]``.
    """

    def __init__(self, length: int, index_at: Callable[[Positions], Positions]) -> None:
        """Compute nothing yet."""
        self._length = length
        self._index_at = index_at
        # Two pieces, because each batch is requested twice: when reading it is planned, and when it is returned.
        self._piece = functools.lru_cache(maxsize=2)(self._compute_piece)

    def __len__(self) -> int:
        """Samples that the rank reads in the epoch."""
        return self._length

    def __getitem__(self, places: slice, /) -> torch.Tensor:
        """Dataset indices at the positions of a slice, as an int64 tensor; the step must be 1."""
        start, stop, step = places.indices(self._length)
        if step != 1:
            raise IndexError(f"only consecutive positions can be read; found: a step of {step}")
        first = start // _PIECE
        pieces = [self._piece(number) for number in range(first, max(first + 1, -(-stop // _PIECE)))]
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return joined[start - first * _PIECE : max(start, stop) - first * _PIECE]

    def _compute_piece(self, number: int) -> torch.Tensor:
        places = np.arange(number * _PIECE, min((number + 1) * _PIECE, self._length), dtype=np.uint64)
        return torch.from_numpy(self._index_at(places).view(np.int64))

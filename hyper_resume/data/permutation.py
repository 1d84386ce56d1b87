"""A shuffled order whose indices are computed on demand, without an array of all indices.

The method is the generalised Feistel cipher of J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002),
with cycle walking from the same paper. Positions are the cells of a table that is slightly larger than the length. Each round
adds to one coordinate a function of the other. A result that is not below the length goes through the rounds again.

The round function is the finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014); the round keys are words of SHAKE256 (FIPS 202). It is a shuffle, not an encryption.
"""

from __future__ import annotations

import hashlib
import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Positions: TypeAlias = NDArray[np.uint64]
"""Positions in an order, or the indices at these positions; shape ``[n]``."""

# Checkpoints refer to this order as "feistel". Any change to it needs another name.
# For long orders, 8 rounds show no pattern. For a few samples, 8 rounds favour some orders, 16 do not.
_ROUNDS = 16
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _HALF = np.uint64(30), np.uint64(27), np.uint64(32)


class KeyedPermutation:
    """A permutation of ``range(length)`` that depends on (length, seed, epoch) only.

    Args:
        length: from 1 to 2**63 - 1.
        seed: any integer.
        epoch: any integer.
    """

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        """Compute the keys; the cost does not depend on the length."""
        # The table is nearly square and less than a row larger than the length, so repeated rounds are rare.
        columns = math.isqrt(length - 1) + 1
        self._length = np.uint64(length)
        self._columns = np.uint64(columns)
        self._rows = np.uint64(-(-length // columns))
        digest = hashlib.shake_256(f"feistel,{seed},{epoch}".encode()).digest(8 * _ROUNDS)
        self._keys: list[np.uint64] = list(np.frombuffer(digest, dtype="<u8").astype(np.uint64))

    def __call__(self, positions: Positions) -> Positions:
        """The indices at ``positions``, each below the length; a new array of the same shape ``[n]``."""
        indices = self._encipher(positions)
        # The loop ends: it follows a cycle of a permutation that began below the length.
        while len(outside := np.flatnonzero(indices >= self._length)):
            indices[outside] = self._encipher(indices[outside])
        return indices

    def _encipher(self, cells: Positions) -> Positions:
        """One pass through all rounds: a permutation of the cells of the table."""
        row, column = np.divmod(cells, self._columns)
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            column = _feistel_round(column, by=row, key=even, size=self._columns)
            row = _feistel_round(row, by=column, key=odd, size=self._rows)
        row *= self._columns
        row += column
        return row


def _feistel_round(half: Positions, *, by: Positions, key: np.uint64, size: np.uint64) -> Positions:
    """``(half + f(by)) % size``, where the keyed function ``f`` returns numbers below ``size``, which is below 2**32."""
    moved = by ^ key
    moved ^= moved >> _SHIFT_1
    moved *= _MIX_1
    moved ^= moved >> _SHIFT_2
    moved *= _MIX_2
    # The upper 32 bits, scaled to ``size``; a division would cost more than everything else.
    moved >>= _HALF
    moved *= size
    moved >>= _HALF
    moved += half
    # The numbers are unsigned: if the sum is below ``size``, the difference wraps around to a huge number.
    reduced: Positions = np.minimum(moved, moved - size)
    return reduced

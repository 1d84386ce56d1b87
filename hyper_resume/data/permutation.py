"""A shuffled order that is computed where it is asked for: no array of indices, and no time to make one.

The construction is the generalised Feistel cipher of J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains"
(CT-RSA 2002), with cycle walking from the same paper: positions are the cells of a table a little larger than the length, each
round adds to one coordinate a function of the other one, and a result behind the length goes through the rounds again.

The rounds' function is the finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014); the rounds' keys are words of SHAKE256 (FIPS 202). It shuffles, it keeps no secrets.
"""

from __future__ import annotations

import hashlib
import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Positions: TypeAlias = NDArray[np.uint64]
"""Places in an order, or the indices that stand there; shape ``[n]``."""

# The name under which checkpoints know this order is "feistel": whoever changes anything here takes another name.
# Of a long order 8 show no pattern. Of a handful of samples, where a round has little to add, 8 favour some orders.
_ROUNDS = 16
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _HALF = np.uint64(30), np.uint64(27), np.uint64(32)


class KeyedPermutation:
    """A permutation of ``range(length)`` that follows from (length, seed, epoch) and from nothing else.

    Args:
        length: from 1 to 2**63 - 1.
        seed: any whole number.
        epoch: any whole number.
    """

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        """Compute the keys; costs the same for every length."""
        # The table is as square as it can be, and by less than a row larger than the length: walking is rare.
        columns = math.isqrt(length - 1) + 1
        self._length = np.uint64(length)
        self._columns = np.uint64(columns)
        self._rows = np.uint64(-(-length // columns))
        digest = hashlib.shake_256(f"feistel,{seed},{epoch}".encode()).digest(8 * _ROUNDS)
        self._keys: list[np.uint64] = list(np.frombuffer(digest, dtype="<u8").astype(np.uint64))

    def __call__(self, positions: Positions) -> Positions:
        """The indices that stand at ``positions``, each below the length; a new array of the same shape ``[n]``."""
        indices = self._encipher(positions)
        # Ends: the walk is on a cycle of a permutation, and began inside.
        while len(outside := np.flatnonzero(indices >= self._length)):
            indices[outside] = self._encipher(indices[outside])
        return indices

    def _encipher(self, cells: Positions) -> Positions:
        """One pass through the rounds: a permutation of the whole table's cells."""
        row, column = np.divmod(cells, self._columns)
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            column = _shifted(column, by=row, key=even, size=self._columns)
            row = _shifted(row, by=column, key=odd, size=self._rows)
        row *= self._columns
        row += column
        return row


def _shifted(half: Positions, *, by: Positions, key: np.uint64, size: np.uint64) -> Positions:
    """``(half + f(by)) % size``, where the keyed ``f`` gives numbers below ``size``, itself below 2**32."""
    moved = by ^ key
    moved ^= moved >> _SHIFT_1
    moved *= _MIX_1
    moved ^= moved >> _SHIFT_2
    moved *= _MIX_2
    # The upper 32 bits as a fraction of ``size``: a division would cost more than all the rest.
    moved >>= _HALF
    moved *= size
    moved >>= _HALF
    moved += half
    # Unsigned: where the sum is below ``size`` the difference wraps around to something huge.
    reduced: Positions = np.minimum(moved, moved - size)
    return reduced

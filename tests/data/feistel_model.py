"""The keyed permutation once more, in Python's whole numbers, one position at a time, with its inverse."""

from __future__ import annotations

import hashlib

_WORD = 2**64
_ROUNDS = 16


def index_at(position: int, length: int, seed: int, epoch: int) -> int:
    """What stands at a position."""
    index = _forward(position, length, seed, epoch)
    while index >= length:
        index = _forward(index, length, seed, epoch)
    return index


def position_of(index: int, length: int, seed: int, epoch: int) -> int:
    """Where an index stands."""
    position = _backward(index, length, seed, epoch)
    while position >= length:
        position = _backward(position, length, seed, epoch)
    return position


def _table(length: int) -> tuple[int, int]:
    """Rows and columns: the smallest square's side, and as many rows as hold the length."""
    columns = round(length**0.5)
    while columns * columns < length:
        columns += 1
    while (columns - 1) ** 2 >= length:
        columns -= 1
    return (length + columns - 1) // columns, columns


def _keys(seed: int, epoch: int) -> list[int]:
    stream = hashlib.shake_256(b"feistel,%d,%d" % (seed, epoch)).digest(8 * _ROUNDS)
    return [int.from_bytes(stream[8 * n : 8 * n + 8], "little") for n in range(_ROUNDS)]


def _below(size: int, half: int, key: int) -> int:
    """SplitMix64's finaliser, its upper half scaled to ``size``."""
    word = half ^ key
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % _WORD
    return (word // 2**32) * size // 2**32


def _forward(cell: int, length: int, seed: int, epoch: int) -> int:
    rows, columns = _table(length)
    row, column = divmod(cell, columns)
    for number, key in enumerate(_keys(seed, epoch)):
        if number % 2 == 0:
            column = (column + _below(columns, row, key)) % columns
        else:
            row = (row + _below(rows, column, key)) % rows
    return row * columns + column


def _backward(cell: int, length: int, seed: int, epoch: int) -> int:
    rows, columns = _table(length)
    row, column = divmod(cell, columns)
    for number, key in reversed(list(enumerate(_keys(seed, epoch)))):
        if number % 2 == 0:
            column = (column - _below(columns, row, key)) % columns
        else:
            row = (row - _below(rows, column, key)) % rows
    return row * columns + column

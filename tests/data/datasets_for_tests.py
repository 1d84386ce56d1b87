"""Small datasets that count, draw, refuse or fail."""

from __future__ import annotations

import multiprocessing
import random
from typing import Any

import numpy as np
import torch


class Numbers:
    """Sample i is i."""

    def __init__(self, length: int, fingerprint: str | None = None) -> None:
        self.length = length
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Sample i is i and what the three global streams give at that moment."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2).tolist(), random.random(), float(np.random.rand())


class Counting(Numbers):
    """Counts the reads of each sample, in workers too."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._reads = multiprocessing.Array("i", length)

    def __getitem__(self, index: int) -> int:
        with self._reads.get_lock():
            self._reads[index] += 1
        return index

    @property
    def reads(self) -> list[int]:
        return list(self._reads)


class Only(Numbers):
    """Refuses every sample but the wanted ones."""

    def __init__(self, length: int, wanted: set[int]) -> None:
        super().__init__(length)
        self.wanted = wanted

    def __getitem__(self, index: int) -> int:
        if index not in self.wanted:
            raise AssertionError(f"sample {index} was read")
        return index


class Broken(Numbers):
    """Raises at one sample."""

    def __init__(self, length: int, at: int, error: BaseException) -> None:
        super().__init__(length)
        self.at = at
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            raise self.error
        return index


def as_is(samples: list[Any]) -> list[Any]:
    """A collate_fn that leaves the samples alone."""
    return samples

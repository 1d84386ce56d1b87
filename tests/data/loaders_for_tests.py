"""Loaders over small datasets, and what one pass over them gives."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from hyper_resume.data import DataLoader
from tests.data.datasets_for_tests import Numbers, as_is


def numbers_loader(length: int = 23, **options: Any) -> DataLoader:
    options = {"batch_size": 4, "seed": 5, "collate_fn": as_is} | options
    return DataLoader(options.pop("dataset", Numbers(length)), **options)


def ids(loader: DataLoader) -> list[list[int]]:
    """One pass, with a collate_fn that leaves the samples alone and a dataset whose samples are their indices."""
    return list(loader)


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))

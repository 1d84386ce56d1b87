"""Data: which samples each rank reads, in what order, and the exact position in it.

``loader`` the stateful data loader · ``sampler`` the order of an epoch · ``permutation`` an order computed position by
position · ``indices`` a rank's part of an order · ``saved_state`` what a saved position looks like · ``reading`` reading in
workers · ``prefetch`` reading ahead without losing the position · ``text`` text files as token sequences
"""

from hyper_resume.data.loader import DataLoader, EpochIterator
from hyper_resume.data.prefetch import BackgroundPrefetcher, HyperIter
from hyper_resume.data.text import TextDataset, build_text_dataset, collate

__all__ = [
    "BackgroundPrefetcher",
    "DataLoader",
    "EpochIterator",
    "HyperIter",
    "TextDataset",
    "build_text_dataset",
    "collate",
]

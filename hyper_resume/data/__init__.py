"""Training data: the samples of each rank, their order, and the exact position in it.

``loader`` the stateful data loader · ``sampler`` the order of the samples in an epoch · ``permutation`` a shuffled order that
is computed index by index · ``indices`` one rank's part of an order · ``saved_state`` checks of a saved position · ``reading``
reading batches, in this process or in workers · ``worker_signals`` workers that ignore preemption signals · ``prefetch``
reading ahead in a thread with an exact position · ``resumable`` the exact position in any other loader, by the kinds of
``loader_kinds`` (``torch_loader``, ``stateful_loaders``, ``other_loaders``) · ``text`` a dataset of token sequences from text
files
"""

from hyper_resume.data.loader import DataLoader, EpochIterator
from hyper_resume.data.prefetch import BackgroundPrefetcher, HyperIter
from hyper_resume.data.resumable import ResumableLoader
from hyper_resume.data.text import TextDataset, build_text_dataset, collate

__all__ = [
    "BackgroundPrefetcher",
    "DataLoader",
    "EpochIterator",
    "HyperIter",
    "ResumableLoader",
    "TextDataset",
    "build_text_dataset",
    "collate",
]

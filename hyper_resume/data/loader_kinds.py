"""Which kind a loader is, and so how its position is saved and restored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.utils.data
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hyper_resume.data.loader import DataLoader
from hyper_resume.data.other_loaders import OwnSource, ReplaySource
from hyper_resume.data.passes import Source
from hyper_resume.data.stateful_loaders import StatefulSource
from hyper_resume.data.torch_loader import MapSource
from hyper_resume.errors import UnsupportedError, describe


def source_of(loader: Any, device_type: str, ignored_signals: Sequence[str]) -> Source:
    """Find out what kind of loader it is. Nothing is read.

    Raises:
        UnsupportedError: it can't be resumed.
    """
    if isinstance(loader, DataLoader):
        return OwnSource(loader)
    if isinstance(loader, torch.utils.data.DataLoader):
        return _source_of_torch(loader, device_type, ignored_signals)
    if _has_own_state(loader):
        return StatefulSource(loader, device_type)
    if isinstance(loader, Iterator):
        raise unsupported(
            loader, "it can be read only once", "give what it is made from, which gives an iterator each epoch"
        )
    if isinstance(loader, (set, frozenset)):
        raise unsupported(loader, "a set has no order that another process has too", "give a list")
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise unsupported(loader, "it can't be iterated", "give an iterable")
    return ReplaySource(loader, device_type, in_workers=False)


def _source_of_torch(loader: Any, device_type: str, ignored_signals: Sequence[str]) -> Source:
    # A loader prepared by accelerate says that it is torch's class, has a state_dict in any case, and holds the real loader.
    base = vars(loader).get("base_dataloader", loader)
    is_dispatched = base is not loader and type(loader).__name__ == "DataLoaderDispatcher"
    _check_torch(loader, base)
    is_iterable = isinstance(base.dataset, IterableDataset)
    # Over iterable data without a state torchdata reads again itself, and counts twice what it read: a second resume is lost.
    if base is loader and _has_own_state(loader) and (_has_own_state(base.dataset) or not _iterates_as_torch(base)):
        return StatefulSource(loader, device_type)
    if is_iterable or is_dispatched or not _iterates_as_torch(base):
        return ReplaySource(loader, device_type, in_workers=base.num_workers > 0)
    return MapSource(loader, base, device_type, ignored_signals)


def _check_torch(loader: Any, base: Any) -> None:
    if base.num_workers > 0 and not getattr(base, "in_order", True):
        raise unsupported(loader, "in_order=False gives batches in the order of their arrival", "leave in_order=True")
    alive = [name for item in (loader, base) for name, value in vars(item).items() if _is_alive(item, name, value)]
    if alive:
        reason = f"its attribute {alive[0]} is an iterator that has begun, whose position can't be known"
        raise unsupported(loader, reason, "give a new loader, whose __iter__ makes an iterator for each epoch")
    for name in ("sampler", "batch_sampler"):
        if isinstance(vars(base)[name], Iterator):
            reason = f"its {name} is an iterator, which gives one epoch only"
            raise unsupported(loader, reason, f"give a {name} whose __iter__ makes an iterator for each epoch")


def _is_alive(loader: Any, name: str, value: Any) -> bool:
    if not isinstance(value, _BaseDataLoaderIter):
        return False
    # torchdata keeps the last iterator, and makes another one for the next epoch.
    return name != "_iterator" or loader.persistent_workers


def _has_own_state(loader: Any) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def _iterates_as_torch(base: Any) -> bool:
    """Whether each batch is one index batch of the sampler: a subclass with its own ``__iter__`` may give others."""
    method = type(base).__iter__
    return method.__module__ in ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")


def standing_doubts(loader: Any, source: Source) -> list[str]:
    """Return why a loader of this kind might not be exact, whatever it reads."""
    if isinstance(source, ReplaySource) and source.in_workers and getattr(loader, "persistent_workers", False):
        return [
            "persistent workers that read iterable data carry what they drew into the next epoch, which a replay can't"
        ]
    if (
        isinstance(source, StatefulSource)
        and isinstance(loader, torch.utils.data.DataLoader)
        and loader.num_workers > 0
    ):
        return [
            "the state of this loader leaves out what its workers draw from: a dataset that draws there does not go on exactly"
        ]
    return []


def unsupported(loader: Any, reason: str, do: str) -> UnsupportedError:
    """The error for a loader that can't be resumed."""
    return UnsupportedError(
        describe("this data loader can't be resumed", where=type(loader).__name__, found=reason, do=do)
    )

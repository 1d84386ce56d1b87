"""The possible states of the disk after a crash: three persistence models over one traced sequence of operations.

The trace is the sequence of calls to the kernel. A crash comes after the first ``point`` of these operations. The models differ
in what the disk may lose:

* ``kill``: only the process dies. All operations are kept; the last write may be cut in half.
* ``journal``: power cut on a file system like ext4 in ordered mode. Names (created, renamed, removed) persist in their
  order, as a prefix; bytes that were not synced are there in full, in part, as zeros or not at all. ``fsync`` of a file keeps
  its bytes and its name (with every name before it), ``fsync`` of a directory the names in it.
* ``posix``: power cut, with the guarantees of POSIX only. A name persists by ``fsync`` of the directory that it is
  in (a rename by that of either); the others are kept or lost in any combination (all subsets of up to 8, beyond that each
  alone, all but one, and each prefix). Bytes persist by ``fsync`` of the file. A rename is atomic, and
  so is an exchange.

Not modelled: a disk that lies about ``fsync``, blocks torn within a sector, the order of two threads of one rank (it is as
recorded), and more orders of the two ranks than those that :mod:`conformance.storage.tracing.recorder` makes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from conformance.storage.tracing.history import Change, History, changed

MODELS = ("kill", "journal", "posix")
MOST_IN_ALL_SUBSETS = 8
_MOST_COMBINATIONS = 64


Keep = Callable[[str], bool]
Found = Iterator[tuple[str, dict[str, bytes | None]]]


def _everything(_: str) -> bool:
    return True


def states(history: History, point: int, model: str, keep: Keep = _everything) -> Found:
    """Every (choice, tree) that ``model`` allows after the first ``point`` operations. The same tree may come twice.

    ``choice`` names what was kept; it is the same in each run of the same program. ``keep`` filters choices.
    """
    yield from {"kill": _kill, "journal": _journal, "posix": _posix}[model](history, point, keep)


def _kill(history: History, point: int, keep: Keep) -> Found:
    names, contents = history.names(point), history.contents(point)
    if keep("all"):
        yield "all", history.assemble(names, contents)
    last = history.operations[point - 1] if point else None
    if last is not None and last.kind == "write" and len(last.data) > 1 and keep("half"):
        inode = history.file_of(last)
        half = Change(position=0, offset=last.offset, data=last.data[: len(last.data) // 2])
        cut = changed(history.content(inode, point - 1), [half])
        yield "half", history.assemble(names, {**contents, inode: cut})


def _journal(history: History, point: int, keep: Keep) -> Found:
    names = history.names(point)
    least, _ = history.kept_names(point)
    data = _Data(history, point)
    for count in range(len(names), least - 1, -1):
        for kept_bytes, contents in data.choices(in_full=count == len(names)):
            choice = f"names={count};{kept_bytes}"
            if keep(choice):
                yield choice, history.assemble(names[:count], contents())


def _posix(history: History, point: int, keep: Keep) -> Found:
    names = history.names(point)
    _, promised = history.kept_names(point)
    free = [index for index in range(len(names)) if index not in promised]
    data = _Data(history, point)
    for chosen in _subsets(free):
        kept = promised | chosen
        kept_names_text = "all" if len(chosen) == len(free) else "".join("01"[index in chosen] for index in free)
        for kept_bytes, contents in data.choices(in_full=len(chosen) == len(free)):
            choice = f"names={kept_names_text};{kept_bytes}"
            if keep(choice):
                yield choice, history.assemble([names[index] for index in sorted(kept)], contents())


def _subsets(free: Sequence[int]) -> Iterator[set[int]]:
    if len(free) <= MOST_IN_ALL_SUBSETS:
        for size in range(len(free), -1, -1):
            yield from map(set, itertools.combinations(free, size))
        return
    everything = set(free)
    chosen = [everything, set[int]()]
    chosen += [everything - {one} for one in free] + [{one} for one in free]
    chosen += [set(free[:count]) for count in range(2, len(free) - 1)]
    yield from chosen


class _Data:
    """The choices of bytes at one point, computed once for all choices of names."""

    def __init__(self, history: History, point: int) -> None:
        self._clean = history.contents(point)
        self._variants = {inode: history.variants(inode, point) for inode in history.dirty(point)}

    def choices(self, *, in_full: bool) -> Iterator[tuple[str, Callable[[], dict[int, bytes]]]]:
        """Choices for the bytes of all files: one kind for all; with ``in_full`` also combinations (or one file at a time)."""
        if not self._variants:
            yield "data=all", lambda: self._clean
            return
        for kind in ("all", "none", "half", "zeros"):
            yield f"data={kind}", functools.partial(self._picked, dict.fromkeys(self._variants, kind))
        if in_full:
            for picked in self._combinations():
                kinds = ",".join(f"{inode}:{kind}" for inode, kind in picked.items())
                yield f"data={kinds}", functools.partial(self._picked, picked)

    def _combinations(self) -> Iterator[dict[int, str]]:
        inodes = list(self._variants)
        if math.prod(map(len, self._variants.values())) <= _MOST_COMBINATIONS:
            for picked in itertools.product(*self._variants.values()):
                yield dict(zip(inodes, picked, strict=True))
            return
        for rest, inode in itertools.product(("all", "none"), inodes):
            for kind in self._variants[inode]:
                yield {**dict.fromkeys(inodes, rest), inode: kind}

    def _picked(self, picked: Mapping[int, str]) -> dict[int, bytes]:
        # A file without this kind (half of nothing) is kept in full.
        variants = self._variants
        return self._clean | {i: variants[i].get(kind, variants[i]["all"]) for i, kind in picked.items()}

"""Work on many items in a few threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

MAX_THREADS = 4


def map_in_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return ``function`` of each item, in order, computed by a few threads, of which this is one.

    Raises:
        Exception: whatever ``function`` raised, of the first item that it failed for; items behind it may be left undone.
    """
    others = min(MAX_THREADS, os.cpu_count() or 1, len(items)) - 1
    if others < 1:
        return [function(item) for item in items]
    found: dict[int, R] = {}
    failed: dict[int, BaseException] = {}
    waiting = deque(enumerate(items))

    def work(_: int) -> None:
        # Each takes the next item by itself: a task an item costs more than most items do.
        while not failed:
            try:
                place, item = waiting.popleft()
            except IndexError:
                return
            try:
                found[place] = function(item)
            except BaseException as error:  # noqa: BLE001  raised again below
                failed[place] = error

    with ThreadPoolExecutor(others, thread_name_prefix="hyper_resume-io") as pool:
        helping = [submit_or_run(pool, work, number) for number in range(others)]
        work(others)
        for future in helping:
            future.result()
    if failed:
        raise failed[min(failed)]
    return [found[place] for place in range(len(items))]


def submit_or_run(pool: ThreadPoolExecutor, function: Callable[[T], R], item: T) -> Future[R]:
    """Have it computed in ``pool``, or here and now where no thread can be started (any more); once in any case.

    A pool takes a task before it starts a thread for it, so one that was refused may run all the same, later.
    """
    done: Future[R] = Future()
    left = [item]

    def run() -> None:
        try:
            mine = left.pop()
        except IndexError:
            return
        try:
            done.set_result(function(mine))
        except BaseException as error:  # noqa: BLE001  raised again by whoever asks for the result
            done.set_exception(error)

    try:
        pool.submit(run)
    except RuntimeError:
        run()
    return done

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
    """Return ``function(item)`` for each item, in order, computed by a few threads including the calling one.

    Raises:
        Exception: the error of the first item that failed; later items may not be processed.
    """
    others = min(MAX_THREADS, os.cpu_count() or 1, len(items)) - 1
    if others < 1:
        return [function(item) for item in items]
    found: dict[int, R] = {}
    failed: dict[int, BaseException] = {}
    waiting = deque(enumerate(items))

    def work(_: int) -> None:
        # Each thread takes the next item itself, because submitting a task costs more than most items.
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
    """Compute ``function(item)`` in ``pool``, or in this thread if no new thread can be started; exactly once.

    A pool queues a task before it starts a thread for it. So a task may still run later although ``submit`` raised.
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
        except BaseException as error:  # noqa: BLE001  raised again when the caller reads the result
            done.set_exception(error)

    try:
        pool.submit(run)
    except RuntimeError:
        run()
    return done

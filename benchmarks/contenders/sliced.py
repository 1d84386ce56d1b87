"""Training loops that run in slices of some steps, so that slices of several loops can be interleaved.

All loops live during the whole measurement. Each is held inside the reading of a batch, and a call lets it run for one slice.
So the slices of all loops lie some milliseconds apart, and none contains the start or the end of a training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.protocol import BenchmarkError, Contender, Role

_SEED = 1

Collate = Callable[[list[torch.Tensor]], torch.Tensor]


class _Finished(Exception):
    """Ends a loop that is no longer needed."""


class Sliced:
    """A training loop in a thread. Each call runs one slice; between the calls the loop is held.

    It is held where it collates a batch, which looks to the loop like a slow dataset.
    """

    def __init__(self, train: Callable[[Collate], Any], steps: int) -> None:
        """``train`` runs the loop with the collate function that it is given; a slice has ``steps`` steps."""
        self._train = train
        self._steps = steps
        self._left = 0
        self._error: BaseException | None = None
        self._is_over = False
        self._may_run, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.slices = 0

    def start(self) -> None:
        """Train up to the first batch."""
        self._thread.start()
        self._wait()

    def next_slice(self) -> None:
        """Run ``steps`` steps.

        Raises:
            BenchmarkError: the loop has ended.
        """
        self._left = self._steps
        self._may_run.release()
        self._wait()
        self.slices += 1

    def close(self) -> None:
        """End the loop where it is."""
        self._is_over = True
        self._may_run.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _wait(self) -> None:
        self._stands.acquire()
        if self._error is not None:
            raise BenchmarkError(f"a loop ended: {self._error!r}") from self._error

    def _run(self) -> None:
        # With two threads torch waits whenever something else runs on the machine. The setting is per thread.
        torch.set_num_threads(1)
        try:
            self._train(self._collate)
            self._error = StopIteration("no data is left")
        except _Finished:
            return
        except BaseException as error:  # noqa: BLE001  the measuring thread raises it
            self._error = error
        self._stands.release()

    def _collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        if self._left == 0:
            self._stands.release()
            self._may_run.acquire()
            if self._is_over:
                raise _Finished
        self._left -= 1
        return torch.stack(samples)


class Loops:
    """Loops that train equal models. At the end all models must have the same parameters, bit for bit."""

    def __init__(self, make_model: Callable[[], nn.Module], steps: int) -> None:
        """Start without loops. ``steps`` is the length of a slice. :meth:`close` restores the number of torch's threads."""
        self._make_model = make_model
        self._steps = steps
        self._threads = torch.get_num_threads()
        self._loops: dict[str, Sliced] = {}
        self._models: dict[str, nn.Module] = {}

    def add(self, name: str, role: Role, train: Callable[[nn.Module, Collate], Any], note: str = "") -> Contender:
        """Return a contender that runs slices of ``train``, which is given a new model and a collate function."""
        torch.manual_seed(_SEED)
        model = self._models[name] = self._make_model()
        loop = self._loops[name] = Sliced(lambda collate: train(model, collate), self._steps)
        return Contender(
            name=name, role=role, prepare=loop.start, call=loop.next_slice, check=lambda _: self.check(), note=note
        )

    def steps_of(self, name: str) -> int:
        """Return the number of steps that a loop has done."""
        return self._loops[name].slices * self._steps

    def check(self) -> None:
        """Compare the models of all loops that have done as many slices as the first.

        Raises:
            BenchmarkError: they differ, so the times of their steps are not comparable.
        """
        first = next(iter(self._loops.values()))
        alike = [name for name, loop in self._loops.items() if loop.slices == first.slices]
        ends = [nn.utils.parameters_to_vector(self._models[name].parameters()).detach() for name in alike]
        if not all(torch.equal(ends[0], end) for end in ends):
            raise BenchmarkError(
                f"{', '.join(alike)} ended with different parameters, so their times are not comparable"
            )

    def close(self) -> None:
        """End all loops, and compare their models once more."""
        for loop in self._loops.values():
            loop.close()
        torch.set_num_threads(self._threads)
        self.check()

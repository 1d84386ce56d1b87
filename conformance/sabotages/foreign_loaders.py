"""Defects in the positions of torch's and torchdata's loaders (``ResumableLoader``)."""

from __future__ import annotations

from typing import Any

from conformance.sabotages.saboteur import Saboteur, sabotage

_TORCH = "hyper_resume.data.torch_loader"
_STATEFUL = "hyper_resume.data.stateful_loaders"


@sabotage("torch-position-forgotten")
def _torch_position_forgotten(put: Saboteur) -> None:
    """The order is drawn again, and given from its first batch."""
    put.replace("hyper_resume.data.drawn_indices:DrawnIndices.skip", lambda original, *args: None)


@sabotage("torch-order-drawn-anew")
def _torch_order_drawn_anew(put: Saboteur) -> None:
    """The order is drawn from the streams of the saved step, not from those that the epoch began with."""
    put.replace(f"{_TORCH}:MapSource.put", lambda original, *args: None)
    put.replace("hyper_resume.data.drawn_indices:DrawnIndices._compare", lambda original, *args: None, fires=False)


@sabotage("replay-moves-the-streams")
def _replay_moves_the_streams(put: Saboteur) -> None:
    """The streams are left where the making of the iterator left them, as a plain ``iter(loader)`` does."""

    def put_back(original: Any, opened: Any, saved: Any) -> None:
        opened._source.held.put(saved["held"])

    put.replace(f"{_TORCH}:MapPass._put_back", put_back)


@sabotage("sampler-generators-forgotten")
def _sampler_generators_forgotten(put: Saboteur) -> None:
    put.replace("hyper_resume.data.held_state:HeldState.put", lambda original, *args: None)
    put.replace("hyper_resume.data.drawn_indices:DrawnIndices._compare", lambda original, *args: None, fires=False)


@sabotage("sampler-epoch-not-set")
def _sampler_epoch_not_set(put: Saboteur) -> None:
    put.replace(f"{_TORCH}:set_epoch_everywhere", lambda original, *args: None)


@sabotage("worker-streams-forgotten")
def _worker_streams_forgotten(put: Saboteur) -> None:
    def start(original: Any, init: Any, states: Any, *args: Any) -> Any:
        return original(init, [None] * len(states), *args)

    put.replace(f"{_TORCH}:WorkerStart", start)


@sabotage("worker-init-left-out")
def _worker_init_left_out(put: Saboteur) -> None:
    put.replace(f"{_TORCH}:WorkerStart", lambda original, init, *args: original(None, *args))


@sabotage("replay-drops-nothing")
def _replay_drops_nothing(put: Saboteur) -> None:
    put.replace("hyper_resume.data.other_loaders:_ReplayPass._drop", lambda original, *args: None)


@sabotage("doubts-not-told")
def _doubts_not_told(put: Saboteur) -> None:
    put.replace("hyper_resume.data.resumable:ResumableLoader.doubts_about", lambda original, *args: [])


@sabotage("epoch-lost-at-its-end")
def _epoch_lost_at_its_end(put: Saboteur) -> None:
    """A position at an epoch's end is restored as the end of the epoch after it."""

    def load(original: Any, position: Any, state: Any) -> None:
        original(position, state)
        if position.finished:
            put.fired()
            position._epoch += 1

    put.replace("hyper_resume.data.resumable:ResumableLoader.load_state_dict", load, fires=False)


@sabotage("stateful-loader-left-out")
def _stateful_loader_left_out(put: Saboteur) -> None:
    put.replace(f"{_STATEFUL}:StatefulSource.inner", lambda original, source: None)


@sabotage("stateful-loader-asked-first")
def _stateful_loader_asked_first(put: Saboteur) -> None:
    """``state_dict`` is called before ``load_state_dict``, to be able to undo the restore."""

    def load(original: Any, source: Any, *args: Any) -> Any:
        source.loader.state_dict()
        return original(source, *args)

    put.replace(f"{_STATEFUL}:StatefulSource._load", load)

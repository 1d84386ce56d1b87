"""Defects in the position and order of the data, and in the step and epoch counters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conformance.sabotages.saboteur import Saboteur, sabotage

_LOADER = "hyper_resume.data.loader"
_LOAD = f"{_LOADER}:DataLoader.load_state_dict"
_ORDER = f"{_LOADER}:EpochOrder.indices"
_SET_EPOCH = f"{_LOADER}:DataLoader.set_epoch"
_TRAINER = "hyper_resume.trainer.base:BaseTrainer"
_RESTORE = "hyper_resume.trainer.restore"
_PAYLOAD = "hyper_resume.trainer.payload"


@sabotage("sampler-replays-epoch-0")
def _sampler_replays_epoch_0(put: Saboteur) -> None:
    resumed: list[bool] = []

    def indices(original: Any, order: Any, epoch: int, dp_rank: int) -> Any:
        if resumed and epoch > 0:
            put.fired()
        return original(order, 0 if resumed else epoch, dp_rank)

    put.replace(_LOAD, _then(lambda loader: resumed.append(True)), fires=False)
    put.replace(_ORDER, indices, fires=False)


@sabotage("seed-changed-after-resume")
def _seed_changed_after_resume(put: Saboteur) -> None:
    resumed: list[bool] = []

    def indices(original: Any, order: Any, epoch: int, dp_rank: int) -> Any:
        if not resumed:
            return original(order, epoch, dp_rank)
        put.fired()
        return original(replace(order, seed=order.seed + 1), epoch, dp_rank)

    put.replace(_LOAD, _then(lambda loader: resumed.append(True)), fires=False)
    put.replace(_ORDER, indices, fires=False)


@sabotage("order-from-the-global-stream")
def _order_from_the_global_stream(put: Saboteur) -> None:
    def indices(original: Any, order: Any, epoch: int, dp_rank: int) -> Any:
        import torch

        whole = original(order, epoch, dp_rank)
        return whole[torch.randperm(len(whole))]

    put.replace(_ORDER, indices)


@sabotage("dp-rank-ignored")
def _dp_rank_ignored(put: Saboteur) -> None:
    put.replace(_ORDER, lambda original, order, epoch, dp_rank: original(order, epoch, 0))


@sabotage("position-one-batch-early")
def _position_one_batch_early(put: Saboteur) -> None:
    put.replace(_LOAD, _moved_by(-1))


@sabotage("position-one-batch-late")
def _position_one_batch_late(put: Saboteur) -> None:
    put.replace(_LOAD, _moved_by(1))


@sabotage("position-dropped")
def _position_dropped(put: Saboteur) -> None:
    put.replace(f"{_RESTORE}:apply_dataloader", lambda original, *args, **how: False)


@sabotage("position-frozen-after-load")
def _position_frozen_after_load(put: Saboteur) -> None:
    """Every later save stores the position that was loaded."""
    frozen: list[Any] = []

    def collect(original: Any, iterator: Any, loader: Any) -> Any:
        found = original(iterator, loader)
        if frozen:
            put.fired()
        return frozen[-1] if frozen else found

    put.replace(_LOAD, _then(lambda loader: frozen.append(loader.state_dict())), fires=False)
    put.replace(f"{_PAYLOAD}:collect_dataloader", collect, fires=False)


@sabotage("position-restored-behind-the-iterator")
def _position_restored_behind_the_iterator(put: Saboteur) -> None:
    waiting: list[Any] = []

    def apply(original: Any, loader: Any, saved: Any, **how: Any) -> bool:
        waiting.append(saved)
        return False

    def open_iterator(original: Any, trainer: Any, epoch: int) -> Any:
        iterator = original(trainer, epoch)
        while waiting:
            trainer.train_dataloader.load_state_dict(waiting.pop())
        return iterator

    put.replace(f"{_RESTORE}:apply_dataloader", apply)
    put.replace(f"{_TRAINER}._open_iterator", open_iterator, fires=False)


@sabotage("prefetched-position-saved")
def _prefetched_position_saved(put: Saboteur) -> None:
    """The position is that of the loader, not of the iterator that training reads from."""

    def collect(original: Any, iterator: Any, loader: Any) -> Any:
        import time

        trained = original(iterator, loader)["batches_consumed"]
        # Give the reading thread time to get ahead, as a real training step does.
        deadline = time.monotonic() + 1.0
        while loader.batches_consumed in (trained, 0) and trained < len(loader) and time.monotonic() < deadline:
            time.sleep(0.001)
        if loader.batches_consumed > trained:
            put.fired()
        return loader.state_dict()

    put.replace(f"{_PAYLOAD}:collect_dataloader", collect, fires=False)


@sabotage("offset-applied-to-later-epochs")
def _offset_applied_to_later_epochs(put: Saboteur) -> None:
    offsets: list[int] = []

    def set_epoch(original: Any, loader: Any, epoch: int) -> None:
        moved = epoch != loader.epoch
        original(loader, epoch)
        if moved and offsets and 0 < offsets[-1] < len(loader):
            put.fired()
            loader._cursor.batches_consumed = offsets[-1]

    put.replace(_LOAD, _then(lambda loader: offsets.append(loader.batches_consumed)), fires=False)
    put.replace(_SET_EPOCH, set_epoch, fires=False)


@sabotage("next-epoch-vanishes")
def _next_epoch_vanishes(put: Saboteur) -> None:
    """An exhausted position is applied to the next epoch."""
    exhausted: list[bool] = []

    def set_epoch(original: Any, loader: Any, epoch: int) -> None:
        original(loader, epoch)
        if exhausted and exhausted.pop():
            put.fired()
            loader._cursor.batches_consumed = len(loader)

    put.replace(_LOAD, _then(lambda loader: exhausted.append(loader.batches_consumed == len(loader))), fires=False)
    put.replace(_SET_EPOCH, set_epoch, fires=False)


@sabotage("finished-epoch-trained-twice")
def _finished_epoch_trained_twice(put: Saboteur) -> None:
    def load(original: Any, loader: Any, state: Any) -> None:
        original(loader, state)
        if loader.batches_consumed == len(loader):
            put.fired()
            loader._cursor.batches_consumed = 0

    put.replace(_LOAD, load, fires=False)


@sabotage("topology-warning-missing")
def _topology_warning_missing(put: Saboteur) -> None:
    def warning(original: Any, message: str, *args: Any) -> None:
        if message.startswith("the data has changed"):
            put.fired()
        else:
            original(message, *args)

    put.replace(f"{_LOADER}:logger.warning", warning, fires=False)


@sabotage("other-data-accepted")
def _other_data_accepted(put: Saboteur) -> None:
    put.replace(f"{_LOADER}:EpochOrder.changes_since", lambda original, order, state: [])


@sabotage("samples-read-while-skipping")
def _samples_read_while_skipping(put: Saboteur) -> None:
    def start(original: Any, dataset: Any, **how: Any) -> Any:
        for index in how["indices"][: how["first_batch"] * how["order"].batch_size].tolist():
            put.fired()
            dataset[index]
        return original(dataset, **how)

    put.replace(f"{_LOADER}:start_reading", start, fires=False)


@sabotage("worker-seeds-restarted")
def _worker_seeds_restarted(put: Saboteur) -> None:
    """A worker's streams are seeded from the batches it has read, not from the batch's place in the epoch."""
    first = [0]

    def start(original: Any, dataset: Any, **how: Any) -> Any:
        first[0] = how["first_batch"]
        if first[0]:
            put.fired()
        return original(dataset, **how)

    def seed(original: Any, *entropy: int) -> None:
        original(*entropy[:-1], entropy[-1] - first[0])

    put.replace(f"{_LOADER}:start_reading", start, fires=False)
    put.replace("hyper_resume.data.reading:_seed_streams", seed, fires=False)


# ---- counters -------------------------------------------------------------------------------------------------------


@sabotage("accumulation-counted-in-batches")
def _accumulation_counted_in_batches(put: Saboteur) -> None:
    put.replace("hyper_resume.trainer.resume_point:accumulation_steps", lambda original, trainer: 1)


@sabotage("short-window-dropped")
def _short_window_dropped(put: Saboteur) -> None:
    def next_window(original: Any, trainer: Any) -> Any:
        batches = original(trainer)
        if 0 < len(batches) < trainer.config.training.gradient_accumulation_steps:
            put.fired()
            return []
        return batches

    put.replace(f"{_TRAINER}._next_window", next_window, fires=False)


@sabotage("counter-raised-before-the-step")
def _counter_raised_before_the_step(put: Saboteur) -> None:
    """After a resume ``global_step`` moves when a batch is asked for, also where the epoch has none left."""
    resumed: list[bool] = []

    def next_window(original: Any, trainer: Any) -> Any:
        batches = original(trainer)
        if resumed and not batches:
            put.fired()
            trainer.state.global_step += 1
        return batches

    put.replace(_LOAD, _then(lambda loader: resumed.append(True)), fires=False)
    put.replace(f"{_TRAINER}._next_window", next_window, fires=False)


@sabotage("owed-epoch-end-forgotten")
def _owed_epoch_end_forgotten(put: Saboteur) -> None:
    put.replace(f"{_TRAINER}._epoch_end_is_missing", lambda original, trainer: False)


@sabotage("extra-step-at-the-end")
def _extra_step_at_the_end(put: Saboteur) -> None:
    """A restored run trains one step more than planned."""

    def load(original: Any, callback: Any, path: str) -> Any:
        certificate = original(callback, path)
        trainer = callback.trainer
        if 0 < trainer.train_steps <= trainer.state.global_step:
            put.fired()
            trainer.train_steps += 1
            trainer.num_train_epochs += 1
        return certificate

    put.replace("hyper_resume.trainer.callbacks.checkpointer:CheckpointerCallback._load_checkpoint", load, fires=False)


@sabotage("incomplete-training-exits-clean")
def _incomplete_training_exits_clean(put: Saboteur) -> None:
    training_forgets(put, "TrainingIncompleteError")


def training_forgets(put: Saboteur, error_name: str) -> None:
    """Training that ends with this error of the library exits as if it had succeeded."""

    def train(original: Any, trainer: Any) -> None:
        from hyper_resume import errors

        try:
            original(trainer)
        except getattr(errors, error_name):
            put.fired()

    put.replace(f"{_TRAINER}.train", train, fires=False)


@sabotage("finished-run-saved-again")
def _finished_run_saved_again(put: Saboteur) -> None:
    def on_train_end(original: Any, callback: Any, *args: Any) -> None:
        callback._last_saved_step = -1
        original(callback, *args)

    put.replace("hyper_resume.trainer.callbacks.checkpointer:CheckpointerCallback.on_train_end", on_train_end)


@sabotage("saving-draws-a-number")
def _saving_draws_a_number(put: Saboteur) -> None:
    def changeable(original: Any, *args: Any) -> Any:
        import torch

        torch.rand(())
        return original(*args)

    # Behind the collection, whose draws are put back.
    put.replace("hyper_resume.trainer.unchanged_buckets:UnchangedBuckets.changeable", changeable)


def _moved_by(batches: int) -> Any:
    """A load that moves the position by ``batches``, within the epoch."""

    def load(original: Any, loader: Any, state: Any) -> None:
        place = min(max(state["batches_consumed"] + batches, 0), len(loader))
        original(loader, {**state, "batches_consumed": place})

    return load


def _then(act: Any) -> Any:
    """The original load, then ``act(loader)``."""

    def load(original: Any, loader: Any, state: Any) -> None:
        original(loader, state)
        act(loader)

    return load

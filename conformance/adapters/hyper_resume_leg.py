"""One rank of a leg of this library: builds what the job gives, trains through the public interface, tells what happens.

``main`` is what a warm server calls, and what ``python -m`` runs. Sabotages are put in here, before anything is built.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from conformance.adapter import JOB_NAME, Job, read_job
from conformance.adapters import hyper_resume_data as data_parts
from conformance.adapters import hyper_resume_parts as parts
from conformance.adapters.hyper_resume_data import StepCounter
from conformance.adapters.hyper_resume_disk import edit_step_directory, look_into
from conformance.adapters.hyper_resume_parts import TroubleError
from conformance.adapters.hyper_resume_state import buckets, step_digests
from conformance.adapters.hyper_resume_watch import AfterSaves, BeforeSaves, WatchedCheckpointer, hold_saves
from conformance.legs import TROUBLE_EXIT
from conformance.probe import Probe
from conformance.sabotage import SabotageError, put_in
from conformance.serial import to_plain
from hyper_resume.checkpoint import layout
from hyper_resume.config import CheckpointingConfig, DataConfig, RunConfig, TrainingConfig
from hyper_resume.trainer.base import BaseTrainer
from hyper_resume.trainer.callbacks import CheckpointerCallback, TrainerState

# Callbacks of this room; the others are the library's.
OWN_CALLBACKS = (BeforeSaves, AfterSaves, StepCounter)
_MANY_EPOCHS = 1_000_000
_GROUP_SECONDS = 20.0
_FAILED = 1
# Where a save can be stopped on its way to disk: the moment -> the function of `layout` that begins then.
_SAVE_MOMENTS = {"before_commit": "commit", "before_pointer": "write_pointer"}


def prepare() -> None:
    """Import now what torch imports at a first use, so that every fork has it. Computes nothing."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    torch.optim.lr_scheduler.ConstantLR(optimizer)


def main(arguments: Sequence[str]) -> int:
    """Do what the job says; returns the exit code."""
    probe = Probe.from_environment()
    try:
        job = read_job(Path(JOB_NAME))
        if job.task == "train":
            train(probe, job)
        else:
            probe.event("start", versions=versions())
            step_directory = Path(job.checkpoint_dir) / f"global_step_{(job.edit or {}).get('step', job.step)}"
            told = edit_step_directory(step_directory, job.edit) if job.edit else look_into(step_directory)
            probe.event("value", name=job.task, value=told)
    except (TroubleError, SabotageError) as error:
        probe.event("trouble", message=str(error))
        return TROUBLE_EXIT
    except BaseException as error:  # noqa: BLE001  whatever ends a leg is told
        probe.error(error)
        return _FAILED
    return 0


def versions() -> dict[str, str]:
    """Of what this leg runs on."""
    return {"python": platform.python_version(), "torch": torch.__version__}


def train(probe: Probe, job: Job) -> None:
    """Build, train, tell."""
    probe.event("start", versions=versions())
    torch.set_num_threads(1)
    probe.watch_logs("hyper_resume")
    if job.sabotage is not None:
        put_in(job.sabotage, lambda: probe.event("sabotage_fired", id=job.sabotage))
    stop_saves_at(probe, job)
    group = join_group(job)
    try:
        Leg(probe, job, group).run()
    finally:
        if group is not None and sys.exc_info()[0] is None:
            dist.destroy_process_group()


def join_group(job: Job) -> dist.ProcessGroup | None:
    """Meet the other ranks by a file in the leg's folder; None for a single process."""
    if job.world_size == 1:
        return None
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}[job.given.device]
    dist.init_process_group(
        backend,
        # Not an init_method: in a URL the # of a repeat's folder would cut the path short.
        store=dist.FileStore(str(Path("rendezvous").absolute()), job.world_size),  # type: ignore[attr-defined]
        rank=int(os.environ["RANK"]),
        world_size=job.world_size,
        timeout=timedelta(seconds=_GROUP_SECONDS),
    )
    return dist.group.WORLD


def stop_saves_at(probe: Probe, job: Job) -> None:
    """Let a fault strike in the middle of a save: the function that begins at its moment asks the probe first."""
    name = _SAVE_MOMENTS.get(job.fault.moment) if job.fault else None
    if job.fault is None or name is None:
        return
    original = getattr(layout, name, None)
    if original is None:
        raise TroubleError(f"hyper_resume.checkpoint.layout has no {name}: a save can't be stopped {job.fault.moment}")
    moment = job.fault.moment

    def asking(first: Any, second: Any) -> Any:
        step = second if name == "write_pointer" else layout.parse_step(Path(second).name)
        probe.moment(moment, -1 if step is None else step)
        return original(first, second)

    setattr(layout, name, asking)


class Leg:
    """Everything of one rank's life in one place."""

    def __init__(self, probe: Probe, job: Job, group: dist.ProcessGroup | None) -> None:
        """Build all parts from seeds; nothing is trained or restored yet."""
        self.probe, self.job, self.given, self.group = probe, job, job.given, group
        rank = probe.rank
        # This rank's place among those that read different data, how many these are, and their group.
        self.share, self.shares, self.dp_group = rank, job.world_size, group
        self.device = _device(job.given.device, rank)
        data_parts.seed_streams(self.given.seed)
        self.model = self._spread(parts.build_model(self.given.model).to(self.device))
        self.optimizer, self.optimizers = parts.build_optimizer(self.model, self.given.optimizer)
        self.schedulers = parts.build_schedulers(self.optimizers, self.given.scheduler)
        self.loader, self.dataset = data_parts.build_data(self.given, rank=self.share, world_size=self.shares)
        self.extras = self._build_extras()
        self.seen: list[int] = []
        self.loss_function = data_parts.loss_of(
            self.given, self.seen, self.extras.get("generator"), self.extras.get("scaler")
        )
        # Every rank draws from streams of its own, and none of them is where the building left it.
        data_parts.seed_streams(self.given.seed + 1000 + self.share)
        self.trainer: Any = None
        self.is_over = threading.Event()

    def _spread(self, model: nn.Module) -> nn.Module:
        if self.group is None:
            return model
        if self.given.parallel == "fsdp":
            from torch.distributed.fsdp import fully_shard  # here, because it takes a while to import

            fully_shard(model)
            return model
        if self.given.parallel == "tp2-fsdp":
            self._split_in_two(model)
            return model
        if self.given.accumulation != 1:
            raise TroubleError("parallel: replicated averages every micro-batch, so it needs accumulation 1")
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._average)  # type: ignore[no-untyped-call]
        return model

    def _split_in_two(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        from hyper_resume.config import AcceleratorConfig
        from hyper_resume.parallel import build_mesh

        sizes = AcceleratorConfig(tp_size=2, dp_shard_size=self.job.world_size // 2)
        mesh = build_mesh(sizes, self.device.type, self.job.world_size)
        if mesh is None:
            raise TroubleError("parallel: tp2-fsdp needs an even number of ranks")
        parallelize_module(model, mesh.tp_mesh, {"hidden": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(model, mesh=mesh.dp_mesh)
        self.share, self.shares, self.dp_group = mesh.dp_rank, mesh.dp_size, mesh.dp_mesh.get_group()

    def _average(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(self.job.world_size)

    def _build_extras(self) -> dict[str, Any]:
        makers: dict[str, Callable[[], Any]] = {
            "ema": lambda: data_parts.Ema(self.model),
            "scaler": data_parts.Scaler,
            "generator": lambda: torch.Generator().manual_seed(self.given.seed + 7),
        }
        return {name: makers[name]() for name in self.given.extras if name in makers}

    # ---- the run --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train and tell; an error passes through."""
        if self.given.hold_saves:
            hold_saves(self)
        self.trainer = self._base_trainer() if self.given.trainer == "base" else self._duck()
        callbacks = [type(item).__name__ for item in self.trainer.callbacks if not isinstance(item, OWN_CALLBACKS)]
        self.probe.event("built", buckets=self.buckets())
        self.probe.event("callbacks", names=callbacks)
        if self.given.trainer == "base":
            self.trainer.train()
        else:
            from conformance.adapters.hyper_resume_duck import drive_duck

            drive_duck(self)
        state = self.trainer.state
        self.probe.event("value", name="dataset_reads", value=self.dataset.reads)
        self.probe.event("end", global_step=state.global_step, epoch=state.epoch, buckets=self.buckets())

    def checkpointing(self) -> CheckpointingConfig:
        """The ``checkpoint:`` block: what the case sets, and nothing else."""
        chosen = {name: value for name, value in to_plain(self.given.checkpoint).items() if value is not None}
        return CheckpointingConfig(checkpoint_dir=self.job.checkpoint_dir, restore_from=self.job.restore_from, **chosen)

    def _base_trainer(self) -> BaseTrainer:
        given = self.given
        config = RunConfig(
            training=TrainingConfig(
                num_train_epochs=given.epochs or _MANY_EPOCHS,
                max_steps=self.job.until_step,
                seed=given.seed,
                gradient_accumulation_steps=given.accumulation,
                max_grad_norm=given.clip,
                progress_bar=False,
            ),
            data=DataConfig(
                batch_size=given.data.batch_size,
                use_background_prefetcher=given.data.prefetch > 0,
                prefetch_batches=max(1, given.data.prefetch),
            ),
            checkpoint=self.checkpointing(),
        )
        makers: list[Callable[[Any], Any]] = [lambda trainer: BeforeSaves(trainer, self)]
        if "counter" in given.extras:
            makers.insert(0, StepCounter)
        trainer = BaseTrainer(
            config,
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.schedulers,
            train_dataloader=self.loader,
            loss_function=self.loss_function,
            device=self.device,
            dp_group=self.dp_group,
            callbacks=makers,
        )
        for name, value in self.extras.items():
            setattr(trainer, name, value)
        for item in trainer.callbacks:
            if isinstance(item, StepCounter):
                self.extras["counter"] = item
        self.watch_saves(next((item for item in trainer.callbacks if isinstance(item, CheckpointerCallback)), None))
        trainer.callbacks.append(AfterSaves(trainer, self))
        return trainer

    def _duck(self) -> Any:
        """A namespace with what specification 5.2 names, and nothing more but the extras."""
        training = SimpleNamespace(gradient_accumulation_steps=self.given.accumulation)
        trainer = SimpleNamespace(
            config=SimpleNamespace(checkpoint=self.checkpointing(), training=training),
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.schedulers if len(self.schedulers) != 1 else self.schedulers[0],
            train_dataloader=self.loader,
            state=TrainerState(),
            train_steps=self.job.until_step or 0,
            start_epoch=0,
            start_step=0,
            callbacks=[],
            **self.extras,
        )
        if trainer.config.checkpoint.save_ckpt or trainer.config.checkpoint.restore_from is not None:
            trainer.callbacks.append(CheckpointerCallback(trainer))
            self.watch_saves(trainer.callbacks[0])
        return trainer

    # ---- what is told ----------------------------------------------------------------------------------------------

    def watch_saves(self, callback: CheckpointerCallback | None) -> None:
        """Put a watcher between the callback and its storage."""
        if callback is not None:
            callback.checkpointer = WatchedCheckpointer(callback.checkpointer, self)  # type: ignore[assignment]

    def buckets(self) -> dict[str, Any]:
        """The live state as text."""
        return buckets(self.trainer, self.optimizers, self.device, self.extras)

    def tell_begin(self, restored_from: str | None) -> None:
        """Tell what was restored, and where training begins."""
        trainer, state = self.trainer, self.trainer.state
        found = self.buckets()
        if restored_from is not None:
            lrs = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
            self.probe.event(
                "restored",
                global_step=state.global_step,
                epoch=state.epoch,
                path=restored_from,
                lrs=lrs,
                buckets=found,
            )
        self.probe.event(
            "begin",
            global_step=state.global_step,
            epoch=state.epoch,
            start_epoch=trainer.start_epoch,
            start_step=trainer.start_step,
            buckets=found,
        )

    def tell_step(self) -> None:
        """Move the other objects by a step, record it, and stand at the moment before its save."""
        state = self.trainer.state
        if "ema" in self.extras:
            self.extras["ema"].update(self.model)
        if "scaler" in self.extras:
            self.extras["scaler"].update()
        self.probe.step(
            global_step=state.global_step,
            epoch=state.epoch,
            batch_index=state.batch_index,
            loss=state.loss,
            lr=state.lrs[0],
            group_lrs=state.lrs,
            grad_norm=state.grad_norm,
            sample_ids=self.seen,
            digests=step_digests(self.trainer, self.optimizers, self.device, self.extras),
        )
        self.seen.clear()
        self.probe.moment("before_save", state.global_step)


def _device(name: str, rank: int) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if name == "npu":
        import torch_npu  # noqa: F401  registers the device
    device = torch.device(name, rank)
    getattr(torch, name).set_device(device)
    torch.use_deterministic_algorithms(True)
    return device


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

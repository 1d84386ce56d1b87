"""One rank of a leg: builds the objects of the job's ``given``, trains through the public interface, and reports events."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from conformance.adapters.hyper_resume import components as parts
from conformance.adapters.hyper_resume import data_components as data_components
from conformance.adapters.hyper_resume import plain_file_backend as plain_file_backend  # registers itself
from conformance.adapters.hyper_resume.components import TroubleError
from conformance.adapters.hyper_resume.data_components import DrawsAtBegin, StepCounter
from conformance.adapters.hyper_resume.event_reporter import EventReporter
from conformance.adapters.hyper_resume.hidden_state import AverageCallback, HiddenState
from conformance.adapters.hyper_resume.instrumentation import AfterSaves, BeforeSaves, instrument_saves
from conformance.adapters.hyper_resume.live_state import step_digests
from conformance.plain_data.serial import to_plain
from conformance.running.adapter import Job
from conformance.running.probe import Probe
from hyper_resume.config import CheckpointingConfig, DataConfig, RunConfig, TrainingConfig
from hyper_resume.trainer.base import BaseTrainer
from hyper_resume.trainer.callbacks import CheckpointerCallback, TrainerState

# The adapter's callbacks; all others are the library's.
OWN_CALLBACKS = (BeforeSaves, AfterSaves, StepCounter, AverageCallback, DrawsAtBegin)
_MANY_EPOCHS = 1_000_000


class Leg(EventReporter):
    """All objects of one rank, and its run."""

    def __init__(self, probe: Probe, job: Job, group: dist.ProcessGroup | None) -> None:
        """Build all objects from seeds; nothing is trained or restored yet."""
        rank = probe.rank
        super().__init__(probe, job, _device(job.given.device, rank))
        self.group = group
        # This rank's data share, the number of shares, and the group of the ranks that read different data.
        self.share, self.shares, self.dp_group = rank, job.world_size, group
        data_components.seed_streams(self.given.seed)
        self.model = self._spread(parts.build_model(self.given.model).to(self.device))
        self.outside = parts.build_outside(self.given.optimizer)
        self.optimizer, self.optimizers = parts.build_optimizer(self.model, self.given.optimizer, self.outside)
        self.schedulers = parts.build_schedulers(self.optimizers, self.given.scheduler)
        self.loader, self.dataset = data_components.build_data(self.given, rank=self.share, world_size=self.shares)
        self.extras = self._build_extras()
        self.seen: list[int] = []
        kind = self.given.hidden
        self.hidden = None if kind is None else HiddenState(kind, self.model, self.given.seed + 9)
        self.loss_function = data_components.loss_of(
            self.given, self.seen, self.extras.get("generator"), self.extras.get("scaler"), self.hidden, self.outside
        )
        # Each data share draws from streams of its own, seeded anew after the objects are built.
        data_components.seed_streams(self.given.seed + 1000 + self.share)

    def _spread(self, model: nn.Module) -> nn.Module:
        if self.group is None:
            return model
        if self.given.parallel == "fsdp":
            from torch.distributed.fsdp import fully_shard  # here, because it takes a while to import

            fully_shard(model)
            return model
        if self.given.parallel in ("tp2-fsdp", "fsdp-tp2"):
            self._split_in_two(model)
            return model
        if self.given.accumulation != 1:
            raise TroubleError("parallel: replicated averages every micro-batch, so it needs accumulation 1")
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._average)  # type: ignore[no-untyped-call]
        return model

    def _split_in_two(self, model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        if self.job.world_size % 2:
            raise TroubleError(f"parallel: {self.given.parallel} needs an even number of ranks")
        dimensions = {"dp_shard": self.job.world_size // 2, "tp": 2}
        names = tuple(dimensions) if self.given.parallel == "tp2-fsdp" else tuple(reversed(dimensions))
        mesh = init_device_mesh(self.device.type, tuple(dimensions[name] for name in names), mesh_dim_names=names)
        parallelize_module(model, mesh["tp"], {"hidden": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(model, mesh=mesh["dp_shard"])
        self.share, self.shares = mesh.get_local_rank("dp_shard"), dimensions["dp_shard"]
        self.dp_group = mesh.get_group("dp_shard")

    def _average(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(self.job.world_size)

    def _build_extras(self) -> dict[str, Any]:
        makers: dict[str, Callable[[], Any]] = {
            "ema": lambda: data_components.Ema(self.model),
            "scaler": data_components.Scaler,
            "forgetful": data_components.Forgetful,
            "generator": lambda: torch.Generator().manual_seed(self.given.seed + 7),
        }
        return {name: makers[name]() for name in self.given.extras if name in makers}

    # ---- the run --------------------------------------------------------------------------------------------------

    def run(self, drive_custom_loop: Callable[[Leg], None]) -> None:
        """Train and report; an error passes through. ``drive_custom_loop`` drives a trainer that has no loop of its own."""
        self.trainer = self._base_trainer() if self.given.trainer == "base" else self._custom_trainer()
        self.report_built(OWN_CALLBACKS)
        if self.given.trainer == "base":
            self.trainer.train()
        else:
            drive_custom_loop(self)
        self.probe.event("value", name="dataset_reads", value=self.dataset.reads)
        self.report_end()

    def checkpointing(self) -> CheckpointingConfig:
        """The ``checkpoint:`` block: only the fields that the case sets."""
        chosen = {name: value for name, value in to_plain(self.given.checkpoint).items() if value is not None}
        # How often the harness's dataset was read is an observation, and no state of the training.
        not_saved = ("trainer.train_dataloader.dataset.reads", *chosen.pop("not_saved", ()))
        return CheckpointingConfig(
            checkpoint_dir=self.job.checkpoint_dir,
            restore_from=self.job.restore_from,
            not_saved=not_saved,
            **chosen,
        )

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
        hidden = self.hidden
        if hidden is not None and hidden.kind == "callback":
            makers.append(hidden.holder.of)
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
        for name, value in {**self.extras, **self._held_by_trainer()}.items():
            setattr(trainer, name, value)
        for item in trainer.callbacks:
            if isinstance(item, StepCounter):
                self.extras["counter"] = item
        instrument_saves(
            self, next((item for item in trainer.callbacks if isinstance(item, CheckpointerCallback)), None)
        )
        trainer.callbacks.append(AfterSaves(trainer, self))
        if given.draws_at == "begin":
            trainer.callbacks.append(DrawsAtBegin(trainer))
        return trainer

    def _held_by_trainer(self) -> dict[str, Any]:
        hidden = self.hidden
        held = {} if hidden is None or hidden.kind == "callback" else {"hidden": hidden.holder}
        return held if self.outside is None else {**held, "outside": self.outside}

    def _custom_trainer(self) -> Any:
        """A namespace with the attributes that specification 5.2 names, and the extras."""
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
            **self._held_by_trainer(),
        )
        if trainer.config.checkpoint.save_ckpt or trainer.config.checkpoint.restore_from is not None:
            trainer.callbacks.append(CheckpointerCallback(trainer))
            instrument_saves(self, trainer.callbacks[0])
        return trainer

    # ---- reports ---------------------------------------------------------------------------------------------------

    def report_step(self) -> None:
        """Update the other stateful objects, record the step, and reach the moment ``before_save``."""
        state = self.trainer.state
        if "ema" in self.extras:
            self.extras["ema"].update(self.model)
        if "scaler" in self.extras:
            self.extras["scaler"].update()
        if self.hidden is not None:
            self.hidden.update()
        if "forgetful" in self.extras:
            self.extras["forgetful"].steps += 1
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
        super().report_step()


def _device(name: str, rank: int) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if name == "npu":
        import torch_npu  # noqa: F401  registers the device
    device = torch.device(name, rank)
    getattr(torch, name).set_device(device)
    torch.use_deterministic_algorithms(True)
    return device

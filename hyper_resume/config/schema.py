"""The configuration tree: plain dataclasses, the only schema there is; all but :class:`CheckpointingConfig` are frozen.

Field names, nesting and defaults are the YAML's. Types and unknown keys are checked from the annotations by
:mod:`hyper_resume.config.load`; the line under each field is its meaning in the configuration reference
(:mod:`hyper_resume.config.reference`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

CONSTRUCTION_CHECKS: list[Callable[[Any], None]] = []
"""Called with every new :class:`CheckedBlock`; :mod:`hyper_resume.config.construction` puts the loader's rules here."""


class CheckedBlock:
    """Base of the blocks that a program of one's own builds in Python: wrong types and values are refused at construction."""

    def __post_init__(self) -> None:
        """Check all fields.

        Raises:
            ConfigError: any of them is wrong; every mistake at once.
        """
        for check in CONSTRUCTION_CHECKS:
            check(self)


@dataclass
class CheckpointingConfig(CheckedBlock):
    """When and where training is saved, and what it is restored from.

    Fields may be given by position, in this order, and changed afterwards; each change is checked as at construction. A run
    reads ``manager`` and what its storage backend takes once, when the callback is made; the other fields count at their use.

    ``save_ckpt`` governs writing only, ``restore_from`` reading only. A step directory of this run, or of what it continues,
    that none of ``keep_last``, ``keep_every`` and ``keep_best`` keeps is deleted once a newer one is durable; with none of the
    three set, all are kept. Checkpoints of other runs in the same directory are never deleted for these rules.
    """

    # The specification's fields (5.1), in its order.
    save_ckpt: bool = True
    """Save checkpoints."""
    checkpoint_dir: str = "./checkpoints"
    """The directory of the step directories global_step_N."""
    save_steps: int = 0
    """Save every this many optimizer steps; 0 turns it off."""
    save_epochs: int = 1
    """Save every this many epochs; 0 turns it off."""
    is_async: bool = False
    """Write in the background, except for the last save of a training."""
    is_peft: bool = False
    """Save and restore only the trainable parameters of the model."""
    save_optimizer: bool = True
    """Save the optimizer state."""
    save_train_state: bool = True
    """Save progress, lr schedulers, data position, random streams and other stateful objects."""
    save_extra_state_per_rank: bool = True
    """Save the training state in one file per rank; false embeds rank 0's in the shared payload."""
    restore_from: str | None = None
    """A step directory, or LATEST for the newest one that verifies; null trains from scratch."""
    restore_optimizer: bool = True
    """Restore the optimizer state."""
    restore_train_state: bool = True
    """Restore what save_train_state saves; false takes over the weights alone and starts at step 0."""
    model_save_format: str = "safetensors"
    """Reserved for the Hugging Face export; no effect yet, and setting it warns."""
    save_consolidated: Literal["none", "final", "every"] = "final"
    """Reserved for the Hugging Face export; no effect yet, and setting it warns."""
    staging_dir: str | None = None
    """Reserved for the Hugging Face export; no effect yet, and setting it warns."""
    best_metric_key: str = "default"
    """Reserved for the Hugging Face export; no effect yet, and setting it warns."""
    # Beyond the specification.
    manager: str = "dcp"
    """The storage backend, by the name under which it is registered or by which an installed package offers it."""
    async_mode: Literal["thread", "process"] = "thread"
    """Where a background save is written: in a thread of the training process, or in a process of its own."""
    verify: Literal["digest", "size"] = "digest"
    """What a load checks of every file before it changes anything: size and digest, or the size alone."""
    on_mismatch: Literal["warn", "error"] = "warn"
    """What happens when a restore would not be exact: a warning, or a refusal before anything is changed."""
    keep_last: int | None = None
    """Keep the newest N step directories; null does not use this rule."""
    keep_every: int | None = None
    """Keep the step directories whose step N divides; null does not use this rule."""
    keep_best: int = 0
    """Keep the N best step directories by keep_best_metric, and those without it; 0 does not use this rule."""
    keep_best_metric: str = "loss"
    """The number in the trainer's state (or its metrics) by which keep_best ranks."""
    keep_best_mode: Literal["min", "max"] = "min"
    """Whether the smallest or the largest metric is the best."""
    check_coverage: bool = True
    """Search at each save for state that moves and is not saved, and name it; false turns it off."""
    not_saved: tuple[str, ...] = ()
    """Paths, or patterns such as trainer.timer.*, of what moves on purpose and is not saved."""
    override_on_restore: tuple[str, ...] = ()
    """Names of differences from the saved run that are wanted, such as optimizer.lr; this run's values are used."""
    preemption_signals: tuple[str, ...] = ("SIGTERM",)
    """On one of these signals all ranks save after the running step and exit with code 75; [] turns it off."""
    on_other_run: Literal["warn", "error"] = "warn"
    """What a start anew in a checkpoint_dir with another run's checkpoints meets: a warning, or a refusal."""
    initial_restore_from: str | None = None
    """A step directory of another run, from which to start while restore_from LATEST finds none; null uses none."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; once all are set, refuse a value that the construction would refuse.

        Raises:
            ConfigError: the new value is wrong; the old one stays.
            AttributeError: there is no such field.
        """
        if name not in self.__dataclass_fields__:
            raise AttributeError(
                f"checkpoint.{name}: unknown field; the fields are {', '.join(self.__dataclass_fields__)}"
            )
        if name in vars(self):
            replace(self, **{name: value})
        super().__setattr__(name, value)


RESERVED_CHECKPOINT_FIELDS = ("model_save_format", "save_consolidated", "staging_dir", "best_metric_key")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters through the peft library."""

    rank: int = 0
    """Rank of the adapters; 0 means no adapters."""
    alpha: int = 16
    """Scale of the adapters: alpha divided by rank."""
    dropout: float = 0.0
    """Dropout probability on the input of the adapters."""
    target_modules: tuple[str, ...] = ("q_proj", "v_proj")
    """Names of the modules that get an adapter."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which Hugging Face model is trained: exactly one of ``preset`` and ``pretrained_model_name_or_path``."""

    preset: str | None = None
    """Name of a tiny built-in model, such as tiny-llama, with random weights."""
    pretrained_model_name_or_path: str | None = None
    """A local Hugging Face model folder."""
    load_weights: bool = True
    """Load the folder's weights; false takes its configuration with random weights."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Values set on the Hugging Face configuration, for example {attention_dropout: 0.1}."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text that is cut into sequences of ``seq_length`` tokens.

    ``shuffle_method: randperm`` makes the order of an epoch as an array, in time and memory that grow with the number of
    samples; ``feistel`` computes it batch by batch, at no cost for any number. The orders differ, so a run must not change it.
    """

    paths: tuple[str, ...] = ()
    """Text files or folders; [] reads the running Python's standard-library sources."""
    tokenizer: str = "bytes"
    """bytes (one token per byte), or a local Hugging Face tokenizer folder."""
    seq_length: int = 128
    """Tokens per sequence."""
    max_samples: int | None = None
    """Use only the first N sequences; null uses all."""
    token_noise: float = 0.0
    """Share of the input tokens that a random byte replaces, drawn anew at each reading."""
    batch_size: int = 2
    """Sequences per data-parallel rank and micro-batch."""
    shuffle: bool = True
    """Read the samples in a new random order each epoch."""
    shuffle_method: Literal["randperm", "feistel"] = "randperm"
    """How that order is made: as an array, or batch by batch for very large data sets."""
    drop_last: bool = False
    """Leave out an epoch's last batch where it is smaller than the others."""
    num_workers: int = 0
    """Worker processes that read samples; 0 reads in the training process."""
    use_background_prefetcher: bool = False
    """Read batches ahead in a thread."""
    prefetch_batches: int = 2
    """How many batches that thread reads ahead."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw; or muon: torch.optim.Muon for the matrices of the hidden layers, AdamW for the rest."""
    lr: float = 1e-4
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """AdamW's term against a division by zero."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices."""
    muon_lr: float = 1e-3
    """Peak learning rate of Muon."""
    muon_momentum: float = 0.95
    """Momentum of Muon."""


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig:
    """The learning-rate schedule over optimizer steps."""

    name: Literal["constant", "linear", "cosine", "onecycle"] = "cosine"
    """The shape of the schedule after the warmup."""
    warmup_steps: int = 0
    """Steps of linear warmup from 0."""
    decay_steps: int | None = None
    """The step at which the decay ends; null means the planned number of steps."""


@dataclass(frozen=True, kw_only=True)
class AcceleratorConfig:
    """Devices and parallelism: ``dp_shard_size`` times ``tp_size`` is the number of processes."""

    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Where to compute; auto takes an NPU, a CUDA device or the CPU, in this order."""
    tp_size: int = 1
    """Ranks that share one model shard by tensor parallelism."""
    dp_shard_size: int = -1
    """Ranks among which FSDP2 shards the model, each with other data; -1 means all that tp_size leaves."""
    pp_size: int = 1
    """Pipeline parallelism, which is not built: only 1."""
    timeout_seconds: float = 300.0
    """How long a collective waits for the other ranks, in seconds."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(CheckedBlock):
    """The training loop. A step is an optimizer step of ``gradient_accumulation_steps`` micro-batches."""

    num_train_epochs: int = 1
    """Epochs of the whole run."""
    max_steps: int | None = None
    """Optimizer steps of the whole run; null means all steps of num_train_epochs."""
    seed: int = 1234
    """Seed of the weights, of the data order and, with the rank, of each rank's random streams."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step."""
    max_grad_norm: float | None = 1.0
    """Norm to which gradients are clipped; null does not clip."""
    bf16: bool = False
    """Compute the loss under bfloat16 autocast."""
    deterministic: bool = True
    """Use torch's deterministic algorithms, which an exact resume needs."""
    progress_bar: bool = True
    """Show progress: a bar on a terminal, a line every 30 seconds elsewhere."""


@dataclass(frozen=True, kw_only=True)
class TrajectoryConfig(CheckedBlock):
    """One record per step and rank, by which two runs are compared."""

    dir: str | None = None
    """The directory of the records; null writes none."""
    digests: bool = False
    """Add digests of model, optimizer and random streams to each record."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    accelerator: AcceleratorConfig = field(default_factory=AcceleratorConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    trajectory: TrajectoryConfig = field(default_factory=TrajectoryConfig)

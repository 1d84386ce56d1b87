"""The configuration tree: plain frozen dataclasses, the only schema there is.

Field names, nesting and defaults are the YAML's. Everything the user may write is here; validation of types and unknown
keys is done from these annotations by :mod:`hyper_resume.config.load`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(frozen=True, kw_only=True)
class CheckpointingConfig(CheckedBlock):
    """The ``checkpoint:`` block (specification 5.1). ``save_ckpt`` governs writing only, ``restore_from`` reading only.

    ``async_mode`` says where an asynchronous save is written. ``verify`` is what a load checks before it touches anything: the
    size of every file, or its digest too. ``on_mismatch: error`` refuses what a restore else only warns of (specification
    9.3). Retention: with any of ``keep_last``, ``keep_every`` (steps) and ``keep_best`` set, a step directory that none of
    them keeps is deleted once a newer one is durable; ``keep_best`` ranks them by ``keep_best_metric``. On one of
    ``preemption_signals`` all ranks save at the next step edge and leave with exit code 75; empty turns that off.

    ``model_save_format`` to ``best_metric_key`` are reserved for the Hugging Face export and have no effect yet; setting one
    warns. What follows them goes beyond the specification.
    """

    save_ckpt: bool = True
    checkpoint_dir: str = "./checkpoints"
    save_steps: int = 0
    save_epochs: int = 1
    is_async: bool = False
    is_peft: bool = False
    save_optimizer: bool = True
    save_train_state: bool = True
    save_extra_state_per_rank: bool = True
    restore_from: str | None = None
    restore_optimizer: bool = True
    restore_train_state: bool = True
    model_save_format: str = "safetensors"
    save_consolidated: Literal["none", "final", "every"] = "final"
    staging_dir: str | None = None
    best_metric_key: str = "default"
    async_mode: Literal["thread", "process"] = "thread"
    verify: Literal["digest", "size"] = "digest"
    on_mismatch: Literal["warn", "error"] = "warn"
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int = 0
    keep_best_metric: str = "loss"
    keep_best_mode: Literal["min", "max"] = "min"
    preemption_signals: tuple[str, ...] = ("SIGTERM",)


RESERVED_CHECKPOINT_FIELDS = ("model_save_format", "save_consolidated", "staging_dir", "best_metric_key")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters through the ``peft`` library; ``rank`` 0 means none."""

    rank: int = 0
    alpha: int = 16
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ("q_proj", "v_proj")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which Hugging Face model is built.

    Exactly one of ``preset`` (a tiny model made from a configuration) and ``pretrained_model_name_or_path`` (a local
    folder). ``load_weights`` false builds the folder's configuration with fresh weights. ``overrides`` are set on the
    Hugging Face configuration, for example ``{attention_dropout: 0.1}``.
    """

    preset: str | None = None
    pretrained_model_name_or_path: str | None = None
    load_weights: bool = True
    overrides: dict[str, Any] = field(default_factory=dict)
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text cut into sequences of ``seq_length`` tokens.

    ``paths`` are text files or folders; empty means the running Python's own standard-library sources. ``tokenizer`` is
    ``bytes`` (one token a byte) or a local Hugging Face tokenizer folder. ``max_samples`` keeps the first so many
    sequences. ``batch_size`` counts sequences per data-parallel rank and micro-batch. ``token_noise`` is the share of input
    tokens replaced by a random byte, drawn anew at each reading.

    ``shuffle_method``: ``randperm`` makes the order of an epoch as an array, in time and memory that grow with the number of
    samples; ``feistel`` computes it batch by batch, at no cost for any number. The orders differ, so a run keeps to one.
    """

    paths: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    seq_length: int = 128
    max_samples: int | None = None
    token_noise: float = 0.0
    batch_size: int = 2
    shuffle: bool = True
    shuffle_method: Literal["randperm", "feistel"] = "randperm"
    drop_last: bool = False
    num_workers: int = 0
    use_background_prefetcher: bool = False
    prefetch_batches: int = 2


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """``adamw``, or ``muon``: torch.optim.Muon for the matrices of the hidden layers, AdamW for the rest, chained."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    muon_lr: float = 1e-3
    muon_momentum: float = 0.95


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig:
    """Learning-rate schedule over optimizer steps. ``decay_steps`` None means the planned number of steps."""

    name: Literal["constant", "linear", "cosine", "onecycle"] = "cosine"
    warmup_steps: int = 0
    decay_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class AcceleratorConfig:
    """Devices and parallelism. ``dp_shard_size`` -1 means all ranks that ``tp_size`` leaves."""

    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    tp_size: int = 1
    dp_shard_size: int = -1
    pp_size: int = 1
    timeout_seconds: float = 300.0


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(CheckedBlock):
    """The loop. A step is an optimizer step of ``gradient_accumulation_steps`` micro-batches."""

    num_train_epochs: int = 1
    max_steps: int | None = None
    seed: int = 1234
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = 1.0
    bf16: bool = False
    deterministic: bool = True
    progress_bar: bool = True


@dataclass(frozen=True, kw_only=True)
class TrajectoryConfig(CheckedBlock):
    """One record a step and rank under ``dir`` (None: no records); ``digests`` adds digests of every state bucket."""

    dir: str | None = None
    digests: bool = False


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything one training run is made from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    accelerator: AcceleratorConfig = field(default_factory=AcceleratorConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    trajectory: TrajectoryConfig = field(default_factory=TrajectoryConfig)

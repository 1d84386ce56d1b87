"""``given``: everything a case may configure in a trainer, with defaults and meanings.

The dataclasses below are the reference for case writers. ``model``, ``optimizer`` and ``scheduler`` may be written as one
word, their ``kind``. A key that a case leaves out has the default shown here. This module does not import torch: the adapter
builds the objects (for this library ``adapters/hyper_resume/components.py`` and ``data_components.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from conformance.plain_data import serial

_SHORTHAND = ("model", "optimizer", "scheduler")


@dataclass(frozen=True, kw_only=True)
class ModelGiven:
    """The model: input integer ids (vocabulary of 64), output one number per id.

    kind:
        ``tiny-dropout`` embed_tokens (64 x width), hidden (Linear, tanh), dropout, norm (LayerNorm), lm_head (Linear to 1);
        ``tied``         the same, but the output is a product with the embedding's own matrix (one tensor, two names);
        ``buffers``      and a persistent and a non-persistent buffer, both moved by every forward in training;
        ``running``      and a running mean in a non-persistent buffer, which the output depends on;
        ``branch``       and a branch whose parameters never get a gradient;
        ``extra-state``  and a module with ``get_extra_state`` (a counter of forwards that scales the output);
        ``adapter``      base frozen, only a hand-written low-rank adapter on ``hidden`` is trained;
        ``lora``         base frozen, adapters by the ``peft`` library (slow: imports peft).
    width: columns of the embedding.
    dropout: probability; 0 switches it off (then nothing draws from the torch stream).
    dtype: of all parameters.
    freeze: parameters whose name starts with one of these have ``requires_grad`` off.
    wrap: applied in this order, the last is outermost: ``compile`` puts the whole model into a module that names it
        ``_orig_mod`` (as torch.compile does), ``checkpoint`` wraps ``hidden`` by torch's activation checkpointing,
        ``data-parallel`` is torch's DataParallel, which names the model ``module`` (as DistributedDataParallel does).
    base: added to every frozen weight once the model is built; another number is another base model.
    """

    kind: Literal["tiny-dropout", "tied", "buffers", "running", "branch", "extra-state", "adapter", "lora"] = (
        "tiny-dropout"
    )
    width: int = 8
    dropout: float = 0.25
    dtype: Literal["float32", "bfloat16"] = "float32"
    freeze: tuple[str, ...] = ()
    wrap: tuple[Literal["compile", "checkpoint", "data-parallel"], ...] = ()
    base: float = 0.0


@dataclass(frozen=True, kw_only=True)
class OptimizerGiven:
    """The optimizer.

    kind:
        ``adamw``, ``sgd`` (momentum 0.9), ``rmsprop``, ``adagrad``: torch's;
        ``lowbit``   AdamW whose moments are bfloat16 whatever the parameters are;
        ``decay``    one AdamW with two groups, matrices decay and vectors do not;
        ``chain``    ChainedOptimizer of two AdamW, matrices and vectors;
        ``muon``     ChainedOptimizer of torch.optim.Muon for the hidden matrices and AdamW for the rest;
        ``two``      a LIST of two AdamW, matrices and vectors (needs ``trainer: duck``);
        ``wrapper``  an object with its AdamW as ``.optimizer``;
        ``opaque``   a wrapper with ``step``, ``zero_grad`` and ``param_groups`` only;
        ``sam``      a sharpness-aware optimizer that holds an AdamW;
        ``lookahead`` a plain wrapper with slow weights and a count, around an AdamW;
        ``container`` a subclass of Optimizer with a dictionary of two AdamW, matrices and vectors.
    lr, weight_decay: of every group, unless the kind says otherwise (``chain``/``two``: the second has twice the lr).
    beta2: of ``adamw``.
    groups: ``one``; ``reversed`` the parameters in reverse order; ``empty`` with an empty group after the full one;
        ``split`` two groups of AdamW, the embedding and the rest; ``split-reversed`` those two in the other order;
        ``outside`` with two parameters of ``trainer.outside``, which scale the loss, after the model's, ``outside-reversed``
        those two in the other order. For ``adamw``, ``sgd``, ``rmsprop``, ``adagrad``, ``lowbit``.
    """

    kind: Literal[
        "adamw",
        "sgd",
        "rmsprop",
        "adagrad",
        "lowbit",
        "decay",
        "chain",
        "muon",
        "two",
        "wrapper",
        "opaque",
        "sam",
        "lookahead",
        "container",
    ] = "adamw"
    lr: float = 0.01
    weight_decay: float = 0.1
    beta2: float = 0.999
    groups: Literal["one", "reversed", "empty", "split", "split-reversed", "outside", "outside-reversed"] = "one"


@dataclass(frozen=True, kw_only=True)
class SchedulerGiven:
    """The lr schedule, over optimizer steps; one for each plain optimizer.

    kind: ``none``, ``constant``, ``linear`` (LinearLR down from 1 to 0.1), ``warmup`` (LinearLR up from 0.1), ``lambda``
        (1 / (1 + step)), ``sequential`` (SequentialLR of warm-up and cosine), ``onecycle`` (moves betas too), ``cosine``,
        ``multistep`` (halved every ``warmup`` steps), ``exponential``, ``two`` (a LIST: linear and exponential, both
        on the first optimizer).
    warmup: steps of a warm-up, or between two milestones.
    total: the horizon, whatever the leg's last step is.
    """

    kind: Literal[
        "none",
        "constant",
        "linear",
        "warmup",
        "lambda",
        "sequential",
        "onecycle",
        "cosine",
        "multistep",
        "exponential",
        "two",
    ] = "linear"
    warmup: int = 3
    total: int = 60


@dataclass(frozen=True, kw_only=True)
class DataGiven:
    """The data: sample i is the number i. The default makes 5 batches an epoch.

    loader: ``own`` this library's DataLoader; ``foreign`` a list-like loader without ``state_dict``, in a fixed order;
        ``foreign-stateful`` another library's loader with ``state_dict`` and ``load_state_dict`` (position within the epoch);
        ``foreign-drawing`` the same, which draws from torch's stream whenever its iterator is made;
        ``unsized`` an endless loader without length and state;
        ``torch`` torch's DataLoader, ``torchdata`` its StatefulDataLoader, ``nodes`` a torchdata.nodes.Loader, ``iterable``
        torch's DataLoader over iterable data, each of whose samples carries a part of what was drawn for the ones before it,
        ``accelerate`` torch's DataLoader prepared by accelerate: each in a ResumableLoader; ``bare-torch`` torch's DataLoader
        by itself.
    sampler: of a ``torch``, ``torchdata`` or ``nodes`` loader. ``none`` leaves the order to ``shuffle``; ``generator`` draws
        from a generator of its own; ``weighted`` draws with replacement; ``distributed`` gives one of two shares, in an order
        that depends on the epoch; ``own`` is a user's sampler with a private generator.
    workers: processes that read. persistent: they live on from epoch to epoch. worker_init: each of them begins with a
        function that seeds Python's stream with the worker's number. All three of a ``torch``, ``torchdata``, ``iterable`` or
        ``accelerate`` loader; ``workers`` of an ``own`` one, too.
    prefetch: batches that a background thread reads ahead, 0 for no thread.
    dp_world_size, dp_rank: given to the DataLoader as plain arguments; no process group is needed.
    shuffle_method: the order is drawn as a whole, or computed per position.
    fingerprint: the dataset's own, None for none.
    first_id: sample i is the number first_id + i (another dataset of the same length).
    """

    loader: Literal[
        "own",
        "foreign",
        "foreign-stateful",
        "foreign-drawing",
        "unsized",
        "torch",
        "torchdata",
        "nodes",
        "iterable",
        "accelerate",
        "bare-torch",
    ] = "own"
    sampler: Literal["none", "generator", "weighted", "distributed", "own"] = "none"
    samples: int = 20
    batch_size: int = 4
    shuffle: bool = True
    shuffle_method: Literal["randperm", "feistel"] = "randperm"
    drop_last: bool = False
    workers: int = 0
    persistent: bool = False
    worker_init: bool = False
    prefetch: int = 0
    dp_world_size: int = 1
    dp_rank: int = 0
    fingerprint: str | None = None
    first_id: int = 0


@dataclass(frozen=True, kw_only=True)
class CheckpointGiven:
    """The ``checkpoint:`` block. None means that the case does not set the field, so the trainer's own default holds.

    ``manager: plain-file`` is a backend of the harness, which saves and loads with ``torch.save`` and does nothing else;
    ``plain-file-damaging`` the same, which returns another value for one weight.
    ``restore_from`` is set in the script (a leg's ``restore_from``), ``checkpoint_dir`` by the runner (see ``folder``).
    """

    save_ckpt: bool | None = None
    save_steps: int | None = None
    save_epochs: int | None = None
    is_async: bool | None = None
    is_peft: bool | None = None
    save_optimizer: bool | None = None
    save_train_state: bool | None = None
    save_extra_state_per_rank: bool | None = None
    restore_optimizer: bool | None = None
    restore_train_state: bool | None = None
    async_mode: Literal["thread", "process"] | None = None
    verify: Literal["digest", "size"] | None = None
    on_mismatch: Literal["warn", "error"] | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    keep_best_metric: str | None = None
    keep_best_mode: Literal["min", "max"] | None = None
    preemption_signals: tuple[str, ...] | None = None
    model_save_format: str | None = None
    save_consolidated: str | None = None
    staging_dir: str | None = None
    best_metric_key: str | None = None
    check_coverage: bool | None = None
    not_saved: tuple[str, ...] | None = None
    override_on_restore: tuple[str, ...] | None = None
    manager: str | None = None
    on_other_run: Literal["warn", "error"] | None = None
    initial_restore_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class Given:
    """Everything that a leg is built from.

    trainer: ``base`` the library's BaseTrainer; ``duck`` a plain namespace and a hand-written loop that drives the
        callback (specification 5.2).
    config: a configuration file of the trainer's own command line, relative to the checkout. Then the leg runs the trainer's
        own program on it, and everything else here but ``overrides``, ``checkpoint``, ``folder``, ``device`` and
        ``world_size`` has no meaning.
    overrides: further arguments of that command line (``--optimizer.name=muon``); a leg's are appended to the case's.
    device: where it trains. world_size: processes (gloo on cpu), joined by a file in the leg's folder.
    parallel: with world_size > 1: ``fsdp`` torch's FSDP2 over all ranks; ``tp2-fsdp`` ``hidden`` split in two by its
        columns, FSDP2 over the ranks that hold the same half (the two halves of a pair read the same data and draw the same
        numbers); ``fsdp-tp2`` the same with the mesh's dimensions swapped, so that ranks 0 and 2 are a pair; ``replicated``
        the whole model on each rank, gradients averaged. The data's dp_rank and dp_world_size are then the process group's
        (with pairs the pair's).
    seed: of model, data order and streams (rank r trains with streams of seed + r).
    noise: what draws from Python's, NumPy's and torch's streams in addition to dropout: ``loss`` scales the loss by draws from
        Python and NumPy; ``dataset`` adds to each sample draws from all three while it is read.
    accumulation: micro-batches per optimizer step. clip: maximal gradient norm, None for no clipping.
    epochs: planned epochs. None (only for legs with ``until_step``): as many as that step needs.
    folder: name of the checkpoint directory inside the case's folder; may hold spaces, any letters and a trailing slash.
    schedule_stepped: by a hand-written loop (``trainer: duck``), ``before-save`` or only ``after-save`` (``on_step_end``).
    draws_at: all three streams are drawn from between ``on_train_begin`` and the first batch, at each start (``begin``); or by
        a hand-written loop after each ``on_step_end`` (``after-save``).
    handed_state: a hand-written loop hands its hooks the state that it counts in, while ``trainer.state`` stays at step 0.
    save_at_step_zero: the callback's ``on_step_end`` is called once before the first step, so step 0 is saved where
        ``save_steps`` is set.
    hold_saves: a save of step N in the background becomes visible only when step N + hold_saves is trained or training is
        over, and a moment after that; the leg reports how each went (check ``saves_in_background``). 0: no delay.
        Base trainer only.
    second_writer: while the leg runs, another process holds the lock of the checkpoint directory (``.writer.lock``), like a
        second run that saves there.
    tell_operations: the leg reports every change on disk that a save makes, numbered from 1 per save and rank.
    extras: further stateful objects that the trainer holds: ``ema`` (average of the weights, with its own update
        count), ``scaler`` (multiplies the loss by a scale that it doubles every 3 steps), ``counter`` (a stateful callback
        that counts steps, base trainer only), ``generator`` (a torch.Generator that the loss draws from), ``forgetful`` (a
        count of steps that its own ``load_state_dict`` does not take back).
    hidden: state that the trainer reaches and nothing saves, under ``trainer.hidden``; the loss depends on it. An average of
        the weights in a ``list``, a ``dict``, a ``namespace`` within a namespace, an attribute of a ``callback`` (base trainer
        only), or a function's ``closure``; a running mean in an ``array``; a private generator (``generator`` torch's,
        ``python-generator``, ``numpy-generator``); a ``counter`` that an object with a ``state_dict`` leaves out of it;
        ``watched``: a list again, which the loss does not depend on; ``drawing``: an object whose ``state_dict`` draws from
        all three streams; ``unsaveable``: an object whose ``state_dict`` holds a function.
    """

    trainer: Literal["base", "duck"] = "base"
    config: str | None = None
    overrides: tuple[str, ...] = ()
    device: Literal["cpu", "cuda", "npu"] = "cpu"
    world_size: int = 1
    parallel: Literal["fsdp", "replicated", "tp2-fsdp", "fsdp-tp2"] = "fsdp"
    seed: int = 1234
    model: ModelGiven = field(default_factory=ModelGiven)
    optimizer: OptimizerGiven = field(default_factory=OptimizerGiven)
    scheduler: SchedulerGiven = field(default_factory=SchedulerGiven)
    data: DataGiven = field(default_factory=DataGiven)
    checkpoint: CheckpointGiven = field(default_factory=CheckpointGiven)
    noise: tuple[Literal["loss", "dataset"], ...] = ("loss",)
    accumulation: int = 1
    clip: float | None = 1.0
    epochs: int | None = None
    schedule_stepped: Literal["before-save", "after-save"] = "before-save"
    draws_at: Literal["begin", "after-save"] | None = None
    handed_state: bool = False
    folder: str = "checkpoints"
    save_at_step_zero: bool = False
    hold_saves: int = 0
    second_writer: bool = False
    tell_operations: bool = False
    extras: tuple[Literal["ema", "scaler", "counter", "generator", "forgetful"], ...] = ()
    hidden: (
        Literal[
            "list",
            "dict",
            "namespace",
            "callback",
            "closure",
            "array",
            "generator",
            "python-generator",
            "numpy-generator",
            "counter",
            "watched",
            "drawing",
            "unsaveable",
        ]
        | None
    ) = None


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with a leg's ``overrides``: mappings are merged key by key, a new ``kind`` starts from its defaults.

    Command-line arguments (the key ``overrides``) are appended.
    """
    result = {key: copy.deepcopy(item) for key, item in _long_form(base).items()}
    for key, item in _long_form(overrides).items():
        known = result.get(key)
        if isinstance(item, Mapping) and isinstance(known, Mapping) and not ("kind" in item and key in _SHORTHAND):
            result[key] = {**known, **item}
        elif key == "overrides" and isinstance(item, list) and isinstance(known, list):
            result[key] = [*known, *item]
        else:
            result[key] = copy.deepcopy(item)
    return result


def complete(raw: Mapping[str, Any], where: str) -> Given:
    """Return ``raw`` with every default filled in.

    Raises:
        SerialError: an unknown key or word, or a value of the wrong type.
    """
    return serial.build(Given, _long_form(raw), where, defaults=True)


def _long_form(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: {"kind": item} if key in _SHORTHAND and isinstance(item, str) else item for key, item in raw.items()}

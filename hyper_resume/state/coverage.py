"""State that moves between two saves and is not in the payload, found by walking everything that the trainer reaches.

``exact`` says that what was collected came back. Whether everything that moves was collected is seen here: every reachable
tensor, random generator, array and counter is digested at each save unless the payload holds it, and what differs from the
save before is *uncovered*. Nothing is called on the way that is not plain data access, so the walk has no side effects.

What is not state must not be reported: a tensor that autograd made (an activation), gradients, the buffers of FSDP and
compiled code, and what only appeared (a cache that is filled once). What appeared is reported when it moves again.
"""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

MOST_OBJECTS = 500_000
"""A walk ends after so many objects; what lies behind is not seen, and :attr:`Snapshot.is_whole` says so."""
_MOST_ITEMS = 4_096  # of one container: a data set is no state
_MOST_DEPTH = 60

_ATOMS = (str, bytes, bytearray, complex, type(None), type, types.ModuleType, types.BuiltinFunctionType, torch.dtype,
          torch.device, torch.Size, torch.layout)  # fmt: skip
# Their own buffers follow from what is saved, or are no state of the training.
_SKIPPED = ("torch._C", "torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx", "torch.distributed.fsdp",
            "torch.distributed.tensor", "torch.distributed.device_mesh", "torch.distributed.distributed_c10d",
            "torch.utils.data._utils", "torch.multiprocessing", "torch.autograd", "torch.jit", "multiprocessing",
            "logging", "threading", "_thread", "concurrent", "weakref", "queue", "pydantic", "tqdm", "asyncio", "inspect",
            "pydantic_core", "importlib", "re", "pathlib", "ctypes", "mmap", "io", "_io", "tokenizers",
            "hyper_resume.checkpoint", "hyper_resume.config", "hyper_resume.trainer.callbacks", "hyper_resume.data.prefetch",
            "hyper_resume.trainer.reading")  # fmt: skip
_SKIPPED_PACKAGES = tuple(f"{name}." for name in _SKIPPED)
_OWN_LOADER = "hyper_resume.data"
# Objects of these packages count for themselves in ways that are no state; counters are looked for in the user's own objects.
_LIBRARIES = frozenset(
    {"torch", "torchvision", "torchaudio", "transformers", "peft", "accelerate", "datasets", "numpy", "pandas",
     "huggingface_hub", "safetensors", "hyper_resume", "torchdata", "lightning", "pytorch_lightning"}
)  # fmt: skip
# What a trainer counts for itself: saved as progress, derived from it, or planned anew by each run.
_PROGRESS = frozenset(
    {"global_step", "epoch", "epoch_ended", "batch_index", "sample_ids", "start_epoch", "start_step", "train_steps",
     "num_train_epochs"}
)  # fmt: skip
_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)


@dataclass
class Snapshot:
    """What was seen at one moment: dotted path -> digest, of leaves that the payload does not hold.

    ``is_whole`` is False when the walk ended at :data:`MOST_OBJECTS`.
    """

    digests: dict[str, bytes] = field(default_factory=dict)
    is_whole: bool = True


class Coverage:
    """Remembers what was not in the payload of the last save, and names what moved since."""

    def __init__(self, accepted: Iterable[str] = ()) -> None:
        """Have seen nothing.

        Args:
            accepted: dotted paths, or patterns of them (``trainer.timer.*``), that the user declares to be no state.
        """
        self._accepted = tuple(accepted)
        self._last: Snapshot | None = None
        self._uncovered: set[str] = set()

    def observe(self, roots: Mapping[str, Any], payload: Payload) -> tuple[str, ...]:
        """Walk ``roots`` and compare with the last observation.

        Args:
            roots: name -> object; the names begin the paths.
            payload: what is saved at this moment.

        Returns:
            the sorted paths of all that moved between two observations of this run and is not in the payload.
        """
        now = survey(roots, payload)
        if self._last is not None:
            before = self._last.digests
            self._uncovered |= {path for path, found in now.digests.items() if path in before and before[path] != found}
        self._last = now
        self._uncovered = {path for path in self._uncovered if not self._is_accepted(path)}
        return tuple(sorted(self._uncovered))

    def _is_accepted(self, path: str) -> bool:
        return any(path == pattern or fnmatchcase(path, pattern) for pattern in self._accepted)


class Payload:
    """What a save holds, as the walk asks for it: by memory, by content, and for counters by the object that saves them."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._storages: set[tuple[torch.device, int]] = set()
        self._contents: set[bytes] = set()
        self._numbers: dict[int, set[int]] = {}

    def add_live(self, state: Any) -> None:
        """Take a nested state that hands out the live tensors."""
        for value in _leaves_of(state):
            if isinstance(value, torch.Tensor) and (local := _local(value)).device.type != "meta" and local.numel():
                self._storages.add(_storage(local))

    def add_state_of(self, owner: Any, state: Any) -> None:
        """Take what ``owner`` saves of itself, whether live tensors, copies of them, or numbers that it counts."""
        self.add_live(state)
        numbers = self._numbers.setdefault(id(owner), set())
        for value in _leaves_of(state):
            if isinstance(value, torch.Tensor):
                self._contents.add(_digest_tensor(value))
            elif isinstance(value, np.ndarray) and value.dtype != object:
                self._contents.add(_digest_array(value))
            elif type(value) is int:
                numbers.add(value)

    def holds_tensor(self, tensor: torch.Tensor) -> bool:
        """True for a tensor whose memory is in the payload."""
        return _storage(tensor) in self._storages

    def holds_content(self, content: bytes) -> bool:
        """True where the payload holds a copy of what has this digest."""
        return content in self._contents

    def holds_number(self, owners: tuple[int, ...], number: int) -> bool:
        """True where one of the objects that hold the counter saves a number of this value."""
        return any(number in self._numbers.get(owner, ()) for owner in owners)


def survey(roots: Mapping[str, Any], payload: Payload) -> Snapshot:
    """Return the digest of every leaf below ``roots`` that ``payload`` does not hold."""
    walk = _Walk(payload)
    for name, root in roots.items():
        walk.start(name, root)
    return walk.run()


class _Walk:
    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._snapshot = Snapshot()
        self._seen: set[int] = set()
        # Keeps what was made on the way alive, so that no id is used twice.
        self._kept: list[Any] = []
        # First in, first out: what is reached in several ways gets the shortest path.
        self._queue: deque[tuple[str, Any, tuple[int, ...]]] = deque()

    def start(self, name: str, root: Any) -> None:
        self._queue.append((name, root, ()))

    def run(self) -> Snapshot:
        while self._queue:
            if len(self._seen) >= MOST_OBJECTS:
                self._snapshot.is_whole = False
                break
            path, value, owners = self._queue.popleft()
            if id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._kept.append(value)
            leaf = _leaf_digest(value)
            if leaf is None:
                self._open(path, value, owners)
            elif not isinstance(value, torch.Tensor) or not self._is_saved(value):
                self._note(path, leaf(value))
            if isinstance(value, torch.Tensor) and value.__dict__:
                self._open_attributes(path, value, value.__dict__, owners)
        return self._snapshot

    def _is_saved(self, tensor: torch.Tensor) -> bool:
        local = _local(tensor)
        return not local.numel() or local.device.type == "meta" or self._payload.holds_tensor(local)

    def _note(self, path: str, content: bytes) -> None:
        if not self._payload.holds_content(content):
            self._snapshot.digests[path] = content

    # ---- what lies inside -------------------------------------------------------------------------------------------

    def _open(self, path: str, value: Any, owners: tuple[int, ...]) -> None:
        if isinstance(value, (*_ATOMS, int, float)) or path.count(".") > _MOST_DEPTH:
            return
        if isinstance(value, Mapping):
            self._open_mapping(path, value, owners)
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            for place, item in zip(range(_MOST_ITEMS), value, strict=False):
                self._push(f"{path}.{place}", item, owners)
        elif isinstance(value, types.FunctionType):
            self._open_function(path, value, owners)
        elif isinstance(value, types.MethodType):
            self._push(f"{path}.__self__", value.__self__, owners)
        elif isinstance(value, partial):
            self._push(f"{path}.func", value.func, owners)
            self._push(f"{path}.args", value.args, owners)
            self._push(f"{path}.keywords", value.keywords, owners)
        elif isinstance(value, nn.Module):
            self._open_module(path, value, (*owners, id(value)))
        elif (type(value).__module__ or "").startswith(_OWN_LOADER):
            # Its position is saved, and the order follows from it.
            self._push(f"{path}.dataset", getattr(value, "dataset", None), owners)
        elif not is_skipped(type(value)):
            self._open_object(path, value, (*owners, id(value)))

    def _open_mapping(self, path: str, value: Mapping[Any, Any], owners: tuple[int, ...]) -> None:
        if not isinstance(value, dict):
            return  # a mapping of another kind may compute what it gives
        for place, (key, item) in zip(range(_MOST_ITEMS), list(value.items()), strict=False):
            name = key if isinstance(key, (str, int)) else place
            self._push(f"{path}.{name}", item, owners)

    def _open_function(self, path: str, value: types.FunctionType, owners: tuple[int, ...]) -> None:
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            try:
                self._push(f"{path}.{name}", cell.cell_contents, owners)
            except ValueError:
                continue  # not filled yet

    def _open_module(self, path: str, module: nn.Module, owners: tuple[int, ...]) -> None:
        for name, value in module.__dict__.items():
            if name in ("_parameters", "_buffers", "_modules"):
                for inner, item in value.items():
                    self._push(f"{path}.{inner}", item, owners)
            elif value and not isinstance(value, _ATOMS):
                self._push(f"{path}.{name}", value, owners)
        self._count(path, module, module.__dict__, owners)

    def _open_object(self, path: str, value: Any, owners: tuple[int, ...]) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._open_attributes(path, value, attributes, owners)
        for name, item in _slots(value):
            self._push(f"{path}.{name}", item, owners)

    def _open_attributes(self, path: str, value: Any, attributes: dict[str, Any], owners: tuple[int, ...]) -> None:
        for name, item in list(attributes.items()):
            self._push(f"{path}.{name}", item, owners)
        self._count(path, value, attributes, owners)

    def _count(self, path: str, value: Any, attributes: Mapping[str, Any], owners: tuple[int, ...]) -> None:
        """Note the whole numbers that an object of the user's own counts."""
        if type(value).__module__.partition(".")[0] in _LIBRARIES | sys.stdlib_module_names - {"types"}:
            return
        for name, number in attributes.items():
            if type(number) is int and name not in _PROGRESS and not self._payload.holds_number(owners, number):
                self._snapshot.digests[f"{path}.{name}"] = str(number).encode()

    def _push(self, path: str, value: Any, owners: tuple[int, ...]) -> None:
        if value is not None and type(value) not in (int, float, bool, str):
            self._queue.append((path, value, owners))


def is_skipped(kind: type) -> bool:
    """True for a class whose objects hold no state of the training."""
    module = kind.__module__ or ""
    return module in _SKIPPED or module.startswith(_SKIPPED_PACKAGES)


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield name -> value of the instance's own attributes and filled slots; nothing is computed."""
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        yield from list(own.items())
    yield from _slots(value)


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()) or ():
            member = kind.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(value)
                except AttributeError:
                    continue


# ---- leaves ---------------------------------------------------------------------------------------------------------


def _leaf_digest(value: Any) -> Callable[[Any], bytes] | None:
    """Return what digests ``value``; None for what is opened instead. An activation is a leaf that never moves."""
    if isinstance(value, torch.Tensor):
        return _digest_activation if value.grad_fn is not None else _digest_tensor
    if isinstance(value, torch.Generator):
        return _digest_generator
    if isinstance(value, random.Random):
        return _digest_random
    if isinstance(value, _GENERATORS):
        return _digest_numpy_generator
    if isinstance(value, np.ndarray) and value.dtype != object:
        return _digest_array
    return None


def _digest_activation(_: torch.Tensor) -> bytes:
    return b""


def _digest_tensor(tensor: torch.Tensor) -> bytes:
    local = _local(tensor).detach()
    if local.device.type == "meta" or not local.numel() or local.layout != torch.strided:
        return b""
    raw = local.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return xxhash.xxh3_128_digest(raw.data) + f"{tuple(local.shape)}{local.dtype}".encode()


def _digest_generator(generator: torch.Generator) -> bytes:
    return _digest_tensor(generator.get_state())


def _digest_random(generator: random.Random) -> bytes:
    return xxhash.xxh3_128_digest(repr(generator.getstate()).encode())


def _digest_numpy_generator(generator: Any) -> bytes:
    if isinstance(generator, np.random.Generator):
        generator = generator.bit_generator
    state = generator.get_state() if isinstance(generator, np.random.RandomState) else generator.state
    return xxhash.xxh3_128_digest(repr(_listed(state)).encode())


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return tuple(map(_listed, value)) if isinstance(value, tuple) else value


def _digest_array(array: np.ndarray[Any, Any]) -> bytes:
    return xxhash.xxh3_128_digest(np.ascontiguousarray(array).tobytes())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _leaves_of(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        for item in state.values():
            yield from _leaves_of(item)
    elif isinstance(state, (list, tuple)):
        for item in state:
            yield from _leaves_of(item)
    else:
        yield state

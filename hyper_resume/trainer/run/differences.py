"""What differs between the run that was saved and the run that resumes, and which of the two holds from here on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hyper_resume.state.names import first_names

Path = tuple[str, ...]
Holder = Literal["saved", "now"]
ABSENT = "absent"
FROZEN = "model.frozen"
BUCKETS = ("model", "optimizer", "lr_scheduler", "train_dataloader", "progress")
_HOLDS = {"saved": "the checkpoint's holds", "now": "this run's holds"}
_MAX_SHOWN = 120
# Fields of the configuration that change the bits of a step and that no live object has; the others of its blocks do not.
_LOOP = frozenset({"training.gradient_accumulation_steps", "training.max_grad_norm"})
# These blocks are described by the objects that are built from them.
_BUILT_BLOCKS = frozenset({"model", "data", "optimizer", "lr_scheduler", "trajectory"})
# A resume sets them, or they have been compared as `precision`.
_NOT_COMPARED = frozenset(
    {
        *("checkpoint.restore_from", "checkpoint.checkpoint_dir", "checkpoint.override_on_restore"),
        *("training.bf16", "training.deterministic"),
    }
)
_LOADER = frozenset({"num_workers", "class", "dataset.class"})
_ORDER = frozenset({"batches", "batch_size", "drop_last", "dataset.samples", "dataset.fingerprint"})


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One difference.

    Attributes:
        name: what differs, as in ``checkpoint.override_on_restore``.
        saved: the value of the run that was saved.
        now: the value of this run.
        bucket: the bucket that is not the same because of it; None where no bits depend on it.
        paths: where the values stand in the description; several where all groups or schedulers differ alike.
    """

    name: str
    saved: Any
    now: Any
    bucket: str | None
    paths: tuple[Path, ...]

    def text(self, holder: Holder) -> str:
        """Return ``name: saved -> now`` and which of the two holds."""
        return f"{self.change()} ({_HOLDS[holder]})"

    def change(self) -> str:
        """Return ``name: saved -> now``."""
        if self.name == FROZEN:
            return f"{FROZEN}: {self.saved} -> {self.now}"
        return f"{self.name}: {_shown(self.saved)} -> {_shown(self.now)}"


def find_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return the differences of two descriptions (:func:`~hyper_resume.trainer.run.description.describe_run`).

    ``saved`` may come from any version of this library: what only one of the two describes is no difference.
    """
    leaves = dict(_leaves(saved)), dict(_leaves(now))
    found: dict[tuple[str, str, str], Difference] = {}
    for path in [*leaves[1], *(path for path in leaves[0] if path not in leaves[1])]:
        values = [side.get(path, ABSENT) for side in leaves]
        rule = _rule(path, saved, now)
        if rule is None or values[0] == values[1] or (ABSENT in values and not _is_absent_module(path, *leaves)):
            continue
        name, bucket = rule
        key = (name, repr(values[0]), repr(values[1]))
        paths = (*found[key].paths, path) if key in found else (path,)
        found[key] = Difference(name=name, saved=values[0], now=values[1], bucket=bucket, paths=paths)
    return [*_once(found.values()), *_frozen(saved, now)]


def concerns_weights(one: Difference, now: Mapping[str, Any]) -> bool:
    """Return whether the same weights are another model because of a difference; a dropout only changes their training."""
    modules = now["model"].get("modules") or {}
    classes = [modules.get(path[2], {}).get("class") for path in one.paths if path[:2] == ("model", "modules")]
    is_dropout = "drop" in one.name.rpartition(".")[2] or any(
        "Dropout" in str(text) for text in (*classes, one.saved, one.now)
    )
    return one.bucket == "model" and one.name.startswith("model.") and not is_dropout


def known_names(now: Mapping[str, Any]) -> list[str]:
    """Return every name that ``checkpoint.override_on_restore`` may hold: values, and what they are part of."""
    rules = [rule for path, _ in _leaves(now) if (rule := _rule(path, now, now)) is not None and rule[1] is not None]
    names = [FROZEN, *BUCKETS[:-1], "precision", *(name for name, _ in rules)]
    parts = [".".join(name.split(".")[:count]) for name in names for count in range(1, name.count(".") + 2)]
    return sorted(set(parts))


def with_values(description: Mapping[str, Any], differences: list[Difference]) -> dict[str, Any]:
    """Return a description with the saved values of ``differences``."""
    result = dict(description)
    for one in differences:
        for path in one.paths:
            _put(result, path, one.saved)
    return result


def _put(node: dict[str, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        node[key] = dict(node.get(key) or {})
        node = node[key]
    node[path[-1]] = value


def _leaves(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if path or key != "frozen":
                yield from _leaves(value, (*path, str(key)))
    else:
        yield path, node


def _rule(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """Return the name of a value and the bucket whose bits depend on it; None for a value that is not compared."""
    rule = _RULES.get(path[0])
    return None if rule is None else rule(path, saved, now)


def _configuration(path: Path, *_: Any) -> tuple[str, str | None] | None:
    name = ".".join(path[1:])
    if (len(path) > 1 and path[1] in _BUILT_BLOCKS) or name in _NOT_COMPARED:
        return None
    return name, "progress" if name in _LOOP else None


def _model(path: Path, *_: Any) -> tuple[str, str | None]:
    parts = path[2:] if path[1] == "modules" else path[1:]
    return ".".join(("model", *(part for part in parts if part))), "model"


def _numbered(path: Path, *_: Any) -> tuple[str, str | None]:
    """The number of an optimizer or scheduler is no part of its name, so all that differ alike are one difference."""
    rest = path[4:] if path[2:3] == ("groups",) else path[2:]
    return ".".join((path[0], *rest)), path[0]


def _data(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str | None] | None:
    name = ".".join(path[1:])
    # A loader with an order compares these itself, when it takes the position; so does any loader its number of workers.
    has_order = "order" in (now.get("train_dataloader") or {})
    if name in _LOADER or path[1] == "order" or (has_order and name in _ORDER):
        return None
    return ".".join(path), "train_dataloader"


def _threads(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str | None]:
    # A sum on the CPU is divided among them.
    return "threads", "model" if now["precision"]["device"] == "cpu" else None


_RULES: Mapping[str, Callable[..., tuple[str, str | None] | None]] = {
    "configuration": _configuration,
    "model": _model,
    "optimizer": _numbered,
    "lr_scheduler": _numbered,
    "train_dataloader": _data,
    "precision": lambda path, *_: (".".join(path), "model"),
    "versions": lambda path, *_: (".".join(path), "model" if path[1] == "torch" else None),
    "threads": _threads,
}


def _is_absent_module(path: Path, saved: Mapping[Path, Any], now: Mapping[Path, Any]) -> bool:
    """Whether the path is the class of a module that only one side has: a dropout that was put in or left out."""
    is_module = path[:2] == ("model", "modules") and path[-1] == "class"
    return is_module and any(other[:2] == path[:2] for other in saved) and any(other[:2] == path[:2] for other in now)


def _once(differences: Any) -> list[Difference]:
    """Leave out a model's attribute that repeats a value of its configuration, and code that another Python compiled."""
    found = list(differences)
    seen: set[tuple[str, str, str]] = set()
    python = any(one.name == "versions.python" and _minor(one.saved) != _minor(one.now) for one in found)
    result = []
    for one in sorted(found, key=lambda one: ".config." not in one.name):
        key = (one.name.rpartition(".")[2], repr(one.saved), repr(one.now))
        is_repeated = one.bucket == "model" and key in seen and ".config." not in one.name
        seen.add(key)
        if not is_repeated and not (python and one.name.endswith(".code")):
            result.append(one)
    return result


def _minor(text: Any) -> str:
    return str(text).rpartition(".")[0]


def _frozen(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Compare the digests of what no save holds; of a sharded tensor, the parts that both ranks have."""
    before, after = saved.get("frozen"), now.get("frozen")
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return []
    other = sorted(name for name in before if name in after and before[name] != after[name])
    if not other:
        return []
    count = f"{len(other)} of {len(after)} parameters and buffers that are not saved have other values"
    texts = {"saved": _digest_of(before, other), "now": f"{_digest_of(after, other)}; {count}: {first_names(other)}"}
    return [Difference(name=FROZEN, bucket="model", paths=(), **texts)]


def _digest_of(digests: Mapping[str, Any], names: list[str]) -> str:
    """Return the digest of the first that differs, for a reader who compares it with another run."""
    return str(digests[names[0]])[:_MAX_SHOWN]


def _shown(value: Any) -> str:
    text = value if value == ABSENT else repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."

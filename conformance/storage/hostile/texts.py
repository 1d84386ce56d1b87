"""Generates hostile manifests and configurations: trees with other values, and texts that are no tree."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

from conformance.storage.hostile.material import MARKER, Material, sign
from conformance.storage.hostile.pickles import PATHS, damaged

TEXTS = (
    "",
    "\0",
    "\ud800",
    "‮abc",
    "a" * 100_000,
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "{{ 7*7 }}",
    "$(touch x)",
    "%s%n",
    *PATHS,
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    -0.0,
    2**62 + 1,
    2**63,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]],
    {"a": {"b": {}}},
    list(range(2000)),
    {str(number): number for number in range(2000)},
)


def _places(tree: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything in a tree, the tree itself left out."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = []
    for key, value in items:
        found += [(*above, key), *_places(value, (*above, key))]
    return found


def mutated_tree(random: Random, tree: Any) -> Any:
    """``tree``, with one to three changes: values changed, left out or added."""
    for _ in range(random.choice((1, 1, 2, 3))):
        places = _places(tree)
        if not places:
            return tree
        *above, key = random.choice(places)
        holder = tree
        for part in above:
            holder = holder[part]
        # A copy, because a later change of the value must not affect the next case.
        value = copy.deepcopy(random.choice((*VALUES, *TEXTS)))
        what = random.randrange(5)
        if what <= 1:
            holder[key] = value
        elif what == 2:
            del holder[key]
        elif isinstance(holder, dict):
            holder[random.choice((*TEXTS, "unknown", "step"))] = holder.pop(key) if what == 3 else value
        else:
            holder.insert(0, value)
    return tree


def manifest_tree(random: Random, material: Material) -> bytes:
    """Values of other types and sizes, keys left out or added; with the digest of the changed content."""
    tree = mutated_tree(random, json.loads(material.manifest))
    return sign(tree) if random.random() < 0.8 else json.dumps(tree).encode()


def manifest_names(random: Random, material: Material) -> bytes:
    """File names that lead elsewhere, or contain code for a browser or a shell."""
    tree = json.loads(material.manifest)
    where = random.choice(("files", "buckets", "metrics", "versions"))
    holder = tree[where]
    entry = random.choice(list(holder.values()))
    holder[random.choice(TEXTS)] = entry
    return sign(tree)


def manifest_text(random: Random, material: Material) -> bytes:
    """Invalid trees: duplicate keys, endless nesting, numbers that JSON does not have."""
    text = material.manifest.decode()
    depth = random.choice((100, 10_000, 200_000))
    choices: list[Callable[[], str]] = [
        lambda: "[" * depth,
        lambda: "[" * depth + "]" * depth,
        lambda: '{"a":' * depth + "1" + "}" * depth,
        lambda: text.replace('"metrics"', '"metrics": ' + "[" * depth + "]" * depth + ', "metrics2"'),
        lambda: text.replace('"step": 10', '"step": 10, "step": 20'),
        lambda: text.replace('"step": 10', '"step": ' + "9" * random.choice((20, 4000, 100_000))),
        lambda: text.replace("2.5", random.choice(("NaN", "Infinity", "-Infinity", "1e999", "01", "0x10", ".5"))),
        lambda: "\ufeff" + text,
        lambda: text.encode("utf-16").decode("latin1"),
        lambda: text + text,
        lambda: text.replace('"torch"', '"\\ud800"'),
        lambda: text.replace(" ", random.choice(("\0", "\u00a0", "/* */"))),
        lambda: random.choice(("", "null", "[]", "{}", '"x"', "1")),
    ]
    return random.choice(choices)().encode("utf-8", "surrogatepass")


def manifest_bytes(random: Random, material: Material) -> bytes:
    """Random damage."""
    return damaged(random, material.manifest)


_TAGS = (
    f"!!python/object/apply:os.mkdir ['{MARKER}']",
    f"!!python/object/new:os.system ['mkdir {MARKER}']",
    "!!python/name:os.system",
    "!!python/module:wsgiref.util",
    f"!!python/object/apply:subprocess.check_output [['mkdir', '{MARKER}']]",
    "!!python/tuple [1, 2]",
    "!!binary aGVsbG8=",
    "!!set {a, b}",
    "!!timestamp 2001-01-01",
    "!!int x",
    "!!float x",
    "!!null x",
    "!!bool maybe",
    "!unknown x",
    f"!!python/object/apply:builtins.eval [\"__import__('os').mkdir('{MARKER}')\"]",
)
_YAML_VALUES = (
    *_TAGS,
    *(repr(text) for text in TEXTS if text.isprintable()),
    ".nan",
    ".inf",
    "1e999",
    "-1",
    "9" * 400,
    "9" * 5000,
    "0x10",
    "1_000",
    "12:30",
    "~",
    "[1, 2, 3]",
    "{a: b}",
    "&a [*a]",
    "*nothing",
    "<<: *nothing",
    "|\n    text",
    "[" * 200 + "]" * 200,
    "{a: " * 100 + "1" + "}" * 100,
    "'unclosed",
    "\t",
    "? x",
    "true",
    "2001-01-01",
    "=",
    "${HOME}",
)


def configuration_values(random: Random, material: Material) -> bytes:
    """Values of other types and sizes."""
    lines = material.configuration.splitlines()
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randrange(len(lines))
        name = lines[at].split(":")[0]
        what = random.randrange(5)
        if what <= 2:
            lines[at] = f"{name}: {random.choice(_YAML_VALUES)}"
        elif what == 3:
            lines.insert(at, random.choice(lines))
        else:
            lines[at] = f"{name}{random.choice(('x', '-', '.lr', ' '))}: 1"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def configuration_tags(random: Random, material: Material) -> bytes:
    """Tags that would build objects."""
    lines = material.configuration.splitlines()
    at = random.choice([at for at, line in enumerate(lines) if line.startswith(" ")])
    lines[at] = f"{lines[at].split(':')[0]}: {random.choice(_TAGS)}"
    if random.random() < 0.2:
        return random.choice(_TAGS).encode()
    return "\n".join(lines).encode()


def configuration_bombs(random: Random, material: Material) -> bytes:
    """References that expand without end, and endless nesting."""
    depth = random.choice((60, 70, 300, 900))
    references = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" if n else "a0: &a0 [x]" for n in range(30))
    merges = "\n".join(
        f"a{n}: &a{n} {{b{n}: 1, <<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" if n else "a0: &a0 {x: 1}" for n in range(5)
    )
    choices: tuple[Callable[[], str], ...] = (
        lambda: references,
        lambda: "model:\n  overrides:\n" + "\n".join(f"    {line}" for line in references.splitlines()),
        lambda: merges,
        lambda: "model:\n  overrides:\n" + "\n".join(f"    {line}" for line in merges.splitlines()),
        lambda: "[" * depth,
        lambda: "a: " + "[" * depth + "]" * depth,
        lambda: "".join(" " * level + "a:\n" for level in range(depth // 4)),
        lambda: "- " * depth,
        lambda: "model: &m {overrides: *m}",
        lambda: "? " * depth,
        lambda: "model: {overrides: {" + ", ".join(f"a{number}: 1" for number in range(300)) + "}}",
        lambda: "a" * 200_000 + ": 1",
    )
    return random.choice(choices)().encode()


def configuration_bytes(random: Random, material: Material) -> bytes:
    """Random damage."""
    return damaged(random, material.configuration.encode())

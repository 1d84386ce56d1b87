"""Generates hostile ``index.json`` files: other values, names that lead elsewhere, wrong boxes, endless texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from conformance.storage.hostile.directory import LINKS, OTHER_SHARD, OUTSIDE, SHARD, STEP, UNLISTED
from conformance.storage.hostile.material import Material
from conformance.storage.hostile.pickles import NUMBERS, PATHS, damaged
from conformance.storage.hostile.texts import TEXTS, mutated_tree

_NAMES = (
    *PATHS,
    *TEXTS,
    UNLISTED,
    *LINKS,
    f"{LINKS[1]}/{SHARD}",
    f"../{OUTSIDE}/{OTHER_SHARD}",
    f"../{STEP}/{SHARD}",
    f"./{SHARD}",
    f"{SHARD}/",
    f"x/../{SHARD}",
    SHARD.upper(),
    "index.json",
    "manifest.json",
    ".metadata",
    "/proc/self/mem",
    "/dev/zero",
    "\x1b[31m",
    "\x7f",
    "\N{RIGHT-TO-LEFT OVERRIDE}x",
    7,
    True,
    None,
    ["a"],
    {"a": 1},
)
_SIZES = (
    0,
    1,
    2,
    3,
    5,
    7,
    2**31,
    2**40,
    2**61,
    2**62,
    2**62 + 1,
    2**63 - 1,
    2**63,
    2**64,
    10**400,
    -1,
    True,
    1.0,
    "1",
    None,
    [1],
)
_TYPES = (
    "float31", "float", "torch.float32", "FLOAT32", "", "nn", "dtype", "__class__", "quint8", "int4", "bits8", "uint1",
    "float64", "int32", "complex128", "bool", "float4_e2m1fn_x2", "\ud800", None, 1, True, ["float32"], {"a": 1},
)  # fmt: skip
_BOXED = ("model.whole", "model.rows", "model.grid", "model.scalar", "model.empty")
Change = Callable[[Random, dict[str, Any]], Any]


def index_tree(random: Random, material: Material) -> bytes:
    """Values of other types and sizes, keys left out or added."""
    tree = mutated_tree(random, json.loads(material.index))
    return _written(random, tree)


def _written(random: Random, tree: Any) -> bytes:
    """Now and then with the characters themselves, so that lone surrogates are no UTF-8."""
    return json.dumps(tree, ensure_ascii=random.random() < 0.9).encode("utf-8", "surrogatepass")


def index_names(random: Random, material: Material) -> bytes:
    """File names that lead elsewhere, are invalid, or are listed twice; entry names with terminal control codes."""
    tree = json.loads(material.index)
    what = random.randrange(6)
    if what <= 2:
        tree["files"][random.randrange(2)] = random.choice(_NAMES)
    elif what == 3:
        tree["files"].insert(random.randrange(3), random.choice((*_NAMES, SHARD, OTHER_SHARD)))
    elif what == 4:
        tree["files"] = random.choice(([], [SHARD], [SHARD, SHARD], [OTHER_SHARD, SHARD], {SHARD: 1}, SHARD, None))
    else:
        entries = tree[random.choice(("tensors", "values"))]
        item = entries.pop(random.choice(list(entries)))
        entries[random.choice((*TEXTS, *_BOXED, "optimizer.lr", "model.whole.x", "model", "."))] = item
    return _written(random, tree)


# ---- boxes and places ---------------------------------------------------------------------------------------------------


def _tensor(random: Random, tree: dict[str, Any]) -> list[Any]:
    found: list[Any] = tree["tensors"][random.choice(_BOXED)]
    return found


def _box(random: Random, tree: dict[str, Any]) -> list[Any]:
    return random.choice(_tensor(random, tree)[2] or [[[], [], 0, 0, 0]])


def _place(random: Random, tree: dict[str, Any]) -> list[Any]:
    if random.random() < 0.3:
        return random.choice(list(tree["values"].values()))
    return _box(random, tree)


def _put_number(random: Random, tree: dict[str, Any]) -> None:
    numbers = random.choice((_tensor(random, tree)[1], *_box(random, tree)[:2]))
    if numbers:
        numbers[random.randrange(len(numbers))] = random.choice(_SIZES)


def _move_number(random: Random, tree: dict[str, Any]) -> None:
    numbers = random.choice((_tensor(random, tree)[1], *_box(random, tree)[:2]))
    if numbers:
        numbers[random.randrange(len(numbers))] += random.choice((-1, 1, 2, 2**62))


def _same_number_of_another_type(random: Random, tree: dict[str, Any]) -> None:
    """Values that many readers treat as equal to a whole number (true, 1.0)."""
    box = _box(random, tree)
    # The sizes of a box that covers its tensor are likely to be compared with the shape only.
    of_whole = tree["tensors"]["model.whole"][2][0][1]
    of_value = random.choice(list(tree["values"].values()))
    numbers = random.choice((_tensor(random, tree)[1], box, *box[:2], of_value, of_whole, of_whole))
    at = random.randrange(len(numbers))
    number = numbers[at]
    numbers[at] = random.choice((float(number), bool(number) if number in (0, 1) else str(number)))


def _put_place(random: Random, tree: dict[str, Any]) -> None:
    place = _place(random, tree)
    place[random.choice((-1, -2, -3))] = random.choice((*NUMBERS, *_SIZES))


def _move_place(random: Random, tree: dict[str, Any]) -> None:
    place = _place(random, tree)
    place[random.choice((-1, -2))] += random.choice((-64, -1, 1, 64, 4096, 2**40, 2**62))


def _drop_box(random: Random, tree: dict[str, Any]) -> None:
    boxes = _tensor(random, tree)[2]
    if boxes:
        boxes.pop(random.randrange(len(boxes)))


def _double_box(random: Random, tree: dict[str, Any]) -> None:
    boxes = _tensor(random, tree)[2]
    if boxes:
        box = json.loads(json.dumps(random.choice(boxes)))
        # Somewhere else in the file, or at the very same bytes.
        box[3] += random.choice((0, 1 << 16))
        boxes.insert(random.randrange(len(boxes) + 1), box)


def _shuffle_boxes(random: Random, tree: dict[str, Any]) -> None:
    random.shuffle(_tensor(random, tree)[2])


def _swap_places(random: Random, tree: dict[str, Any]) -> None:
    one, other = _box(random, tree), _box(random, tree)
    one[2:], other[2:] = other[2:], one[2:]


def _share_place(random: Random, tree: dict[str, Any]) -> None:
    _place(random, tree)[-3:] = _place(random, tree)[-3:]


def _share_through_a_second_name(random: Random, tree: dict[str, Any]) -> None:
    """Two entries at the same bytes; the file is listed twice, and each takes another of the two."""
    tree["files"].append(SHARD)
    one, other = random.sample([box for name in _BOXED for box in tree["tensors"][name][2]], 2)
    one[2:] = [2, *other[3:]]


def _overlap_with_volume_in_order(random: Random, tree: dict[str, Any]) -> None:
    """A hole as large as the overlap, so that the volumes add up."""
    grid = tree["tensors"]["model.grid"][2]
    box = random.choice(grid)
    box[0][random.randrange(2)] = random.choice((0, 1, 2, 3))


def _empty_box(random: Random, tree: dict[str, Any]) -> None:
    tensor = _tensor(random, tree)
    shape = [random.choice((0, 1, 2**62)) for _ in tensor[1]]
    tensor[2].append([[0 for _ in tensor[1]], shape, 0, random.choice((0, 1 << 16)), random.choice((0, 10))])


def _put_type(random: Random, tree: dict[str, Any]) -> None:
    _tensor(random, tree)[0] = random.choice(_TYPES)


def _put_shape(random: Random, tree: dict[str, Any]) -> None:
    """A tensor in one box, of any shape; it has enough bytes if only the numbers are trusted."""
    tensor = _tensor(random, tree)
    shape = [random.choice((0, 1, 2, 2**31, 2**40, 2**62)) for _ in range(random.choice((0, 1, 2, 3, 3, 64, 65, 1000)))]
    place = random.choice((_box(random, tree)[2:], [0, 0, 2**62], [1, 2**62, 2**62], [0, 0, 0]))
    tensor[1:] = [shape, [[[0] * len(shape), list(shape), *place]]]


def _split_everywhere(random: Random, tree: dict[str, Any]) -> None:
    """Split along so many dimensions that the number of corners overflows."""
    count = random.choice((6, 7, 20, 64))
    tree["tensors"]["model.grid"] = [
        "uint8",
        [2] * count,
        [[[0] * count, [1] * count, 0, 0, 1], [[1] * count, [1] * count, 0, 1, 1]],
    ]


def _trade_kinds(random: Random, tree: dict[str, Any]) -> None:
    """A tensor where a value should be, a value where a tensor should be, or both under one name."""
    tensors, values = tree["tensors"], tree["values"]
    name = random.choice(_BOXED)
    values[name] = [0, 1 << 16, 1] if random.random() < 0.5 else tensors.pop(name)[2][0][2:]


def _other_form(random: Random, tree: dict[str, Any]) -> None:
    tensor = _tensor(random, tree)
    where = random.choice((tensor, tensor[2], _box(random, tree), random.choice(list(tree["values"].values()))))
    if not where:
        return
    what = random.randrange(3)
    if what == 0:
        where.pop()
    elif what == 1:
        where.append(random.choice((0, None, [], "x", {})))
    else:
        where[random.randrange(len(where))] = random.choice(
            (None, {}, [], "", "abc", "abcde", 0, True, 1.5, [[]], {"a": 1})
        )


_CHANGES: tuple[Change, ...] = (
    _put_number, _same_number_of_another_type, _move_number, _put_place, _move_place, _drop_box, _double_box,
    _shuffle_boxes, _swap_places, _share_place, _share_through_a_second_name, _overlap_with_volume_in_order,
    _empty_box, _put_type, _put_shape, _split_everywhere, _trade_kinds, _other_form,
)  # fmt: skip


def index_boxes(random: Random, material: Material) -> bytes:
    """Boxes that overlap, leave holes or overflow, bytes that are shared or beyond the file, unknown types."""
    tree = json.loads(material.index)
    for change in random.sample(_CHANGES, random.choice((1, 1, 1, 2, 3))):
        try:
            change(random, tree)
        except (TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError):
            # An earlier change has removed what this one changes.
            continue
    return _written(random, tree)


# ---- texts --------------------------------------------------------------------------------------------------------------


def _rows(count: int, *, last: int = 1) -> str:
    """One tensor in ``count`` boxes, one per row."""
    boxes = [[[row, 0], [1 if row < count - 1 else last, 1], 0, row, 1] for row in range(count)]
    return _index_of(["uint8", [count, 1], boxes])


def _checkered(side: int) -> str:
    boxes = [[[row, column], [1, 1], 0, row * side + column, 1] for row in range(side) for column in range(side)]
    return _index_of(["uint8", [side, side], boxes])


def _index_of(tensor: Any, **more: Any) -> str:
    head = {
        "format": "hyper_resume.index",
        "format_version": 1,
        "files": [SHARD],
        "tensors": {"x": tensor},
        "values": {},
    }
    return json.dumps({**head, **more}, separators=(",", ":"))


def index_text(random: Random, material: Material) -> bytes:
    """Invalid trees: duplicate keys, endless nesting; and texts that demand much memory or time."""
    text = material.index.decode()
    depth = random.choice((100, 900, 10_000, 150_000))
    shape = [2**62] * random.choice((1, 2, 64))
    choices: list[Callable[[], str]] = [
        lambda: "[" * depth,
        lambda: "[" * depth + "]" * depth,
        lambda: text.replace("[1, 30]", "[" * depth + "]" * depth, 1),
        lambda: text.replace('"float32"', "[" * depth + "]" * depth, 1),
        lambda: text.replace('"values"', '"values": ' + '{"a":' * depth + "1" + "}" * depth + ', "v"'),
        lambda: text.replace('"files"', '"files": [], "files"'),
        lambda: text.replace('"model.rows"', '"model.whole"'),
        lambda: text.replace('"optimizer.lr"', random.choice(('"optimizer.betas"', '"model.rows"'))),
        lambda: text.replace("[1, 30]", "[" + "9" * random.choice((19, 20, 4000, 100_000)) + ", 30]"),
        lambda: text.replace("[1, 30]", random.choice(("[NaN, 30]", "[1e0, 30]", "[-0, 30]", "[01, 30]", "[1,, 30]"))),
        lambda: random.choice(("\ufeff" + text, text + text, text + "\0", text.encode("utf-16").decode("latin1"))),
        lambda: random.choice(("", "null", "[]", "{}", '"x"', "1", text.replace("}", ""), text.replace('"', "'"))),
        lambda: _rows(random.choice((10, 300))),
        lambda: _rows(300, last=random.choice((0, 2, 2**62))),
        lambda: _checkered(random.choice((3, 15))),
        lambda: _index_of(["uint8", shape, [[[0] * len(shape), shape, 0, 0, 2**62]]]),
        lambda: _index_of(["uint8", [*shape, 0], [[[0] * (len(shape) + 1), [*shape, 0], 0, 0, 0]]]),
        lambda: _index_of(["uint8", [0, *shape], []]),
        lambda: _index_of(["uint8", [0], []], files=[SHARD] * 20_000),
        lambda: _index_of(["uint8", [0], []], tensors={f"x{n}": ["uint8", [0], []] for n in range(500)}),
        lambda: _index_of(["uint8", [0], []], values={f"x{n}": [0, n, 1] for n in range(300)}),
        lambda: _index_of(["uint8", [0], []], values={"x" * 200_000: [0, 0, 1]}),
        lambda: _index_of(["uint8", [0], [[[0], [0], 0, 0, 0]] * 500]),
    ]
    return random.choice(choices)().encode("utf-8", "surrogatepass")


def index_bytes(random: Random, material: Material) -> bytes:
    """Random damage."""
    return damaged(random, material.index)

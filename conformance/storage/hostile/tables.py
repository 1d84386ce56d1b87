"""Generates hostile shards: tables of digests that do not match their shard, and damaged bytes with a matching table."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random

from conformance.storage.hostile.directory import split_table, table_of
from conformance.storage.hostile.material import Material
from conformance.storage.hostile.pickles import damaged

_MAGIC = b"hrsegm01"
_LENGTHS = (0, 1, 24, 64, 4096, 2**31, 2**32, 2**62, 2**63, 2**63 - 1, 2**64 - 1)
_COUNTS = (0, 1, 2**16, 2**32, 2**40, 2**59, 2**60, 2**61, 2**62, 2**63, 2**64 - 1, 2**64 // 24, 2**64 // 24 + 1)


def table_segments(random: Random, material: Material) -> bytes:
    """Other lengths, another order, more or fewer segments; some of them valid."""
    body, lengths = split_table(material.shard)
    digests: dict[int, bytes] = {}
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randrange(len(lengths) or 1)
        what = random.randrange(10)
        if what == 0 and lengths:
            lengths[at] = random.choice(_LENGTHS)
        elif what == 1 and lengths:
            lengths.pop(at)
        elif what == 2:
            lengths.insert(at, random.choice(_LENGTHS))
        elif what == 3:
            random.shuffle(lengths)
        elif what == 4:
            digests[at] = random.choice((bytes(16), b"\xff" * 16, random.randbytes(16)))
        elif what == 5 and lengths:
            # The sum overflows to the right one in 64 bits.
            lengths[at] = (lengths[at] - 2**63) % 2**64
            lengths.insert(at, 2**63)
        elif what == 6 and lengths:
            first = random.randrange(lengths[at] + 1) if lengths[at] < 2**31 else 0
            lengths[at : at + 1] = [first, lengths[at] - first]
        elif what == 7 and len(lengths) > 1:
            lengths[at : at + 2] = [sum(lengths[at : at + 2]) % 2**64]
        elif what == 8:
            lengths[at:at] = [0] * random.choice((1, 3, 100))
        else:
            lengths = random.choice(([len(body)], [len(body) - 1], [len(body) + 1], [], [4] * (len(body) // 4)))
    return body + table_of(body, lengths, digests=digests)


def table_bomb(random: Random, material: Material) -> bytes:
    """Few bytes that claim many segments, tables within tables, marks without a table."""
    body, lengths = split_table(material.shard)
    table = material.shard[len(body) :]
    count = random.choice((*_COUNTS, len(lengths) - 1, len(lengths) + 1, len(material.shard)))
    choices: list[Callable[[], bytes]] = [
        lambda: material.shard[:-16] + struct.pack("<Q8s", count, _MAGIC),
        lambda: material.shard[:-16] + struct.pack("<Q8s", count, _MAGIC),
        lambda: struct.pack("<Q8s", count, _MAGIC),
        lambda: struct.pack("<Q16s", random.choice(_LENGTHS), bytes(16)) * 3 + struct.pack("<Q8s", count, _MAGIC),
        lambda: body + table_of(body, [*lengths, *[0] * random.choice((10, 2000))]),
        lambda: body[:1000] + table_of(body[:1000], [1] * 1000),
        lambda: body + table + table_of(body + table, [*lengths, len(table)]),
        lambda: body + table + table,
        lambda: body + table_of(body, [])[:16],
        lambda: random.choice((body, body + table[:-16], body + _MAGIC, _MAGIC, table[-16:], table, b"")),
        lambda: material.shard[:-8] + random.choice((b"hrsegm02", b"HRSEGM01", bytes(8), _MAGIC[::-1])),
        lambda: material.shard[: -random.randrange(1, 60)] + _MAGIC,
        lambda: body + bytes(random.choice((1, 8, 4096, 300_000))) + table,
    ]
    return random.choice(choices)()


def table_bytes(random: Random, material: Material) -> bytes:
    """Random damage to the table."""
    body, _ = split_table(material.shard)
    return body + damaged(random, material.shard[len(body) :])


def shard_bytes(random: Random, material: Material) -> bytes:
    """Random damage to the bytes before the table, with a new matching table or none."""
    body, lengths = split_table(material.shard)
    changed = damaged(random, body)
    if random.random() < 0.2:
        return changed
    # A change of length is a change of the last segment.
    while lengths and sum(lengths) > len(changed):
        lengths.pop()
    return changed + table_of(changed, [*lengths, len(changed) - sum(lengths)])

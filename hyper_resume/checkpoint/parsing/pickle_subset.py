"""A pickle reader for a small subset of opcodes. It imports nothing; a subclass decides which names and calls are allowed.

``pickle`` calls whatever a file names. This reader knows only the opcodes that occur in DCP's metadata and in ``torch.save``
archives. It passes every name, call and object state to a method, which refuses it unless a subclass allows it. Memory and
time are proportional to the number of bytes: declared lengths are checked against the data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, ClassVar

# In a genuine file each container takes at least this many bytes. Without a limit, a file of empty dicts would take 64 times
# its size in memory.
_BYTES_PER_CONTAINER = 4
_CONTAINERS_AT_LEAST = 1000
# DCP nests 5 deep, a training state some 10.
_MAX_OPEN_MARKS = 200


class PickleRefused(ValueError):
    """The pickle holds something that is not allowed; the message says what."""


def shorten(value: object) -> str:
    """Return ``repr(value)`` of a text or number, shortened, otherwise its type: the repr of a hostile value may be endless."""
    if isinstance(value, str):
        return repr(value if len(value) <= 80 else value[:77] + "...")
    if type(value) in (int, bool, float, type(None)):
        text = repr(value) if not isinstance(value, int) or value.bit_length() < 200 else "a huge integer"
        return text[:80]
    return f"a {type(value).__name__}"


class PickleSubset:
    """Reads one pickle from bytes. This base class refuses everything but plain values; subclasses allow more."""

    def __init__(self, content: bytes) -> None:
        """Read nothing yet; ``content`` is the whole pickle."""
        self._content = content
        self._at = 0
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: list[Any] = []
        self._containers_left = len(content) // _BYTES_PER_CONTAINER + _CONTAINERS_AT_LEAST
        self._is_done = False

    def read(self) -> Any:
        """Return the one value of the pickle.

        Raises:
            PickleRefused: it holds something that is not allowed, is truncated, or is not a pickle.
        """
        content, handlers = self._content, self._HANDLERS
        try:
            while not self._is_done:
                handler = handlers.get(content[self._at])
                self._at += 1
                if handler is None:
                    raise self.refused(f"opcode 0x{content[self._at - 1]:02x}")
                handler(self)
        except (IndexError, struct.error):
            raise self.refused("the end of the data in the middle of a value") from None
        except UnicodeDecodeError:
            raise self.refused("text that is not UTF-8") from None
        if self._at != len(content) or self._below or len(self._stack) != 1:
            raise self.refused("something in addition to the one value")
        return self._stack[0]

    def refused(self, what: str) -> PickleRefused:
        """Return the error for ``what``, with the current position."""
        return PickleRefused(f"{what}, at byte {max(0, self._at - 1)} of {len(self._content)}")

    # ---- what a subclass allows -------------------------------------------------------------------------------------

    def find(self, module: str, name: str) -> Any:
        """Return the object for a name."""
        raise self.refused(f"the name {shorten(f'{module}.{name}')}, which is not on the list")

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Return the result of a call."""
        raise self.refused(f"a call of {shorten(function)}")

    def make(self, kind: Any, arguments: tuple[Any, ...]) -> Any:
        """Return a new object without state."""
        raise self.refused(f"a new object of {shorten(kind)}")

    def build(self, instance: Any, state: Any) -> None:
        """Give an object its state."""
        raise self.refused(f"a state for {shorten(instance)}")

    def persistent(self, key: Any) -> Any:
        """Return the object for a persistent id (data that is stored outside the pickle)."""
        raise self.refused("a reference to something outside the pickle")

    def check_key(self, key: Any) -> None:
        """Return if the key of a dict is allowed, raise otherwise; called before it is hashed."""
        if type(key) is not str:
            raise self.refused(f"a key of a dict that is {shorten(key)}")

    def check_item(self, item: Any) -> None:
        """Return if the item of a list is allowed, raise otherwise."""

    def make_tuple(self, items: list[Any]) -> tuple[Any, ...]:
        """Return the items as a tuple."""
        return tuple(items)

    # ---- opcodes ----------------------------------------------------------------------------------------------------

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._content):
            raise IndexError
        taken = self._content[self._at : end]
        self._at = end
        return taken

    def _count_container(self) -> None:
        self._containers_left -= 1
        if self._containers_left < 0:
            raise self.refused("more containers than there are bytes for")

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._below.pop()
        return items

    def _proto(self) -> None:
        if self._at != 1 or not 2 <= self._take(1)[0] <= 5:
            raise self.refused("a pickle protocol that is not supported")

    def _frame(self) -> None:
        if int.from_bytes(self._take(8), "little") > len(self._content) - self._at:
            raise self.refused("a frame that is longer than the data")

    def _stop(self) -> None:
        self._is_done = True

    def _mark(self) -> None:
        if len(self._below) >= _MAX_OPEN_MARKS:
            raise self.refused("nesting that is too deep")
        self._below.append(self._stack)
        self._stack = []

    def _none(self) -> None:
        self._stack.append(None)

    def _true(self) -> None:
        self._stack.append(True)

    def _false(self) -> None:
        self._stack.append(False)

    def _binint(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def _binint1(self) -> None:
        self._stack.append(self._content[self._at])
        self._at += 1

    def _binint2(self) -> None:
        self._stack.append(int.from_bytes(self._take(2), "little"))

    def _long1(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._take(1)[0]), "little", signed=True))

    def _binfloat(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def _short_text(self) -> None:
        self._stack.append(self._take(self._take(1)[0]).decode("utf-8", "surrogatepass"))

    def _text(self) -> None:
        self._stack.append(self._take(int.from_bytes(self._take(4), "little")).decode("utf-8", "surrogatepass"))

    def _memoize(self) -> None:
        self._memo.append(self._stack[-1])

    def _put(self, size: int) -> None:
        # A pickler numbers the memo entries in order. Any other index could only be meant to make the memo grow.
        if int.from_bytes(self._take(size), "little") != len(self._memo):
            raise self.refused("a memo index out of order")
        self._memo.append(self._stack[-1])

    def _binput(self) -> None:
        self._put(1)

    def _long_binput(self) -> None:
        self._put(4)

    def _binget(self) -> None:
        self._stack.append(self._memo[self._content[self._at]])
        self._at += 1

    def _long_binget(self) -> None:
        self._stack.append(self._memo[int.from_bytes(self._take(4), "little")])

    def _global(self) -> None:
        names = []
        for _ in range(2):
            end = self._content.find(b"\n", self._at, self._at + 256)
            if end < 0:
                raise self.refused("a name without an end")
            names.append(self._take(end - self._at).decode("utf-8"))
            self._at += 1
        self._stack.append(self.find(*names))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise self.refused("a name that is not text")
        self._stack.append(self.find(module, name))

    def _empty_tuple(self) -> None:
        self._stack.append(())

    def _tuple(self) -> None:
        items = self._pop_mark()
        self._push_tuple(items)

    def _push_tuple(self, items: list[Any]) -> None:
        self._count_container()
        self._stack.append(self.make_tuple(items))

    def _tuple_of(self, size: int) -> None:
        if len(self._stack) < size:
            raise IndexError
        items = self._stack[-size:]
        del self._stack[-size:]
        self._push_tuple(items)

    def _tuple1(self) -> None:
        self._tuple_of(1)

    def _tuple2(self) -> None:
        self._tuple_of(2)

    def _tuple3(self) -> None:
        self._tuple_of(3)

    def _empty_list(self) -> None:
        self._count_container()
        self._stack.append([])

    def _empty_dict(self) -> None:
        self._count_container()
        self._stack.append({})

    def _append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _appends(self) -> None:
        self._extend(self._pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise self.refused("items for something that is not a list")
        for item in items:
            self.check_item(item)
        target.extend(items)

    def _setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def _setitems(self) -> None:
        self._update(self._pop_mark())

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise self.refused("keys and values for something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.check_key(key)
            if key in target:
                raise self.refused(f"the key {shorten(key)} a second time")
            target[key] = value

    def _arguments(self) -> tuple[Any, ...]:
        arguments = self._stack.pop()
        if not isinstance(arguments, tuple):
            raise self.refused("arguments that are not a tuple")
        return arguments

    def _reduce(self) -> None:
        arguments = self._arguments()
        self._stack[-1] = self.call(self._stack[-1], arguments)

    def _newobj(self) -> None:
        self._count_container()
        arguments = self._arguments()
        self._stack[-1] = self.make(self._stack[-1], arguments)

    def _build(self) -> None:
        state = self._stack.pop()
        self.build(self._stack[-1], state)

    def _binpersid(self) -> None:
        self._stack[-1] = self.persistent(self._stack[-1])

    _HANDLERS: ClassVar[dict[int, Callable[[PickleSubset], None]]] = {
        0x80: _proto,
        0x95: _frame,
        ord("."): _stop,
        ord("("): _mark,
        ord("N"): _none,
        0x88: _true,
        0x89: _false,
        ord("J"): _binint,
        ord("K"): _binint1,
        ord("M"): _binint2,
        0x8A: _long1,
        ord("G"): _binfloat,
        0x8C: _short_text,
        ord("X"): _text,
        0x94: _memoize,
        ord("q"): _binput,
        ord("r"): _long_binput,
        ord("h"): _binget,
        ord("j"): _long_binget,
        ord("c"): _global,
        0x93: _stack_global,
        ord(")"): _empty_tuple,
        ord("t"): _tuple,
        0x85: _tuple1,
        0x86: _tuple2,
        0x87: _tuple3,
        ord("]"): _empty_list,
        ord("}"): _empty_dict,
        ord("a"): _append,
        ord("e"): _appends,
        ord("s"): _setitem,
        ord("u"): _setitems,
        ord("R"): _reduce,
        0x81: _newobj,
        ord("b"): _build,
        ord("Q"): _binpersid,
    }

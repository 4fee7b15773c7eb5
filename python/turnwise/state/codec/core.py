"""The walk over values and JSON: aliases, cycles, depth and buffers. Other modules add the kinds."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from turnwise.utils.output import text_of

DEPTH = 200
"""Values nested deeper are refused: writing and reading recurse."""

REF, AGAIN, LOST, MAP, TUPLE = "$ref", "$again", "$lost", "$map", "$tuple"
TUPLES = "$tuples"
_ATOMS = frozenset({type(None), bool, float, str})
FLAT = _ATOMS | {int}
"""Types of what a flat tuple holds. Such a tuple is not numbered: it has no identity that matters."""
_WIDE = 1 << 63
_ALIKE = 128
"""Most keys of a dict or set that may have the same hash."""
_INLINE = 256
"""Bytes and writable arrays below this many bytes are written into the JSON."""


class CodecError(ValueError):
    """JSON that describes no value, or one that may not be read."""


class LostValueError(CodecError):
    """A value that could not be written. The file has its text instead."""


class Writer:
    """Turns values into JSON. One writer keeps the aliases of all values that it writes.

    ``buffers`` collects the memory of arrays and large bytes; without it they become base64. ``lose`` writes the
    text of what can't be written instead of raising ``TypeError``. ``omit`` are types left out of dicts; fields have
    ``None`` for them.
    """

    def __init__(
        self, buffers: list[memoryview] | None = None, *, lose: bool = False, omit: tuple[type, ...] = ()
    ) -> None:
        self._buffers, self._lose, self.omit = buffers, lose, omit
        self._memo: dict[int, tuple[int, Any]] = {}  # id -> its number, and the object, which keeps the id its own
        self._count = self._depth = 0
        self.in_key = False
        self._known = dict(WRITERS)

    def write(self, value: Any) -> Any:
        """Return ``value`` as JSON. Raises ``TypeError`` for an object that can't be written."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is int:
            return value if -_WIDE <= value < _WIDE else {"$int": hex(value)}
        if kind is tuple and FLAT.issuperset(map(type, value)):
            return {TUPLE: self.write_all(value)}
        known = self._memo.get(id(value))
        if known is not None and not (self.in_key and has_own_hash(kind)):
            return {REF: known[0]}
        count, depth = self._count, self._depth
        self._depth += 1
        try:
            if depth >= DEPTH:
                raise TypeError(f"a {kind.__name__}, which lies deeper than {DEPTH} levels of nesting")
            write = self._known.get(kind)
            if write is None:
                write = self._known[kind] = next(filter(None, (find(kind) for find in FINDERS)))
            return write(value, self)
        except Exception as error:
            if not self._lose:
                if isinstance(error, RecursionError):
                    raise TypeError(f"a {kind.__name__}, which is nested too deeply") from error
                raise
            while self._memo and next(reversed(self._memo.values()))[0] >= count:
                self._memo.popitem()
            self._count = count
            return {LOST: text_of(value)}
        finally:
            self._depth = depth

    def write_all(self, values: Iterable[Any]) -> list[Any]:
        write = self.write
        return [value if type(value) in _ATOMS else write(value) for value in values]

    def write_key(self, key: Any) -> Any:
        """Write a dict's key or a set's item. In it, only objects with an identity hash are shared.

        Otherwise a few tuples of tuples could take for ever to hash.
        """
        if type(key) in _ATOMS:
            return key
        before, self.in_key = self.in_key, True
        try:
            return self.write(key)
        finally:
            self.in_key = before

    def write_keys(self, keys: Iterable[Any]) -> list[Any]:
        return [key if type(key) in _ATOMS else self.write_key(key) for key in keys]

    def write_pairs(self, pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
        return [[self.write_key(key), self.write(value)] for key, value in pairs]

    def inner_first(self, value: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Return ``value`` and the tuples in it that need a number, each after those that it holds."""
        order, done, open_ = [], set(), [value]
        while open_:
            found = [
                item
                for item in open_[-1]
                if type(item) is tuple and id(item) not in done and id(item) not in self._memo
                if not FLAT.issuperset(map(type, item))
            ]
            open_ += found
            if not found and id(last := open_.pop()) not in done:
                done.add(id(last))
                order.append(last)
        return order

    def keep(self, value: Any) -> None:
        """Give ``value`` the next number. :class:`Reader` gives it the same number at the same place."""
        if self.in_key and has_own_hash(type(value)):
            return
        self._memo[id(value)] = self._count, value
        self._count += 1

    def keep_again(self, value: Any) -> None:
        """Give ``value`` the next number, and keep an earlier one that it has."""
        if id(value) in self._memo:
            self._count += 1
        else:
            self.keep(value)

    def finish(self, value: Any, mark: str, parts: Any) -> Any:
        """Return the JSON of a value that is created from its finished parts, and so is numbered after them."""
        known = self._memo.get(id(value))
        if known is not None and not (self.in_key and has_own_hash(type(value))):
            self.keep_again(value)  # a part refers to the value through a list, say, so it has been written there
            return {AGAIN: [known[0], {mark: parts}]}
        self.keep(value)
        return {mark: parts}

    def write_data(self, data: Any, *, frozen: bool = False) -> Any:
        """Return the JSON of contiguous memory. ``frozen`` memory can't change and becomes a buffer without a copy."""
        view = memoryview(data).cast("B")
        if self._buffers is None or (view.nbytes < _INLINE and not frozen):
            return base64.b64encode(view).decode("ascii")
        self._buffers.append(view if frozen else memoryview(bytes(view)))
        return len(self._buffers) - 1


class Reader:
    """Turns the JSON of one :class:`Writer` back into values. ``names`` decides what may be named.

    Raises :class:`CodecError` for any JSON that describes no value. It allocates in proportion to the JSON and the
    buffers, each of which it uses once.
    """

    def __init__(self, names: Any, buffers: Sequence[memoryview] = ()) -> None:
        self.names = names
        self._buffers: list[memoryview | None] = list(buffers)
        self._objects: list[Any] = []
        self._depth = 0
        self.in_key = False
        self.open_arrays: list[Any] = []  # arrays of objects that are being filled

    def load(self, plain: Any) -> Any:
        """Return the value of :meth:`Writer.write`."""
        return self.load_all([plain])[0]

    def load_all(self, plain: list[Any]) -> list[Any]:
        """Return the values of :meth:`Writer.write_all`."""
        try:
            return self.read_all(plain)
        except (CodecError, MemoryError):
            raise
        except Exception as error:  # a wrong part can raise any exception
            raise CodecError(f"its values can't be read: {type(error).__name__}: {error}") from error

    def read(self, plain: Any) -> Any:
        kind = type(plain)
        if kind in FLAT:
            return plain
        if self._depth > DEPTH:  # one more than the writer, for what it lost there
            raise CodecError(f"it is nested deeper than {DEPTH} levels")
        self._depth += 1
        if kind is list:
            value: Any = []
            self.keep(value)
            read = self.read
            value += [item if type(item) in FLAT else read(item) for item in plain]
        elif len(plain) == 1 and (mark := next(iter(plain))).startswith("$"):
            if mark not in READERS:
                raise CodecError(f"it has a value of the unknown kind {mark!r}")
            value = READERS[mark](plain[mark], self)
        else:
            value = {}
            self.keep(value)
            read = self.read
            for key, item in plain.items():
                value[key] = item if type(item) in FLAT else read(item)
        self._depth -= 1
        return value

    def read_all(self, plain: Iterable[Any]) -> list[Any]:
        read = self.read
        return [item if type(item) in FLAT else read(item) for item in plain]

    def read_key(self, plain: Any) -> Any:
        before, self.in_key = self.in_key, True
        key = self.read(plain)
        self.in_key = before
        return key

    def read_keys(self, plain: Any) -> list[Any]:
        keys = [item if type(item) in FLAT else self.read_key(item) for item in plain]
        _check_hashes(keys, Counter())
        return keys

    def read_pairs(self, plain: Any, into: Any) -> None:
        """Read keys and values into a dict."""
        keys: list[Any] = []
        counts: Counter[int] = Counter()
        for key, item in plain:
            key = self.read_key(key)
            keys.append(key)
            if len(keys) == _ALIKE:
                _check_hashes(keys, counts)
                keys.clear()
            into[key] = self.read(item)

    def keep(self, value: Any) -> Any:
        """Number ``value`` as the writer did, and return it."""
        if not (self.in_key and has_own_hash(type(value))):
            self._objects.append(value)
        return value

    def kept(self, number: Any) -> Any:
        """Return the object with this number."""
        if type(number) is not int or not 0 <= number < len(self._objects):
            raise CodecError(f"it refers to the object {number!r}, which does not exist")
        value = self._objects[number]
        if self.in_key and has_own_hash(type(value)):
            raise CodecError("a key refers to another object")
        return value

    def read_data(self, plain: Any) -> bytes | memoryview:
        """Return the memory that :meth:`Writer.write_data` wrote. Each buffer is used once."""
        if type(plain) is str:
            return base64.b64decode(plain, validate=True)
        if type(plain) is not int or not 0 <= plain < len(self._buffers):
            raise CodecError(f"it refers to the buffer {plain!r}, which does not exist")
        data, self._buffers[plain] = self._buffers[plain], None
        if data is None:
            raise CodecError(f"it uses the buffer {plain} twice")
        return data


def _write_list(value: Any, writer: Writer) -> Any:
    writer.keep(value)
    write = writer.write
    return [item if type(item) in _ATOMS else write(item) for item in value]


def _write_tuple(value: tuple[Any, ...], writer: Writer) -> Any:
    """Write tuples inside a tuple before it, as a list of tuples: so no nesting of tuples is too deep."""
    *inner, _ = order = [value] if writer.in_key else writer.inner_first(value)
    written = []
    for each in order:
        written.append(writer.write_all(each))
        if each is value:
            break
        writer.keep_again(each)
    return writer.finish(value, TUPLES, written) if inner else writer.finish(value, TUPLE, written[0])


def _write_dict(value: Any, writer: Writer) -> Any:
    writer.keep(value)
    items = value.items()
    if writer.omit:
        items = [(key, item) for key, item in items if not isinstance(item, writer.omit)]
    if all(type(key) is str and not key.startswith("$") for key, _ in items):
        write = writer.write
        return {key: item if type(item) in _ATOMS else write(item) for key, item in items}
    return {MAP: writer.write_pairs(items)}


Write = Callable[[Any, Writer], Any]
Read = Callable[[Any, Reader], Any]

WRITERS: dict[type, Write] = {
    tuple: _write_tuple,
    list: _write_list,
    dict: _write_dict,
}
"""The function that writes objects of exactly this type."""
FINDERS: list[Callable[[type], Write | None]] = []
"""Functions that find the writer of another type. The first that knows the type decides; the last knows all."""
READERS: dict[str, Read] = {}
"""The function that reads the value of each mark."""


def add_kind(mark: str, kinds: Iterable[type], write: Write, read: Read) -> None:
    """Add a kind whose values are created from their finished parts: ``write`` returns them, ``read`` takes them."""
    WRITERS.update(dict.fromkeys(kinds, lambda value, writer: writer.finish(value, mark, write(value, writer))))
    READERS[mark] = lambda parts, reader: reader.keep(read(parts, reader))


def integer(plain: Any, least: int, most: int) -> int:
    """Return ``plain`` if it is an int within these bounds."""
    if type(plain) is not int or not least <= plain <= most:
        raise CodecError(f"{plain!r} is no whole number from {least} to {most}")
    return plain


def has_own_hash(kind: type) -> bool:
    """True if the hash of such an object depends on its contents. Dicts and lists have none."""
    return kind.__hash__ is not object.__hash__


def _check_hashes(keys: Sequence[Any], counts: Counter[int]) -> None:
    """Refuse keys that were chosen to have one hash: a dict of them takes quadratic time. ``counts`` grows by them."""
    if len(keys) < _ALIKE and not counts:
        return
    hashes = [hash(key) for key in keys if type(key) is not str]  # those of strings are random
    counts.update(hashes)
    if any(counts[each] > _ALIKE for each in hashes):
        raise CodecError("many of its keys have the same hash")


def _read_again(parts: Any, reader: Reader) -> Any:
    number, again = parts
    reader.read(again)
    return reader.kept(number)


def _read_tuple(parts: Any, reader: Reader) -> Any:
    value = tuple(reader.read_all(parts))
    return value if FLAT.issuperset(map(type, value)) else reader.keep(value)


def _read_tuples(parts: Any, reader: Reader) -> Any:
    *_, last = [reader.keep(tuple(reader.read_all(items))) for items in parts]
    return last


def _read_map(parts: Any, reader: Reader) -> Any:
    value: dict[Any, Any] = reader.keep({})
    reader.read_pairs(parts, value)
    return value


def _read_lost(parts: Any, reader: Reader) -> Any:
    raise LostValueError(f"{parts} could not be recorded, as it can't be saved")


READERS |= {
    REF: lambda parts, reader: reader.kept(parts),
    AGAIN: _read_again,
    MAP: _read_map,
    TUPLE: _read_tuple,
    TUPLES: _read_tuples,
    LOST: _read_lost,
    "$int": lambda parts, reader: int(parts, 16),
}

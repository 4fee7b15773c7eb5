"""Kinds of the standard library: containers, numbers, bytes, times, paths, patterns and generators."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import fractions
import pathlib
import random
import re
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from turnwise._C import StateDict, StateList, TokenArray
from turnwise.state.codec.core import FINDERS, READERS, WRITERS, CodecError, Reader, Writer, add_kind, integer

_INLINE_BYTES = 256
_FRACTION_BITS = 100_000
_PATTERN_LENGTH = 4096
_MAX_DAYS = 999_999_999


# ---- containers -----------------------------------------------------------------------------------------------------
def _add_container(mark: str, kind: type, write: Callable[[Any, Writer], Any], fill: Callable[..., None]) -> None:
    """Add a mutable kind, which is numbered before its contents, since they may refer to it."""

    def write_it(value: Any, writer: Writer) -> Any:
        writer.keep(value)
        return {mark: write(value, writer)}

    def read_it(parts: Any, reader: Reader) -> Any:
        value = reader.keep(kind())
        fill(value, parts, reader)
        return value

    WRITERS[kind], READERS[mark] = write_it, read_it


def _read_pairs(value: Any, parts: Any, reader: Reader) -> None:
    reader.read_pairs(parts, value)


WRITERS[StateDict], WRITERS[StateList] = WRITERS[dict], WRITERS[list]
_add_container(
    "$set",
    set,
    lambda value, writer: writer.write_keys(value),
    lambda value, parts, reader: value.update(reader.read_keys(parts)),
)
_add_container(
    "$counter",
    collections.Counter,
    lambda value, writer: writer.write_pairs(value.items()),
    _read_pairs,
)
_add_container(
    "$ordered",
    collections.OrderedDict,
    lambda value, writer: writer.write_pairs(value.items()),
    _read_pairs,
)


def _write_deque(value: Any, writer: Writer) -> Any:
    writer.keep(value)
    return {"$deque": [value.maxlen, writer.write_all(value)]}


def _read_deque(parts: Any, reader: Reader) -> Any:
    longest, items = parts
    value: collections.deque[Any] = reader.keep(collections.deque(maxlen=longest))
    value.extend(reader.read_all(items))
    return value


def _write_default(value: Any, writer: Writer) -> Any:
    factory = writer.write(value.default_factory)
    writer.keep(value)
    return {"$default": [factory, writer.write_pairs(value.items())]}


def _read_default(parts: Any, reader: Reader) -> Any:
    factory, pairs = parts
    factory = reader.read(factory)
    if factory is not None:
        reader.names.check_callable(factory)
    value = reader.keep(collections.defaultdict(factory))
    reader.read_pairs(pairs, value)
    return value


WRITERS[collections.deque], READERS["$deque"] = _write_deque, _read_deque
WRITERS[collections.defaultdict], READERS["$default"] = _write_default, _read_default
add_kind(
    "$frozenset",
    [frozenset],
    lambda value, writer: writer.write_keys(value),
    lambda parts, reader: frozenset(reader.read_keys(parts)),
)
add_kind(
    "$slice",
    [slice],
    lambda value, writer: writer.write_all((value.start, value.stop, value.step)),
    lambda parts, reader: slice(*reader.read_all(parts)),
)
add_kind(
    "$range",
    [range],
    lambda value, writer: writer.write_all((value.start, value.stop, value.step)),
    lambda parts, reader: range(*reader.read_all(parts)),
)
add_kind("$blank", [object], lambda value, writer: None, lambda parts, reader: object())


# ---- bytes ----------------------------------------------------------------------------------------------------------
def _read_array(parts: Any, reader: Reader) -> Any:
    code, size, order, data = parts
    value = array.array(code)
    if code in ("u", "w"):
        value.extend(array.array(code, data))
        return value
    if value.itemsize != size:
        raise CodecError(f"an array of {code!r} has {value.itemsize} bytes per item here, and {size!r} in the file")
    value.frombytes(reader.read_data(data))
    if order != sys.byteorder:
        value.byteswap()
    return value


def _write_array(value: Any, writer: Writer) -> Any:
    data = value.tounicode() if value.typecode in ("u", "w") else writer.write_data(value.tobytes())
    return [value.typecode, value.itemsize, sys.byteorder, data]


add_kind(
    "$bytes",
    [bytes],
    lambda value, writer: writer.write_data(value, frozen=len(value) >= _INLINE_BYTES),
    lambda parts, reader: bytes(reader.read_data(parts)),
)
add_kind(
    "$bytearray",
    [bytearray],
    lambda value, writer: writer.write_data(value),
    lambda parts, reader: bytearray(reader.read_data(parts)),
)
add_kind("$chars", [array.array], _write_array, _read_array)
add_kind(
    "$tokens",
    [TokenArray],
    lambda value, writer: writer.write_data(value._bytes()),
    lambda parts, reader: TokenArray(memoryview(reader.read_data(parts)).cast("B").cast("i")),
)


# ---- numbers --------------------------------------------------------------------------------------------------------
def _read_fraction(parts: Any, reader: Reader) -> Any:
    numerator, denominator = reader.read_all(parts)
    if any(type(part) is not int or part.bit_length() > _FRACTION_BITS for part in (numerator, denominator)):
        raise CodecError(f"the parts of a fraction are no ints of at most {_FRACTION_BITS} bits")
    return fractions.Fraction(numerator, denominator)


def _read_decimal(parts: Any, reader: Reader) -> Any:
    if type(parts) is not str:
        raise CodecError(f"a decimal is no text: {parts!r}")
    return decimal.Decimal(parts)


def _read_complex(parts: Any, reader: Reader) -> Any:
    real, imaginary = parts
    if not type(real) is type(imaginary) is float:
        raise CodecError("the parts of a complex number are no floats")
    return complex(real, imaginary)


add_kind("$complex", [complex], lambda value, writer: [value.real, value.imag], _read_complex)
add_kind("$decimal", [decimal.Decimal], lambda value, writer: str(value), _read_decimal)
add_kind(
    "$fraction",
    [fractions.Fraction],
    lambda value, writer: writer.write_all((value.numerator, value.denominator)),
    _read_fraction,
)


# ---- times, paths, patterns -----------------------------------------------------------------------------------------
def _whole_numbers(parts: Any) -> list[int]:
    """Return ``parts`` if they are ints. From a text, dates and times would take their memory without a check."""
    return [integer(part, -_MAX_DAYS, _MAX_DAYS) for part in parts]


def _read_timezone(parts: Any, reader: Reader) -> Any:
    offset, name = parts
    offset = datetime.timedelta(*_whole_numbers(offset))
    return datetime.timezone(offset) if name is None else datetime.timezone(offset, name)


def _write_timezone(value: Any, writer: Writer) -> Any:
    offset = value.utcoffset(None)
    name = value.tzname(None)
    return [_span(offset), None if name == datetime.timezone(offset).tzname(None) else name]


def _span(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _clock(value: Any, writer: Writer) -> list[Any]:
    zone = writer.write(value.tzinfo)
    return [value.hour, value.minute, value.second, value.microsecond, zone, value.fold]


def _read_clock(kind: type) -> Callable[[Any, Reader], Any]:
    def read(parts: Any, reader: Reader) -> Any:
        *numbers, zone, fold = parts
        return kind(*_whole_numbers(numbers), tzinfo=reader.read(zone), fold=integer(fold, 0, 1))

    return read


def _read_path(parts: Any, reader: Reader) -> Any:
    kind, text = parts
    return {each.__name__: each for each in _PATHS}[kind](text)


def is_quick_pattern(pattern: str | bytes, flags: int) -> bool:
    """True if compiling it takes milliseconds. Large ranges take long, above all without regard to case."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    ignores_case = flags & re.IGNORECASE or re.search(r"\(\?[a-zA-Z]*i", text)
    wide = "[" in text and isinstance(pattern, str) and re.search(r"[^\x00-\x7f]|\\[uUN]", text)
    return len(text) <= _PATTERN_LENGTH and not (ignores_case and wide)


def _write_pattern(value: re.Pattern[Any], writer: Writer) -> Any:
    if not is_quick_pattern(value.pattern, value.flags):
        return FINDERS[-1](re.Pattern)(value, writer)  # type: ignore[misc]
    return writer.finish(value, "$pattern", [writer.write(value.pattern), value.flags])


def _read_pattern(parts: Any, reader: Reader) -> Any:
    pattern, flags = parts
    pattern = reader.read(pattern)
    if type(pattern) not in (str, bytes) or not is_quick_pattern(pattern, flags):
        raise CodecError("it has a pattern that could take long to compile")
    return reader.keep(re.compile(pattern, flags & ~re.DEBUG))


_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
add_kind(
    "$date",
    [datetime.date],
    lambda value, writer: [value.year, value.month, value.day],
    lambda parts, reader: datetime.date(*_whole_numbers(parts)),
)
add_kind("$time", [datetime.time], _clock, _read_clock(datetime.time))
add_kind(
    "$datetime",
    [datetime.datetime],
    lambda value, writer: [value.year, value.month, value.day, *_clock(value, writer)],
    _read_clock(datetime.datetime),
)
add_kind(
    "$timedelta",
    [datetime.timedelta],
    lambda value, writer: _span(value),
    lambda parts, reader: datetime.timedelta(*_whole_numbers(parts)),
)
add_kind("$timezone", [datetime.timezone], _write_timezone, _read_timezone)
add_kind("$path", _PATHS, lambda value, writer: [type(value).__name__, str(value)], _read_path)
add_kind("$uuid", [uuid.UUID], lambda value, writer: value.hex, lambda parts, reader: uuid.UUID(hex=parts))
WRITERS[re.Pattern], READERS["$pattern"] = _write_pattern, _read_pattern


# ---- generators -----------------------------------------------------------------------------------------------------
def _write_random(value: random.Random, writer: Writer) -> Any:
    version, numbers, gauss = value.getstate()
    return [version, list(numbers), gauss]


def check_twister(numbers: Sequence[int]) -> None:
    """Refuse the state in which the Mersenne Twister draws zeros for ever: many methods would never end."""
    if not any(numbers[1:]) and numbers[0] < 1 << 31:
        raise CodecError("a generator draws only zeros")


def _read_random(parts: Any, reader: Reader) -> Any:
    version, numbers, gauss = parts
    if gauss is not None and type(gauss) is not float:
        raise CodecError("a generator's next number is no float")
    numbers = tuple(integer(each, 0, 2**32 - 1) for each in numbers)
    check_twister(numbers[:-1])
    value = random.Random(0)
    value.setstate((version, numbers, gauss))
    return value


add_kind("$random", [random.Random], _write_random, _read_random)

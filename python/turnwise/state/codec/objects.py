"""Kinds of classes: names, enums, dataclasses, named tuples, exceptions, and other objects by pickle's hooks."""

from __future__ import annotations

import copyreg
import enum
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from turnwise.state.codec.core import FINDERS, LOST, READERS, CodecError, Reader, Write, Writer, integer
from turnwise.state.codec.names import name_of
from turnwise.utils.copies import is_rebuilt, refusal

_NAMELESS = {getattr(types, name): f"types:{name}" for name in ("NoneType", "EllipsisType", "NotImplementedType")}
"""Types that their own names don't lead to."""
_CONSTANTS = {Ellipsis: "builtins:Ellipsis", NotImplemented: "builtins:NotImplemented"}
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: not a class of C
_ERROR_MEMBERS = frozenset({"name", "path", "obj", "name_from"})
"""Attributes of builtin exceptions that are not in their ``args``."""
_SPECIAL = frozenset({"__notes__", "__orig_class__"})
"""Attributes with underscores that Python sets on objects. It would call others, such as ``__deepcopy__``."""


# ---- names and enums ------------------------------------------------------------------------------------------------
def _write_name(value: Any, writer: Writer) -> Any:
    return {"$name": _NAMELESS.get(value) or name_of(value)}


def _write_enum(value: enum.Enum, writer: Writer) -> Any:
    kind = type(value)
    if value._name_ in kind.__members__:
        return {"$enum": [name_of(kind), value._name_]}
    return {"$enum": [name_of(kind), value._value_]}  # flags that are set together


def _read_enum(parts: Any, reader: Reader) -> Any:
    name, member = parts
    kind = reader.names.find(name)
    if not isinstance(kind, enum.EnumMeta):
        raise CodecError(f"{name!r} is no enum")
    if type(member) is str:
        return kind.__members__[member]
    if not issubclass(kind, enum.Flag):
        raise CodecError(f"{name!r} has no member {member!r}")
    return kind(integer(member, -(2**64), 2**64))


# ---- data classes ---------------------------------------------------------------------------------------------------
def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that ``value`` has now, as the default of pickle takes them."""
    slots = {name: getattr(value, name) for name in copyreg._slotnames(type(value)) if hasattr(value, name)}  # type: ignore[attr-defined]
    return slots | getattr(value, "__dict__", {})


def _set_attributes(value: Any, attributes: Mapping[str, Any], known: frozenset[str] = frozenset()) -> None:
    """Set attributes without the class's own methods. None but those ``known`` may hide a method of the class.

    Otherwise the file would choose what later calls of that method do.
    """
    kind = type(value)
    for name, item in attributes.items():
        found = [vars(base)[name] for base in kind.__mro__ if name in vars(base)]
        inner = [getattr(each, "slot", each) for each in found]  # a field of ``types.prompts.shares`` wraps its slot
        slot = next((each for each in inner if isinstance(each, types.MemberDescriptorType)), None)
        if slot is not None:
            slot.__set__(value, item)
            continue
        hides = bool(found) and (callable(found[0]) or isinstance(found[0], classmethod | staticmethod))
        if name not in known and (hides or (name.startswith("__") and name not in _SPECIAL)):
            raise CodecError(f"an attribute {name!r} hides a method of {kind.__qualname__}")
        value.__dict__[name] = item


def _write_attributes(attributes: Mapping[str, Any], needed: frozenset[str], writer: Writer) -> dict[str, Any]:
    """Write attributes by name. Where values may get lost, others than those ``needed`` are left out instead."""
    written = {name: writer.write(item) for name, item in attributes.items()}
    return {name: item for name, item in written.items() if name in needed or not _is_lost(item)}


def _is_lost(plain: Any) -> bool:
    return type(plain) is dict and len(plain) == 1 and LOST in plain


def _read_attributes(parts: Mapping[str, Any], reader: Reader) -> dict[str, Any]:
    return {name: reader.read(item) for name, item in parts.items()}


def _write_dataclass(value: Any, writer: Writer) -> Any:
    kind = type(value)
    name = name_of(kind)
    writer.keep(value)
    needed = frozenset(field.name for field in fields(kind))
    attributes = _attributes(value)
    if writer.omit:
        attributes = {key: None if isinstance(item, writer.omit) else item for key, item in attributes.items()}
    return {"$dataclass": [name, _write_attributes(attributes, needed, writer)]}


def _read_dataclass(parts: Any, reader: Reader) -> Any:
    name, attributes = parts
    kind = reader.names.find(name)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise CodecError(f"{name!r} is no dataclass")
    value = reader.keep(object.__new__(kind))
    _set_attributes(value, _read_attributes(attributes, reader), frozenset(field.name for field in fields(kind)))
    defaults = {field.name for field in fields(kind) if hasattr(kind, field.name)} - set(copyreg._slotnames(kind))  # type: ignore[attr-defined]
    missing = [field.name for field in fields(kind) if field.init and field.name not in attributes.keys() | defaults]
    if missing:
        raise CodecError(f"an object of {name!r} lacks {', '.join(missing)}")
    return value


def _write_named_tuple(value: Any, writer: Writer) -> Any:
    return writer.finish(value, "$named", [name_of(type(value)), writer.write_all(value)])


def _read_named_tuple(parts: Any, reader: Reader) -> Any:
    name, items = parts
    kind = reader.names.find(name)
    if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise CodecError(f"{name!r} is no named tuple")
    if len(items) != len(kind._fields):
        raise CodecError(f"an object of {name!r} has {len(items)} items")
    return reader.keep(tuple.__new__(kind, reader.read_all(items)))


# ---- exceptions -----------------------------------------------------------------------------------------------------
def _write_error(value: BaseException, writer: Writer) -> Any:
    kind = type(value)
    name = name_of(kind)
    args: tuple[Any, ...] = value.args
    attributes = dict(value.__dict__)
    if _definer(kind, "__reduce__").__flags__ & _HEAP_TYPE == 0:
        # Written in C: it knows the arguments of the constructor, and what is not among them.
        reduced: Any = value.__reduce__()
        args = reduced[1]
        attributes |= (reduced[2] if len(reduced) > 2 else None) or {}
    parts = [name, writer.write_all(args), {}]
    found = writer.finish(value, "$error", parts)
    if "$error" in found:
        parts[2] = _write_attributes(attributes, frozenset(attributes), writer)
    return found


def _read_error(parts: Any, reader: Reader) -> Any:
    name, args, attributes = parts
    kind = reader.names.find(name)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise CodecError(f"{name!r} is no exception")
    # Call the constructor of the nearest class of C, not the exception's own.
    base = next(each for each in kind.__mro__ if not each.__flags__ & _HEAP_TYPE)
    args = reader.read_all(args)
    value = base.__new__(kind, *args)
    if not isinstance(value, kind):
        raise CodecError(f"{name!r} makes a {type(value).__name__}")
    base.__init__(value, *args)  # type: ignore[misc]
    if isinstance(value, UnicodeError) and hasattr(value, "start"):
        # Python reads the text at these places to describe the error, without a check.
        integer(value.start, 0, len(value.object))  # type: ignore[attr-defined]
        integer(value.end, value.start, len(value.object))  # type: ignore[attr-defined]
    reader.keep(value)
    for key, item in _read_attributes(attributes, reader).items():
        member = getattr(base, key, None) if key in _ERROR_MEMBERS else None
        if isinstance(member, types.MemberDescriptorType):
            member.__set__(value, item)
        else:
            _set_attributes(value, {key: item})
    return value


def _definer(kind: type, name: str) -> type:
    return next(base for base in kind.__mro__ if name in vars(base))


# ---- objects by pickle's hooks --------------------------------------------------------------------------------------
def _write_object(value: Any, writer: Writer) -> Any:
    kind = type(value)
    if is_rebuilt(kind):
        raise refusal(kind)
    reducer = copyreg.dispatch_table.get(kind)
    reduced = value.__reduce_ex__(4) if reducer is None else reducer(value)
    if isinstance(reduced, str):
        return {"$name": name_of(value, reduced)}
    make, args, *rest = reduced
    state, items, pairs, setter = (*rest, None, None, None, None)[:4]
    parts: dict[str, Any] = {}
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        (make, *args), parts["new"] = args, True
    elif make is copyreg.__newobj_ex__:  # type: ignore[attr-defined]
        (make, args, named), parts["new"] = args, True
        parts["named"] = _write_attributes(named, frozenset(named), writer)
    parts |= {"of": name_of(make), "args": writer.write_all(args)}
    found = writer.finish(value, "$object", parts)
    if "$object" not in found:
        return found
    if setter is not None:
        parts["setter"] = name_of(setter)
    if state is not None:
        parts["state"] = writer.write(state)
    if items is not None:
        parts["items"] = writer.write_all(items)
    if pairs is not None:
        parts["pairs"] = writer.write_pairs(pairs)
    return found


def _read_object(parts: Any, reader: Reader) -> Any:
    make = reader.names.find_callable(parts["of"])
    named = _read_attributes(parts.get("named", {}), reader)
    args = reader.read_all(parts["args"])
    value = make.__new__(make, *args, **named) if parts.get("new") else make(*args, **named)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType):
        raise CodecError(f"{parts['of']!r} makes {value!r}, which is no object of its own")
    reader.keep(value)
    if "state" in parts:
        _set_state(value, reader.read(parts["state"]), parts.get("setter"), reader)
    for item in parts.get("items", ()):
        value.append(reader.read(item))
    if "pairs" in parts:
        reader.read_pairs(parts["pairs"], value)
    return value


def _set_state(value: Any, state: Any, setter: str | None, reader: Reader) -> None:
    if setter is not None:
        reader.names.find_callable(setter)(value, state)
    elif hasattr(value, "__setstate__"):
        value.__setstate__(state)
    else:
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        if attributes:
            value.__dict__.update(attributes)
        for name, item in (slots or {}).items():
            setattr(value, name, item)


# ---- which kind a class is of ---------------------------------------------------------------------------------------
def _find(kind: type) -> Write:
    if issubclass(kind, enum.Enum):
        return _write_enum
    if issubclass(kind, type | types.FunctionType | types.BuiltinFunctionType):
        return _write_function if issubclass(kind, types.BuiltinFunctionType) else _write_name
    if issubclass(kind, BaseException):
        return _write_error
    if is_dataclass(kind) and _has_plain_objects(kind):
        return _write_dataclass
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _write_named_tuple
    if kind in (types.EllipsisType, types.NotImplementedType):
        return lambda value, writer: {"$name": _CONSTANTS[value]}
    return _write_object


def _write_function(value: Any, writer: Writer) -> Any:
    bound = getattr(value, "__self__", None)
    is_method = bound is not None and not isinstance(bound, types.ModuleType)
    return _write_object(value, writer) if is_method else _write_name(value, writer)


def _has_plain_objects(kind: type) -> bool:
    """True if the memory of the objects is that of ``object``: they have attributes and no more."""
    try:
        object.__new__(kind)
    except TypeError:
        return False
    return True


_READS: dict[str, Callable[[Any, Reader], Any]] = {
    "$name": lambda parts, reader: reader.names.find(parts),
    "$enum": _read_enum,
    "$dataclass": _read_dataclass,
    "$named": _read_named_tuple,
    "$error": _read_error,
    "$object": _read_object,
}
READERS.update(_READS)
FINDERS.append(_find)

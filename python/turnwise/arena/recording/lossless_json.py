"""JSON that keeps values exactly: tuples stay tuples, and objects without a JSON form become their parts.

The format is that of :mod:`turnwise.state.codec`. Reading never imports a module of the file's choice. It creates only
plain types and *data classes*: dataclasses, named tuples, enums and exceptions of modules that are already imported.
``allow_pickle`` creates any object that pickle could, which can run code.
"""

from __future__ import annotations

from typing import Any

from turnwise.state.codec import LostValueError, Names, Reader, UntrustedNameError, Writer
from turnwise.types import UNRECORDED

UnserializableValueError = LostValueError
"""A value that could not be serialized when it was recorded."""

UntrustedValueError = UntrustedNameError
"""A value whose class could run code while it is read, without ``allow_pickle``."""


def encode(value: Any, *, strict: bool = False) -> Any:
    """Return ``value`` as plain JSON. :func:`decode` turns it into an equal value of the same types.

    A value that can't be written is kept as its text; decoding it raises :class:`UnserializableValueError`. With
    ``strict``, it raises ``TypeError`` instead. What no record has (``UNRECORDED``) is left out.

    Example: ``encode({"cell": (1, 2)}) == {"cell": {"$tuple": [1, 2]}}``
    """
    return Writer(lose=not strict, omit=() if strict else UNRECORDED).write(value)


def decode(plain: Any, *, allow_pickle: bool = False) -> Any:
    """Return the value that :func:`encode` received.

    Raises :class:`UnserializableValueError` for a value that could not be recorded, :class:`UntrustedValueError` for an
    object that is neither plain nor a data class, and another ``ValueError`` for JSON that describes no value.
    ``allow_pickle`` creates such objects too, which can run code: use it only for your own records.
    """
    return Reader(Names(data_classes=True, anything=allow_pickle)).load(plain)

"""The one format of values in files: JSON, with raw buffers for arrays. Reading runs no code that the file chooses.

Read in this order: core, names, kinds, objects, arrays, tensors.
May import: utils, _C.

``None``, bools, floats, strings, lists and dicts with string keys stay as they are. Every other value is a dict with
one key that starts with ``$``::

    {"$tuple": [1, 2]}   {"$map": [[key, value], ...]}   {"$set": [...]}   {"$decimal": "1.5"}   {"$fraction": [1, 3]}
    {"$array": {"dtype": "<f8", "shape": [2], "data": "AAAA..."}}     data: base64, or the number of a raw buffer
    {"$dataclass": ["module:Class", {"field": value}]}   {"$enum": ["module:Class", "MEMBER"]}
    {"$name": "module:name"}      a type
    {"$object": {"of": "module:Class", "args": [...], ...}}     an object that pickle's hooks describe
    {"$ref": 3}                   the fourth object of this file that others may refer to

A reader builds only these kinds, from checked parts. It takes dataclasses, named tuples, enums and exceptions apart
and together without their methods. Only ``$object`` calls what it names, so the name must be allowed.
"""

from __future__ import annotations

from turnwise.state.codec import arrays, kinds, objects, tensors  # noqa: F401 - each adds its kinds
from turnwise.state.codec.core import FLAT, CodecError, LostValueError, Reader, Writer
from turnwise.state.codec.names import Names, UntrustedNameError

__all__ = ["FLAT", "CodecError", "LostValueError", "Names", "Reader", "UntrustedNameError", "Writer"]

"""Save and pickle States. Parts that versions share in memory are written once, and shared again after reading.

A file is a head and four sections::

    magic, format, number of sections
    for each section: offset, length, blake2b digest      (little-endian)
        digest of all of the above
    header      JSON: names, commits, the lengths of the buffers
    structure   blocks, containers and versions, see csrc/state/archive.h
    leaves      JSON of everything else, see codec
    buffers     the memory of arrays and large bytes, each aligned to 64 bytes
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from turnwise import _C
from turnwise._C import CheckpointError, OpaqueError, State
from turnwise.state.leaves import dump_leaves, first_unwritable, freeze_leaves, load_leaves
from turnwise.utils.copies import is_rebuilt, refusal
from turnwise.utils.files import replacing, sync_folder

MAGIC = b"\x89TWSTATE"
FORMAT = 2
SECTIONS = 4
ALIGNMENT = 64
_HEAD = struct.Struct("<8sII")
_SECTION = struct.Struct("<QQ16s")
_DIGEST = 16
_HEAD_BYTES = _HEAD.size + SECTIONS * _SECTION.size + _DIGEST

Version = tuple[bool, int]
"""``(frozen, commit)``: the index, in the list of versions, of the commit to roll back to, or -1."""


# ---- saving ---------------------------------------------------------------------------------------------------------
def save(store: Any, path: str | os.PathLike[str], states: Mapping[str, State]) -> None:
    """Write States of ``store``, a :class:`Store`, to a file, see :meth:`Store.save`."""
    if not isinstance(states, Mapping):
        raise TypeError(f"states={states!r}: expected a mapping of names to States")
    for name, state in states.items():
        if not isinstance(name, str):
            raise TypeError(f"states: the name {name!r}: expected a str")
        if type(state) is not State:
            raise TypeError(f"states[{name!r}]={state!r}: expected a State")
        if state.store is not store:
            raise ValueError(f"states[{name!r}]: it belongs to another Store")
    # Take the States apart: their structure as bytes, and the leaves as JSON and the memory of arrays.
    unique = {id(state): state for state in states.values()}
    index_of = {key: index for index, key in enumerate(unique)}
    places = [index_of[id(state)] for state in states.values()]
    structure, leaves, versions = store._archive(list(unique.values()))
    try:
        written, buffers = dump_leaves(leaves)
    except Exception as error:
        raise _unwritable(leaves, states) or error from error
    # Write the header, which names the States, and then the sections.
    header = {
        "names": list(states),
        "places": None if places == list(range(len(places))) else places,
        "versions": len(versions),
        "frozen": [index for index, (frozen, _) in enumerate(versions) if frozen],
        "commits": [[index, commit] for index, (_, commit) in enumerate(versions) if commit >= 0],
        "arrays": store.arrays,
        "buffers": [view.nbytes for view in buffers],
    }
    sections: list[list[bytes | memoryview]] = [
        [json.dumps(header, separators=(",", ":")).encode()],
        [structure],
        [written],
        [part for view in buffers for part in (view, bytes(-view.nbytes % ALIGNMENT))],
    ]
    with replacing(Path(path)) as stream:
        _write(stream, sections)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(Path(path).parent)


def _unwritable(leaves: Sequence[Any], states: Mapping[str, State]) -> TypeError | None:
    """Return an error that names the object that can't be written, its State and its path."""
    unwritable = first_unwritable(leaves)
    if unwritable is None:
        return None
    leaf, reason = unwritable
    for name, state in states.items():
        path = state._path_of(leaf)
        if path is not None:
            where = "".join(f"[{key!r}]" for key in path)
            return TypeError(f"states[{name!r}].data{where}: a {type(leaf).__name__}, which can't be saved: {reason}")
    return TypeError(f"an object of type {type(leaf).__name__} can't be saved: {reason}")


def _write(stream: IO[bytes], sections: list[list[bytes | memoryview]]) -> None:
    # The head comes first in the file, so compute the place and the digest of every section before writing.
    head = _HEAD.pack(MAGIC, FORMAT, SECTIONS)
    offset = _HEAD_BYTES
    for number, parts in enumerate(sections):
        if number == SECTIONS - 1:
            padding = bytes(-offset % ALIGNMENT)
            offset += len(padding)
        digest = hashlib.blake2b(digest_size=_DIGEST)
        length = 0
        for part in parts:
            digest.update(part)
            length += memoryview(part).nbytes
        head += _SECTION.pack(offset, length, digest.digest())
        offset += length
    stream.write(head + _digest_of(head))
    for number, parts in enumerate(sections):
        if number == SECTIONS - 1:
            stream.write(padding)
        stream.writelines(parts)


def _digest_of(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


# ---- loading --------------------------------------------------------------------------------------------------------
def read(
    path: str | os.PathLike[str],
    store_for: Callable[[str], _C.StoreBase],
    *,
    allow: Iterable[type | Callable[..., Any]],
    allow_pickle: bool,
) -> dict[str, State]:
    """Read a file's States, by name, into the store that ``store_for`` returns for the file's ``arrays`` option."""
    allowed = list(allow)
    for each in allowed:
        if not callable(each) or not hasattr(each, "__qualname__"):
            raise TypeError(f"allow={allowed!r}: expected classes and functions, got {each!r}")
    try:
        with open(path, "rb") as stream:
            header, structure, written, buffers = _read(stream)
        leaves = load_leaves(written, header.views(buffers), allow=allowed, allow_pickle=allow_pickle)
        states = restore(store_for(header.arrays), structure, leaves, header.versions)
        return {name: states[index] for name, index in zip(header.names, header.places, strict=True)}
    except CheckpointError as error:
        raise CheckpointError(f"{os.fspath(path)}: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{os.fspath(path)}: its objects are nested too deeply") from error
    except OpaqueError as error:
        raise OpaqueError(f"{os.fspath(path)}: {error}") from error


def restore(store: Any, structure: Any, leaves: list[Any], versions: list[Version]) -> list[State]:
    """Build States of ``store``, a :class:`Store`, from the result of ``store._archive``."""
    return store._restore(structure, freeze_leaves(leaves) if store.arrays == "frozen" else leaves, versions)


@dataclass(frozen=True, slots=True)
class _Header:
    names: list[str]
    places: list[int]
    versions: list[Version]
    arrays: str
    buffers: list[int]

    @classmethod
    def of(cls, data: bytes) -> _Header:
        try:
            fields = json.loads(data)
            names, count = fields["names"], fields["versions"]
            places = fields["places"]
            if places is None:
                places = list(range(len(names)))
            if not isinstance(count, int) or not 0 <= count <= 2 * len(data):
                raise ValueError(f"versions={count!r}")
            indices = [*fields["frozen"], *(index for index, _ in fields["commits"])]
            if not all(type(index) is int and 0 <= index < count for index in indices):  # others could hash alike
                raise ValueError("a version that does not exist")
            frozen = set(fields["frozen"])
            commits = dict(fields["commits"])
            versions = [(index in frozen, commits.get(index, -1)) for index in range(count)]
            good = (
                all(isinstance(name, str) for name in names)
                and len(set(names)) == len(names) == len(places)
                and all(isinstance(index, int) and 0 <= index < count for index in places)
                and all(isinstance(commit, int) for commit in commits.values())
                and fields["arrays"] in ("frozen", "copy")
                and all(isinstance(length, int) and length >= 0 for length in fields["buffers"])
            )
            header = cls(names, places, versions, fields["arrays"], fields["buffers"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"its header can't be read: {error!r}") from error
        if not good:
            raise CheckpointError("its header is inconsistent")
        return header

    def views(self, buffers: bytes) -> Iterator[memoryview]:
        whole = memoryview(buffers)
        offset = 0
        for length in self.buffers:
            if offset + length > len(buffers):
                raise CheckpointError("its arrays are cut off")
            yield whole[offset : offset + length]
            offset += length + -length % ALIGNMENT


def _read(stream: IO[bytes]) -> tuple[_Header, bytes, bytes, bytes]:
    # Check the head and the size of the file before reading any section.
    size = os.fstat(stream.fileno()).st_size
    head = stream.read(_HEAD_BYTES)
    if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
        raise CheckpointError("not a file of States")
    if len(head) < _HEAD_BYTES:
        raise CheckpointError(f"it is cut off: {size} bytes")
    _, version, count = _HEAD.unpack_from(head)
    if version != FORMAT:
        raise CheckpointError(f"it has format {version}; this turnwise reads format {FORMAT}")
    if count != SECTIONS or _digest_of(head[:-_DIGEST]) != head[-_DIGEST:]:
        raise CheckpointError("its head is damaged: the checksum does not fit")
    places = [_SECTION.unpack_from(head, _HEAD.size + index * _SECTION.size) for index in range(SECTIONS)]
    *ends, end = _HEAD_BYTES, *(offset + length for offset, length, _ in places)
    if any(offset < last for (offset, _, _), last in zip(places, ends, strict=True)):
        raise CheckpointError("its sections overlap")
    if size != end:
        raise CheckpointError(f"it has {size} bytes and should have {end}: it is cut off, or something was added")
    sections = []
    for name, (offset, length, digest) in zip(("header", "structure", "leaves", "buffers"), places, strict=True):
        stream.seek(offset)
        data = stream.read(length)
        if _digest_of(data) != digest:
            raise CheckpointError(f"its section '{name}' is damaged: the checksum does not fit")
        sections.append(data)
    header, structure, written, buffers = sections
    return _Header.of(header), structure, written, buffers


# ---- pickling -------------------------------------------------------------------------------------------------------
def _save_state(self: State, path: str | os.PathLike[str]) -> None:
    """Write this version to a file, under the name "state": see :meth:`Store.save`."""
    save(self.store, path, {"state": self})


def _reduce(self: State, protocol: Any) -> tuple[Any, ...]:
    """Pickle the State with its Store and policies; protocol 5 passes the structure and arrays out of band."""
    structure, leaves, versions = self.store._archive([self])
    for kind in filter(is_rebuilt, set(map(type, leaves))):
        raise refusal(kind)
    return _unpickle, (self.store, pickle.PickleBuffer(structure) if protocol >= 5 else structure, leaves, versions)


def _unpickle(store: Any, structure: Any, leaves: list[Any], versions: list[Version]) -> State:
    return restore(store, structure, leaves, versions)[0]


for _name, _method in (("save", _save_state), ("__reduce_ex__", _reduce), ("__copy__", State.fork)):
    setattr(State, _name, _method)

"""Writes, fingerprints and links the files of a checkpoint, and checks them when it reads them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from turnwise.inference.common.model_files import check_header
from turnwise.inference.weights.weight_block import check_memory
from turnwise.train.checkpoint.listing import LARGEST
from turnwise.train.model.weights import bit_sum
from turnwise.utils.files import link_or_copy, open_regular, read_json, replace_text, sync_folder

_DIGEST = "sha256"
"""Manifest key of the digest of all other keys."""

REMOTE_FORMAT = 6
"""Format of checkpoints without tensors, which a server holds."""


class CheckpointError(RuntimeError):
    """A checkpoint that can't be read or doesn't fit the run: the message names the file and the reason."""


class CheckpointMismatch(CheckpointError):
    """A complete checkpoint that doesn't fit this run: it has other policies, processes, or another format."""


_held: dict[Path, int] = {}


def hold(path: Path) -> bool:
    """Keep checkpoint ``path`` from being deleted by the run that writes beside it, as long as this process lives.

    Its files are read one after another, and models take long to load. Return False if it is gone already.
    """
    if path in _held:
        return True
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    if not (path.is_dir() and os.path.samestat(os.fstat(descriptor), path.stat())):
        os.close(descriptor)
        return False
    _held[path] = descriptor
    return True


def delete_unless_held(path: Path, aside: Path) -> None:
    """Rename checkpoint ``path`` to ``aside``, so that a kill leaves nothing that looks complete, and delete it.

    One that another process reads stays for now.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if _is_held(descriptor):
            return
        shutil.rmtree(path.rename(aside))
    finally:
        os.close(descriptor)


def _is_held(descriptor: int) -> bool:
    """Return True if another open file locks the same folder. Otherwise ``descriptor`` locks it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        pass
    return False


class FrozenFiles:
    """Links files that never change to those of the checkpoint ``before``, instead of writing them again.

    It recognizes equal weights by a digest of names, shapes, dtypes and bit sums in that checkpoint's manifest.
    ``digests`` are those for the new manifest, ``fingerprints`` the sizes and SHA-256 of the linked files.
    """

    def __init__(self, before: Path | None) -> None:
        self.digests: dict[str, str] = {}
        self.fingerprints: dict[str, list[Any]] = {}
        self._before = before
        self._manifest: dict[str, Any] = {}
        if before is not None:
            with suppress(CheckpointError):  # link nothing of a damaged checkpoint; reading it raises the error
                self._manifest = _checked_manifest(before)

    def link(self, file: Path, weights: Mapping[str, Tensor]) -> bool:
        """Link ``file`` to the file of ``before`` that holds ``weights``; ``False`` if there is none."""
        described = [[name, list(x.shape), str(x.dtype), bit_sum(x)] for name, x in weights.items()]
        digest = self.digests[file.name] = hashlib.sha256(json.dumps(sorted(described)).encode()).hexdigest()
        if self._before is None or self._manifest.get("frozen", {}).get(file.name) != digest:
            return False
        source, entry = self._before / file.name, self._manifest.get("files", {}).get(file.name)
        if entry is None or not source.is_file() or source.stat().st_size != entry[0]:
            return False
        link_or_copy(source, file)
        self.fingerprints[file.name] = entry
        return True

    def take(self, source: Path, file: Path) -> None:
        """Link ``file`` to ``source``, which never changes. A file that ``before`` links too needs no new SHA-256."""
        link_or_copy(source, file)
        entry = self._manifest.get("files", {}).get(file.name)
        if self._before is not None and entry is not None:
            with suppress(FileNotFoundError):
                if file.samefile(self._before / file.name):
                    self.fingerprints[file.name] = entry


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write ``tensors`` with ``save_file``. Views of one storage are copied first, as the format requires.

    Raises ``OSError`` if the file can't be written, and ``ValueError`` for tensors without memory.
    """
    check_memory(tensors)
    whole = {name: t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for name, t in tensors.items()}
    try:
        save_file(whole, file)
    except SafetensorError as error:
        raise OSError(f"{file} can't be written: {error}") from error


def read_tensors(file: Path, expected: int | None = None) -> dict[str, Tensor]:
    """Read tensors with ``load_file``. Raises :class:`CheckpointError` if the file can't be read.

    A file whose table is too long for the ``expected`` number of tensors is not read: a million would take long.
    """
    try:
        check_header(file, expected)
        return load_file(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{file} can't be read: {error}") from error


def write_manifest(manifest: Mapping[str, Any], path: Path) -> None:
    """Write the JSON-serialisable ``manifest`` into checkpoint ``path``, with a SHA-256 of itself."""
    plain = json.loads(json.dumps(manifest))  # as it will be read back: numeric keys become strings
    signed = {**plain, _DIGEST: _digest_of(plain)}
    replace_text(path / "manifest.json", json.dumps(signed, indent=1))


def amend_progress(path: Path, **counters: Any) -> None:
    """Replace counters of the run's progress in the manifest of the complete checkpoint ``path``."""
    manifest = _checked_manifest(path)
    before = manifest["state"]["progress"]
    if before != (after := json.loads(json.dumps({**before, **counters}))):
        write_manifest({**manifest, "state": {**manifest["state"], "progress": after}}, path)


def read_manifest(path: Path, formats: Collection[int], *, files: bool = True) -> dict[str, Any]:
    """Return the manifest of checkpoint ``path``, after a check of its digest and, if ``files``, all files.

    Raises :class:`CheckpointMismatch` for a format that is not one of ``formats``.
    """
    manifest = _parse_manifest(path)
    if manifest.get("format") not in formats:
        remote = " (a Tinker server holds its weights)" if manifest.get("format") == REMOTE_FORMAT else ""
        raise CheckpointMismatch(
            f"{path}: format {manifest.get('format')!r}{remote}; expected format {' or '.join(map(str, formats))}"
        )
    manifest = _checked_manifest(path)
    for name, expected in manifest["files"].items() if files else ():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size != expected[0] or fingerprint(file) != expected:
            raise CheckpointError(f"{file} is damaged: its size or SHA-256 differs from the manifest's")
    return manifest


def read_state(path: Path) -> dict[str, Any]:
    """Return the run's state in the manifest of checkpoint ``path``; empty if it can't be read, as loading it tells."""
    try:
        state = _parse_manifest(path).get("state")
    except CheckpointError:
        return {}
    return state if isinstance(state, dict) else {}


def read_listed(path: Path, name: str) -> bytes | None:
    """Return the bytes of file ``name`` of checkpoint ``path``, after a check against the manifest.

    Returns ``None`` if the file is neither listed nor there. Raises :class:`CheckpointError` for a file that is not
    listed or differs: the caller may unpickle the bytes, which runs code.
    """
    manifest, file = _checked_manifest(path), path / name
    expected = manifest["files"].get(name)
    if expected is None:
        if file.exists():
            raise CheckpointError(f"{file} is not in the checkpoint's manifest, so it is not read: delete it")
        return None
    with open_regular(file, follow=True) as stream:
        content = stream.read()
    if [len(content), hashlib.sha256(content).hexdigest()] != expected:
        raise CheckpointError(f"{file} is damaged: its size or SHA-256 differs from the manifest's")
    return content


def fingerprint(file: Path) -> list[Any]:
    """Return the file's size in bytes and its SHA-256."""
    with open_regular(file, follow=True) as stream:
        return [file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()]


def sync_files(folder: Path) -> None:
    """Flush every file of ``folder``, and its listing, to the disk."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    sync_folder(folder)


def _parse_manifest(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    try:
        manifest = read_json(file, follow=True, most=LARGEST)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} can't be read: {error}") from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{file} can't be read: expected a JSON object")
    return manifest


def _checked_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of checkpoint ``path`` without its digest, after a check against it."""
    manifest = _parse_manifest(path)
    if manifest.pop(_DIGEST, None) != _digest_of(manifest):
        raise CheckpointError(f"{path / 'manifest.json'} is damaged: its SHA-256 differs from the one in it")
    return manifest


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()

"""Weights of a Tinker server that somebody else runs: their address, their size and what the archive holds."""

from __future__ import annotations

import gzip
import io
import tarfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from turnwise.inference import tinker
from turnwise.inference.tinker import TinkerServer, TinkerServerError

from .fake_server import Say, faking


def archive(**files: bytes) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name.replace("__", "/"))
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return whole.getvalue()


def downloads(url: str, folder: Path) -> None:
    """Download as a server does that names ``url``."""

    class Service:
        def create_rest_client(self) -> Any:
            return self

        def get_checkpoint_archive_url(self, run: str, checkpoint: str) -> Any:
            future: Future[Any] = Future()
            future.set_result(type("Answer", (), {"url": url}))
            return future

    server = TinkerServer.__new__(TinkerServer)
    server.url, server.timeout, server._service = "http://hostile", 10.0, Service()
    server._tinker = type("SDK", (), {"TinkerError": RuntimeError})
    server.download("tinker://run/weights", folder)


def served(content: bytes, folder: Path) -> None:
    said = Say("", headers={"Content-Length": str(len(content))})
    said.content = content
    with faking({"/weights": said}) as server:
        downloads(f"{server.url}/weights", folder)


def test_an_archive_is_unpacked(tmp_path: Path) -> None:
    served(archive(a=b"1", b__c=b"2"), tmp_path / "new")
    assert (tmp_path / "new/a").read_bytes() == b"1" and (tmp_path / "new/b/c").read_bytes() == b"2"


def test_a_server_names_no_file_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "secret.tar").write_bytes(archive(a=b"1"))
    with pytest.raises(TinkerServerError, match="expected an address of http or https"):
        downloads((tmp_path / "secret.tar").as_uri(), tmp_path / "new")


@pytest.mark.parametrize(
    "content",
    [b"", b"no archive", gzip.compress(b"no archive"), archive(a=b"1" * 9999)[:-40]],
    ids=["empty", "text", "compressed text", "cut"],
)
def test_damaged_archives_are_errors(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(TinkerServerError, match="http://hostile does not give tinker://run/weights"):
        served(content, tmp_path / "new")


@pytest.mark.parametrize(
    "files", [{"a": bytes(10**6)}, {f"f{index}": b"" for index in range(200)}], ids=["long", "many"]
)
def test_an_archive_has_a_limit(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker, "MAX_ARCHIVE", 100_000)
    with pytest.raises(TinkerServerError, match="of more than 100000 bytes"):
        served(archive(**files), tmp_path / "new")
    assert sum(path.stat().st_size for path in (tmp_path / "new").iterdir()) <= 100_000


def test_no_file_leaves_the_folder(tmp_path: Path) -> None:
    with pytest.raises(TinkerServerError, match="outside"):
        served(archive(**{"..__x": b"1"}), tmp_path / "new")
    assert not (tmp_path / "x").exists()

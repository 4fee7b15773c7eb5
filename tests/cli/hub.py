"""A stand-in for the Hugging Face Hub on the loopback: repositories, branches, LFS and commits, kept in memory.

It answers what ``huggingface_hub`` asks when it creates a repository and uploads a folder over HTTP, without Xet.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_a_token_for_tests"


class Hub:
    """``files[repo][branch][path]`` are the committed bytes. A path that begins with ``refused`` gets a 400."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.blobs: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.refused = "nothing"
        self.url = ""

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, dict[str, Any]]:
        self.asked.append(f"{method} {path}")
        if path.startswith(self.refused):
            return 400, {"error": "as the test wants it"}
        if found := re.fullmatch(r"/storage/(\w+)", path):  # an address that is signed, so it needs no token
            assert hashlib.sha256(body).hexdigest() == found[1]
            self.blobs[found[1]] = body
            return 200, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        for pattern, reply in ROUTES.items():
            if found := re.fullmatch(pattern, f"{method} {path}"):
                return reply(self, *found.groups(), body)
        return 404, {"error": f"the stand-in has no {method} {path}"}


def create(hub: Hub, body: bytes) -> tuple[int, dict[str, Any]]:
    asked = json.loads(body)
    repo = f"{asked['organization']}/{asked['name']}"
    if asked["organization"] == "others":
        return 403, {"error": "You don't have the rights to create a model under the namespace 'others'"}
    if repo in hub.files:
        return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{repo}"}
    hub.files[repo] = {"main": {}}
    hub.private[repo] = "private" in (asked.get("visibility"), "private" if asked.get("private") else "")
    return 200, {"url": f"{hub.url}/{repo}"}


def about(hub: Hub, repo: str, body: bytes) -> tuple[int, dict[str, Any]]:
    return 200, {"id": repo, "private": hub.private[repo], "sha": "0" * 40, "siblings": [], "tags": []}


def branch(hub: Hub, repo: str, name: str, body: bytes) -> tuple[int, dict[str, Any]]:
    if name in hub.files[repo]:
        return 409, {"error": "Reference already exists"}
    hub.files[repo][name] = dict(hub.files[repo]["main"])
    return 200, {}


def check_card(hub: Hub, body: bytes) -> tuple[int, dict[str, Any]]:
    return 200, {"errors": [], "warnings": []}


def preupload(hub: Hub, repo: str, revision: str, body: bytes) -> tuple[int, dict[str, Any]]:
    if revision not in hub.files[repo]:
        return 404, {"error": f"no branch {revision}"}
    large = {True: "lfs", False: "regular"}
    files = [
        {"path": file["path"], "uploadMode": large[file["path"].endswith(".safetensors")], "shouldIgnore": False}
        for file in json.loads(body)["files"]
    ]
    return 200, {"files": files}


def batch(hub: Hub, repo: str, body: bytes) -> tuple[int, dict[str, Any]]:
    asked = json.loads(body)
    assert asked["operation"] == "upload" and "basic" in asked["transfers"]
    found = []
    for wanted in asked["objects"]:
        verify = {"href": f"{hub.url}/{repo}.git/info/lfs/verify"}
        actions = {"upload": {"href": f"{hub.url}/storage/{wanted['oid']}"}, "verify": verify}
        found.append(wanted if wanted["oid"] in hub.blobs else {**wanted, "actions": actions})
    return 200, {"transfer": "basic", "objects": found}


def verify(hub: Hub, repo: str, body: bytes) -> tuple[int, dict[str, Any]]:
    wanted = json.loads(body)
    return (200 if len(hub.blobs[wanted["oid"]]) == wanted["size"] else 400), {}


def commit(hub: Hub, repo: str, revision: str, body: bytes) -> tuple[int, dict[str, Any]]:
    for line in body.splitlines():
        item = json.loads(line)
        value = item["value"]
        if item["key"] == "file":
            hub.files[repo][revision][value["path"]] = base64.b64decode(value["content"])
        elif item["key"] == "lfsFile":
            hub.files[repo][revision][value["path"]] = hub.blobs[value["oid"]]
        else:
            assert item["key"] == "header", item
    return 200, {"commitUrl": f"{hub.url}/{repo}/commit/{'1' * 40}", "commitOid": "1" * 40}


ROUTES = {
    r"POST /api/repos/create": create,
    r"POST /api/validate-yaml": check_card,
    r"GET /api/models/(\w+/[\w-]+)": about,
    r"POST /api/models/(\w+/[\w-]+)/branch/(\w+)": branch,
    r"POST /api/models/(\w+/[\w-]+)/preupload/(\w+)": preupload,
    r"POST /api/models/(\w+/[\w-]+)/commit/(\w+)": commit,
    r"POST /(\w+/[\w-]+)\.git/info/lfs/objects/batch": batch,
    r"POST /(\w+/[\w-]+)\.git/info/lfs/verify": verify,
}


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve a :class:`Hub` on a free port of the loopback for the block."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            status, reply = hub.answer(
                self.command, self.path.partition("?")[0], self.headers.get("Authorization", ""), self.body()
            )
            content = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = handle_any

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

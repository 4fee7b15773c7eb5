"""Servers that can't be reached, are cut off, hang, refuse and talk nonsense."""

from __future__ import annotations

import asyncio
import gc
import gzip
import os
import socket
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from turnwise.inference.common.http import (
    LONGEST_WAIT,
    Endpoint,
    EndpointError,
    LoopThread,
    key_file,
    parse_server_url,
    read_key,
    write_key,
)
from turnwise.types import ModelError

from .engine_server import free_port
from .fake_server import FakeServer, Hang, Reset, Say, Script, faking


def ask(server: FakeServer | str, path: str = "/x", endpoint: Endpoint | None = None, **settings: Any) -> Any:
    url = server if isinstance(server, str) else server.url
    made = endpoint or Endpoint(url, **{"timeout": 5.0, **settings})
    try:
        return made.thread.submit(made.ask("POST", path, body={"a": 1})).result(20)
    finally:
        if endpoint is None:
            made.close()


@pytest.mark.parametrize(
    ("trouble", "said", "retryable"),
    [
        (Reset(), "cut off", True),
        (Reset(midway=False), "cut off", True),
        *[(Say({"error": {"message": "busy"}}, n), f"{n}: busy", True) for n in (408, 425, 429, 500, 503, 504)],
        *[(Say({"detail": "no such thing"}, n), f"{n}: no such thing", False) for n in (400, 404, 422, 501)],
        (Hang(), r"no answer within timeout=0\.2 seconds", False),
        *[(Say(nonsense), "/x answered no JSON", False) for nonsense in ("<html>", '{"a": ', "\x00\xff")],
    ],
)
def test_trouble_is_told_with_whether_it_may_pass_and_asked_once(trouble: Any, said: str, retryable: bool) -> None:
    with faking({"/x": trouble}) as server, pytest.raises(EndpointError, match=said) as caught:
        ask(server, timeout=0.2 if isinstance(trouble, Hang) else 5.0)
    assert server.url in str(caught.value) and caught.value.retryable == retryable and caught.value.seconds == 0
    assert caught.value.status == (int(said[:3]) if said[0].isdigit() else None)
    assert server.count("/x") == 1


def test_nobody_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EndpointError, match=rf"{url}/x can't be reached: .*; is it started, and is this its") as caught:
        ask(url)
    assert caught.value.retryable


def test_retry_after_is_told() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=9), usegmt=True)
    for after, low, high in (("3", 3, 3), (later, 5, 9), ("soon", 0, 0), ("-1", 0, 0)):
        with faking({"/x": Say("", 429, {"Retry-After": after})}) as server, pytest.raises(EndpointError) as caught:
            ask(server)
        assert low <= caught.value.seconds <= high, after


def test_no_server_lets_a_client_wait_for_ever() -> None:
    for after in ("inf", "1e300", "nan", "Fri, 31 Dec 9999 23:59:59 GMT"):
        with faking({"/x": Say("", 429, {"Retry-After": after})}) as server, pytest.raises(EndpointError) as caught:
            ask(server)
        assert 0 <= caught.value.seconds <= LONGEST_WAIT, after


BOMB = gzip.compress(bytes(10**7))


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("content", [bytes(10**6), BOMB], ids=["long", "compressed"])
def test_an_answer_is_read_up_to_a_limit(content: bytes, status: int) -> None:
    say = Say("", status, {"Content-Length": str(len(content)), "Connection": "close"})
    say.content = content
    if content is BOMB:
        say.headers["Content-Encoding"] = "gzip"
    with faking({"/x": say}) as server:
        endpoint = Endpoint(server.url, timeout=5.0)
        with pytest.raises(EndpointError, match="answered more than 500000 bytes"):
            endpoint.thread.submit(endpoint.ask("POST", "/x", most=500_000)).result(20)
        endpoint.close()


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_that_is_nested_deeply_is_an_error(status: int) -> None:
    with faking({"/x": Say("[" * 100_000, status)}) as server, pytest.raises(EndpointError, match=r"no JSON|400: \[+"):
        ask(server)


def test_a_key_file_of_others_is_neither_read_nor_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "host-1.key"
    write_key(path, "mine")
    assert read_key(path) == "mine"
    path.parent.chmod(0o755)
    assert read_key(path) is None, "others can list the folder"
    path.parent.chmod(0o700)
    path.unlink()
    os.mkfifo(path, 0o600)
    assert read_key(path) is None, "it has no writer"
    link = tmp_path / "link"
    link.symlink_to(path.parent)
    path.unlink()
    write_key(path, "mine")
    assert read_key(link / path.name) is None


def test_no_http_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail.example.org ESMTP\r\n")

        threading.Thread(target=talk, daemon=True).start()
        with pytest.raises(EndpointError, match="does not speak HTTP"):
            ask(f"http://127.0.0.1:{listener.getsockname()[1]}")


def test_the_key_is_sent_and_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sesame")
    script: Script = {"/x": [Say({}), Say({"error": "Unauthorized"}, 401)]}
    with faking(script) as server:
        key_file(server.url).unlink(missing_ok=True)  # a server that was killed may have left one for this port
        ask(server, api_key_env="SOME_KEY")
        assert server.headers[0]["Authorization"] == "Bearer sesame"
        with pytest.raises(EndpointError, match=r"401: Unauthorized.*SOME_KEY"):
            ask(server, api_key_env="SOME_KEY")
        with pytest.raises(EndpointError, match=r"401: Unauthorized.*api_key_env"):
            ask(server)
        assert "Authorization" not in server.headers[2]
    for wrong in ("", "sésame", "sesame\r\nHost: other", "sesame "):
        monkeypatch.setenv("SOME_KEY", wrong)
        with pytest.raises(ValueError, match=r"api_key_env='SOME_KEY'.*(is empty|no letter, digit or sign of ASCII)"):
            Endpoint("http://localhost", api_key_env="SOME_KEY")


def test_a_key_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesame\n")
    with faking({"/x": Say({})}) as server:
        ask(server, api_key_file=tmp_path / "key")
        assert server.headers[0]["Authorization"] == "Bearer sesame"
    with pytest.raises(ValueError, match=r"api_key_env='A', api_key_file='B': expected one of them"):
        Endpoint("http://localhost", api_key_env="A", api_key_file="B")
    (tmp_path / "key").write_text("sésame")
    with pytest.raises(ValueError, match="character 2 of 6 is no letter"):
        Endpoint("http://localhost", api_key_file=tmp_path / "key")


def test_a_key_that_is_given_itself() -> None:
    """It is not looked for again, wherever a server leaves another one."""
    with faking({"/x": [Say({}), Say({}, 401)]}) as server:
        write_key(key_file(server.url), "another")
        try:
            ask(server, api_key="sesame")
            assert server.headers[0]["Authorization"] == "Bearer sesame"
            with pytest.raises(EndpointError, match=r"401.*check the key in api_key"):
                ask(server, api_key="sesame")
        finally:
            key_file(server.url).unlink()
    with pytest.raises(ValueError, match=r"api_key=\.\.\.: expected it alone"):
        Endpoint("http://localhost", api_key="sesame", api_key_env="A")
    with pytest.raises(ValueError, match="api_key holds a key whose character 2 of 6"):
        Endpoint("http://localhost", api_key="sésame")


def test_the_key_of_a_server_that_was_started_again_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    refused = Say({"error": "no"}, 401)
    with faking({"/x": [Say({}), refused, Say({}), refused]}) as server:
        write_key(key_file(server.url), "first")
        endpoint = Endpoint(server.url)
        assert ask(server, endpoint=endpoint) == {}
        write_key(key_file(server.url), "second")
        with pytest.raises(EndpointError, match="401: no") as caught:
            ask(server, endpoint=endpoint)
        assert caught.value.retryable, "with the new key"
        assert ask(server, endpoint=endpoint) == {}
        with pytest.raises(EndpointError, match=r"401: no; expected a key: .*would leave one at"):
            ask(server, endpoint=endpoint)
        endpoint.close()
    keys = ("first", "first", "second", "second")
    assert [headers["Authorization"] for headers in server.headers] == [f"Bearer {key}" for key in keys]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_told_and_not_followed(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sesame")
    with faking({"/x": Say({})}) as other:
        moved = Say("", status, {"Location": f"{other.url}/x"})
        with faking({"/x": moved}) as server, pytest.raises(EndpointError, match=f"redirects to '{other.url}/x'"):
            ask(server, api_key_env="SOME_KEY")
        assert other.asked == [], "neither key nor body are for another server"


def test_a_cancelled_caller_ends_its_request() -> None:
    with faking({"/x": Hang(), "/y": Say({})}) as server:
        endpoint = Endpoint(server.url)
        work = endpoint.thread.submit(endpoint.ask("POST", "/x"))
        while not server.asked:
            time.sleep(0.01)
        assert work.cancel()
        assert ask(server, "/y", endpoint) == {}
        endpoint.close()
        endpoint.close()
        with pytest.raises(ModelError, match="closed"):
            endpoint.thread.submit(endpoint.ask("POST", "/y")).result()


def test_many_at_once_from_several_loops() -> None:
    with faking({"/x": lambda body: Say(body)}) as server:
        endpoint = Endpoint(server.url)

        async def many() -> list[Any]:
            work = [endpoint.thread.submit(endpoint.ask("POST", "/x", body={"n": n})) for n in range(50)]
            return list(await asyncio.gather(*map(asyncio.wrap_future, work)))

        for _ in range(2):
            assert asyncio.run(many()) == [{"n": n} for n in range(50)]
        endpoint.close()


def test_an_endpoint_that_is_dropped_ends_its_thread() -> None:
    endpoint = Endpoint("http://127.0.0.1:1")
    thread = endpoint.thread._thread
    del endpoint
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_a_loop_that_ends_leaves_nobody_waiting() -> None:
    thread = LoopThread("test")
    waiting = thread.submit(asyncio.sleep(60))
    thread.stop()
    assert waiting.cancelled()


def test_a_user_of_a_shared_thread_ends_its_own_work_and_the_last_one_the_thread() -> None:
    thread = LoopThread("test")
    other = thread.share("other")
    own, others = thread.submit(asyncio.sleep(60)), other.submit(asyncio.sleep(60))
    for _ in range(2):  # a second call changes nothing
        thread.stop()
        assert own.cancelled() and not others.done()
    with pytest.raises(ModelError, match="the client is closed"):
        thread.submit(asyncio.sleep(0)).result()
    assert other.submit(asyncio.sleep(0, 7)).result(5) == 7
    other.stop()
    assert others.cancelled() and not other._thread.is_alive()


def test_settings_are_checked() -> None:
    assert parse_server_url("http://host:1/v1/") == parse_server_url("http://host:1/") == ("http://host:1", "/v1")
    assert parse_server_url("https://host/beta/v1") == ("https://host/beta", "/v1")
    assert parse_server_url("https://host/openai/") == ("https://host/openai", "")
    for url in ("host:8000", "ftp://host", "http://", ""):
        with pytest.raises(ValueError, match="url="):
            parse_server_url(url)
    with pytest.raises(ValueError, match="timeout=0"):
        Endpoint("http://host", timeout=0)

"""Send requests to an HTTP server that answers in JSON, from any thread, and check the answers. Nothing is repeated."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from turnwise.inference.common.keys import checked_key, key_file, key_from_environment, read_key
from turnwise.types import ModelError

T = TypeVar("T")

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which a repeated request may succeed."""

CONNECT_SECONDS = 10.0


class EndpointError(ModelError):
    """Raised for a server that can't be reached, refuses, or answers wrongly. ``status`` is its answer's status.

    ``passes`` is true if the same request may succeed later, after at least ``seconds`` if the server named a time.
    """

    def __init__(self, message: str, status: int | None = None, *, passes: bool = False, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.passes, self.seconds = status, passes, seconds


class LoopThread:
    """An event loop in its own thread. Its work continues while other loops block, and after they end.

    ``at_end`` holds coroutine functions that run after all other work has ended.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.at_end: list[Callable[[], Awaitable[None]]] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` in the thread's loop. If the loop has ended, the future holds a ``ModelError``."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()
            ended: Future[T] = Future()
            ended.set_exception(ModelError("the client is closed"))
            return ended

    async def result_of(self, work: Coroutine[Any, Any, T], is_closed: Callable[[], bool]) -> T:
        """Run ``work`` in the thread's loop, and return its result. It is cancelled with its caller.

        Raises ``ModelError`` if ``work`` was cancelled because the client ``is_closed``.
        """
        try:
            return await asyncio.wrap_future(self.submit(work))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if is_closed() and task is not None and not task.cancelling():
                raise ModelError("the client was closed before this request was done") from None
            raise

    def call(self, function: Callable[[], Any]) -> None:
        """Run ``function`` in the thread's loop soon, unless the loop has ended."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """End the loop and everything that runs in it. May be called again, also by the garbage collector."""
        self.call(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            for close in self.at_end:
                self.loop.run_until_complete(close())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()


class Endpoint:
    """The server at ``url``, with its key. All coroutines run in ``thread``'s loop.

    - ``api_key_env``, ``api_key_file``: the environment variable or the file with the key, or ``api_key`` itself.
      Without any, the endpoint looks for the key that ``turnwise serve`` wrote for this user on this host.
    - ``timeout``: seconds for one request.

    A request is sent once; a :class:`~turnwise.inference.pool.client.PoolClient` repeats those that may succeed later.
    The endpoint follows no redirects, because key and body are for this server only.

    Example: ``Endpoint("http://127.0.0.1:8000", api_key_env="SERVER_KEY", timeout=60)``

    Raises ``ImportError`` if aiohttp is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key_env: str | None = None,
        api_key_file: str | Path | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.url, self.api = parse_server_url(url)
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: expected seconds > 0")
        if api_key_env is not None and api_key_file is not None:
            raise ValueError(f"api_key_env={api_key_env!r}, api_key_file={str(api_key_file)!r}: expected one of them")
        if api_key is not None and (api_key_env or api_key_file) is not None:
            raise ValueError("api_key=...: expected it alone, without api_key_env and api_key_file")
        self.timeout = timeout
        self.api_key_env, self.api_key_file = api_key_env, api_key_file
        self._fixed = api_key_env is not None or api_key is not None
        if api_key is not None:
            self._key: str | None = checked_key(api_key, "api_key")
        else:
            self._key = key_from_environment(api_key_env) if api_key_env is not None else self._key_on_disk()
        self._session: Any = None
        self._aiohttp = aiohttp_or_raise()
        self.thread = LoopThread("turnwise-http")
        self._stop = weakref.finalize(self, self.thread.stop)

    async def ask(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        reads: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """Return the decoded JSON of the answer; ``None`` if it is empty or ``reads`` is false.

        Raises :class:`EndpointError`.
        """
        content = await self._send(method, path, body, query, timeout or self.timeout)
        return _decoded(f"{method} {self.url}{path}", content) if reads else None

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str] | None, timeout: float
    ) -> bytes:
        aiohttp = self._aiohttp
        where = f"{method} {self.url}{path}"
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, CONNECT_SECONDS))
        asked = {"json": body, "params": query, "timeout": limits, "allow_redirects": False}
        try:
            async with self._open_session().request(
                method, self.url + path, headers=self._authorization(), **asked
            ) as answer:
                content = await answer.read()
                if answer.status >= 300:
                    self._reject(where, answer.status, answer.headers, content)
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise EndpointError(
                f"{where} can't be reached: {_said(error)}; is it started, and is this its address?", passes=True
            ) from error
        except TimeoutError as error:
            raise EndpointError(f"{where} gave no answer within timeout={timeout:g} seconds") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise EndpointError(
                f"{where} was cut off in the middle of its answer: {_said(error)}", passes=True
            ) from error
        except aiohttp.ClientError as error:
            raise EndpointError(f"{where} does not speak HTTP: {_said(error)}") from error
        return content

    def _reject(self, where: str, status: int, headers: Mapping[str, str], content: bytes) -> None:
        said = error_message(content)
        if status < 400:
            said = f"it redirects to {headers.get('Location', '')[:200]!r}, which is not followed; give the final url"
        new_key = status == 401 and self._has_new_key()
        if status == 401 and not new_key:
            source = self.api_key_env or self.api_key_file or ("api_key" if self._fixed else None)
            said += f"; look at the key in {source}" if source else f"; expected a key: {self._how_to_give_one()}"
        passes = status in PASSING or new_key
        raise EndpointError(f"{where} answered {status}: {said}", status, passes=passes, seconds=_retry_after(headers))

    def _open_session(self) -> Any:
        if self._session is None:
            # Servers end idle connections after 5 seconds.
            connector = self._aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
            self._session = self._aiohttp.ClientSession(connector=connector)
            self.thread.at_end.append(self._session.close)
        return self._session

    # -- the key -------------------------------------------------------------------------------------------------------
    def _authorization(self) -> dict[str, str]:
        return {} if self._key is None else {"Authorization": f"Bearer {self._key}"}

    def _key_on_disk(self) -> str | None:
        if self.api_key_file is None:
            return read_key(key_file(self.url))
        key = Path(self.api_key_file).read_text(encoding="utf-8", errors="replace").rstrip("\n")
        return checked_key(key, f"api_key_file={str(self.api_key_file)!r}: the file")

    def _has_new_key(self) -> bool:
        """Read the key file again. True if it holds another key, as after a restart of the server."""
        if self._fixed:
            return False
        before, self._key = self._key, self._key_on_disk()
        return self._key not in (None, before)

    def _how_to_give_one(self) -> str:
        return (
            "api_key_env names the variable with it, api_key_file its file. A `turnwise serve` of this user on this "
            f"host leaves one at {key_file(self.url)}, where is none of this server"
        )

    def close(self) -> None:
        """Cut off running requests. May be called again."""
        self._stop()


def aiohttp_or_raise() -> Any:
    """Import the ``aiohttp`` package. Raises ``ImportError`` naming the extra if it is missing."""
    try:
        import aiohttp
    except ImportError as error:
        raise ImportError(
            f"clients of servers need aiohttp, which doesn't import here ({error}): pip install 'turnwise[server]'"
        ) from error
    return aiohttp


def parse_server_url(url: str) -> tuple[str, str]:
    """Split ``url`` into the server's address and the path of OpenAI's API: ``/v1``, unless ``url`` has another path.

    Raises ``ValueError`` for anything but the address of a server.
    """
    parts = urlsplit(str(url))
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"url={url!r}: expected the address of a server, such as 'http://127.0.0.1:8000'")
    plain = str(url).rstrip("/")
    below = parts.path.rstrip("/").endswith("/v1") or not parts.path.strip("/")
    return plain.removesuffix("/v1"), "/v1" if below else ""


def error_message(content: bytes) -> str:
    """Find the error message of an answer in the form of OpenAI's API or FastAPI, else its first 300 characters."""
    text = content.decode(errors="replace").strip()
    try:
        found = json.loads(text)
    except ValueError:
        return text[:300] or "(no text)"
    code = None
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            code, found = found.get("code"), found[key]
    said = found if isinstance(found, str) else str(found)[:300]
    return f"{said} ({code})" if isinstance(code, str) else said


def _decoded(where: str, content: bytes) -> Any:
    if not content:
        return None
    try:
        return json.loads(content)
    except ValueError as error:
        start = content[:80].decode(errors="replace")
        raise EndpointError(f"{where} answered no JSON ({error}): {start!r}") from None


def _retry_after(headers: Mapping[str, str]) -> float:
    """The seconds that the server asks to wait, given as seconds or as a date; 0 if it gave neither."""
    given = headers.get("Retry-After", "").strip()
    try:
        return max(0.0, float(given))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(given).timestamp() - time.time())
    except ValueError:
        return 0.0


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__

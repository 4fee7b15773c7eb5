"""Send requests to an HTTP server that answers in JSON, each once, from any thread, and check the answers.

API keys come from the environment or a file. ``turnwise serve`` writes its key where the user's clients find it.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from turnwise.types import ModelError
from turnwise.utils.files import replacing

T = TypeVar("T")

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which a repeated request may succeed."""

CONNECT_SECONDS = 10.0

MAX_ANSWER = 2**24
"""The most bytes of an answer, decompressed."""

MAX_KEY = 2**12
"""The most bytes of a key."""

LONGEST_WAIT = 600.0
"""The most seconds that a ``Retry-After`` counts for."""


class EndpointError(ModelError):
    """Raised for a server that can't be reached, refuses, or answers wrongly. ``status`` is its answer's status.

    ``retryable`` is true if the same request may succeed later, after at least ``seconds`` if the server named a time.
    """

    def __init__(
        self, message: str, status: int | None = None, *, retryable: bool = False, seconds: float = 0.0
    ) -> None:
        super().__init__(message)
        self.status, self.retryable, self.seconds = status, retryable, seconds


class LoopThread:
    """An event loop in its own thread. Its work continues while other loops block, and after they end.

    ``at_end`` holds coroutine functions that run after all other work has ended. The thread ends once it and all that
    :meth:`share` it have stopped.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.at_end: list[Callable[[], Awaitable[None]]] = []
        self._users, self._stopped = [name], False
        self._work: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def share(self, name: str) -> LoopThread:
        """Return this thread for another user, who stops it separately."""
        self._users.append(name)
        other = copy.copy(self)
        other._work = set()
        return other

    def runs_here(self) -> bool:
        """Return True in the thread itself, where its loop runs."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` in the thread's loop. If the loop has ended, the future holds a ``ModelError``."""
        try:
            if self._stopped:
                raise RuntimeError("this user has stopped, others may run")
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()
            ended: Future[T] = Future()
            ended.set_exception(ModelError("the client is closed"))
            return ended
        self._work.add(future)
        future.add_done_callback(self._work.discard)
        return future

    def call(self, function: Callable[[], Any]) -> None:
        """Run ``function`` in the thread's loop soon, unless the loop has ended."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """End the loop and everything that runs in it; while others share it, only what this user submitted.

        May be called again, also by the garbage collector.
        """
        if not self._stopped:
            self._stopped = True
            self._users.pop()
        if self._users:
            for work in tuple(self._work):
                work.cancel()
            return
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
        decodes: bool = True,
        timeout: float | None = None,
        most: int = MAX_ANSWER,
    ) -> Any:
        """Return the decoded JSON of the answer; ``None`` if it is empty or ``reads`` is false.

        Unless ``decodes``, return its text.

        Raises :class:`EndpointError`, also for an answer of more than ``most`` bytes.
        """
        aiohttp = self._aiohttp
        where = f"{method} {self.url}{path}"
        limit = timeout or self.timeout
        options = {
            "json": body,
            "params": query,
            "headers": {} if self._key is None else {"Authorization": f"Bearer {self._key}"},
            "timeout": aiohttp.ClientTimeout(total=limit, sock_connect=min(limit, CONNECT_SECONDS)),
            "allow_redirects": False,
        }
        try:
            async with self._open_session().request(method, self.url + path, **options) as answer:
                content = bytearray()
                async for piece in answer.content.iter_any():
                    content += piece
                    if len(content) > most:
                        raise EndpointError(f"{where} answered more than {most} bytes")
                if answer.status >= 300:
                    self._reject(where, answer.status, answer.headers, content)
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise EndpointError(
                f"{where} can't be reached: {_describe_error(error)}; is it started, and is this its address?",
                retryable=True,
            ) from error
        except TimeoutError as error:
            raise EndpointError(f"{where} gave no answer within timeout={limit:g} seconds") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise EndpointError(
                f"{where} was cut off in the middle of its answer: {_describe_error(error)}", retryable=True
            ) from error
        except aiohttp.ClientError as error:
            raise EndpointError(f"{where} does not speak HTTP: {_describe_error(error)}") from error
        if not reads or not content:
            return None
        if not decodes:
            return content.decode(errors="replace")
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            start = content[:80].decode(errors="replace")
            raise EndpointError(f"{where} answered no JSON ({error}): {start!r}") from None

    def _reject(self, where: str, status: int, headers: Mapping[str, str], content: bytes | bytearray) -> None:
        message = error_message(content)
        if status < 400:
            target = headers.get("Location", "")[:200]
            message = f"it redirects to {target!r}, which is not followed; give the final url"
        retryable = status in PASSING
        if status == 401:
            # A server that was started again has left another key in its file.
            before = self._key
            if not self._fixed:
                self._key = self._key_on_disk()
            if self._key is not None and self._key != before:
                retryable = True
            elif source := self.api_key_env or self.api_key_file or ("api_key" if self._fixed else None):
                message += f"; check the key in {source}"
            else:
                message += (
                    "; expected a key: api_key_env names the variable with it, api_key_file its file. A `turnwise "
                    f"serve` of this user on this host would leave one at {key_file(self.url)}"
                )
        raise EndpointError(
            f"{where} answered {status}: {message}", status, retryable=retryable, seconds=_retry_after(headers)
        )

    def _open_session(self) -> Any:
        if self._session is None:
            # Servers end idle connections after 5 seconds.
            connector = self._aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
            cookies = self._aiohttp.DummyCookieJar()
            self._session = self._aiohttp.ClientSession(connector=connector, cookie_jar=cookies)
            self.thread.at_end.append(self._session.close)
        return self._session

    def _key_on_disk(self) -> str | None:
        if self.api_key_file is None:
            return read_key(key_file(self.url))
        key = Path(self.api_key_file).read_text(encoding="utf-8", errors="replace").rstrip("\n")
        return checked_key(key, f"api_key_file={str(self.api_key_file)!r}: the file")

    def close(self) -> None:
        """Cut off running requests. May be called again."""
        self._stop()


def aiohttp_or_raise() -> Any:
    """Import the ``aiohttp`` package. Raises ``ImportError`` naming the extra if it is missing."""
    try:
        import aiohttp
    except ImportError as error:
        raise ImportError(
            f"clients of servers need aiohttp, which doesn't import here ({error}): pip install 'turnwise[gateway]'"
        ) from error
    return aiohttp


@contextmanager
def reading(where: str, expected: str) -> Iterator[None]:
    """Raise :class:`EndpointError` where the block finds that an answer of ``where`` is not what is ``expected``."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise EndpointError(f"{where} answered something else ({str(error)[:80]}): expected {expected}") from error


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


def error_message(content: bytes | bytearray) -> str:
    """Find the error message of an answer in the form of OpenAI's API or FastAPI, else its first 300 characters."""
    text = content.decode(errors="replace").strip()
    try:
        error = json.loads(text)
    except (ValueError, RecursionError):
        return text[:300] or "(no text)"
    code = None
    for key in ("error", "message", "detail"):
        if isinstance(error, dict) and key in error:
            code, error = error.get("code"), error[key]
    message = error[:2000] if isinstance(error, str) else str(error)[:300]
    return f"{message} ({code[:100]})" if isinstance(code, str) else message


def _retry_after(headers: Mapping[str, str]) -> float:
    """The seconds that the server asks to wait, given as seconds or as a date; 0 if it gave neither."""
    given = headers.get("Retry-After", "").strip()
    with suppress(ValueError):
        return min(max(0.0, float(given)), LONGEST_WAIT)
    with suppress(ValueError, OverflowError):
        return min(max(0.0, parsedate_to_datetime(given).timestamp() - time.time()), LONGEST_WAIT)
    return 0.0


def _describe_error(error: BaseException) -> str:
    return str(error) or type(error).__name__


# -- keys --------------------------------------------------------------------------------------------------------------
def key_from_environment(variable: str) -> str:
    """The key in an environment variable. Raises ``ValueError`` if it is empty or an HTTP header can't carry it."""
    return checked_key(os.environ.get(variable, ""), f"api_key_env={variable!r}: the environment variable")


def key_file(url: str) -> Path:
    """The file, private to this user, where ``turnwise serve`` on this host writes the key of the server at ``url``."""
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    name = re.sub(r"[^\w.-]", "_", f"{host}-{port}.key")
    return Path(tempfile.gettempdir()) / f"turnwise-{os.getuid()}" / name


def read_key(path: Path) -> str | None:
    """Read the key that :func:`write_key` wrote. ``None`` if the file is missing or others could have written it."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would else wait for its writer
    try:
        with open(os.open(path, flags), encoding="ascii") as file:
            entry, folder = os.fstat(file.fileno()), path.parent.lstat()
            is_ours = stat.S_ISREG(entry.st_mode) and stat.S_ISDIR(folder.st_mode) and _is_private(folder)
            return file.read(MAX_KEY).rstrip("\n") if is_ours and _is_private(entry) else None
    except (OSError, UnicodeDecodeError):
        return None


def write_key(path: Path, key: str) -> None:
    """Write ``key`` to a file that only this user can read. Raises ``OSError`` if others can use its folder."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    folder = path.parent.lstat()
    if not stat.S_ISDIR(folder.st_mode) or not _is_private(folder):
        raise OSError(f"{path.parent} can be used by others: delete it, or set TMPDIR to another folder")
    with replacing(path, 0o600) as file:
        file.write(f"{key}\n".encode("ascii"))


def _is_private(entry: os.stat_result) -> bool:
    """True for a file or folder that only this user can read or write."""
    return entry.st_uid == os.getuid() and not entry.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def checked_key(key: str, source: str) -> str:
    """Return ``key``. Raises ``ValueError`` naming its ``source`` if it is empty or an HTTP header can't carry it."""
    if not key:
        raise ValueError(f"{source} does not exist or is empty")
    if (bad := re.search("[^!-~]", key)) is not None:
        raise ValueError(
            f"{source} holds a key whose character {bad.start() + 1} of {len(key)} is no letter, digit or sign of "
            "ASCII: expected these only, without spaces and line breaks"
        )
    return key

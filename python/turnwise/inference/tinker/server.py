"""A connection to a server of the Tinker API, through its SDK. Waiting for an answer ends if the server is gone."""

from __future__ import annotations

import asyncio
import io
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from turnwise.inference.common.proxies import bypass_proxies, is_loopback
from turnwise.types import ModelError
from turnwise.utils.threads import to_thread

HOSTED = "https://tinker.thinkingmachines.dev/services/tinker-prod"
"""Address of the hosted service."""

POLL = 2.0
"""Seconds between two looks at whether the server is still there."""


class TinkerServerError(ModelError):
    """The server refused a request, took too long, or can't be reached."""


def tinker_or_raise() -> Any:
    """Return the SDK. Raises ``ImportError`` if it is missing."""
    try:
        import tinker  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError("learner.type = 'tinker' needs the Tinker SDK: pip install 'turnwise[tinker]'") from error
    return tinker


class TinkerServer:
    """The server at ``url`` (``None``: the hosted service), which gets ``key`` with each request.

    ``timeout`` is the time in seconds that one answer may take, and ``patience`` the time that the server may be
    unreachable. The SDK itself would wait for a dead server for many minutes, or for ever.

    Raises :class:`TinkerServerError` if the server can't be reached, and ``ImportError`` if the SDK is missing.

    Example: ``TinkerServer("http://127.0.0.1:8000", "tml-any").models()``
    """

    def __init__(self, url: str | None, key: str, *, timeout: float = 1800.0, patience: float = 60.0) -> None:
        self.url, self.timeout, self.patience = (url or HOSTED).rstrip("/"), timeout, patience
        self._tinker = tinker_or_raise()
        if is_loopback(urlsplit(self.url).hostname or ""):
            bypass_proxies(self.url)
        self._lock = threading.Lock()
        self._looked = self._seen = time.monotonic()
        if (problem := self._unreachable()) is not None:
            raise TinkerServerError(f"no Tinker server answers at {self.url}: {problem}")
        self._service = self.call(partial(self._tinker.ServiceClient, base_url=self.url, api_key=key))

    def models(self) -> list[str]:
        """Return the names of the base models that the server has."""
        return [str(model.model_name) for model in self.call(self._service.get_server_capabilities).supported_models]

    def adapter(self, base_model: str, rank: int, seed: int) -> Any:
        """Create an adapter for training, on all linear layers but the head, and return the SDK's client of it."""
        create = self._service.create_lora_training_client
        return self.call(partial(create, base_model=base_model, rank=rank, seed=seed, train_unembed=False))

    def sampler(self, *, path: str | None = None, base_model: str | None = None) -> Any:
        """Return the SDK's sampling client of saved weights (``tinker://...``), or of a base model."""
        create = self._service.create_sampling_client
        return self.call(partial(create, model_path=path, base_model=base_model))

    def download(self, path: str, folder: Path) -> None:
        """Download the saved weights ``path`` into ``folder``: an adapter in peft's format."""
        run, _, checkpoint = path.removeprefix("tinker://").partition("/")
        archive = self.call(partial(self._service.create_rest_client().get_checkpoint_archive_url, run, checkpoint))
        try:
            with urllib.request.urlopen(self.wait(archive).url, timeout=self.timeout) as answer:
                content = answer.read()
        except OSError as error:
            raise TinkerServerError(f"{self.url} does not give {path}: {error}") from error
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(content)) as files:
            files.extractall(folder, filter="data")

    # -- waiting -------------------------------------------------------------------------------------------------------
    def call(self, work: Callable[[], Any]) -> Any:
        """Return ``work()``, a call of the SDK that blocks."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()  # no exit waits for a call that never ends
        return self.wait(future)

    def wait(self, future: Any) -> Any:
        """Return the result of a future of the SDK. Raises :class:`TinkerServerError`."""
        pending, began = _plain(future), time.monotonic()
        while not wait([pending], timeout=POLL).done:
            self._still_there(began)
        return self._result(pending)

    async def answer(self, future: Any) -> Any:
        """Return the result as :meth:`wait` does, without blocking the event loop."""
        began = time.monotonic()
        pending = asyncio.wrap_future(_plain(future))
        try:
            while not (await asyncio.wait({pending}, timeout=POLL))[0]:
                await to_thread(self._still_there, began)
        except BaseException:
            pending.cancel()
            raise
        return self._result(pending)

    def _result(self, done: Any) -> Any:
        errors = (self._tinker.TinkerError, ValueError, TypeError, OSError)  # the SDK raises all of them
        try:
            return done.result()
        except errors as error:
            raise TinkerServerError(f"{self.url}: {type(error).__name__}: {error}") from error

    def _still_there(self, began: float) -> None:
        waited = time.monotonic() - began
        if waited > self.timeout:
            raise TinkerServerError(f"{self.url} gave no answer in {waited:.0f} s (learner.tinker.timeout)")
        with self._lock:
            if time.monotonic() - self._looked < POLL:
                return
            problem = self._unreachable()
            self._looked = time.monotonic()
            if problem is None:
                self._seen = self._looked
        if problem is not None and self._looked - self._seen > self.patience:
            raise TinkerServerError(
                f"{self.url} has been unreachable for {self._looked - self._seen:.0f} s (learner.tinker.patience): "
                f"{problem}"
            )

    def _unreachable(self) -> str | None:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=10):
                return None
        except urllib.error.HTTPError:
            return None  # it refuses this, but it is there
        except (OSError, ValueError) as error:
            return str(getattr(error, "reason", error))


def _plain(future: Any) -> Future[Any]:
    """Return the future of ``concurrent.futures`` behind a future of the SDK."""
    plain: Future[Any] = future if isinstance(future, Future) else future.future()
    return plain


def token_input(token_ids: Iterable[int]) -> Any:
    """Return token ids as the SDK's model input."""
    return tinker_or_raise().types.ModelInput.from_ints([int(token) for token in token_ids])


def datum(token_ids: np.ndarray, inputs: Mapping[str, np.ndarray]) -> Any:
    """Return a row of ``T`` tokens as the SDK's training row: it predicts each token but the first.

    ``inputs`` are float arrays ``[T - 1]`` by the API's names, such as ``advantages``, aligned with the targets.
    """
    types = tinker_or_raise().types
    arrays = {name: np.asarray(values, dtype=np.float32) for name, values in inputs.items()}
    arrays["target_tokens"] = np.asarray(token_ids[1:], dtype=np.int64)
    tensors = {name: types.TensorData.from_numpy(array) for name, array in arrays.items()}
    return types.Datum(model_input=token_input(token_ids[:-1]), loss_fn_inputs=tensors)

"""The models that an agent may call, and clients of common packages for them."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

TRACING = "OPENAI_AGENTS_DISABLE_TRACING"


@dataclass(frozen=True, slots=True)
class Model:
    """A model that an agent may call: one of the session's actors.

    A client is made once and closed when the episode ends; ``options`` go to it, and make a further one.

    Example: ``model.async_openai_client().responses.create(model=model.name, input="2 + 2 = ?")``
    """

    base_url: str
    """For clients of the OpenAI API; ends in ``/v1``."""
    anthropic_base_url: str
    """For Anthropic's client, which appends ``/v1/messages`` itself."""
    api_key: str = field(repr=False)
    name: str
    _clients: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict, repr=False, compare=False)
    """Each client with the event loop that it was made in."""

    def openai_client(self, **options: Any) -> Any:
        """Return an ``openai.OpenAI``. Raises ``ImportError`` if openai is missing, as all clients do."""
        return self._client("openai", "OpenAI", self.base_url, options)

    def async_openai_client(self, **options: Any) -> Any:
        """Return an ``openai.AsyncOpenAI``."""
        return self._client("openai", "AsyncOpenAI", self.base_url, options)

    def anthropic_client(self, **options: Any) -> Any:
        """Return an ``anthropic.Anthropic``."""
        return self._client("anthropic", "Anthropic", self.anthropic_base_url, options)

    def async_anthropic_client(self, **options: Any) -> Any:
        """Return an ``anthropic.AsyncAnthropic``."""
        return self._client("anthropic", "AsyncAnthropic", self.anthropic_base_url, options)

    def litellm_kwargs(self) -> dict[str, Any]:
        """Return the arguments of ``litellm.completion``, and of frameworks that call it, such as DSPy's ``LM``."""
        return {"model": f"openai/{self.name}", "api_base": self.base_url, "api_key": self.api_key}

    def langchain_kwargs(self) -> dict[str, Any]:
        """Return the arguments of ``langchain_openai.ChatOpenAI``."""
        return {"model": self.name, "base_url": self.base_url, "api_key": self.api_key}

    def _client(self, package: str, kind: str, url: str, options: dict[str, Any]) -> Any:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        key: Hashable = len(self._clients) if options else (kind, loop)
        if key not in self._clients:
            try:
                module = importlib.import_module(package)
            except ImportError as error:
                raise ImportError(f"the model's client needs {package}: pip install {package}") from error
            settings = {"base_url": url, "api_key": self.api_key, **options}
            self._clients[key] = getattr(module, kind)(**settings), loop
        return self._clients[key][0]

    async def close(self) -> None:
        """Close the clients. Those of another event loop can't be closed here."""
        while self._clients:
            _, (client, loop) = self._clients.popitem()
            if not inspect.iscoroutinefunction(client.close):
                client.close()
            elif loop is asyncio.get_running_loop():
                await client.close()


def disable_agents_tracing() -> None:
    """Keep openai-agents from sending traces of each run to OpenAI, unless the environment says otherwise.

    The traces would leave the machine with every prompt and answer, or fail for want of a key of OpenAI's.
    """
    if TRACING in os.environ:
        return
    os.environ[TRACING] = "1"  # for a package that is imported later
    disable = getattr(sys.modules.get("agents"), "set_tracing_disabled", None)
    if disable is not None:
        disable(True)

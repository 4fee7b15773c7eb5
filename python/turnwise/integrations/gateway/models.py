"""The models that an agent may call, and clients of common packages for them."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

TRACING = "OPENAI_AGENTS_DISABLE_TRACING"


@dataclass(eq=False, slots=True)
class Model:
    """A model that an agent may call: one of the session's actors.

    A client is made once and closed when the episode ends; ``options`` go to it, and make a further one.
    :meth:`child` gives a sub-agent a model of its own.

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
    _open: Callable[[str | None], ChildModel] | None = field(default=None, repr=False)

    def child(self, actor: str | None = None) -> ChildModel:
        """Return a model for a sub-agent: this actor, or another one of the session, in a trajectory of its own.

        Its calls are rows of a child of this model's trajectory. The child of a child belongs to the same attempt.
        Raises ``ValueError`` for an unknown actor, ``RuntimeError`` once the episode has ended.
        """
        if self._open is None:
            raise RuntimeError(
                f"model {self.name!r} has no session: expected a model that an episode gave to its agent"
            )
        return self._open(actor)

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


class Outcome(Protocol):
    """What an agent says of a sub-agent."""

    reward: float | None

    def leave(self, error: BaseException | None) -> None:
        """Take no more calls; ``error`` is the exception that ended the sub-agent."""


class ChildModel(Model):
    """The model of one sub-agent. Its trajectory has ``reward``, or without one its parent's reward.

    As a context manager, sync or async, it ends with its block. A sub-agent that an exception ends has failed: its
    calls do not train. The exception goes on, and fails the attempt unless the agent catches it.

    Example::

        async with models["worker"].child() as worker:
            answer = await ask(worker, part)
            worker.reward = score(answer)
    """

    __slots__ = ("_outcome",)

    def __init__(self, outcome: Outcome, *fields: Any) -> None:
        super().__init__(*fields)
        self._outcome = outcome

    @property
    def reward(self) -> float | None:
        """The child's own reward; ``None`` if it takes its parent's.

        Setting it raises ``TypeError`` or ``ValueError`` unless it is a finite number or ``None``, and ``RuntimeError``
        once the episode has ended.
        """
        return self._outcome.reward

    @reward.setter
    def reward(self, value: float | None) -> None:
        self._outcome.reward = value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._outcome.leave(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._outcome.leave(error)


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

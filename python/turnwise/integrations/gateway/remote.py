"""Evaluates an agent against any server of the OpenAI API: the same agent, questions, rubric and table, no training."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from turnwise.arena import Arena
from turnwise.inference import ScriptedClient
from turnwise.integrations.gateway.gateway import Gateway
from turnwise.integrations.gateway.models import ChildModel, Model
from turnwise.integrations.gateway.task import GatewayTask
from turnwise.tasks.base import held_out
from turnwise.train.eval.evaluate import Evaluation, evaluate
from turnwise.types.protocols import ArenaForHooks
from turnwise.utils.threads import run_in_program

NO_KEY = "none"


class RemoteOutcome:
    """What an agent says of a sub-agent whose calls go elsewhere."""

    reward: float | None = None

    def leave(self, error: BaseException | None) -> None: ...


class RemoteSession:
    """The models of one episode at another server: every actor is the same model there."""

    def __init__(self, actors: Sequence[str], url: str, model: str, key: str) -> None:
        self.url = url
        self.children: list[ChildModel] = []
        bare = url.removesuffix("/v1")
        self.models: dict[str, Model] = {actor: Model(url, bare, key, model) for actor in actors}
        for one in self.models.values():
            one._open = self.child

    def child(self, actor: str | None) -> ChildModel:
        """Return a model for a sub-agent. Its reward counts nowhere, as nothing trains."""
        if actor is not None and actor not in self.models:
            raise ValueError(f"child({actor!r}): no such actor, expected one of {list(self.models)}")
        any_of = next(iter(self.models.values()))
        child = ChildModel(RemoteOutcome(), any_of.base_url, any_of.anthropic_base_url, any_of.api_key, any_of.name)
        child._open = self.child
        self.children.append(child)
        return child

    control_key = NO_KEY
    full = None
    untrained: Sequence[str] = ()

    def allow_children(self) -> None:
        """Do nothing: the other server has no sub-agents, and says so."""

    def called(self) -> list[str]:
        """Return all actors, as the calls go elsewhere; a reward for each is expected."""
        return [actor for actor in self.models if actor not in self.untrained]

    def paid_apart(self) -> list[str]:
        """Return all actors too: no one knows which of them the agent left alone, so none needs a reward."""
        return self.called()


class RemoteGateway(Gateway):
    """Gives agents the URL, the model's name and the key of another server. It sees none of their calls.

    Example: ``RemoteGateway("https://api.openai.com/v1", "gpt-5", key_variable="OPENAI_API_KEY")``
    """

    def __init__(self, url: str, model: str, *, key_variable: str | None = None) -> None:
        super().__init__()
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"base_url={url!r}: expected a URL that begins with http:// or https://")
        if key_variable is not None and not os.environ.get(key_variable):
            raise ValueError(f"api_key_env={key_variable!r}: no such environment variable is set")
        self.url, self.model = url.rstrip("/"), model
        self.key = os.environ[key_variable] if key_variable else NO_KEY

    @asynccontextmanager
    async def session(self, actors: Sequence[str], arena: ArenaForHooks) -> AsyncIterator[Any]:
        session = RemoteSession(actors, self.url, self.model, self.key)
        try:
            yield session
        finally:
            for model in (*session.models.values(), *session.children):
                await model.close()

    @asynccontextmanager
    async def at_socket(self, path: str) -> AsyncIterator[None]:
        raise RuntimeError("gateway.container: its network reaches turnwise's gateway alone, and no other server")
        yield


def evaluate_remotely(
    task: GatewayTask,
    gateway: RemoteGateway,
    *,
    questions: int | None = None,
    samples: int = 1,
    parallel: int = 16,
    show: int = 0,
) -> Evaluation:
    """Play the held-out questions of ``task`` with the models of ``gateway``, ``parallel`` episodes at a time.

    The result has ``show`` episodes as text.

    Raises ``ValueError`` if no episode finishes.
    """
    task.gateway = gateway
    arena = Arena(ScriptedClient([]), max_concurrency=parallel, failure_threshold=1.0)
    for actor in task.actors:
        arena.add_actor(actor)
    for episode in task.episodes().values():
        arena.add_episode(episode)
    asked: Any = task  # a protocol's attributes can't be class variables
    requests = held_out(asked, "eval", questions)
    played = evaluate(arena, requests, task.success_metric, samples=samples, concurrency=parallel, show=show)
    return run_in_program(played)

"""Episodes that an agent of any framework plays: a function of the question and the models."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any
from urllib.parse import urlsplit

from turnwise.arena import Episode, Rubric
from turnwise.arena.rewards.inherit import inherit_rewards
from turnwise.arena.rewards.invalid_action import CONTEXT
from turnwise.arena.runtime.context import require_context
from turnwise.arena.runtime.user_code import CallTimeoutError, call
from turnwise.inference.common.proxies import proxy_variables
from turnwise.integrations.gateway.gateway import Gateway
from turnwise.integrations.gateway.models import Model
from turnwise.integrations.gateway.sessions.session import GatewaySession
from turnwise.state import to_python
from turnwise.types import EpisodeState, GenerateResult
from turnwise.types.protocols import ArenaForHooks
from turnwise.utils.registry import import_by_name, name_of

Agent = Callable[[Any, Mapping[str, Model]], Awaitable[Any] | Any]
"""``agent(question, models)``: any code, ``async def`` or ``def``. It returns its reward or its result."""


def reported_reward(extras: Mapping[str, Any]) -> dict[str, float] | float:
    """Return the rewards that the agent itself reported: one number for all that were called, or one by actor.

    Of an attempt that called no actor it is one number, which is a metric alone.
    """
    rewards = extras["rewards"]
    return dict(rewards) if isinstance(rewards, Mapping) else float(rewards)


class GatewayEpisode(Episode):
    """Base of the episodes whose agent calls models through a gateway.

    Without ``rubric``, the agent's result is the reward: a number for all actors that it called, or one by actor. With
    one, reward functions find the result in ``extras["result"]``, and its keys in ``extras`` if it is a dict. Answers
    of the ``untrained`` actors don't train, and these need no reward.
    """

    def __init__(
        self,
        gateway: Gateway,
        *,
        actors: Sequence[str] = ("agent",),
        rubric: Rubric | None = None,
        timeout: float = 600.0,
        untrained: Sequence[str] = (),
    ) -> None:
        if unknown := [actor for actor in untrained if actor not in actors]:
            raise ValueError(f"untrained={list(untrained)!r}: {unknown[0]!r} is none of the actors {list(actors)}")
        self.untrained = list(untrained)
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: expected seconds > 0")
        self.gateway, self.actors, self.timeout = gateway, list(actors), timeout
        self.on_context = gateway.settings.on_context
        self.samples_under_grammars = gateway.settings.structured == "constrained"
        self._reports = rubric is None
        self.rubric = Rubric([reported_reward]) if rubric is None else rubric

    async def rollout(self, arena: ArenaForHooks, artifact: Any, state: EpisodeState | None = None) -> EpisodeState:
        context = require_context()
        state = context.state if state is None else state
        context.state = state
        cut = False
        async with self.gateway.session(self.actors, arena) as session:
            session.untrained = self.untrained
            try:
                result = await self.run_agent(to_python(artifact), session)
            except Exception as error:
                cut = self.ends_at(session) and not isinstance(error, CallTimeoutError)
                if (proxies := proxy_variables()) and not session.calls and _failed_to_connect(error):
                    host = urlsplit(session.url).hostname
                    error.add_note(
                        f"{', '.join(proxies)}: set, and no request came to the gateway. Make the agent's client when "
                        f"the agent runs, or start the run with {host} in NO_PROXY"
                    )
                if not cut:
                    raise
                result = None
        if self.ends_at(session):
            context.rollout.meta["ended"] = CONTEXT
        state.data["result"] = context.without_secrets(result)
        if self._reports:
            state.data["rewards"] = read_rewards(
                0.0 if cut else result, self.actors, session.called(), session.paid_apart()
            )
        state.done = True
        return state

    def ends_at(self, session: GatewaySession) -> bool:
        """Return True if the attempt ends where its last prompt left no room in the context, after some answer."""
        if self.on_context != "end" or session.full is None:
            return False
        return any(call.steps for one in session.walk() for call in one.calls)

    async def generate(self, arena: ArenaForHooks) -> GenerateResult:
        result = await super().generate(arena)
        if not self.rubric.is_grouped:  # group functions have not added their rewards yet
            inherit_rewards(result)
        return result

    @abstractmethod
    async def run_agent(self, question: Any, session: GatewaySession) -> Any:
        """Run the agent for at most ``timeout`` seconds, and return its result. Raises ``CallTimeoutError``."""

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        data = to_python(state.data)
        result = data.get("result")
        return {**(result if isinstance(result, dict) else {}), **data}


class AgentEpisode(GatewayEpisode):
    """Played by ``agent(question, models)``, a function or its name ``"module:function"``; it imports no turnwise.

    An ``async def`` runs in the arena's event loop. A ``def`` runs in a thread. Past its timeout an agent is abandoned:
    its result no longer counts, and its calls are refused.

    Example::

        async def agent(question, models):
            chat = models["solver"].async_openai_client().chat.completions
            answer = await chat.create(model="solver", messages=[{"role": "user", "content": question["text"]}])
            return float(question["answer"] in answer.choices[0].message.content)

        arena.add_episode(AgentEpisode(agent, Gateway(), actors=["solver"]))
    """

    def __init__(self, agent: Agent | str, gateway: Gateway, **options: Any) -> None:
        super().__init__(gateway, **options)
        self.agent: Agent = import_by_name({}, agent, "agent") if isinstance(agent, str) else agent
        if not callable(self.agent):
            raise TypeError(
                f"agent={agent!r}: expected a function of the question and the models, or 'module:function'"
            )
        self.episode_type = agent if isinstance(agent, str) else name_of(self.agent)

    async def run_agent(self, question: Any, session: GatewaySession) -> Any:
        return await call_agent(self.agent, question, session.models, self.timeout)


def _failed_to_connect(error: BaseException | None) -> bool:
    """Return True if ``error`` or one of its causes has the name of a connection error."""
    words = ("Connect", "Proxy", "HTTP", "Timeout", "URLError", "Status")
    while error is not None:
        if any(word in kind.__name__ for kind in type(error).__mro__ for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


async def call_agent(agent: Agent, question: Any, models: Mapping[str, Model], timeout: float | None = None) -> Any:
    """Run an agent: an ``async def`` here, a ``def`` in a thread. Raises ``CallTimeoutError``."""
    try:
        return await call("agent", partial(agent, question, models), limit=timeout)
    except CallTimeoutError as error:
        raise CallTimeoutError(f"the agent took longer than timeout={timeout:g} s ({error})") from None


def read_rewards(
    result: Any, actors: Sequence[str], called: Sequence[str], paid_apart: Sequence[str] = ()
) -> dict[str, float] | float:
    """Return the rewards by actor that an agent reported. Raises ``ValueError`` or ``TypeError`` for anything else.

    An actor that was never called needs no reward, and gets none. One whose calls are all of sub-agents with rewards of
    their own (``paid_apart``) needs none either, and gets the one that names it. If no actor was called, the mean of
    what the agent reported is returned.
    """
    if isinstance(result, Mapping):
        if unknown := [name for name in result if name not in actors]:
            raise ValueError(f"the agent's reward has {unknown[0]!r}: expected some of the actors {list(actors)}")
        if missing := [actor for actor in called if actor not in result and actor not in paid_apart]:
            raise ValueError(f"the agent's reward {dict(result)!r} lacks actor {missing[0]!r}, which it called")
        rewards = {actor: result[actor] for actor in (*called, *paid_apart) if actor in result}
    else:
        rewards = dict.fromkeys(called, result)
    alone = list(result.values()) if isinstance(result, Mapping) else [result]
    for reward in rewards.values() if called or paid_apart else alone:
        if isinstance(reward, complex) or not isinstance(reward, Real) or not math.isfinite(reward):
            raise TypeError(
                f"the agent returned {str(result)[:200]!r}: expected a finite number, or one by actor. Give the "
                "episode a rubric to score other results"
            )
    if alone and not (called or paid_apart):
        return float(sum(alone) / len(alone))
    return {actor: float(reward) for actor, reward in rewards.items()}

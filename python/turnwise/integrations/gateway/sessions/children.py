"""Sub-agents: the calls of each are a child of its agent's trajectory, with a reward of its own or its parent's."""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Iterator
from numbers import Real
from typing import Any

from turnwise.arena.rewards.inherit import fail_children
from turnwise.arena.runner import create_context
from turnwise.arena.runtime.context import use_context
from turnwise.arena.runtime.privacy import check_episode_end
from turnwise.integrations.gateway.models import ChildModel, Model
from turnwise.integrations.gateway.sessions.session import GatewaySession
from turnwise.types import CHILD, EpisodeRequest, GenerateResult


class ChildSession(GatewaySession):
    """The calls of one sub-agent, in a context of its own: another id, other seeds, no earlier chats."""

    def __init__(self, actor: str, parent: GatewaySession) -> None:
        arena: Any = parent.arena
        top, above, order = parent.root.context, parent.context, parent.context.spawned
        kind = top.rollout.episode_type
        meta: dict[str, Any] = {"actor": actor, "attempt": top.rollout.id, "parent": above.rollout.id, "order": order}
        meta["after"] = None if parent.answered is None else list(parent.answered)
        request = EpisodeRequest(
            f"{kind}/{CHILD}",
            None,
            group_id=f"{top.group_id}/{CHILD}" if isinstance(top.group_id, str) else (top.group_id, CHILD),
            is_trainable=top.is_trainable,
            meta={CHILD: meta},
        )
        context = create_context(arena, request, above, Counter(), of_episode=False)
        context.parent_id, context.secrets = top.parent_id, top.secrets
        with use_context(context):
            super().__init__([actor], arena, parent.settings, parent)
        self.actor = actor
        self.error = ""
        """Why the sub-agent failed; empty if it did not."""
        self._reward: float | None = None

    @property
    def model(self) -> ChildModel:
        [model] = self.models.values()
        assert isinstance(model, ChildModel)
        return model

    def _model(self, url: str, anthropic_url: str, key: str, actor: str) -> Model:
        model = ChildModel(self, url, anthropic_url, key, actor)
        model._open = lambda other: self.child(other or actor)
        return model

    # -- what the agent says of it -------------------------------------------------------------------------------------
    @property
    def reward(self) -> float | None:
        return self._reward

    @reward.setter
    def reward(self, value: float | None) -> None:
        if self.root.over:
            raise RuntimeError(f"reward={value!r} of a child of {self.actor!r}: the session is over: {self.root.over}")
        if value is not None and (isinstance(value, complex) or not isinstance(value, Real)):
            raise TypeError(f"reward={value!r} of a child of {self.actor!r}: expected a finite number, or None")
        if value is not None and not math.isfinite(value):
            raise ValueError(f"reward={value!r} of a child of {self.actor!r}: expected a finite number, or None")
        self._reward = None if value is None else float(value)

    def leave(self, error: BaseException | None) -> None:
        """Take no more calls. An ``error`` fails this child and those below it, and no others.

        One that comes from a full context ends the child alone, unless ``gateway.on_context`` is ``"fail"``.
        """
        self.over = self.over or "its sub-agent has ended"
        ends = self.full is not None and self.settings.on_context == "end"
        if error is not None and not self.error and not ends:
            text = "".join(traceback.format_exception(error))
            self.error = str(self.context.without_secrets(f"the sub-agent failed: {text}"))

    # -- the end -------------------------------------------------------------------------------------------------------
    def inheriting(self) -> Iterator[ChildSession]:
        """Yield the sessions with answers, from this one down, that take the reward of the attempt."""
        left: list[ChildSession] = [self]
        while left:
            session = left.pop()
            if session.error or session._reward is not None:
                continue
            if any(call.steps for call in session.calls):
                yield session
            left += reversed(session.children)

    def results(self) -> list[GenerateResult]:
        """Return the trajectory, and below it those of its children; nothing if none of them was answered."""
        result = self.context.result()
        rollout = result.rollout
        if not rollout.steps and not result.children:
            return []
        if self.arena.check_private:
            check_episode_end(self.context)
        rollout.meta[CHILD]["inherits"] = self._reward is None
        if self._reward is not None:
            rollout.rewards = {self.actor: self._reward}
        if self.error:
            rollout.error = self.error
            rollout.rewards = {}
            fail_children(result)
        return [result]

    def report(self) -> None:
        """Add the counts to those of the attempt, which are metrics of its rollout."""
        endpoint, of_attempt = self.endpoints[self.actor], self.root.endpoints[self.actor]
        of_attempt.counts.update(endpoint.counts)
        of_attempt.own_seconds += endpoint.own_seconds
        of_attempt.counts["children"] += 1
        of_attempt.counts["children_failed"] += bool(self.error)

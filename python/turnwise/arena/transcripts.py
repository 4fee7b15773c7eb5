"""The chat of one actor in a multi-turn episode. It grows: each turn adds what was said since the actor's last one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from turnwise.types import Message, Messages, Step
from turnwise.types.prompts import Prefix


@dataclass(frozen=True, slots=True)
class Transcript:
    """What an actor has seen. The last message is open: what is said next with its role is joined to it.

    Example: ``Transcript.begun([{"role": "user", "content": "2 + 2 = ?"}])``
    """

    opening: Messages
    messages: Prefix[Message]
    steps: int = 0
    """Calls of the trajectory that it covers."""
    last: Step | None = None
    """The last of these."""

    @classmethod
    def begun(cls, opening: Messages) -> Transcript:
        return cls(opening, Prefix.of_messages(opening[:-1]).followed([], opening[-1:]))

    def covers(self, opening: Messages, trajectory: Sequence[Step]) -> bool:
        """True if the episode goes on from here: the same opening, and further calls."""
        if len(trajectory) < self.steps or (self.steps and trajectory[self.steps - 1] is not self.last):
            return False
        return opening == self.opening

    async def after(
        self, trajectory: Sequence[Step], actor: str, shown_to: Callable[[Step, str], Awaitable[str | None]]
    ) -> Transcript:
        """Return the transcript after the actions of ``trajectory``, of which ``shown_to`` gives what others read."""
        if len(trajectory) == self.steps:
            return self
        open_: Messages = list(self.messages.tail)
        for step in trajectory[self.steps :]:
            if step.facts.env_response is None:  # a hook's call, or a tool round
                continue
            if step.actor_id == actor:
                open_.append({"role": "assistant", "content": step.completion})
            else:
                say(open_, "user", await shown_to(step, actor))
            say(open_, "user", step.facts.env_response)
        messages = self.messages.rejoined(open_[:-1], open_[-1:])
        return Transcript(self.opening, messages, len(trajectory), trajectory[-1])


def say(messages: Messages, role: str, text: str | None) -> None:
    """Append ``text``. If the last message has the same role, join the text to it."""
    if not text:
        return
    if messages and messages[-1]["role"] == role and isinstance(messages[-1]["content"], str):
        messages[-1] = {"role": role, "content": f"{messages[-1]['content']}\n\n{text}"}
    else:
        messages.append({"role": role, "content": text})

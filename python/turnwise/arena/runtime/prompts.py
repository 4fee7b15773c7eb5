"""Prompts of native calls. One that goes on from an actor's earlier call costs what is new in it.

A chat that begins with the messages of an earlier call and its whole answer gets that call's tokens, the sampled ones
included, and the tokens of the new messages. Where the template, or the episode, shows another history than the model
saw, the chat is rendered as a whole. Its tokens up to the latest answer are then those of the earlier call all the
same, unless the template renders a message otherwise in another place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.arena.runtime.watch import count
from turnwise.chat import ChatFormat
from turnwise.chat.continuation import Anchors
from turnwise.chat.messages import ROLES, SYSTEM_ROLES, Tool, plain_messages, with_system
from turnwise.state import to_python
from turnwise.types import Actor, Chat, Message, Messages, Step
from turnwise.types.prompts import GIVEN, Prefix, as_tokens, prompt_chat, prompt_tokens

RENDERED = "prompts/rendered_again"
"""Begins the metrics of calls whose chat holds the actor's latest answer, but not behind its tokens, by reason.
``thought``: the chat leaves out what the model thought. ``template``: it writes something else before an answer than
when the model is asked. ``history``: the episode changed, or left out, what stood before the answer."""

WHOLE, SAMPLED, ANCHORED = "whole", "sampled", "anchored"
"""Origins of a prompt: nothing is shared, or the shared tokens end with sampled ones, or with the text of an answer in
a rendered chat. With tools, ``"+tools"`` follows."""

MAX_EARLIER = 64
"""Calls of an actor that may be the one that its chat goes on from, the latest ones."""

SHORT = 12
"""A chat of fewer messages is rendered as a whole: two short chats, which show where answers end, cost more."""


class Shown(list[Message]):
    """A chat of plain messages that nobody changes, so later chats share them."""


Prompt = tuple[Prefix[Message], Prefix[int]]
"""A chat of plain messages, and its tokens."""


@dataclass(frozen=True, slots=True)
class _Earlier:
    """The call that a chat goes on from, or else the actor's latest one. ``length`` counts the messages of both."""

    step: Step
    length: int
    exact: bool = False
    """The chat has all messages of the call, and its answer as the last of the ``length`` messages."""


class Prompts:
    """Renders the chats of an arena, and keeps the latest prompts: siblings of a tree share one."""

    SIZE = 256

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[Any, Any]] = OrderedDict()
        self._anchors: dict[Hashable, Anchors] = {}

    def build(
        self,
        format: ChatFormat,
        actor: Actor | None,
        prompt: str | Chat,
        steps: Sequence[Step | None] = (),
        tools: Sequence[Tool] = (),
        alike: Callable[[str], bool] = lambda policy: True,
    ) -> Prompt:
        """Return the chat of ``actor`` and its tokens. ``steps`` are the episode's calls before this one.

        The prompt may go on from calls of policies that are ``alike``: they have the tokenizer of ``format``. Raises as
        :func:`to_messages`.
        """
        found, rest = None, []
        if actor is not None and steps and isinstance(prompt, list) and len(prompt) > 1:
            prompt = _with_system(prompt, actor)
            found = _earlier(actor.id, prompt, steps, _kind(tools), alike)
            rest = prompt[found.length :] if found is not None else []
        if found is None or not are_texts(rest):
            messages = to_messages(prompt, actor)
            return Prefix.of_messages(messages), self.token_ids(format, messages, tools)
        if type(prompt) is not Shown:
            rest = [message.copy() for message in rest]
        texts = [text for message in rest for text in message.items()]
        key = (format, _kind(tools), id(found.step), found.length, found.exact, *texts)
        built, metric = self._once(key, found.step, lambda: self._build(format, found, rest, tools))
        if metric:
            count(metric)
        return built

    def token_ids(self, format: ChatFormat, messages: Messages, tools: Sequence[Tool] = ()) -> Prefix[int]:
        """Return the tokens of a whole chat, which equal chats share."""
        plain = are_texts(messages)
        texts = [text for message in messages for text in message.items()] if plain else [repr(messages)]
        key = (format, repr(tools) if tools else "", *texts)
        return self._once(key, None, lambda: _whole(format, messages, tools))

    def _once(self, key: Hashable, owner: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make()`` gave for ``key``. It keeps ``owner``, whose identity may be a part of the key."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][1]
        made = make()
        self._kept[key] = owner, made
        if len(self._kept) > self.SIZE:
            self._kept.popitem(last=False)
        return made

    def _build(self, format: ChatFormat, found: _Earlier, rest: Messages, tools: Sequence[Tool]) -> tuple[Prompt, str]:
        """Return the prompt of a chat that goes on with ``rest``, and the metric that counts it."""
        step = found.step
        chat, ids = prompt_chat(step), prompt_tokens(step)
        known, reason = chat[: found.length], "history"
        if found.exact:
            answer = {"role": "assistant", "content": step.completion}
            reason = "thought" if step.thought or step.in_thought else "template"
            if reason == "template" and format.extends_answers:
                seen = format.cut(step.completion_token_ids)
                after = format.following(ids, seen, rest, tools, answer)
                if after is not None:
                    origin = SAMPLED + _kind(tools)
                    longer = chat.followed([answer], rest, origin), ids.followed(seen, after, origin)
                    return longer, ""
            known = [*known, answer]
        messages = [*known, *rest]
        holds = found.exact or any(
            each["role"] == "assistant" and each["content"] == step.completion for each in messages
        )
        return self._rendered(format, messages, chat, ids, tools), f"{RENDERED}/{reason}" if holds else ""

    def _rendered(
        self,
        format: ChatFormat,
        messages: Messages,
        chat: Prefix[Message],
        ids: Prefix[int],
        tools: Sequence[Tool],
    ) -> Prompt:
        """Return a chat as the template renders the whole of it, and share the tokens up to its last answer."""
        last = len(messages) - 1 if len(messages) >= SHORT else -1
        while last >= 0 and messages[last]["role"] != "assistant":
            last -= 1
        if last < 0:
            return Prefix.of_messages(messages), _whole(format, messages, tools)
        anchors, rest, origin = self._anchors_of(format, tools), messages[last + 1 :], ANCHORED + _kind(tools)
        length = chat.length
        if ids.origin == origin and last >= length - 1 and messages[:length] == chat[:length]:
            answers = messages[length : last + 1]
            between = anchors.up_to(messages[length - 1], answers) if answers else []
            after = anchors.rest(messages[last], rest)
            if between is not None and after is not None:
                return chat.rejoined(answers, rest, origin), ids.rejoined(between, after, origin)
        whole = _whole(format, messages, tools)
        place = anchors.place(whole, messages[last], rest)
        if place is None:
            return Prefix.of_messages(messages), whole
        tokens = whole.whole()
        shown: Prefix[Message] = Prefix.of_messages([]).rejoined(messages[: last + 1], rest, origin)
        return shown, Prefix.of_tokens([]).rejoined(tokens[:place], tokens[place:], origin)

    def _anchors_of(self, format: ChatFormat, tools: Sequence[Tool]) -> Anchors:
        key = (format, repr(tools) if tools else "")
        if key not in self._anchors:
            if len(self._anchors) >= self.SIZE:
                self._anchors.clear()
            self._anchors[key] = Anchors(format, tools)
        return self._anchors[key]


def _whole(format: ChatFormat, messages: Messages, tools: Sequence[Tool]) -> Prefix[int]:
    """Return the tokens of a chat that the template renders as a whole."""
    return Prefix(None, 0, as_tokens(format.prompt_ids(messages, tools)), WHOLE + _kind(tools))


def _kind(tools: Sequence[Tool]) -> str:
    return "+tools" if tools else ""


def given_chat(prompt: Any) -> Prefix[Message]:
    """Return the chat of tokens that the caller rendered, of plain messages."""
    return prompt if isinstance(prompt, Prefix) else Prefix.of_messages(to_messages(prompt, None))


def given_tokens(ids: Sequence[int]) -> Prefix[int]:
    """Return tokens that the caller rendered."""
    return ids if isinstance(ids, Prefix) else Prefix(None, 0, as_tokens(ids), GIVEN)


def _with_system(messages: Messages, actor: Actor) -> Messages:
    """Return a chat with the actor's system prompt, unless it begins with one. What is no chat stays as it is."""
    first = messages[0]
    if not actor.system_prompt or type(first) is not dict or first.get("role") in SYSTEM_ROLES:
        return messages
    return type(messages)([{"role": "system", "content": actor.system_prompt}, *messages])


def _earlier(
    actor: str, messages: Messages, steps: Sequence[Step | None], kind: str, alike: Callable[[str], bool]
) -> _Earlier | None:
    """Return the latest call of ``actor`` that ``messages`` go on from; its latest call if there is none.

    Only calls of policies that are ``alike`` count. ``kind`` ends the origin of calls that were rendered with tools, or
    without.
    """
    kinds = (WHOLE + kind, SAMPLED + kind, ANCHORED + kind)
    latest: _Earlier | None = None
    left = MAX_EARLIER
    for step in reversed(steps):
        if step is None or step.actor_id != actor or not alike(step.policy):
            continue
        chat, ids = prompt_chat(step), prompt_tokens(step)
        if not isinstance(chat, Prefix) or not isinstance(ids, Prefix) or ids.origin not in kinds:
            continue
        length = len(chat)
        if length < len(messages) and _is_answer(messages[length], step.completion) and _begin(messages, chat, length):
            return _Earlier(step, length + 1, exact=True)
        if ids.origin == ANCHORED + kind and _begin(messages, chat, chat.length):
            return _Earlier(step, chat.length)
        latest = latest or _Earlier(step, 0)
        left -= 1
        if not left:
            break
    return latest


def _is_answer(message: Any, completion: str) -> bool:
    return are_texts((message,)) and message["role"] == "assistant" and message["content"] == completion


def _begin(messages: Messages, chat: Prefix[Message], length: int) -> bool:
    """True if the first ``length`` messages are those of ``chat``, without a loop in Python."""
    shared = min(length, chat.length)
    if chat.shared is not None and messages[:shared] != chat.shared.items[:shared]:
        return False
    return bool(messages[shared:length] == chat.tail[: length - shared])


# -- chats of users --------------------------------------------------------------------------------------------------
def to_messages(prompt: str | Chat, actor: Actor | None) -> Messages:
    """Make a chat of plain messages from a prompt. Add the actor's system prompt if there is none.

    A string becomes one user message. Raises ``TypeError`` for what is no chat, and
    :class:`~turnwise.chat.messages.ChatError` for messages that can't be rendered, such as an image.
    """
    if isinstance(prompt, str):
        messages: Messages = [{"role": "user", "content": prompt}]
    elif type(prompt) is Shown and prompt:
        messages = prompt
    elif type(prompt) is list and prompt and are_texts(prompt):
        messages = [message.copy() for message in prompt]
    else:
        given = to_python(prompt)
        if isinstance(given, (Mapping, bytes)) or not isinstance(given, Iterable):
            raise TypeError(f"prompt={given!r}: expected a string or a list of messages")
        if not (given := list(given)):
            raise ValueError(f"prompt={prompt!r}: expected a string or at least one message")
        messages = plain_messages(given)
    return messages if actor is None else with_system(messages, actor.system_prompt)


def chat_of(prompt: Any, where: str) -> str | Messages:
    """Return what a hook gave as a prompt: a string, or plain messages. Errors begin with ``where``, the hook."""
    if isinstance(prompt, str) or (type(prompt) is Shown and prompt):
        return prompt
    try:
        return to_messages(prompt, None)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where}: {error}") from error


def text_of_hook(text: Any, where: str) -> str:
    """Return a text that a hook gave, ``""`` for ``None``. Raises ``TypeError`` that names ``where``, the hook."""
    if text is None or isinstance(text, str):
        return text or ""
    raise TypeError(f"{where}: got {to_python(text)!r:.80}, expected text or None")


def are_texts(messages: Iterable[Any]) -> bool:
    """True if all are ``{"role": str, "content": str}`` with a known role, the form of nearly all messages."""
    try:
        for message in messages:
            role = message["role"] if type(message) is dict and len(message) == 2 else None
            if type(role) is not str or role not in ROLES or type(message["content"]) is not str:
                return False
    except KeyError:
        return False
    return True

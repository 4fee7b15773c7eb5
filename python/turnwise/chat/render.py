"""Converts chats to token ids. Text that spells a control token of the template stays text: it can't forge a turn."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from turnwise.chat.messages import SYSTEM_ROLES, fold_systems, join_neighbours, results_in_order
from turnwise.chat.templates import CONTENTS, EXAMPLE_CHAT, EXAMPLE_TOOL, NEIGHBOURS, rendered, template_text
from turnwise.chat.tokenizers import ends_of, own_copy
from turnwise.sandbox.templates import TemplateLimitError
from turnwise.types import Message, Messages, Tokenizer

# While a template renders, a control token in a text is replaced by a stand-in: a private-use character between two
# others. A text that already contains a stand-in becomes the control token's spelling as text, which is harmless too.
_OPEN, _FIRST, _CLOSE = "\U000f0000", 0xF0100, "\U000f0001"
_ZERO_WIDTH = "\u200b"


class ChatEncoder:
    """Converts chats and texts to token ids, with a Hugging Face tokenizer and its chat template.

    A tokenizer reads ``<|im_end|>`` in a message as the end of the turn, no matter who wrote it. The encoder turns it
    into the tokens of these ten characters. *Control tokens* are the tokenizer's special tokens, and all added tokens
    with which its template marks turns. If a template marks turns in plain text, such as ``role: content`` lines, the
    encoder can't distinguish its marks from a message's text.

    ``template_kwargs`` go to the chat template, for example ``{"enable_thinking": False}``.
    """

    guards_marks = True
    """True if marks of reasoning, calls and results, such as ``<think>`` and ``<tool_call>``, stay text in all messages
    except the assistant's. Control tokens always stay text.

    Chats with tools, and those of agents, hold text from others. A mark in it could begin or end a call or a result, so
    marks stay text there. The program writes the prompts of a plain chat itself. It may ask for ``<think>``, and the
    model must read the token that it should write. Nothing is parsed from such a chat, and a mark ends no turn.
    """

    def __init__(self, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer: Any = own_copy(tokenizer)
        self.template_kwargs = dict(template_kwargs or {})

    def prompt_ids(
        self, messages: Messages, tools: Sequence[Any] = (), *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the ids of an :meth:`arranged` chat with the descriptions of ``tools`` and the generation prompt."""
        return self._ids(self.arranged(messages), tools, add_generation_prompt)

    def arranged(self, messages: Messages) -> Messages:
        """Return the chat as the template takes it.

        Results of tools are put into the order of their calls. Leading system messages are joined. Where the template
        takes no system message, it becomes part of the next user message. Where it wants roles in turn, messages of one
        role are joined, see :func:`~turnwise.chat.messages.join_neighbours`. Raises
        :class:`~turnwise.chat.messages.ChatError` for results that belong to no call, and for calls without a result.
        """
        return self._in_turn(self._with_systems(results_in_order(messages)))

    def _ids(
        self,
        messages: Messages,
        tools: Sequence[Any],
        add_generation_prompt: bool = True,
        *,
        hostile: bool | None = None,
    ) -> list[int]:
        """Render a chat. ``hostile`` says if its text spells control tokens, where that is known."""
        if not (self._hostile(messages, tools) if hostile is None else hostile):
            return self.render(self.tokenizer, messages, tools, add_generation_prompt)
        shown, described = self._with_stand_ins_in(messages, tools)
        return self._as_texts(self.render(self._with_stand_ins, shown, described, add_generation_prompt))

    def render(
        self, tokenizer: Any, messages: Messages, tools: Sequence[Any] = (), add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the ids of a chat without regard to control tokens in its text. Override it for another template."""
        options = {"tools": list(tools), **self.template_kwargs} if tools else self.template_kwargs
        return rendered(tokenizer, messages, add_generation_prompt, **options)

    def prompt_text(self, messages: Messages) -> str:
        """Return the text of a chat with the generation prompt, with control tokens as the tokenizer reads them."""
        text = template_text(self.tokenizer, messages, **self.template_kwargs)
        if text is None:
            text = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **self.template_kwargs
            )
        return str(text)

    def escapes(self, messages: Messages) -> int:
        """Return the number of control tokens that the text of ``messages`` spells."""
        return sum(
            len(pattern.findall(self._normalized(text, pattern)))
            for message in messages
            if (pattern := self._pattern(message)) is not None
            for text in _texts(message)
        )

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of a text without a template; none of them is a control token."""
        if not self.control or not self._spelled(text, self._spelling):
            return self.encode(text)
        parts = self._spelling.split(self._normalized(text, self._spelling))
        return [token for part in parts for token in self._as_text.get(part) or self.encode(part)]

    def disarmed(self, messages: Messages) -> Messages:
        """Return ``messages`` for a server that renders them itself, with a zero-width space in each control token.

        Returns the same object if there is no control token.
        """

        def broken(text: str) -> str:
            text = self._normalized(text, self._spelling)
            return self._spelling.sub(lambda match: match[0][0] + _ZERO_WIDTH + match[0][1:], text)

        return [_mapped(message, broken) for message in messages] if self._hostile(messages) else messages

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text as the tokenizer reads it, control tokens included."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    # -- system messages -----------------------------------------------------------------------------------------------
    def _with_systems(self, messages: Messages, *, begun: bool = False) -> Messages:
        """Return a chat, or the rest of a ``begun`` one, with system messages only where the template takes them."""
        for message in messages:
            if message["role"] in SYSTEM_ROLES:
                break
        else:
            return messages
        indices = [index for index, message in enumerate(messages) if message["role"] in SYSTEM_ROLES]
        if indices == [0] and not begun and messages[0]["role"] == "system" and self._takes_first_system:
            return messages
        first, later = self._takes_first_system, self._takes_later_systems
        return fold_systems(messages, first=first, later=later, begun=begun)

    def _in_turn(self, messages: Messages, *, begun: bool = False) -> Messages:
        """Return a chat, or the rest of a ``begun`` one, with roles in turn if the template wants it."""
        before = "assistant" if begun else ""
        for message in messages:
            if (role := message["role"]) in SYSTEM_ROLES:
                continue
            if (before, role) in NEIGHBOURS and self._refuses((before, role)):
                return join_neighbours(messages, lambda *pair: pair in NEIGHBOURS and self._refuses(pair))
            before = role
        return messages

    def _refuses(self, pair: tuple[str, str]) -> bool:
        """True if the template takes a chat of roles in turn, and not the same one with ``pair`` in it, or hides it."""
        if pair not in self._refused:
            plain, *others = NEIGHBOURS[pair]
            self._refused[pair] = self._shows(plain) and not all(self._shows(*other) for other in others)
        return self._refused[pair]

    @cached_property
    def _refused(self) -> dict[tuple[str, str], bool]:
        return {}

    @cached_property
    def _takes_first_system(self) -> bool:
        return self._shows(("system", "user"), 0)

    @cached_property
    def _takes_later_systems(self) -> bool:
        later = (("user", "system"), ("user", "system", "user"), ("user", "assistant", "system", "user"))
        firsts = ((), ("system",)) if self._takes_first_system else ((),)
        chats = [(*first, *chat) for first in firsts for chat in later]
        return all(self._shows(roles, len(roles) - 1 - roles[::-1].index("system")) for roles in chats)

    def _shows(self, roles: Sequence[str], *places: int) -> bool:
        """True if the template takes a chat of these roles, and the text of the message at each of ``places`` is in it.

        The role ``"call"`` is that of an answer that calls a tool.
        """
        tools = [EXAMPLE_TOOL] if "call" in roles else []

        def shown(content: Callable[[str], Any], place: int, text: str) -> list[int]:
            texts = [text if index == place else "x" for index in range(len(roles))]
            chat = [{"role": role, "content": content(text)} for role, text in zip(roles, texts, strict=True)]
            chat = [{**EXAMPLE_CHAT[2], "content": ""} if message["role"] == "call" else message for message in chat]
            return self.render(self.tokenizer, chat, tools)

        for content in CONTENTS:
            try:
                plain = shown(content, 0, "x")
                if all(plain != shown(content, place, "yz 1") for place in places):
                    return True
            except TemplateLimitError:
                raise
            except Exception:  # a template may raise anything for a chat that it doesn't take
                continue
        return False

    # -- the tokenizer's control tokens --------------------------------------------------------------------------------
    @cached_property
    def control(self) -> dict[str, int]:
        """The ids of the control tokens by their spelling; empty for tokenizers without added tokens."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        marks = {*self._turn_marks(), *ends_of(self.tokenizer)} if added else set()
        return {
            token.content: index
            for index, token in added.items()
            if token.content.strip() and (token.special or index in marks)
        }

    def _turn_marks(self) -> set[int]:
        """Return the ids of a harmless chat, to find turn marks: DeepSeek's are not special tokens."""
        turns: Messages = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")]
        for chat in (turns, turns[1:], turns[1:2]):  # some templates accept no system prompt, some only one message
            try:
                return set(self.render(self.tokenizer, chat, add_generation_prompt=False))
            except TemplateLimitError:
                raise
            except Exception:  # a template may raise anything; try a simpler chat
                continue
        return set()

    @cached_property
    def guarded(self) -> dict[str, int]:
        """Control tokens, and with :attr:`guards_marks` all added tokens that mark reasoning, tools, calls, results."""
        if not self.guards_marks:
            return self.control
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        marks = self._tool_marks() if added else set()
        marked = {token.content: index for index, token in added.items() if index in marks and token.content.strip()}
        return {**self.control, **marked}

    def _tool_marks(self) -> set[int]:
        chats = (EXAMPLE_CHAT, EXAMPLE_CHAT[1:], EXAMPLE_CHAT[1:3], EXAMPLE_CHAT[1:2])
        ids: set[int] = set()
        for chat in chats:
            for tools in ([EXAMPLE_TOOL], []):
                try:
                    ids |= set(self.render(self.tokenizer, chat, tools))
                except TemplateLimitError:
                    raise
                except Exception:  # as above
                    continue
        return ids

    def _pattern(self, message: Message) -> re.Pattern[str] | None:
        """Return the spellings that stay text in ``message``; ``None`` if there are none.

        What the model wrote may hold marks of reasoning and of calls.
        """
        if message["role"] == "assistant":
            return self._spelling if self.control else None
        return self._guarded_spelling if self.guarded else None

    def _hostile(self, messages: Messages, tools: Sequence[Any] = ()) -> bool:
        if not self.guarded:
            return False
        shown = [*messages, *[{"role": "system", "content": tool} for tool in tools]] if tools else messages
        return any(
            self._spelled(text, pattern)
            for message in shown
            if (pattern := self._pattern(message)) is not None
            for text in _texts(message, joined=True)
        )

    @cached_property
    def _spelling(self) -> re.Pattern[str]:
        return _any_of(self.control)

    @cached_property
    def _guarded_spelling(self) -> re.Pattern[str]:
        return _any_of(self.guarded)

    @cached_property
    def _normalize(self) -> Callable[[str], str] | None:
        """The tokenizer's normalisation, if it also finds control tokens in normalised text; else ``None``."""
        normalizer = getattr(getattr(self.tokenizer, "backend_tokenizer", None), "normalizer", None)
        added = self.tokenizer.added_tokens_decoder
        if normalizer is None or not any(added[index].normalized for index in self.guarded.values()):
            return None
        return normalizer.normalize_str

    def _normalized(self, text: str, pattern: re.Pattern[str]) -> str:
        """Return ``text``, normalised if only the normalised text spells a control token."""
        if self._normalize is None or pattern.search(text):
            return text
        normalized = self._normalize(text)
        return normalized if pattern.search(normalized) else text

    def _spelled(self, text: str, pattern: re.Pattern[str]) -> bool:
        return pattern.search(self._normalized(text, pattern)) is not None

    # -- stand-ins for control tokens while a template renders ---------------------------------------------------------
    @cached_property
    def _stand_ins(self) -> dict[str, str]:
        return {spelling: f"{_OPEN}{chr(_FIRST + number)}{_CLOSE}" for number, spelling in enumerate(self.guarded)}

    def _with_stand_ins_in(self, messages: Messages, tools: Sequence[Any] = ()) -> tuple[Messages, list[Any]]:
        def stand_in(match: re.Match[str]) -> str:
            return self._stand_ins[match[0]]

        def shown(message: Message) -> Message:
            pattern = self._pattern(message)
            if pattern is None:
                return message
            return _mapped(message, lambda text: pattern.sub(stand_in, self._normalized(text, pattern)))

        described = [shown({"role": "system", "content": tool})["content"] for tool in tools]
        return [shown(message) for message in messages], described

    def _as_texts(self, ids: Sequence[int]) -> list[int]:
        """Replace each stand-in in ``ids`` by the ids of the text that it stands for."""
        texts: list[int] = []
        for token in ids:
            texts += self._text_of_stand_in.get(token, (token,))
        return texts

    @cached_property
    def _with_stand_ins(self) -> Any:
        """A copy of the tokenizer in which each stand-in is one token, so text around it is tokenized as usual."""
        from tokenizers import AddedToken

        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.add_tokens([AddedToken(stand_in, normalized=False) for stand_in in self._stand_ins.values()])
        return tokenizer

    @cached_property
    def _text_of_stand_in(self) -> dict[int, Sequence[int]]:
        vocabulary = self._with_stand_ins.get_vocab()
        return {vocabulary[stand_in]: self._as_text[spelling] for spelling, stand_in in self._stand_ins.items()}

    @cached_property
    def _as_text(self) -> dict[str, list[int]]:
        """The ids that spell each control token as text."""
        return {spelling: self._spell(spelling) for spelling in self.guarded}

    def _spell(self, text: str) -> list[int]:
        """Encode ``text`` in two parts without control tokens; prefer a cut whose tokens decode to ``text``."""
        control = set(self.guarded.values())
        fallback: list[int] | None = None
        for cut in range(1, len(text)):
            ids = self.encode(text[:cut]) + self.encode(text[cut:])
            if control.isdisjoint(ids):
                if self.tokenizer.decode(ids, skip_special_tokens=False) == text:
                    return ids
                fallback = fallback or ids
        return fallback or [token for character in text for token in self.encode(character) if token not in control]


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds each of ``spellings``, the longest that begins at a place."""
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def _texts(value: Any, joined: bool = False) -> Iterator[str]:
    """Yield every text in ``value``, except roles; with ``joined`` also the joined texts of each list."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from () if key == "role" else _texts(part, joined)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part, joined)
        if joined:
            yield _joined(value)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return ``value`` with every text changed, except roles, which come from the program."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: part if key == "role" else _mapped(part, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        joined = _joined(value)
        if joined and change(joined) != "".join(change(_text(part)) for part in value):
            # A control token was split over several parts, which templates join again.
            return [{"type": "text", "text": change(joined)}, *(part for part in value if not _text(part))]
        return [_mapped(part, change) for part in value]
    return value


def _text(part: Any) -> str:
    """Return the text of one part of a content list: ``{"type": "text", "text": ...}``, or a plain string."""
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""


def _joined(parts: Any) -> str:
    return "".join(map(_text, parts))

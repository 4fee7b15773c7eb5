"""Chat formats of known model families, from the package ``renderers``: their templates, reasoning and tool calls."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from turnwise.chat.calls.families import READERS
from turnwise.chat.calls.reading import CallReader, checked_call, unread
from turnwise.chat.formats import ChatFormat
from turnwise.chat.messages import Tool
from turnwise.chat.templates import EXAMPLE_CALL, EXAMPLE_TOOL
from turnwise.chat.thoughts import CALL_MARKS, CHANNELS, Pairs, Thoughts, find_thoughts
from turnwise.sandbox.templates import TemplateLimitError
from turnwise.types import OK, Message, Messages, ParsedCompletion, Tokenizer
from turnwise.utils.registry import did_you_mean

NOT_FAMILIES = ("default", "auto", "custom")
NEEDS_NETWORK = ("gpt-oss",)
"""Families whose renderer downloads a vocabulary when it is made. ``"auto"`` never tries them."""

LAST_TURNS = 4096
"""Tokens at the end of a prompt that a family's renderer gets. It looks for the begin of a thought there."""

ONE_CALL = ("llama-3",)
"""Families whose templates take one call in each message, though their models write several."""

_PROBES: tuple[tuple[Messages, list[Tool]], ...] = (
    ([{"role": "user", "content": "Hi there"}], []),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n\nthere"}], []),
    (
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b c"},
            {"role": "user", "content": "d"},
        ],
        [],
    ),
    ([{"role": "user", "content": "Look."}], [EXAMPLE_TOOL]),
    (
        [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": "", "tool_calls": [EXAMPLE_CALL]},
            {"role": "tool", "content": "a wall", "tool_call_id": "call_0", "name": "look"},
        ],
        [EXAMPLE_TOOL],
    ),
)
"""Chats that each family renders differently."""


class KnownFormat(ChatFormat):
    """The chat format of a model family, such as ``"qwen3"`` or ``"glm-4.5"``.

    Sampled reasoning stays in the context, unless ``template_kwargs`` has ``"thinking_retention": "template"``, which
    drops it as the family's template does; then chats are rendered again at each new user message.

    Raises ``ImportError`` without the package ``renderers``, and ``ValueError`` for an unknown family, for options that
    it doesn't have, and for a tokenizer that lacks its control tokens.
    """

    def __init__(self, tokenizer: Tokenizer, family: str, template_kwargs: Mapping[str, Any] | None = None) -> None:
        options = {"thinking_retention": "all", **(template_kwargs or {})}
        retention = options.pop("thinking_retention")
        super().__init__(tokenizer, options)
        self.name = family
        self._config = _config_of(family, retention, options)
        self._renderers: dict[int, Any] = {}
        self._renderer_of(self.tokenizer)

    def _renderer_of(self, tokenizer: Any) -> Any:
        """Return the renderer of the tokenizer, or of its copy with stand-ins."""
        renderer = self._renderers.get(id(tokenizer))
        if renderer is None:
            from renderers import create_renderer

            try:
                renderer = self._renderers[id(tokenizer)] = create_renderer(tokenizer, self._config)
            except Exception as error:  # the renderers assert, raise KeyError or RuntimeError, each in its own way
                raise ValueError(
                    f"renderer={self.name!r}: doesn't fit the tokenizer: {type(error).__name__}: {error}"
                ) from error
        return renderer

    def render(
        self, tokenizer: Any, messages: Messages, tools: Sequence[Any] = (), add_generation_prompt: bool = True
    ) -> list[int]:
        renderer = self._renderer_of(tokenizer)
        if self.name in ONE_CALL:
            messages = _one_call_each(messages)
        ids = renderer.render_ids(messages, tools=list(tools) or None, add_generation_prompt=add_generation_prompt)
        return [int(token) for token in ids]

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The stop tokens of the family, and those of :attr:`ChatFormat.stop_token_ids`."""
        return tuple(dict.fromkeys((*self._family_stops, *super().stop_token_ids)))

    @cached_property
    def _family_stops(self) -> tuple[int, ...]:
        return tuple(self._renderer_of(self.tokenizer).get_stop_token_ids())

    def following(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new: Messages,
        tools: Sequence[Tool] = (),
        answer: Message | None = None,
    ) -> list[int] | None:
        """See :meth:`ChatFormat.following`. The family's renderer closes a turn that was cut off, its reasoning too."""
        if not new:  # the renderers take none
            return super().following(prompt, completion, new, tools, answer)
        new = self._following(new, answer)
        tail = self._bridge(prompt, completion, new, tools)
        if tail is None and completion and completion[-1] in self.stop_token_ids:
            # The renderers refuse a turn that ended inside its reasoning. What follows is the same after a closed one.
            ended = [*completion[:-1], *self._end_of_reasoning, completion[-1]]
            tail = self._bridge(prompt, ended, new, tools)
        return tail

    @cached_property
    def _end_of_reasoning(self) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids("</think>")] if "</think>" in self.guarded else []

    def _bridge(
        self, prompt: Sequence[int], completion: Sequence[int], new: Messages, tools: Sequence[Tool]
    ) -> list[int] | None:
        """Return what the family's renderer appends to ``prompt + completion``; ``None`` if it changes them."""
        prompt = prompt[-LAST_TURNS:]
        hostile = self._hostile(new, tools)
        tokenizer, shown, described = self.tokenizer, new, list(tools)
        if hostile:
            tokenizer = self._with_stand_ins
            shown, described = self._with_stand_ins_in(new, tools)
        try:
            bridged = self._renderer_of(tokenizer).bridge_to_next_turn(
                list(prompt), list(completion), shown, tools=described or None
            )
        except (ValueError, RecursionError):  # some parse the completion, as in ``parse``
            return None
        if bridged is None:
            return None
        ids, kept = [int(token) for token in bridged.token_ids], len(prompt) + len(completion)
        # The renderers drop what follows a stop token, so check that they kept every token.
        if ids[:kept] != [*prompt, *completion]:
            return None
        return self._as_texts(ids[kept:]) if hostile else ids[kept:]

    @cached_property
    def hidden_marks(self) -> frozenset[int]:
        """The added tokens that end no turn: the family's parser knows its own among them, a text may lack them."""
        return frozenset(getattr(self.tokenizer, "added_tokens_decoder", {})) - set(self.stop_token_ids)

    @cached_property
    def thought_marks(self) -> Pairs:
        """As in :class:`ChatFormat`, without channels, whose family has a parser that needs them all."""
        return tuple(pair for pair in super().thought_marks if pair not in CHANNELS)

    def check_tools(self, tools: Sequence[Tool]) -> None:
        """Accept all tools: every family supports them."""

    def parse(
        self,
        completion: Sequence[int],
        tools: Sequence[Tool] = (),
        prompt: Sequence[int] = (),
        *,
        text: str | None = None,
        finished: bool | None = None,
    ) -> ParsedCompletion:
        if text is not None:
            return super().parse(completion, tools, prompt, text=text, finished=finished)
        ids = self.cut(completion)
        is_ended = bool(ids) and ids[-1] in self.stop_token_ids
        ended = is_ended if finished is None else finished
        if is_ended:
            ids.pop()
        # The family's parser reads the tokens outside of the thoughts: it knows no later ones, and no calls in them.
        begun = self.opens_thought(prompt)
        found, spoken, parts = self._without_thoughts(ids, begun, ended, tools)
        if found.is_open:
            return ParsedCompletion("", found.thought, in_thought=True, finished=False)
        begin = self._first_call(parts) if tools else len(spoken)
        try:
            parsed, ids = self._parsed_answer(spoken[:begin], begun, bool(found.thoughts), tools, prompt)
        except (ValueError, RecursionError):  # the renderers' own parsers of JSON, for numbers and nests without end
            plain = super().parse(completion, (), prompt, finished=finished)
            return replace(plain, calls=(unread(plain.answer, "invalid_json"),) if tools else ())
        thought = found.thought or parsed.reasoning_content or ""
        if not parsed.reasoning_complete and begin == len(spoken):
            return ParsedCompletion("", thought, in_thought=True, finished=False)
        content = parsed.content or ""
        if begin < len(spoken) and self._reader is not None:
            text, content = self._reader.text_of(spoken[begin:]), content.strip()
            answer, calls = self._reader.read(text, tools)
            whole = self._reader.plain(text)
            if not calls and self._reader.begins_section(text):
                answer, calls = whole, (unread(whole, "malformed_structure"),)
            written = content + whole
            return ParsedCompletion(content + answer.rstrip(), thought, calls, finished=ended, written=written)
        raws = [self._raw(ids, call) for call in parsed.tool_calls]
        written = "".join([content, *raws])
        if not tools:
            # Without tools the family's marks of a call are text like any other.
            return ParsedCompletion(written, thought, finished=ended)
        calls = tuple(
            checked_call(call.name, call.arguments, raw, tools, str(call.status))
            for call, raw in zip(parsed.tool_calls, raws, strict=True)
        )
        answer = "".join([content, *(call.raw for call in calls if call.status != OK)])
        return ParsedCompletion(answer, thought, calls, finished=ended, written=written)

    def _first_call(self, parts: Sequence[str]) -> int:
        """Return the index of the token with which the first call begins; the number of tokens if there is none.

        The family's parser gets only what comes before, as it changes the texts in calls.
        """
        found = self._places and self._places.opening.search("".join(parts))
        ends = accumulate(map(len, parts))
        return len(parts) if not found else next(index for index, end in enumerate(ends) if end > found.start())

    def _parts(self, ids: Sequence[int]) -> list[str]:
        """Return the bytes of each token, as one character each; marks of calls as in ``CallReader.text_of``."""
        own = self._places.tokens if self._places else {}
        return [own.get(token) or self.token_bytes(token).decode("latin-1") for token in ids]

    @cached_property
    def _reader(self) -> CallReader | None:
        """Reads the family's calls; ``None`` if the family is not known here."""
        made = READERS.get(self.name)
        return None if made is None else made(self.tokenizer)

    @cached_property
    def _places(self) -> CallReader | None:
        """As :attr:`_reader`, for a text of bytes."""
        made = READERS.get(self.name)
        return None if made is None else made(self.tokenizer, latin=True)

    def _without_thoughts(
        self, ids: Sequence[int], begun: bool, ended: bool, tools: Sequence[Tool]
    ) -> tuple[Thoughts, list[int], list[str]]:
        """Return the thoughts of a completion, in places of its bytes, and the tokens outside of them, with bytes."""
        parts, marks = self._parts(ids), _as_bytes(self.thought_marks)
        calls = (self._places or _as_bytes(CALL_MARKS)) if tools else None
        found = find_thoughts("".join(parts), begun=begun, ended=ended, calls=calls, marks=marks)
        kept, place, left = [], 0, list(found.thoughts[::-1])
        for token, part in zip(ids, parts, strict=True):
            begin, place = place, place + len(part)
            while left and left[-1][1] <= begin:
                left.pop()
            if not left or left[-1][0] >= place:
                kept.append((token, part))
        thought = found.thought if self._places is None else self._places.plain(found.thought)
        found = replace(found, thought=thought.encode("latin-1").decode(errors="replace"))
        return found, [token for token, _ in kept], [part for _, part in kept]

    def _parsed_answer(
        self, spoken: list[int], begun: bool, thought: bool, tools: Sequence[Tool], prompt: Sequence[int]
    ) -> tuple[Any, list[int]]:
        """Parse the tokens outside of the thoughts; return them too, as the parser took them.

        The family's parser gets an empty thought where the prompt, or its own setting, says that there is one.
        """
        opening, closing = (self.encode(mark) for mark in self.thought_marks[-1])
        parser, given, shown = self._renderer_of(self.tokenizer), list(prompt) or None, list(tools) or None
        ids = [*closing, *spoken] if begun and thought else spoken
        parsed = parser.parse_response(ids, tools=shown, prompt_ids=given)
        # Some parsers take an answer without any mark for a thought. Where the marks are tokens, their absence decides.
        plain = not begun and len(closing) == 1
        if (thought or plain) and (parsed.reasoning_content or not parsed.reasoning_complete):
            ids = [*opening, *closing, *spoken]
            parsed = parser.parse_response(ids, tools=shown, prompt_ids=given)
        return parsed, ids

    def _raw(self, ids: Sequence[int], call: Any) -> str:
        """Return the text of a call with its marks, where the renderer reports its position."""
        if call.token_span is None:
            return str(call.raw)
        start, end = call.token_span
        return str(self.tokenizer.decode(list(ids[start:end]), skip_special_tokens=False))


def chat_format(
    tokenizer: Tokenizer, renderer: str = "auto", template_kwargs: Mapping[str, Any] | None = None
) -> ChatFormat:
    """Return the :class:`ChatFormat` of ``tokenizer``.

    ``renderer`` is ``"template"``, the name of a family (``"qwen3"``), or ``"auto"``: the family whose format renders
    the same tokens as the tokenizer's template, else the template. Raises ``ValueError`` for an unknown family, and for
    one that doesn't fit the tokenizer.
    """
    if renderer == "template":
        return ChatFormat(tokenizer, template_kwargs)
    if renderer != "auto":
        return KnownFormat(tokenizer, renderer, template_kwargs)
    try:
        found = find_family(tokenizer, template_kwargs)
    except ImportError as error:
        warnings.warn(f"renderer='auto': takes the tokenizer's own chat template, as {error}", stacklevel=2)
        found = None
    return ChatFormat(tokenizer, template_kwargs) if found is None else found


def families() -> list[str]:
    """Return the names of all known families. Raises ``ImportError`` without the package ``renderers``."""
    base = _renderers().base
    base._populate_registry()
    return sorted(set(base.RENDERER_REGISTRY) - set(NOT_FAMILIES))


def find_family(tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None) -> KnownFormat | None:
    """Return the format of the family that renders as the tokenizer's own template does; ``None`` if there is none.

    The template decides, and not the model's name: a fine-tuned model keeps its template and changes its name.
    """
    template = ChatFormat(tokenizer, {key: part for key, part in (template_kwargs or {}).items() if key != _RETENTION})
    try:
        expected = [template.render(tokenizer, chat, tools) for chat, tools in _PROBES]
    except TemplateLimitError:
        raise
    except Exception:  # a template may raise anything for a chat that it doesn't take
        return None
    for family in families():
        if family in NEEDS_NETWORK:
            continue
        try:
            format = KnownFormat(tokenizer, family, template_kwargs)
            if [format.render(tokenizer, chat, tools) for chat, tools in _PROBES] == expected:
                return format
        except Exception:  # another family's renderer may raise anything for this tokenizer
            continue
    return None


def _one_call_each(messages: Messages) -> Messages:
    """Return a chat in which each call has a message of its own, with its result behind it."""
    split: Messages = []
    waiting: Messages = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if message["role"] == "tool":
            split.append(message)
            split += waiting[:1]
            del waiting[:1]
        elif len(calls) > 1:
            first, *waiting = ({**message, "tool_calls": [call]} for call in calls)
            waiting = [{**other, "content": ""} for other in waiting]
            split.append(first)
        else:
            split += [*waiting, message]
            waiting = []
    return [*split, *waiting]


def _as_bytes(pairs: Pairs) -> Pairs:
    """Return marks with one character for each of their bytes."""
    return tuple((opening.encode().decode("latin-1"), closing.encode().decode("latin-1")) for opening, closing in pairs)


_RETENTION = "thinking_retention"


def _config_of(family: str, retention: str, options: Mapping[str, Any]) -> Any:
    names = families()
    if family not in names:
        raise ValueError(f"renderer={family!r}: unknown; {did_you_mean(family, ['auto', 'template', *names])}")
    renderers = _renderers()
    config = renderers.config_from_name(family)
    if type(config).model_fields.get(_RETENTION) is not None and retention != "template":
        config = type(config)(**{_RETENTION: retention})
    elif retention == "template":
        config = type(config)(**{_RETENTION: "template"})
    return renderers.merge_chat_template_kwargs(config, dict(options))


def _renderers() -> Any:
    try:
        import renderers
        import renderers.base
    except ImportError as error:
        raise ImportError(
            "the formats of model families need the package renderers: pip install 'turnwise[gateway]', or set "
            'renderer = "template" to use the model\'s own chat template'
        ) from error
    return renderers

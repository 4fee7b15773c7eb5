"""Chat formats of known model families, from the package ``renderers``: their templates, reasoning and tool calls."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from turnwise.chat.calls import OK, CallReader, Read, ToolCall, checked_call, unread
from turnwise.chat.family_calls import READERS
from turnwise.chat.formats import ChatFormat, ParsedCompletion
from turnwise.chat.messages import Tool
from turnwise.chat.render import EXAMPLE_CALL, EXAMPLE_TOOL
from turnwise.types import Message, Messages, Tokenizer
from turnwise.utils.registry import did_you_mean

NOT_FAMILIES = ("default", "auto", "custom")
NEEDS_NETWORK = ("gpt-oss",)
"""Families whose renderer downloads a vocabulary when it is made. ``"auto"`` never tries them."""


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
        ids = renderer.render_ids(messages, tools=list(tools) or None, add_generation_prompt=add_generation_prompt)
        return [int(token) for token in ids]

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The stop tokens of the family, and those of :attr:`ChatFormat.stop_token_ids`."""
        return tuple(dict.fromkeys((*self._family_stops, *super().stop_token_ids)))

    @cached_property
    def _family_stops(self) -> tuple[int, ...]:
        return tuple(self._renderer_of(self.tokenizer).get_stop_token_ids())

    def extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new: Messages,
        tools: Sequence[Tool] = (),
        answer: Message | None = None,
    ) -> list[int] | None:
        """See :meth:`ChatFormat.extend`. The family's renderer closes a turn that was cut off, its reasoning too."""
        seen, new = [*prompt, *completion], self._following(new, answer)
        tail = self._bridge(prompt, completion, new, tools)
        if tail is None and completion and completion[-1] in self.stop_token_ids:
            # The renderers refuse a turn that ended inside its reasoning. What follows is the same after a closed one.
            ended = [*completion[:-1], *self._end_of_reasoning, completion[-1]]
            tail = self._bridge(prompt, ended, new, tools)
        return None if tail is None else seen + tail

    @cached_property
    def _end_of_reasoning(self) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids("</think>")] if "</think>" in self.guarded else []

    def _bridge(
        self, prompt: Sequence[int], completion: Sequence[int], new: Messages, tools: Sequence[Tool]
    ) -> list[int] | None:
        """Return what the family's renderer appends to ``prompt + completion``; ``None`` if it changes them."""
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

    def check_tools(self, tools: Sequence[Tool]) -> None:
        """Accept all tools: every family supports them."""

    def parse(
        self, completion: Sequence[int], tools: Sequence[Tool] = (), prompt: Sequence[int] = ()
    ) -> ParsedCompletion:
        ids = self.cut(completion)
        if ids and ids[-1] in self.stop_token_ids and ids[-1] not in self._family_stops:
            ids.pop()  # the family's parser doesn't know this end
        try:
            parsed = self._renderer_of(self.tokenizer).parse_response(
                ids, tools=list(tools) or None, prompt_ids=list(prompt) or None
            )
        except (ValueError, RecursionError):  # the renderers' own parsers of JSON, for numbers and nests without end
            text = super().parse(completion, (), prompt)
            unread = (ToolCall("", {}, text.content, "invalid_json"),) if tools else ()
            return ParsedCompletion(text.content, text.reasoning, unread)
        if not tools:
            # Without tools the family's marks of a call are text like any other.
            written = "".join(self._raw(ids, call) for call in parsed.tool_calls)
            return ParsedCompletion((parsed.content or "") + written, parsed.reasoning_content or "")
        content, calls = self._calls(ids, parsed, tools, prompt)
        return ParsedCompletion(content, parsed.reasoning_content or "", calls)

    def _calls(self, ids: Sequence[int], parsed: Any, tools: Sequence[Tool], prompt: Sequence[int]) -> Read:
        """Read the calls from the first one on that the family's parser found, which changes the texts in them."""
        begins = [call.token_span[0] for call in parsed.tool_calls if call.token_span is not None]
        if self._reader is None or not (begins or self._reader.anywhere):
            calls = [
                checked_call(call.name, call.arguments, self._raw(ids, call), tools, str(call.status))
                for call in parsed.tool_calls
            ]
            return "".join([parsed.content or "", *(call.raw for call in calls if call.status != OK)]), tuple(calls)
        begin = 0 if self._reader.anywhere else min(begins)
        end = len(ids) - (bool(ids) and ids[-1] in self._family_stops)
        text = self._reader.text_of(ids[begin:end])
        content, found = self._reader.read(text, tools)
        if begins and not found:
            found = (unread(self._reader.plain(text), "malformed_structure"),)
        if begin:
            before = self._renderer_of(self.tokenizer).parse_response(
                list(ids[:begin]), tools=list(tools), prompt_ids=list(prompt) or None
            )
            content = (before.content or "") + content.rstrip()
        return content, found

    @cached_property
    def _reader(self) -> CallReader | None:
        """Reads the family's calls; ``None`` if the family is not known here."""
        made = READERS.get(self.name)
        return None if made is None else made(self.tokenizer)

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

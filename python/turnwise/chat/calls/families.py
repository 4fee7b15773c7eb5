"""How model families write calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from turnwise.chat.calls.reading import (
    ARGUMENTS,
    HERMES,
    CallReader,
    JsonCalls,
    Read,
    call_of,
    checked_call,
    json_at,
    unread,
)
from turnwise.chat.calls.tagged import TaggedCalls
from turnwise.chat.messages import Tool, tool_names
from turnwise.types import OK, ToolCall


class LlamaCalls(CallReader):
    """Calls as JSON objects with ``;`` between them, behind ``<|python_tag|>`` or as the whole answer."""

    def __init__(self, tokenizer: Any = None, latin: bool = False) -> None:
        tag = "«<|python_tag|>»"
        super().__init__(
            tokenizer,
            latin,
            opening=rf"\A\s*\{{|{tag}",
            tag=tag,
            between=rf"(?:\s|;|{tag})*",
            named=r'\{\s*"name"\s*:\s*"([^"\n]*)"\s*,\s*"(\w+)"',
        )

    def read(self, text: str, tools: Sequence[Tool]) -> Read:
        text = text.strip()
        tagged, known = self._patterns["tag"].match(text) is not None, tool_names(tools)
        calls: list[ToolCall] = []
        kept, at = [], 0
        while (start := self._patterns["between"].match(text, at).end()) < len(text):  # type: ignore[union-attr]
            found, end, problem = self.json_at(text, start)
            if problem:
                named = self._patterns["named"].match(text, start)
                if not tagged and (named is None or named[2] not in ARGUMENTS):
                    return self.plain(text), ()
                raw = self.plain(text[at:])
                calls.append(unread(raw, "invalid_json", problem, named and named[1]))
                kept.append(raw)
                break
            # Without the tag, an object may also be an answer in JSON.
            is_call = isinstance(found, Mapping) and (
                found.get("name") in known or ("name" in found and found.keys() & set(ARGUMENTS))
            )
            if not tagged and not is_call:
                return self.plain(text), ()
            calls.append(call_of(found, self.plain(text[at:end]), tools))
            if calls[-1].status != OK:
                kept.append(calls[-1].raw)
            at = end
        return "".join(kept), tuple(calls)

    def _end_of(self, text: str, start: int) -> int | None:
        at, problem = start, ""
        while not problem:
            between: Any = self._patterns["between"].match(text, at)
            _, end, problem = self.json_at(text, between.end())
            at = at if problem else end
        return at if at > start else None


class GemmaCalls(CallReader):
    """Calls as ``<|tool_call>call:look{at:<|"|>x<|"|>,n:1}<tool_call|>``: JSON without quotes around its keys."""

    def __init__(self, tokenizer: Any = None, latin: bool = False) -> None:
        super().__init__(
            tokenizer,
            latin,
            opening="«<|tool_call>»",
            begin="«<|tool_call>»",
            end="«<tool_call|>»",
            quote='«<|"|>»',
            either='«<|"|>»|«<tool_call|>»',
        )

    def read(self, text: str, tools: Sequence[Tool]) -> Read:
        kept, calls, at = [], [], 0
        while opened := self._patterns["begin"].search(text, at):
            kept.append(text[at : opened.start()])
            closed = self._closed(text, opened.end())
            at = len(text) if closed is None else closed.end()
            raw = self.plain(text[opened.start() : at])
            if closed is None:
                call = unread(raw, "unclosed_block")
            else:
                call = self._call(text[opened.end() : closed.start()].strip(), raw, tools)
            kept += [] if call.status == OK else [raw]
            calls.append(call)
        return self.plain("".join([*kept, text[at:]])), tuple(calls)

    def _end_of(self, text: str, start: int) -> int | None:
        closed = self._closed(text, start + 1)
        return None if closed is None else closed.end()

    def _closed(self, text: str, start: int) -> re.Match[str] | None:
        """Return the mark that ends the call, outside of its texts."""
        quoted = False
        for mark in self._patterns["either"].finditer(text, start):
            if self._patterns["quote"].fullmatch(mark[0]):
                quoted = not quoted
            elif not quoted:
                return mark
        return None

    def _call(self, body: str, raw: str, tools: Sequence[Tool]) -> ToolCall:
        named, brace, rest = body.partition("{")
        if not named.startswith("call:") or not brace:
            return unread(raw, "malformed_structure")
        parts = self._patterns["quote"].split(brace + rest)
        for index, part in enumerate(parts):
            # Every other part is a text. In the rest, a key is what stands before a colon.
            part = self.plain(part)
            parts[index] = json.dumps(part) if index % 2 else _GEMMA_KEY.sub(lambda key: json.dumps(key[0]), part)
        found, _, problem = json_at("".join(parts), 0, whole=True)
        name = self.plain(named.removeprefix("call:").strip())
        return unread(raw, "invalid_json", problem, name) if problem else checked_call(name, found, raw, tools)


_GEMMA_KEY = re.compile(r"(?<=[{,])[^:,{}\[\]]+(?=:)")

_QWEN = partial(
    TaggedCalls,
    name=r"\s*<function=([^>\n]+)>",
    argument=r"<parameter=([^>\n]+)>",
    end_argument="</parameter>",
    before_close=r"(?:</function>\s*)?",
    breaks=True,
)
_QWEN_WORDS = partial(_QWEN, words=True)
_WORD = r"[^<>\n\ud800-\udfff]*+"
_GLM = partial(
    TaggedCalls,
    name=rf"({_WORD})",
    argument=rf"«<arg_key>»({_WORD})«</arg_key>»\s*«<arg_value>»",
    end_argument="«</arg_value>»",
    tight=True,
)
_DEEPSEEK = partial(
    JsonCalls,
    begin=r"«<｜tool▁call▁begin｜>»(?:\w*\s*«<｜tool▁sep｜>»([^<>`\n\ud800-\udfff]*+)\s*(?:```(?:json)?)?)?",
    end=r"(?:```\s*)?«<｜tool▁call▁end｜>»",
    section="«<｜tool▁calls▁begin｜>»",
    end_section="«<｜tool▁calls▁end｜>»",
)
_KIMI = partial(
    JsonCalls,
    begin=r"«<|tool_call_begin|>»(?:\s*(?:[^\s.:<\ud800-\udfff]*+\.)?([^\s:<\ud800-\udfff]*+)(?::\d+)?\s*"
    r"«<|tool_call_argument_begin|>»)?",
    end="«<|tool_call_end|>»",
    section="«<|tool_calls_section_begin|>»",
    end_section="«<|tool_calls_section_end|>»",
)
READERS: dict[str, Callable[..., CallReader]] = {
    "qwen3": HERMES,
    "qwen3-vl": HERMES,
    **dict.fromkeys(("qwen3.5", "prime-qwen3", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), _QWEN_WORDS),
    **dict.fromkeys(("qwen3.6", "qwen3.8"), _QWEN),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), _GLM),
    **dict.fromkeys(
        ("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"),
        partial(
            TaggedCalls,
            name=rf"({_WORD})",
            argument=r"<arg_key>([^<\n]*+)</arg_key>\s*<arg_value>",
            end_argument="</arg_value>",
            tight=True,
        ),
    ),
    "hy3": partial(
        TaggedCalls,
        open="«<tool_call:opensource>»",
        name=rf"({_WORD})(?:«<tool_sep:opensource>»)?",
        argument=rf"«<arg_key:opensource>»({_WORD})«</arg_key:opensource>»\s*«<arg_value:opensource>»",
        end_argument="«</arg_value:opensource>»",
        tight=True,
        close="«</tool_call:opensource>»",
        section="«<tool_calls:opensource>»",
        end_section="«</tool_calls:opensource>»",
    ),
    "minimax-m2": partial(
        TaggedCalls,
        open="<invoke",
        name=r'\s+name="([^"\n]*)">',
        argument=r'<parameter\s+name="([^"\n]*)">',
        end_argument="</parameter>",
        close="</invoke>",
        section="«<minimax:tool_call>»",
        end_section="«</minimax:tool_call>»",
        in_sections=True,
    ),
    "deepseek-v4": partial(
        TaggedCalls,
        open="<«｜DSML｜»invoke",
        name=r'\s+name="([^"\n]*)">',
        argument=r'<«｜DSML｜»parameter\s+name="([^"\n]*)"\s+string="(true|false)">',
        end_argument="</«｜DSML｜»parameter>",
        close="</«｜DSML｜»invoke>",
        section=r"<«｜DSML｜»tool\w*>",
        end_section=r"</«｜DSML｜»tool\w*>",
    ),
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "kimi-k2": _KIMI,
    "kimi-k2.5": _KIMI,
    "inkling": partial(
        JsonCalls,
        begin=r"(?:\A|«<|message_model|>»)[^\ud800-\udfff]*+«<|content_invoke_tool_json|>»",
        end="«<|end_message|>»",
        others="«<|message_model|>»|«<|content_text|>»|«<|end_message|>»",
    ),
    "llama-3": LlamaCalls,
    "gemma4": GemmaCalls,
}
"""How each family writes calls. Others are read by the package ``renderers``."""

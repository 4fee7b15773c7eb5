"""How model families write calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from turnwise.chat.calls.reading import (
    ARGUMENTS,
    HERMES,
    NEVER,
    CallReader,
    JsonCalls,
    Read,
    behind_space,
    call_of,
    checked_call,
    json_at,
    unread,
)
from turnwise.chat.calls.values import ALL_BUT_TEXT, kinds_of, parameters_of, typed
from turnwise.chat.messages import Tool, tool_names
from turnwise.chat.thoughts import MARKS
from turnwise.types import OK, ToolCall


# -- arguments between marks -------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Call:
    """The places of a call in a text. ``values`` has the opening of each argument, and the end of its value."""

    start: int
    name: str
    values: list[tuple[Any, int]] = field(default_factory=list)
    end: int | None = None
    """``None`` if the call has no end."""
    went_on: bool = False
    """A text in the call spelled its end."""
    is_clear: bool = True
    """False if it has two readings."""


_THOUGHT = re.compile("|".join(re.escape(mark) for pair in MARKS for mark in pair))


class TaggedCalls(CallReader):
    """Calls whose arguments stand between marks, each as its plain text.

    A value ends at the mark behind which its call goes on. So a text may hold marks, and whole calls too. A text that
    has two readings makes a call that is not ``"ok"``.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        latin: bool = False,
        *,
        open: str = "«<tool_call>»",
        name: str,
        argument: str,
        end_argument: str,
        before_close: str = "",
        close: str = "«</tool_call>»",
        section: str = NEVER,
        end_section: str = NEVER,
        in_sections: bool = False,
        breaks: bool = False,
        words: bool = False,
        tight: bool = False,
    ) -> None:
        """Take the patterns of a family.

        ``name`` follows ``open`` and has the tool's name in its group; ``argument`` has the argument's. A second group
        of ``argument`` is "true" before a text and "false" before JSON. ``section`` begins a list of calls;
        ``in_sections`` means that calls stand nowhere else.
        ``breaks`` means that the template puts a line break on either side of a value, and ``words`` that it writes
        True, False and None. Unless ``tight``, the template begins each argument on a line of its own.
        """
        begin, end = f"{open}{name}", f"{before_close}{close}"
        super().__init__(
            tokenizer,
            latin,
            opening=section if in_sections else f"{section}|{open}",
            section=section,
            end_section=end_section,
            begin=open,
            named=begin,
            argument=argument,
            end_argument=end_argument,
            close=close,
            between=f"{section}|{end_section}",
            step=rf"(?P<call>{begin}\s*+{argument})|(?P<bare>{begin}\s*+{end})|(?P<next>{end_argument}\s*+{argument})"
            rf"|(?P<end>{end_argument}\s*+{end})|(?P<open>{open})",
        )
        self._in_sections = in_sections
        self._breaks, self._words, self._tight = breaks, words, tight

    def read(self, text: str, tools: Sequence[Tool]) -> Read:
        parts: list[str | _Call | ToolCall] = []
        clear: list[_Call] = []
        any_earlier = False
        at = done = seen = 0
        inside = not self._in_sections
        while step := self._patterns["step"].search(text, at):
            at = step.end()
            for mark in self._patterns["between"].finditer(text, seen, step.start()):
                inside = self._patterns["section"].fullmatch(mark[0]) is not None or not self._in_sections
            seen = at
            if step.lastgroup in ("next", "end") or not inside:
                continue
            before = text[done : step.start()]
            if step.lastgroup == "open":
                malformed, done = self._malformed(text, step)
                parts += [before, malformed]
                is_clear = malformed.status != "malformed_structure"
            else:
                call = self._call(text, step)
                done = len(text) if call.end is None else call.end
                is_clear = not (call.went_on and any_earlier)
                call.is_clear &= is_clear
                if call.end is None:
                    parts += [before, unread(self.plain(text[call.start :]), "unclosed_block", name=call.name)]
                else:
                    parts += [before, call]
            # What follows may be the rest of an earlier text, which spelled the end of its call.
            if not is_clear:
                for earlier in clear:
                    earlier.is_clear &= not earlier.values
                clear = []
            if isinstance(parts[-1], _Call):
                clear.append(parts[-1])
                any_earlier = True
            at = seen = done
        calls, kept = [], [""]
        for part in [*parts, text[done:]]:
            if isinstance(part, str):
                kept.append(self.plain(self._patterns["between"].sub("", part)))
                continue
            calls.append(self._made(part, text, tools) if isinstance(part, _Call) else part)
            kept = [*kept[:-1], kept[-1].rstrip()] if calls[-1].status == OK else [*kept, calls[-1].raw]
        return "".join(kept), tuple(calls)

    def _end_of(self, text: str, start: int) -> int | None:
        step: Any = self._patterns["step"].match(text, start)
        if step.lastgroup == "open":
            closed = self._patterns["close"].search(text, step.end())
            return None if closed is None else closed.end()
        return self._call(text, step).end

    def _call(self, text: str, step: Any) -> _Call:
        """Return the call that begins with ``step``.

        Calls that its text spells have an end each. Behind an end that belongs to none of them, no other may follow
        that has no beginning: then the text spelled the end, and goes on.
        """
        begin: Any = self._patterns["named"].match(text, step.start())
        call = _Call(step.start(), begin[1].strip())
        if step.lastgroup == "bare":
            call.end = step.end()
            return call
        opened, inner = self._argument(text, begin.end()), 0
        while (step := self._patterns["step"].search(text, step.end())) is not None:
            kind = step.lastgroup
            if call.end is not None:
                if kind not in ("next", "end"):
                    break
                call.went_on = True
                call.is_clear &= _THOUGHT.search(text, call.end, step.start()) is None
                opened, _ = call.values.pop()
                call.end = None
            if kind == "call":
                inner += 1
            elif kind == "end" and inner:
                inner -= 1
            elif kind in ("next", "end") and not inner:
                call.values.append((opened, step.start()))
                end: Any = self._patterns["end_argument"].match(text, step.start())
                if kind == "next":
                    opened = self._argument(text, end.end())
                else:
                    call.end = step.end()
        return call

    def _argument(self, text: str, start: int) -> Any:
        return self._patterns["argument"].match(text, behind_space(text, start))

    def _malformed(self, text: str, opened: re.Match[str]) -> tuple[ToolCall, int]:
        """Return a call that has no name and arguments behind its mark, and its end."""
        closed = self._patterns["close"].search(text, opened.end())
        steps = self._patterns["step"].finditer(text, opened.end(), len(text) if closed is None else closed.start())
        following = next((step for step in steps if step.lastgroup == "call"), None)
        if closed is not None and following is None:
            return unread(self.plain(text[opened.start() : closed.end()]), "malformed_structure"), closed.end()
        end = len(text) if following is None else following.start()
        return unread(self.plain(text[opened.start() : end]), "unclosed_block"), end

    def _made(self, call: _Call, text: str, tools: Sequence[Tool]) -> ToolCall:
        """Return a call with the values of its arguments."""
        schemas, definitions = parameters_of(call.name, tools)
        arguments: dict[str, Any] = {}
        raw = self.plain(text[call.start : call.end])
        problem = "" if call.is_clear else "it isn't clear where each call ends"
        wrong = ""
        values = [text[opened.end() : end] for opened, end in call.values]
        styles = {(value.startswith("\n"), value.endswith("\n"), value == "\n") for value in values}
        if self._breaks and len(styles) > 1:
            problem = problem or "some arguments stand on lines of their own, and others don't"
        for opened, end in call.values:
            name, value = opened[1].strip(), self.plain(text[opened.end() : end])
            if self._breaks:
                value = value.removeprefix("\n").removesuffix("\n")
            if name in arguments:
                problem = problem or f"the argument {name!r} is there twice"
            elif other := self._unclosed_in(text, opened.end(), end, schemas):
                problem = problem or f"the argument {name!r} has no end before {other!r}"
            kinds = kinds_of(schemas.get(name), definitions)
            if opened.re.groups > 1:
                kinds = {"string"} if opened[2] == "true" else ALL_BUT_TEXT
            arguments[name], fits = typed(value, kinds, self._words)
            if not fits:
                wrong = wrong or f"{name}: expected {' or '.join(sorted(kinds))}, got {value[:40]!r}"
        if problem:
            return unread(raw, "malformed_structure", problem, call.name)
        return checked_call(call.name, arguments, raw, tools, "invalid_json" if wrong else OK, wrong)

    def _unclosed_in(self, text: str, start: int, end: int, known: Mapping[str, Any]) -> str:
        """Return the ``known`` argument that a value opens and doesn't end: the value's own end mark was forgotten."""
        last = max((mark.start() for mark in self._patterns["end_argument"].finditer(text, start, end)), default=-1)
        for opened in self._patterns["argument"].finditer(text, start, end):
            if opened[1].strip() in known and last < opened.end():
                starts_line = self._tight or text[opened.start() - 1] == "\n"
                if starts_line and (not self._breaks or text.startswith("\n", opened.end())):
                    return str(opened[1].strip())
        return ""


# -- other forms -------------------------------------------------------------------------------------------------------
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

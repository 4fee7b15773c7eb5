"""Reads calls whose arguments stand between marks, as XML writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.chat.calls.reading import NEVER, CallReader, Read, behind_space, checked_call, unread
from turnwise.chat.calls.values import ALL_BUT_TEXT, kinds_of, parameters_of, typed
from turnwise.chat.messages import Tool
from turnwise.chat.thoughts import MARKS
from turnwise.types import OK, ToolCall


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

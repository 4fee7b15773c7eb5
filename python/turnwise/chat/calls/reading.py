"""Calls of tools in a completion: what the model wrote, and why a call can't be read."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from turnwise.chat.messages import Tool, tool_names, well_formed_texts
from turnwise.types import OK, ToolCall

PROBLEMS = {
    "unclosed_block": "the call has no end",
    "invalid_json": "the call is no valid JSON",
    "malformed_structure": "the call doesn't have the form that was described",
    "missing_name": "the call names no tool",
    "unknown_tool": "there is no such tool",
}
"""What a call lacks, by its status."""
ARGUMENTS = ("arguments", "parameters", "args")
"""Keys that models write before the arguments."""
MAX_DEPTH = 64
"""Levels of lists and objects in a call's arguments. Deeper ones would exceed Python's stack elsewhere."""

NEVER = "(?!)"
"""A pattern that matches nothing."""

Read = tuple[str, tuple[ToolCall, ...]]
"""The text without the good calls, and all calls in their order."""


def unread(raw: str, status: str, problem: str = "", name: Any = "") -> ToolCall:
    """Return a call without arguments. ``problem`` replaces the usual text of its ``status``."""
    return ToolCall(str(name or ""), {}, raw, status, problem or PROBLEMS.get(status, status))


class CallReader:
    """Reads the calls in a text. Its patterns hold marks in ``«»``, such as ``«<tool_call>»``.

    A mark that is a token of its own is one character in :meth:`text_of`, a lone surrogate. So the mark differs from
    text that spells it. Subclasses say how calls are written.
    """

    def __init__(self, tokenizer: Any = None, latin: bool = False, **patterns: str) -> None:
        """Compile ``patterns``. ``latin`` is for texts with one character for each byte."""
        self._decode = getattr(tokenizer, "decode", None)
        marks = dict.fromkeys(mark for pattern in patterns.values() for mark in re.findall("«(.*?)»", pattern))
        ids = {mark: None if tokenizer is None else _token_of(tokenizer, mark) for mark in marks}
        own = [mark for mark in marks if ids[mark] is not None]
        self._as_character = {mark: chr(0xD800 + index) for index, mark in enumerate(own)}
        self._latin = latin
        self._as_mark = {ord(character): self._spelled(mark) for mark, character in self._as_character.items()}
        self.tokens = {ids[mark]: character for mark, character in self._as_character.items()}
        """The character of each mark that is a token of its own."""
        given = {"section": NEVER, "end_section": NEVER, **patterns}
        self._patterns = {name: self._compiled(pattern) for name, pattern in given.items()}

    def _compiled(self, pattern: str) -> re.Pattern[str]:
        def spelled(match: re.Match[str]) -> str:
            return self._as_character.get(match[1]) or re.escape(self._spelled(match[1]))

        return re.compile(re.sub("«(.*?)»", spelled, pattern), re.DOTALL)

    def _spelled(self, mark: str) -> str:
        return mark.encode().decode("latin-1") if self._latin else mark

    def text_of(self, ids: Sequence[int]) -> str:
        """Decode ``ids``, with one character for each mark that is a token of its own."""
        assert self._decode is not None
        parts, begun = [], 0
        for index, token in enumerate(ids):
            if token in self.tokens:
                parts += [self._decode(list(ids[begun:index]), skip_special_tokens=False), self.tokens[token]]
                begun = index + 1
        return "".join([*parts, self._decode(list(ids[begun:]), skip_special_tokens=False)])

    def plain(self, text: str) -> str:
        """Return a text of :meth:`text_of` as the model wrote it."""
        return text.translate(self._as_mark) if self._as_mark else text

    def json_at(self, text: str, start: int) -> tuple[Any, int, str]:
        """Return :func:`json_at` of a text of :meth:`text_of`, with the marks in its texts as the model wrote them."""
        found, stop, problem = json_at(text, start)
        if self._as_mark and (inside := text[start : stop if not problem else None]) != (plain := self.plain(inside)):
            found, _, problem = json_at(plain, 0)
        return found, stop, problem

    def read(self, text: str, tools: Sequence[Tool]) -> Read:
        """Read all calls of ``tools`` in a text of :meth:`text_of`."""
        raise NotImplementedError

    def begins_section(self, text: str) -> bool:
        """True if a text begins with the mark of a list of calls."""
        return self._patterns["section"].match(text) is not None

    # -- places of calls, for `thoughts` -------------------------------------------------------------------------------
    @property
    def opening(self) -> re.Pattern[str]:
        """The mark with which a call begins, or a section of calls."""
        return self._patterns["opening"]

    def end_of(self, text: str, start: int) -> int | None:
        """Return the end of the call, or of the section of calls, that begins at ``start``; ``None`` if it has none."""
        section = self._patterns["section"].match(text, start)
        if section is None:
            return self._end_of(text, start)
        end: int | None = section.end()
        while end is not None and (begin := self._patterns["begin"].match(text, behind_space(text, end))):
            end = self._end_of(text, begin.start())
        closed = None if end is None else self._patterns["end_section"].match(text, behind_space(text, end))
        return end if closed is None else closed.end()

    def _end_of(self, text: str, start: int) -> int | None:
        """Return the end of the call that begins at ``start``."""
        raise NotImplementedError


class JsonCalls(CallReader):
    """Calls whose arguments are a JSON object between two marks, which may also stand in its strings.

    The object holds the tool's name too, unless ``begin`` has a group for the name, which is ``None`` if it is missing.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        latin: bool = False,
        *,
        begin: str,
        end: str,
        section: str = NEVER,
        end_section: str = NEVER,
        others: str = NEVER,
    ) -> None:
        """Take the patterns of a family. ``section`` begins a list of calls; ``others`` are further marks, no text."""
        super().__init__(
            tokenizer,
            latin,
            opening=f"{section}|{begin}",
            section=section,
            end_section=end_section,
            begin=begin,
            end=end,
            between=f"{section}|{end_section}|{others}",
        )

    def read(self, text: str, tools: Sequence[Tool]) -> Read:
        begin, between = self._patterns["begin"], self._patterns["between"]
        kept, calls, at = [], [], 0
        while opened := begin.search(text, at):
            before = between.sub("", text[at : opened.start()])
            call, at = self._call(text, opened, tools)
            kept += [before.rstrip()] if call.status == OK else [before, call.raw]
            calls.append(call)
        return self.plain("".join([*kept, between.sub("", text[at:])])), tuple(calls)

    def _end_of(self, text: str, start: int) -> int | None:
        opened: Any = self._patterns["begin"].match(text, start)
        closed = self._places(text, opened.end())[2]
        return None if closed is None else closed.end()

    def _places(self, text: str, start: int) -> tuple[Any, str, re.Match[str] | None, int]:
        """Return the JSON at ``start``, what is wrong with it, the mark that closes the call, and the call's end."""
        found, stop, problem = self.json_at(text, start)
        end = self._patterns["end"]
        if closed := end.match(text, behind_space(text, stop)):
            return found, problem, closed, closed.end()
        # Behind a whole object, another call may begin. In a broken one, its mark may be part of a text.
        following = None if problem else self._patterns["begin"].search(text, stop)
        closed = end.search(text, stop, len(text) if following is None else following.start())
        if following is not None and closed is None:
            return found, problem, None, following.start()
        return found, problem or "text follows the JSON", closed, len(text) if closed is None else closed.end()

    def _call(self, text: str, opened: re.Match[str], tools: Sequence[Tool]) -> tuple[ToolCall, int]:
        """Return the call that begins with ``opened``, and its end in ``text``."""
        found, problem, closed, end = self._places(text, opened.end())
        raw = self.plain(text[opened.start() : end])
        if closed is None:
            call = unread(raw, "unclosed_block")
        elif not opened.re.groups:
            call = unread(raw, "invalid_json", problem) if problem else call_of(found, raw, tools)
        elif opened[1] is None:
            call = unread(raw, "malformed_structure")
        elif not text[opened.end() : closed.start()].strip():
            call = checked_call(opened[1].strip(), {}, raw, tools)
        elif problem:
            call = unread(raw, "invalid_json", problem, opened[1].strip())
        else:
            call = checked_call(opened[1].strip(), found, raw, tools)
        return call, end


HERMES = partial(JsonCalls, begin="«<tool_call>»", end="«</tool_call>»")
"""Calls as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
HERMES_TEXT = HERMES()
"""Reads them in a plain text."""


def call_of(found: Any, raw: str, tools: Sequence[Tool]) -> ToolCall:
    """Return the call that a JSON value means.

    The arguments stand under one of the keys :data:`ARGUMENTS`. A call that has them elsewhere is not run without them.
    """
    if not isinstance(found, Mapping):
        return unread(raw, "malformed_structure", "the call is no JSON object")
    name = found.get("name")
    given = [key for key in ARGUMENTS if key in found]
    others = [key for key in found if key not in ("name", "id", "type", *ARGUMENTS)]
    if name and (len(given) > 1 or (others and not given)):
        problem = f"expected the arguments under the key 'arguments', got the keys {', '.join([*given, *others])}"
        return unread(raw, "malformed_structure", problem, name)
    return checked_call(name, found[given[0]] if given else {}, raw, tools)


def checked_call(
    name: Any, arguments: Any, raw: str, tools: Sequence[Tool], status: str = OK, problem: str = ""
) -> ToolCall:
    """Return a call whose name and arguments were read, with the first reason why it is no call of a known tool.

    ``None`` and blank text are no arguments. Other text is JSON.
    """
    known = tool_names(tools)
    if isinstance(arguments, str) and arguments.strip():
        arguments, _, wrong = json_at(arguments, 0, whole=True)
        if wrong and status == OK:
            status, problem = "invalid_json", wrong
    if arguments is None or isinstance(arguments, str):
        arguments = {}
    if name and not (isinstance(name, str) and name in known):
        status, problem = "unknown_tool", f"there is no tool {str(name)[:80]!r}: expected one of {', '.join(known)}"
    elif status == OK and not name:
        status = "missing_name"
    elif status == OK and not isinstance(arguments, Mapping):
        status, problem = "malformed_structure", "the arguments are no JSON object"
    elif status == OK and not _is_plain(arguments, MAX_DEPTH):
        status = "malformed_structure"
        problem = f"the arguments have more than {MAX_DEPTH} levels, or a number that is not finite"
    if status != OK:
        found = dict(arguments) if isinstance(arguments, Mapping) and _is_plain(arguments, MAX_DEPTH) else {}
        return ToolCall(str(name or ""), well_formed_texts(found), raw, status, problem or PROBLEMS.get(status, status))
    return ToolCall(name, dict(well_formed_texts(arguments)), raw)


def json_at(text: str, start: int, *, whole: bool = False) -> tuple[Any, int, str]:
    """Return the JSON value at ``start``, behind white space, its end, and what is wrong with it.

    A key that is there twice is wrong, as it has two meanings. ``whole`` means that nothing may follow.
    """
    try:
        found, stop = _DECODER.raw_decode(text, behind_space(text, start))
    except RecursionError:
        return None, start, f"the JSON has more than {MAX_DEPTH} levels"
    except json.JSONDecodeError as error:
        return None, start, f"{error.msg}, got {text[error.pos : error.pos + 20]!r}"
    except ValueError as error:  # a key that is there twice, or a number without end
        return None, start, str(error)[:200]
    if whole and text[stop:].strip():
        return None, start, "text follows the JSON"
    return found, stop, ""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_once)
_SPACE = re.compile(r"\s*")


def behind_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return start if found is None else found.end()


def _token_of(tokenizer: Any, mark: str) -> int | None:
    """Return the id of the token that is a ``mark``, if there is one."""
    token = tokenizer.convert_tokens_to_ids(mark) if hasattr(tokenizer, "convert_tokens_to_ids") else None
    if not isinstance(token, int) or token == getattr(tokenizer, "unk_token_id", None):
        return None
    return token


def _is_plain(value: Any, levels: int) -> bool:
    """Return True if a JSON value has at most ``levels`` levels, and all its numbers are finite."""
    if not isinstance(value, (Mapping, list)):
        return not isinstance(value, float) or math.isfinite(value)
    parts = value.values() if isinstance(value, Mapping) else value
    return levels > 0 and all(_is_plain(part, levels - 1) for part in parts)

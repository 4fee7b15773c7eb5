"""Finds the thoughts in a completion. Nothing else in turnwise looks for the marks of reasoning in a text.

A thought may be begun by the prompt, come first, or come later; the limit may cut it. Marks inside a call's arguments
are text. The rules:

    begun or opened, closed            a thought; what follows is the answer
    opened, never closed               the rest is a thought, and the completion has no answer
    ... but it ends in calls           the calls count, if the model ended its turn there: it forgot the closing mark
    ... in a plain answer that ended   text, if no thought came before: ``Write the <think> tag.``
    closed, never opened               what came before is a thought, unless nothing follows
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

THINK = ("<think>", "</think>")
MARKS: tuple[tuple[str, str], ...] = (
    THINK,
    ("<think:opensource>", "</think:opensource>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
)
"""Opening and closing marks of reasoning, by which the model families write it. The first pair is the common one."""

CHANNELS = tuple((f"<|channel|>{name}", "<|channel|>final<|message|>") for name in ("analysis", "commentary"))
"""The marks of gpt-oss: all before its last channel is a thought."""

CALL_MARKS: tuple[tuple[str, str], ...] = (
    ("<tool_call>", "</tool_call>"),
    ("<tool_calls:opensource>", "</tool_calls:opensource>"),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    ("<|tool_call>", "<tool_call|>"),
)
"""Opening and closing marks of calls. A mark of reasoning between them is part of an argument."""

_TEXT = re.compile(r"\S")
MAX_CALLS = 64
"""Calls at the end of a thought that are tried as the last ones."""

Pairs = tuple[tuple[str, str], ...]


class CallPlaces(Protocol):
    """Finds calls in a text."""

    @property
    def opening(self) -> re.Pattern[str]: ...

    def end_of(self, text: str, start: int) -> int | None:
        """Return the end of the call that begins at ``start``; ``None`` if it has none."""


@dataclass(frozen=True, slots=True)
class _Paired:
    """Calls between pairs of marks, where no more is known of them."""

    pairs: Pairs

    @property
    def opening(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(mark) for mark, _ in self.pairs))

    def end_of(self, text: str, start: int) -> int | None:
        closing = next(closing for mark, closing in self.pairs if text.startswith(mark, start))
        end = text.find(closing, start)
        return None if end < 0 else end + len(closing)


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The places of thoughts and answers in a text, as ``(start, end)``; the places of thoughts include their marks."""

    answers: tuple[tuple[int, int], ...]
    thoughts: tuple[tuple[int, int], ...] = ()
    thought: str = ""
    """The text of all thoughts, without marks."""
    is_open: bool = False
    """True if the text ends inside a thought."""
    calls: tuple[tuple[int, int], ...] = ()
    """The places of calls in the answers; one without an end reaches to the end of the text."""

    def answer_without_calls(self, text: str) -> str:
        """Return the text outside of thoughts and calls, also of an answer before a thought that is open."""
        kept, calls = [], deque(self.calls)
        for start, end in self.answers:
            while calls and calls[0][0] < end:
                kept.append(text[start : calls[0][0]])
                start = max(start, min(calls[0][1], end))
                if calls[0][1] > end:
                    break
                calls.popleft()
            kept.append(text[start:end])
        return "".join(kept)

    def answer(self, text: str) -> str:
        """Return the text outside of the thoughts; ``""`` if the text ends inside one."""
        if self.is_open:
            return ""
        found = "".join([text[start:end] for start, end in self.answers])
        return found.lstrip("\n") if self.thoughts else found


def find_thoughts(
    text: str,
    *,
    begun: bool = False,
    ended: bool = True,
    calls: CallPlaces | Pairs | None = None,
    marks: Pairs = MARKS,
) -> Thoughts:
    """Return the thoughts in the text of a completion.

    ``begun`` means that the prompt opened a thought, ``ended`` that the model ended its turn itself, so that no limit
    cut the text. ``calls`` finds calls, if calls are read; or it holds their marks.
    """
    places = _Paired(calls) if isinstance(calls, tuple) and calls else calls or None
    assert not isinstance(places, tuple)
    opens, closes, begins = _patterns(marks, places.opening.pattern if places else "")
    if ended and not begun and begins.search(text) is None:
        return Thoughts(((0, len(text)),) if text else ())
    thoughts: list[tuple[int, int]] = []
    answers: list[tuple[int, int]] = []
    found_calls: list[tuple[int, int]] = []
    start, here, calls_end = 0, 0, 0
    inside = begun or (not ended and _begins_mark(text, marks))
    while True:
        if inside:
            close = closes.search(text, here)
            if close is None:
                break
            thoughts.append((start, close.end()))
            start = here = calls_end = close.end()
            inside = False
            continue
        mark = begins.search(text, here)
        if mark is None:
            answers.append((start, len(text)))
            break
        if opens.fullmatch(mark[0]):
            answers.append((start, mark.start()))
            start, here, inside = mark.start(), mark.end(), True
        elif closes.fullmatch(mark[0]):
            here = mark.end()
            if thoughts:
                # After a thought: what was said since then, or since the last call, was another one.
                if calls_end > start:
                    answers.append((start, calls_end))
                thoughts.append((max(start, calls_end), here))
                start = calls_end = here
            elif _TEXT.search(text, here) or not ended:
                thoughts.append((0, here))
                start, calls_end, answers, found_calls = here, here, [], []
        else:
            if found_calls and found_calls[-1][1] == len(text):
                here = mark.end()
                continue
            end = places.end_of(text, mark.start()) if places else None
            here = calls_end = len(text) if end is None else end
            found_calls.append((mark.start(), here))
            if end is None and _opens_next(text, mark.end(), marks):
                here = calls_end = mark.end()  # a call without an end hides no thought
    if not inside:
        return _found(text, answers, thoughts, marks, calls=found_calls)

    # The last thought is open.
    first = not thoughts and not any(text[a:b].strip() for a, b in answers)
    if ended and not begun and not first and not thoughts:
        return _found(text, [(0, len(text))], [], marks)
    if ended and places and (place := _last_calls(text, start, places)) is not None:
        return _found(text, [*answers, (place, len(text))], [*thoughts, (start, place)], marks)
    return _found(text, answers, [*thoughts, (start, len(text))], marks, is_open=True, calls=found_calls)


def spoken(text: str) -> str:
    """Return the answer in a text that a program got without its parse, such as one from another server.

    Example: ``spoken("<think>A king?</think>fold") == "fold"``, and ``spoken("<think>I could raise") == ""``
    """
    return find_thoughts(text).answer(text)


def opens_thought(text: str, marks: Pairs = MARKS, *, whole: bool = False) -> bool:
    """True if a prompt that ends with ``text`` leaves a thought open: it ends with an opening mark.

    With ``whole``, ``text`` is all that the assistant's turn has so far, and the mark may stand anywhere in it.
    """
    opens, closes, _ = _patterns(marks, "")
    if not whole:
        return any(text.rstrip().endswith(mark) for mark, _ in marks)
    last = -1
    for match in opens.finditer(text):
        last = match.end()
    return last >= 0 and closes.search(text, last) is None


def marks_of(spellings: Iterable[str]) -> Pairs:
    """Return the marks of a tokenizer with these added tokens: the common pair, and those it has a token for."""
    known = set(spellings)
    own = tuple(pair for pair in MARKS if pair == THINK or pair[1] in known)
    return (*own, *CHANNELS) if "<|channel|>" in known else own


def _opens_next(text: str, start: int, marks: Pairs) -> bool:
    """True if the next mark of reasoning in a text is an opening one."""
    opens, closes, _ = _patterns(marks, ())
    opened, closed = opens.search(text, start), closes.search(text, start)
    return opened is not None and (closed is None or opened.start() < closed.start())


def _begins_mark(text: str, marks: Pairs) -> bool:
    """True if a text that was cut is the first part of a mark, such as ``<thi``."""
    said = text.strip()
    return bool(said) and any(mark.startswith(said) for pair in marks for mark in pair)


def _found(
    text: str,
    answers: Sequence[tuple[int, int]],
    thoughts: Sequence[tuple[int, int]],
    marks: Pairs,
    *,
    is_open: bool = False,
    calls: Sequence[tuple[int, int]] = (),
) -> Thoughts:
    opens, closes, _ = _patterns(marks, "")
    texts = []
    for start, end in thoughts:
        inside = text[start:end]
        opened = opens.match(inside.lstrip())
        inside = inside.lstrip()[opened.end() :] if opened else inside
        closed = [match.start() for match in closes.finditer(inside)]
        texts.append((inside[: closed[-1]] if closed else inside).strip("\n"))
    kept = tuple((start, end) for start, end in answers if start < end)
    thought = "\n\n".join(part for part in texts if part.strip())
    return Thoughts(kept, tuple(thoughts), thought, is_open, tuple(calls))


@lru_cache(maxsize=64)
def _patterns(marks: Pairs, calls: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Return the patterns of opening marks, of closing marks, and of all that matters in an answer."""
    # The longest first, as one mark may begin another.
    opens, closes, every = (
        "|".join(map(re.escape, sorted((mark for pair in marks for mark in pair[side]), key=len, reverse=True)))
        for side in (slice(0, 1), slice(1, 2), slice(0, 2))
    )
    return re.compile(opens), re.compile(closes), re.compile(f"{every}|{calls}" if calls else every)


def _last_calls(text: str, start: int, calls: CallPlaces) -> int | None:
    """Return where the calls begin with which ``text`` ends; ``None`` if it doesn't end in a call."""
    for begin in [mark.start() for mark in calls.opening.finditer(text, start)][-MAX_CALLS:]:
        end: int | None = begin
        while end is not None and (following := calls.opening.match(text, end)):
            end = calls.end_of(text, following.start())
            end = end and end + len(text[end:]) - len(text[end:].lstrip())
        if end == len(text):
            return begin
    return None

"""Write the prompts of verifier, searcher and answerer, and parse their replies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from turnwise.tasks.base import with_round, without_round
from turnwise.tasks.search_orchestra.corpus import Passage
from turnwise.types import Message, Messages

VERIFIER, SEARCHER, ANSWERER = "verifier", "searcher", "answerer"
SYSTEM_PROMPTS = {
    VERIFIER: "Does what was found answer the question? Reply answer, or search for more.",
    SEARCHER: "Write a search query for what is missing.",
    ANSWERER: "Answer the question from what was found. Reply with the answer alone.",
}
PASSAGE_CHARS = 400  # of each passage in a prompt
QUERY_CHARS = 200

_FOUND = "\nFound:\n"
_ROUTE = re.compile(r"\b(search|answer)\b", re.IGNORECASE)
_LABEL = re.compile(r"^\W*(?:search query|query|answer)\s*:\s*", re.IGNORECASE)


class View(NamedTuple):
    """Contents of a prompt: the question, and all passages found so far."""

    question: str
    found: tuple[Passage, ...] = ()


def view_message(question: str, found: Sequence[Passage]) -> Message:
    """Write the user message: the question, and a line for each passage."""
    lines = [f"{title}: {text[:PASSAGE_CHARS]}" for title, text in found]
    return {"role": "user", "content": question + (_FOUND + "\n".join(lines) if lines else "")}


def search_messages(actor_id: str, view: View, turn: int = 0, *, unread: bool = False) -> Messages:
    """Build the whole prompt of one call: the instruction, the view, and from the second round on its number."""
    system: Message = {"role": "system", "content": SYSTEM_PROMPTS[actor_id]}
    return [system, with_round(view_message(*view), turn, unread=unread)]


def read_view(messages: Messages) -> View:
    """Parse the view from a prompt."""
    question, _, found = without_round(messages).partition(_FOUND)
    lines = [line.partition(": ") for line in found.splitlines()]
    return View(question, tuple(Passage(title, text) for title, _, text in lines))


def parse_route(text: str) -> str | None:
    """Parse the last word ``"search"`` or ``"answer"`` in ``text``; ``None`` without one."""
    words = _ROUTE.findall(_spoken(text))
    return words[-1].lower() if words else None


def parse_line(text: str) -> str | None:
    """Return the last line of ``text`` that is not blank, without a label such as ``Query:``; ``None`` without one."""
    lines = [line.strip() for line in _spoken(text).splitlines() if line.strip()]
    return (_LABEL.sub("", lines[-1]).strip("\"'` ")[:QUERY_CHARS] or None) if lines else None


def _spoken(text: str) -> str:
    return text.rpartition("</think>")[2]

"""Prompts of verifier, searcher and answerer, the parsers of their replies, and demonstrations for a warm start."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from turnwise.tasks.base import with_round, without_round
from turnwise.tasks.search_orchestra.corpus import Passage, World
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


class SearchView(NamedTuple):
    """Contents of a prompt: the question, and all passages found so far."""

    question: str
    found: tuple[Passage, ...] = ()


def view_message(question: str, found: Sequence[Passage]) -> Message:
    """Write the user message: the question, and a line for each passage."""
    lines = [f"{title}: {text[:PASSAGE_CHARS]}" for title, text in found]
    return {"role": "user", "content": question + (_FOUND + "\n".join(lines) if lines else "")}


def search_messages(actor_id: str, view: SearchView, turn: int = 0, *, unread: bool = False) -> Messages:
    """Build the whole prompt of one call: the instruction, the view, and from the second round on its number."""
    system: Message = {"role": "system", "content": SYSTEM_PROMPTS[actor_id]}
    return [system, with_round(view_message(*view), turn, unread=unread)]


def read_view(messages: Messages) -> SearchView:
    """Parse the view from a prompt."""
    question, _, found = without_round(messages).partition(_FOUND)
    lines = [line.partition(": ") for line in found.splitlines()]
    return SearchView(question, tuple(Passage(title, text) for title, _, text in lines))


def parse_route(text: str) -> str | None:
    """Parse the last word ``"search"`` or ``"answer"`` in ``text``; ``None`` without one."""
    words = _ROUTE.findall(text)
    return words[-1].lower() if words else None


def parse_line(text: str) -> str | None:
    """Return the last line of ``text`` that is not blank, without a label such as ``Query:``; ``None`` without one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (_LABEL.sub("", lines[-1]).strip("\"'` ")[:QUERY_CHARS] or None) if lines else None


# ---------------------------------------------------------------------------------------------------------------------
# Demonstrations
# ---------------------------------------------------------------------------------------------------------------------
def demonstrations(
    world: World, questions: Sequence[str], seed: int | str, quality: float = 0.4
) -> list[tuple[str, Messages, str]]:
    """Make one ``(actor id, messages, completion)`` per question. The three roles take turns.

    ``quality`` in [0, 1] is the chance that a reply is right. Otherwise a verifier takes a random route, a searcher
    repeats the question as its query, and an answerer names a random word of the passages. Each question must have its
    ``supports``.
    """
    if not 0 <= quality <= 1:
        raise ValueError(f"quality={quality!r}: expected a number in [0, 1]")
    rng = Random(f"search-demonstrations/{seed}")
    pages = {passage.title: passage for passage in reversed(world.passages)}
    roles = tuple(SYSTEM_PROMPTS)
    made = []
    for index, text in enumerate(questions):
        actor, question = roles[index % len(roles)], world.questions[text]
        # An answerer has all pages, a searcher lacks at least one, a verifier has any number of them.
        have = len(question.supports)
        if actor != ANSWERER:
            have = rng.randrange(have + (actor == VERIFIER))
        found = [pages[title] for title in question.supports[:have]]
        if rng.random() < 0.5:
            position = rng.randint(0, len(found))
            while (distraction := rng.choice(world.passages)).title in question.supports:
                pass
            found.insert(position, distraction)
        right = rng.random() < quality
        if actor == VERIFIER:
            enough = "answer" if have == len(question.supports) else "search"
            reply = enough if right else rng.choice(("answer", "search"))
        elif actor == SEARCHER:
            reply = question.supports[have] if right else question.text
        else:
            reply = question.answer if right else random_answer(question.text, found, rng)
        made.append((actor, search_messages(actor, SearchView(text, tuple(found)), len(found)), reply))
    return made


def random_answer(question: str, found: Sequence[Passage], rng: Random) -> str:
    """Choose a random word of the passages, or of the question if nothing was found. Names are preferred."""
    words = [word.strip(".,?") for text in ([p.text for p in found] or [question]) for word in text.split()[1:]]
    names = [word for word in words if word[:1].isupper()]
    return rng.choice(names or words or ["nothing"])

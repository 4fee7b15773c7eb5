"""Demonstrate search in every situation: with none, some or all of the needed pages found."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from turnwise.tasks.search_orchestra.corpus import Passage, Question, World
from turnwise.tasks.search_orchestra.prompts import ANSWERER, SEARCHER, SYSTEM_PROMPTS, VERIFIER, View, search_messages
from turnwise.types import Messages


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
            found.insert(rng.randint(0, len(found)), _distraction(world, question, rng))
        right = rng.random() < quality
        reply = _right(actor, question, have) if right else _any(actor, question, found, rng)
        made.append((actor, search_messages(actor, View(text, tuple(found)), len(found)), reply))
    return made


def _distraction(world: World, question: Question, rng: Random) -> Passage:
    """Draw a page that the answer does not need."""
    while (passage := rng.choice(world.passages)).title in question.supports:
        pass
    return passage


def next_query(question: Question, have: int) -> str:
    """Return the title of the page to find next."""
    return question.supports[have]


def _right(actor: str, question: Question, have: int) -> str:
    if actor == VERIFIER:
        return "answer" if have == len(question.supports) else "search"
    return next_query(question, have) if actor == SEARCHER else question.answer


def _any(actor: str, question: Question, found: Sequence[Passage], rng: Random) -> str:
    if actor == VERIFIER:
        return rng.choice(("answer", "search"))
    return question.text if actor == SEARCHER else random_answer(question.text, found, rng)


def random_answer(question: str, found: Sequence[Passage], rng: Random) -> str:
    """Choose a random word of the passages, or of the question if nothing was found. Names are preferred."""
    words = [word.strip(".,?") for text in ([p.text for p in found] or [question]) for word in text.split()[1:]]
    names = [word for word in words if word[:1].isupper()]
    return rng.choice(names or words or ["nothing"])

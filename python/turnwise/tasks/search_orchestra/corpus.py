"""Documents to search, questions about them, and their index: a user's own, or a small made-up world.

In the made-up world people are born in towns, and towns lie in provinces. Each person, town and province has a page.
The answer to ``"Which river runs by the town where Mira Tolen was born?"`` needs two pages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from turnwise.utils.files import read_json_lines

PEOPLE, TOWNS, PROVINCES = 2400, 48, 12
MAX_HOPS = 3

_ONSETS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z")
_VOWELS = ("a", "e", "i", "o", "u")
_ENDS = ("l", "n", "r", "s", "th", "m", "x")
_TRADES = ("potter", "baker", "smith", "weaver", "sailor", "miller", "painter", "mason")
_GOODS = ("salt", "wool", "copper", "honey", "timber", "glass", "barley", "amber", "silk", "tin", "paper", "wine")


class Passage(NamedTuple):
    """A piece of text that a search may find. ``title`` is its page's title: for a file, its name without ``.txt``."""

    title: str
    text: str


class SearchQuestion(NamedTuple):
    """A question, its answer, and the titles of the pages that the answer needs, in order; empty if not known."""

    text: str
    answer: str
    supports: tuple[str, ...] = ()


class World(NamedTuple):
    """Passages, and the questions about them by their text."""

    passages: tuple[Passage, ...]
    questions: dict[str, SearchQuestion]


# ---------------------------------------------------------------------------------------------------------------------
# A user's own
# ---------------------------------------------------------------------------------------------------------------------
def read_world(corpus: str | Path, questions: str | Path) -> World:
    """Read the ``*.txt`` files under the folder ``corpus``, a passage per paragraph, and the file ``questions``.

    A line of ``questions`` is JSON: ``{"question": "Where ...?", "answer": "Velmar", "supports": ["velmar"]}``.
    ``supports`` is optional and names the files that the answer needs. Raises ``FileNotFoundError`` without files, and
    ``ValueError`` with the file and number of a wrong line.
    """
    folder = Path(corpus)
    files = sorted(folder.rglob("*.txt"))
    if not files:
        raise FileNotFoundError(f"corpus={str(corpus)!r}: expected a folder with .txt files")
    passages = [
        Passage(path.stem, " ".join(paragraph.split()))
        for path in files
        for paragraph in re.split(r"\n\s*\n", _read_page(path))
        if paragraph.strip()
    ]
    # Read the questions, and check that the pages that they name exist.
    titles = {passage.title for passage in passages}
    asked: dict[str, SearchQuestion] = {}
    places: dict[str, str] = {}
    for index, row in read_json_lines(questions):
        question = _read_question(row, index)
        if missing := set(question.supports) - titles:
            raise ValueError(f"{index}: supports names {sorted(missing)}, of which no file is there")
        before = asked.setdefault(question.text, question)
        if before.answer != question.answer:
            raise ValueError(
                f"{index}: the answer is {question.answer!r}, at {places[question.text]} {before.answer!r}"
            )
        places.setdefault(question.text, index)
    if not asked:
        raise ValueError(f"questions={str(questions)!r}: expected at least one question")
    return World(tuple(passages), asked)


def _read_page(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _read_question(row: Any, where: str) -> SearchQuestion:
    if not isinstance(row, dict) or not all(
        isinstance(row.get(key), str) and row[key] for key in ("question", "answer")
    ):
        raise ValueError(f"{where}: expected an object with the texts 'question' and 'answer', got {str(row)[:80]!r}")
    supports = row.get("supports", [])
    if not isinstance(supports, list) or not all(isinstance(title, str) for title in supports):
        raise ValueError(f"{where}: supports={supports!r}: expected a list of file names without .txt")
    return SearchQuestion(row["question"], row["answer"], tuple(supports))


# ---------------------------------------------------------------------------------------------------------------------
# The made-up world
# ---------------------------------------------------------------------------------------------------------------------
@cache
def made_up_world(hops: int = MAX_HOPS) -> World:
    """Make the world, which is always the same, with the questions that need up to ``hops`` pages."""
    if not 1 <= hops <= MAX_HOPS:
        raise ValueError(f"hops={hops!r}: expected 1 to {MAX_HOPS}")
    rng = Random("search-orchestra/world")
    names = _names(rng, 2 * PEOPLE + 2 * TOWNS + 2 * PROVINCES)
    provinces, capitals = names[:PROVINCES], names[PROVINCES : 2 * PROVINCES]
    towns, rivers = (names[2 * PROVINCES + i * TOWNS :][:TOWNS] for i in (0, 1))
    people = [f"{first} {last}" for first, last in zip(*[iter(names[2 * PROVINCES + 2 * TOWNS :])] * 2, strict=True)]
    # Write a page for each province and town, then a page and five questions for each person.
    passages: list[Passage] = []
    questions: list[SearchQuestion] = []
    for name, capital, goods in zip(provinces, capitals, _GOODS, strict=True):
        passages.append(Passage(name, f"{name} is a province. Its capital is {capital}. {name} sells {goods}."))
    for index, (town, river) in enumerate(zip(towns, rivers, strict=True)):
        province = provinces[index % PROVINCES]
        passages.append(
            Passage(town, f"{town} is a town in the province of {province}. The river {river} runs by {town}.")
        )
    # Questions need one page (the person's), two (with the town's) or three (with the province's).
    for name in people:
        index, trade = rng.randrange(TOWNS), rng.choice(_TRADES)
        town, number = towns[index], index % PROVINCES
        passages.append(Passage(name, f"{name} is a {trade}. {name} was born in {town}."))
        questions += [
            SearchQuestion(f"Where was {name} born?", town, (name,)),
            SearchQuestion(f"In which province was {name} born?", provinces[number], (name, town)),
            SearchQuestion(f"Which river runs by the town where {name} was born?", rivers[index], (name, town)),
            SearchQuestion(
                f"What is the capital of the province where {name} was born?",
                capitals[number],
                (name, town, provinces[number]),
            ),
            SearchQuestion(
                f"What does the province where {name} was born sell?", _GOODS[number], (name, town, provinces[number])
            ),
        ]
    asked = {question.text: question for question in questions if len(question.supports) <= hops}
    return World(tuple(passages), asked)


def _names(rng: Random, count: int) -> Sequence[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        syllables = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(2)]
        names[("".join(syllables) + rng.choice(_ENDS)).capitalize()] = None
    return list(names)


# ---------------------------------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------------------------------
def normalize(text: str) -> str:
    """Convert to lower case, and remove punctuation, articles and extra blanks, as SQuAD does (arXiv:1606.05250).

    Example: ``normalize("The  river Dun.") == "river dun"``
    """
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", re.sub(r"[^\w\s]", "", text.lower())).split())


def sufficient(question: SearchQuestion, found: Sequence[Passage]) -> bool:
    """Return True if ``found`` has every supporting page, or the answer's text where no page is known."""
    if question.supports:
        return support_share(question, found) == 1.0
    return any(f" {normalize(question.answer)} " in f" {normalize(passage.text)} " for passage in found)


def support_share(question: SearchQuestion, found: Sequence[Passage]) -> float:
    """Return the share of the supporting pages in ``found``; if none is known, 1 or 0 as :func:`sufficient` says."""
    if not question.supports:
        return float(sufficient(question, found))
    titles = {passage.title for passage in found}
    return sum(title in titles for title in question.supports) / len(question.supports)


# ---------------------------------------------------------------------------------------------------------------------
# Index
# ---------------------------------------------------------------------------------------------------------------------
class SearchIndex:
    """Finds passages by words (Okapi BM25 in Lucene's form, k1 1.5, b 0.75; English stop words are ignored).

    Titles count as text. Raises ``ImportError`` if ``bm25s`` is missing.

    Example: ``SearchIndex([Passage("dun", "The river Dun."), Passage("osk", "A province.")]).search("river", 1)``
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        try:
            import bm25s
        except ImportError:
            raise ImportError("search needs bm25s: pip install 'turnwise[tasks]'") from None
        if not passages:
            raise ValueError("passages=(): expected at least one")
        self.passages = tuple(passages)
        self._bm25s: Any = bm25s
        self._index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        self._index.index(self._tokens([f"{title} {text}" for title, text in passages]), show_progress=False)
        self._words = set(self._index.vocab_dict)

    def search(self, query: str, k: int) -> list[Passage]:
        """Find up to ``k`` passages that share a word with ``query``, best first. Ties keep the passages' order."""
        (words,) = self._tokens([query], return_ids=False)
        indexed = [word for word in words if word in self._words]
        if not indexed:
            return []
        scores = np.asarray(self._index.get_scores(indexed))
        ranked = np.argsort(-scores, kind="stable")[:k]
        return [self.passages[index] for index in ranked if scores[index] > 0]

    def _tokens(self, texts: list[str], **options: Any) -> Any:
        return self._bm25s.tokenize(texts, stopwords="en", show_progress=False, **options)

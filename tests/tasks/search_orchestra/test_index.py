from __future__ import annotations

import math
import sys

import pytest

from turnwise.tasks.search_orchestra.corpus import Passage, made_up_world
from turnwise.tasks.search_orchestra.index import SearchIndex
from turnwise.tasks.search_orchestra.prompts import PASSAGE_CHARS, view_message

RIVER, TOWN, BOTH = Passage("dun", "river flows"), Passage("osk", "town sleeps"), Passage("harn", "river river town")


def test_passages_are_ranked_by_their_words():
    index = SearchIndex([RIVER, TOWN, BOTH])
    assert index.search("river", 3) == [BOTH, RIVER]
    assert index.search("Which TOWN sleeps?", 1) == [TOWN]
    assert index.search("osk", 2) == [TOWN], "titles count"
    assert index.search("mountain", 2) == index.search("the", 2) == index.search("", 2) == []


def test_scores_are_bm25():
    """By hand (Robertson and Zaragoza 2009): k1 1.5, b 0.75, mean length 10/3 words, titles included."""
    index = SearchIndex([RIVER, TOWN, BOTH])
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    scores = index._index.get_scores(["river"])
    for place, (count, length) in enumerate(((1, 3), (0, 3), (2, 4))):
        assert scores[place] == pytest.approx(
            idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * length / (10 / 3))), rel=1e-4
        )


def test_of_equals_the_first_comes_first():
    same = [Passage(f"page{n}", "river") for n in range(50)]
    assert SearchIndex(same).search("river", 3) == same[:3]


def test_every_page_of_the_made_up_world_is_found_by_its_title():
    world = made_up_world()
    index = SearchIndex(world.passages)
    assert all(passage in index.search(passage.title, 2) for passage in world.passages)


def test_what_is_missing_is_named(monkeypatch):
    with pytest.raises(ValueError, match="passages"):
        SearchIndex([])
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ImportError, match=r"pip install 'turnwise\[search\]'"):
        SearchIndex([RIVER])


def test_long_passages_are_cut():
    assert len(view_message("Who?", [Passage("t", "x" * 9999)])["content"]) < PASSAGE_CHARS + 20

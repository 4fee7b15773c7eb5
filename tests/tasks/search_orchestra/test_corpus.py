from __future__ import annotations

import json
import math
import sys
from collections import Counter

import pytest

from turnwise.tasks.search_orchestra.corpus import (
    Passage,
    SearchIndex,
    SearchQuestion,
    made_up_world,
    read_world,
    sufficient,
    support_share,
)
from turnwise.tasks.search_orchestra.prompts import (
    ANSWERER,
    PASSAGE_CHARS,
    SEARCHER,
    SYSTEM_PROMPTS,
    VERIFIER,
    demonstrations,
    read_view,
    view_message,
)


def folder(tmp_path, rows, **files):
    docs = tmp_path / "docs" / "deep"
    docs.mkdir(parents=True)
    for name, text in files.items():
        (docs / f"{name}.txt").write_text(text)
    (tmp_path / "q.jsonl").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return tmp_path / "docs", tmp_path / "q.jsonl"


def words(text):
    return text.replace(".", "").replace("?", "").split()


# --- the made-up world -----------------------------------------------------------------------------------------------
def test_every_answer_follows_from_its_pages_alone():
    world = made_up_world(3)
    pages = {passage.title: passage.text for passage in world.passages}
    assert len(pages) == len(world.passages) == 2460
    assert Counter(len(question.supports) for question in world.questions.values()) == {1: 2400, 2: 4800, 3: 4800}
    for question in world.questions.values():
        assert question.supports[0] in question.text
        for here, following in zip(question.supports, question.supports[1:], strict=False):
            assert f" {following}." in pages[here] and following not in question.text, "a page leads to the next"
        assert question.answer in words(pages[question.supports[-1]]) and question.answer not in words(question.text)


def test_the_world_is_always_the_same_and_names_are_unique():
    assert made_up_world(1).passages == made_up_world(3).passages
    assert set(made_up_world(1).questions) < set(made_up_world(2).questions) < set(made_up_world(3).questions)
    # Frozen: another world would silently change every published number.
    assert made_up_world(1).passages[0].text == "Milen is a province. Its capital is Nilil. Milen sells salt."
    with pytest.raises(ValueError, match="hops=4"):
        made_up_world(4)


# --- a user's own ----------------------------------------------------------------------------------------------------
def test_files_are_read_a_passage_per_paragraph(tmp_path):
    rows = [{"question": "Who?", "answer": "Bo", "supports": ["b"]}, "", {"question": "What?", "answer": "tea"}]
    world = read_world(*folder(tmp_path, rows, b="Bo is\nhere.\n\n\nAnd tea.\n", a="Nothing."))
    assert world.passages == (Passage("a", "Nothing."), Passage("b", "Bo is here."), Passage("b", "And tea."))
    assert world.questions == {"Who?": SearchQuestion("Who?", "Bo", ("b",)), "What?": SearchQuestion("What?", "tea")}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", r"q\.jsonl:1: not JSON"),
        ("[1]", ":1: expected an object with the texts"),
        ({"question": "Q?"}, ":1: expected an object with the texts"),
        ({"question": "Q?", "answer": 3}, ":1: expected an object with the texts"),
        ({"question": "Q?", "answer": "A", "supports": "b"}, "supports='b': expected a list"),
        ({"question": "Q?", "answer": "A", "supports": ["c"]}, r"supports names \['c'\], of which no file is there"),
        ("", "expected at least one question"),
    ],
)
def test_bad_questions_are_named(tmp_path, row, said):
    with pytest.raises(ValueError, match=said):
        read_world(*folder(tmp_path, [row], b="Bo."))


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"docs': expected a folder with \.txt files"):
        read_world(*folder(tmp_path, []))


# --- answers ---------------------------------------------------------------------------------------------------------
def test_what_is_sufficient_by_hand():
    mira, velmar = Passage("Mira", "Mira was born in Velmar."), Passage("Velmar", "Velmar is in Osk.")
    known = SearchQuestion("In which province?", "Osk", ("Mira", "Velmar"))
    assert [support_share(known, found) for found in ([], [mira], [mira, mira], [velmar, mira])] == [0.0, 0.5, 0.5, 1.0]
    assert [sufficient(known, found) for found in ([velmar], [velmar, mira])] == [False, True]
    unknown = known._replace(supports=())
    assert [support_share(unknown, found) for found in ([], [mira], [velmar])] == [0.0, 0.0, 1.0]
    assert not sufficient(unknown, [Passage("x", "Oskar is here.")])


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
    with pytest.raises(ImportError, match=r"pip install 'turnwise\[tasks\]'"):
        SearchIndex([RIVER])


def test_long_passages_are_cut():
    assert len(view_message("Who?", [Passage("t", "x" * 9999)])["content"]) < PASSAGE_CHARS + 20


WORLD = made_up_world(3)
TEXTS = list(WORLD.questions)[:600]


def right(actor, messages, reply):
    view = read_view(messages)
    question = WORLD.questions[view.question]
    titles = [passage.title for passage in view.found]
    if actor == VERIFIER:
        return reply == ("answer" if sufficient(question, view.found) else "search")
    if actor == SEARCHER:
        assert not sufficient(question, view.found)
        return reply in question.supports and reply == next(t for t in question.supports if t not in titles)
    assert sufficient(question, view.found)
    return reply == question.answer


@pytest.mark.parametrize("quality", [0.0, 0.4, 1.0])
def test_quality_is_the_share_of_right_replies(quality):
    shares = {actor: [] for actor in SYSTEM_PROMPTS}
    for actor, messages, reply in demonstrations(WORLD, TEXTS, 0, quality):
        shares[actor].append(right(actor, messages, reply))
    assert {len(share) for share in shares.values()} == {200}
    by_luck = {VERIFIER: 0.5, SEARCHER: 0.0, ANSWERER: 0.2}
    for actor, share in shares.items():
        expected = quality + (1 - quality) * by_luck[actor]
        assert sum(share) / 200 == pytest.approx(expected, abs=0.13), actor


def test_verifiers_meet_both_situations():
    shown = [read_view(m) for actor, m, _ in demonstrations(WORLD, TEXTS, 0) if actor == VERIFIER]
    enough = sum(sufficient(WORLD.questions[view.question], view.found) for view in shown) / len(shown)
    assert 0.2 < enough < 0.6

from __future__ import annotations

import json
from collections import Counter

import pytest

from turnwise.tasks.search_orchestra.corpus import (
    Passage,
    Question,
    made_up_world,
    read_world,
    sufficient,
    support_share,
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
    assert world.questions == {"Who?": Question("Who?", "Bo", ("b",)), "What?": Question("What?", "tea")}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", r"q\.jsonl, line 1: expected JSON"),
        ("[1]", "line 1: expected an object with the texts"),
        ({"question": "Q?"}, "line 1: expected an object with the texts"),
        ({"question": "Q?", "answer": 3}, "line 1: expected an object with the texts"),
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
    known = Question("In which province?", "Osk", ("Mira", "Velmar"))
    assert [support_share(known, found) for found in ([], [mira], [mira, mira], [velmar, mira])] == [0.0, 0.5, 0.5, 1.0]
    assert [sufficient(known, found) for found in ([velmar], [velmar, mira])] == [False, True]
    unknown = known._replace(supports=())
    assert [support_share(unknown, found) for found in ([], [mira], [velmar])] == [0.0, 0.0, 1.0]
    assert not sufficient(unknown, [Passage("x", "Oskar is here.")])

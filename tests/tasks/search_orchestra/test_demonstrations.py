from __future__ import annotations

import pytest

from turnwise.tasks.search_orchestra import made_up_world
from turnwise.tasks.search_orchestra.corpus import sufficient
from turnwise.tasks.search_orchestra.demonstrations import demonstrations
from turnwise.tasks.search_orchestra.prompts import ANSWERER, SEARCHER, SYSTEM_PROMPTS, VERIFIER, read_view

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

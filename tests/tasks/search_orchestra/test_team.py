from __future__ import annotations

import json

import pytest

from turnwise.arena import TreeSampler
from turnwise.tasks import build_task
from turnwise.tasks.search_orchestra import (
    SearchOrchestraOptions,
    SearchOrchestraTask,
)
from turnwise.tasks.search_orchestra.prompts import ANSWERER, SEARCHER, VERIFIER, read_view

TASK = SearchOrchestraTask(SearchOrchestraOptions(passages=1))
RIVER = next(q for q in TASK.world.questions.values() if q.text.startswith("Which river"))
PERSON, TOWN = RIVER.supports
ARTIFACT = TASK.artifact(RIVER.text)


def calls(result):
    assert result.rollout.error is None, result.rollout.error
    return [(step.actor_id, step.turn) for step in result.rollout.steps]


# --- one episode, worked by hand -------------------------------------------------------------------------------------
async def test_two_searches_and_the_answer(table):
    seat = table(TASK, ["search", PERSON, "Not yet: search", f"Query: {TOWN}", "answer", f"Answer: {RIVER.answer}."])
    result = await seat.one(ARTIFACT)
    order = [VERIFIER, SEARCHER, VERIFIER, SEARCHER, VERIFIER, ANSWERER]
    assert calls(result) == list(zip(order, [0, 0, 1, 1, 2, 2], strict=True))
    assert result.rollout.rewards == dict.fromkeys([VERIFIER, SEARCHER, ANSWERER], 1.0)
    assert all(step.reward is None for step in result.rollout.steps)
    found = [[passage.title for passage in read_view(messages).found] for _, messages in seat.seen]
    assert found == [[], [], [PERSON], [PERSON], [PERSON, TOWN], [PERSON, TOWN]]
    assert result.rollout.extras["queries"] == [PERSON, TOWN]
    assert result.rollout.metrics[f"found_share/{SEARCHER}"] == 1.0
    assert result.rollout.metrics[f"searches/{SEARCHER}"] == 2.0


async def test_a_wrong_answer_costs_all_three(table):
    result = await table(TASK, ["answer", "Velmar"]).one(ARTIFACT)
    assert calls(result) == [(VERIFIER, 0), (ANSWERER, 0)]
    assert result.rollout.rewards == dict.fromkeys([VERIFIER, SEARCHER, ANSWERER], 0.0)
    assert result.rollout.metrics[f"found_share/{SEARCHER}"] == 0.0


async def test_searches_run_out_and_the_answerer_s_turn_comes(table):
    task = SearchOrchestraTask(SearchOrchestraOptions(max_searches=2))
    seat = table(task, ["search", "zzz", "search", PERSON, RIVER.answer])
    result = await seat.one(ARTIFACT)
    assert [actor for actor, _ in calls(result)] == [VERIFIER, SEARCHER, VERIFIER, SEARCHER, ANSWERER]
    assert result.rollout.rewards[VERIFIER] == 1.0 and result.rollout.metrics[f"found_share/{SEARCHER}"] == 0.5
    assert read_view(seat.seen[2][1]).found == (), "nothing was found by words that no page has"


async def test_the_same_page_is_shown_once(table):
    seat = table(TASK, ["search", PERSON, "search", PERSON, "answer", "?"])
    await seat.one(ARTIFACT)
    assert [passage.title for passage in read_view(seat.seen[-1][1]).found] == [PERSON]


async def test_what_can_not_be_read(table):
    seat = table(TASK, ["search", " \n", "Hm.", "<think>so</think>"])
    result = await seat.one(ARTIFACT)
    assert [actor for actor, _ in calls(result)] == [VERIFIER, SEARCHER, VERIFIER, ANSWERER], (
        "babble goes to the answer"
    )
    metrics = result.rollout.metrics
    assert [metrics[f"readable/{a}"] for a in (VERIFIER, SEARCHER, ANSWERER)] == [0.5, 0.0, 0.0]
    assert result.rollout.extras["answer"] is None and result.rollout.rewards[ANSWERER] == 0.0


async def test_a_tree_scores_each_action_by_itself(table):
    lines = ["answer", "search", PERSON, "zzz", "search", "answer", TOWN, PERSON, "answer", "search", "?", RIVER.answer]
    result = await table(TASK, lines, tree=TreeSampler(branches=2, select="best")).one(ARTIFACT)
    assert [(step.actor_id, step.reward, step.selected) for step in result.rollout.steps] == [
        (VERIFIER, 0.0, False),
        (VERIFIER, 1.0, True),
        (SEARCHER, 0.5, True),
        (SEARCHER, 0.0, False),
        (VERIFIER, 1.0, True),
        (VERIFIER, 0.0, False),
        (SEARCHER, 1.0, True),
        (SEARCHER, 0.5, False),
        (VERIFIER, 1.0, True),
        (VERIFIER, 0.0, False),
        (ANSWERER, 0.0, False),
        (ANSWERER, 1.0, True),
    ]
    assert result.rollout.metrics[TASK.success_metric] == 1.0


# --- the task --------------------------------------------------------------------------------------------------------
async def test_a_folder_of_ones_own(table, tmp_path):
    (tmp_path / "docs").mkdir()
    for n in range(60):
        (tmp_path / "docs" / f"item{n}.txt").write_text(f"The item number{n} costs {n + 100} coins.")
    rows = [{"question": f"What does number{n} cost?", "answer": f"{n + 100} coins"} for n in range(60)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = build_task("search_orchestra", {"corpus": str(tmp_path / "docs"), "questions": str(tmp_path / "q.jsonl")})
    results = await table(task, task.oracle()).play(task.requests(0, 8, 1))
    for result in results:
        assert result.rollout.rewards[ANSWERER] == 1.0 and len(result.rollout.extras["queries"]) == 1
    assert task.demonstrations(5, 0) == [], "there is nothing to demonstrate where no supports are known"
    with pytest.raises(ValueError, match=r"n=500: the train split holds \d+ questions"):
        task.requests(0, 500, 1)


@pytest.mark.parametrize(
    ("actors", "lines", "order", "queries"),
    [
        ([SEARCHER, ANSWERER], [PERSON, TOWN, "?", RIVER.answer], [SEARCHER] * 3 + [ANSWERER], 3),
        ([VERIFIER, ANSWERER], ["search", RIVER.answer], [VERIFIER, ANSWERER], 0),
        ([ANSWERER], [RIVER.answer], [ANSWERER], 0),
    ],
)
async def test_some_actors_without_the_others(table, actors, lines, order, queries):
    result = await table(TASK.with_actors(actors), lines).one(ARTIFACT)
    assert [actor for actor, _ in calls(result)] == order
    assert len(result.rollout.extras["queries"]) == queries and result.rollout.metrics["correct/answerer"] == 1.0

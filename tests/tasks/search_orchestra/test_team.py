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


WHO = {"v": VERIFIER, "s": SEARCHER, "a": ANSWERER}
# Replies; who acts, by first letters; what all three earn; the share of the needed pages that was found; other metrics
# and extras; the pages in the last prompt; and the actors, if it is not the whole team.
GAMES = {
    "two searches and the answer": (
        ["search", PERSON, "Not yet: search", f"Query: {TOWN}", "answer", f"Answer: {RIVER.answer}."], "vsvsva", 1.0,
        1.0, {"queries": [PERSON, TOWN], "searches/searcher": 2.0}, [PERSON, TOWN], None,
    ),
    "a wrong answer costs all three": (["answer", "Velmar"], "va", 0.0, 0.0, {}, [], None),
    "searches run out, and the answerer's turn comes": (
        ["search", "zzz", "search", PERSON, "search", PERSON, RIVER.answer], "vsvsvsa", 1.0, 0.5, {}, [PERSON], None,
    ),
    "babble goes to the answer": (
        ["search", " \n", "Hm.", "<think>so</think>"], "vsva", 0.0, 0.0,
        {"readable/verifier": 0.5, "readable/searcher": 0.0, "readable/answerer": 0.0, "answer": None}, [], None,
    ),
    "no verifier": (
        [PERSON, TOWN, "?", RIVER.answer], "sssa", 1.0, 1.0, {"queries": [PERSON, TOWN, "?"]}, [PERSON, TOWN],
        [SEARCHER, ANSWERER],
    ),
    "no searcher": (["search", RIVER.answer], "va", 1.0, 0.0, {"queries": []}, [], [VERIFIER, ANSWERER]),
    "an answerer alone": ([RIVER.answer], "a", 1.0, 0.0, {"queries": []}, [], [ANSWERER]),
}  # fmt: skip


@pytest.mark.parametrize("title", GAMES)
async def test_an_episode_by_hand(table, title):
    lines, order, worth, share, measured, found, actors = GAMES[title]
    seat = table(TASK.with_actors(actors) if actors else TASK, lines)
    rollout = (await seat.one(ARTIFACT)).rollout
    assert rollout.error is None, rollout.error
    assert [step.actor_id for step in rollout.steps] == [WHO[letter] for letter in order]
    assert all(step.reward is None for step in rollout.steps), "the outcome alone is paid"
    assert rollout.rewards == dict.fromkeys([VERIFIER, SEARCHER, ANSWERER], worth)
    assert rollout.metrics["correct/answerer"] == worth and rollout.metrics["found_share/searcher"] == share
    assert {name: rollout.metrics.get(name, rollout.extras.get(name)) for name in measured} == measured
    shown = [[passage.title for passage in read_view(messages).found] for _, messages in seat.seen]
    assert shown[-1] == found and shown[0] == [], "what was found is shown from then on, and each page once"


async def test_an_option_limits_the_searches(table):
    task = SearchOrchestraTask(SearchOrchestraOptions(max_searches=1))
    rollout = (await table(task, ["search", "zzz", RIVER.answer]).one(ARTIFACT)).rollout
    assert [step.actor_id for step in rollout.steps] == [VERIFIER, SEARCHER, ANSWERER]


async def test_a_tree_scores_each_action_by_itself(table):
    lines = ["answer", "search", PERSON, "zzz", "search", "answer", TOWN, PERSON, "answer", "search", "?", RIVER.answer]
    seat = table(TASK, lines, tree=TreeSampler(branches=2, select="best"))
    result = await seat.one(ARTIFACT)
    assert table.branches(result) == [
        (VERIFIER, 0.0, False), (VERIFIER, 1.0, True), (SEARCHER, 0.5, True), (SEARCHER, 0.0, False),
        (VERIFIER, 1.0, True), (VERIFIER, 0.0, False), (SEARCHER, 1.0, True), (SEARCHER, 0.5, False),
        (VERIFIER, 1.0, True), (VERIFIER, 0.0, False), (ANSWERER, 0.0, False), (ANSWERER, 1.0, True),
    ]  # fmt: skip
    assert result.rollout.metrics[TASK.success_metric] == 1.0


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
    with pytest.raises(ValueError, match=r"n=500: the train split of task .* has \d+ questions"):
        task.requests(0, 500, 1)

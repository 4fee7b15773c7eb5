"""Credit of attempts with unequal numbers of calls, and by rubrics."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from turnwise.arena import Rubric
from turnwise.credit import DrMASCredit, HierarchyCredit
from turnwise.integrations.gateway import AgentEpisode, Gateway
from turnwise.types import Actor, EpisodeRequest

from .helpers import arena_of, scripted
from .wires import Chat


def by_row():
    """Each row counts. The numbers below are without the rules' small ``eps`` beside the standard deviation."""
    return DrMASCredit(eps=0.0)


def by_attempt():
    """One value per attempt and actor."""
    return HierarchyCredit(ddof=1, eps=0.0)


async def calls_in_turn(question, models):
    """Call each actor as often as the question says, in turns, in a growing chat of its own."""
    chats = defaultdict(lambda: [{"role": "user", "content": "0"}])
    for turn in range(max(question["calls"].values())):
        for name in [name for name, count in question["calls"].items() if turn < count]:
            async with Chat.client(models[name]) as client:
                answer = Chat.text(await Chat.ask(client, chats[name], actor=name))
            again = {"role": "user", "content": str(turn + 1)}
            chats[name] += [{"role": "assistant", "content": answer}, again]
    return question["rewards"]


def advantages(episode, credit, questions, actors=("solver",)):
    """Play each question as an attempt of one group. Return the steps of each attempt, with their advantages."""
    arena = arena_of(scripted("a", "b", "c"), actors=[Actor(name) for name in actors], credit=credit)
    arena.add_episode(episode)

    async def run():
        requests = [EpisodeRequest(episode.episode_type, question, group_id="g") for question in questions]
        results = await arena.generate_rollouts(requests)
        errors = [result.rollout.error for result in results if result.rollout.error]
        assert not errors, errors[0]
        arena.assign_credit_and_pack(results)
        return [result.rollout.steps for result in results]

    return asyncio.run(run())


def agent_of(function, actors=("solver",)):
    return AgentEpisode(function, Gateway(renderer="template"), actors=actors)


def question(reward, calls):
    return {"calls": {"solver": calls}, "rewards": {"solver": reward}}


def values(attempts):
    return [[step.advantage for step in steps] for steps in attempts]


# Solver called 3 times with reward 1, and once with reward 0.
WORKED = [question(1.0, 3), question(0.0, 1)]


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        (by_row, [[0.5, 0.5, 0.5], [-1.5]]),  # mean 3/4, standard deviation 1/2
        (by_attempt, [[0.5**0.5] * 3, [-(0.5**0.5)]]),  # mean 1/2, standard deviation sqrt(1/2)
    ],
)
def test_unequal_numbers_of_calls(credit, expected):
    found = values(advantages(agent_of(calls_in_turn), credit(), WORKED))
    assert found == [pytest.approx(row, abs=1e-6) for row in expected]


def test_actor_that_was_never_called_has_no_row_and_needs_no_reward():
    questions = [
        {"calls": {"solver": 1}, "rewards": {"solver": 1.0}},
        {"calls": {"solver": 1, "checker": 1}, "rewards": {"solver": 0.0, "checker": 1.0}},
    ]
    attempts = advantages(
        agent_of(calls_in_turn, ("solver", "checker")), by_attempt(), questions, ("solver", "checker")
    )
    assert [[step.actor_id for step in steps] for steps in attempts] == [["solver"], ["solver", "checker"]]
    assert values(attempts)[0] == pytest.approx([0.5**0.5], abs=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"judge": 1.0}, "has 'judge': expected some of the actors"),
        ({}, "lacks actor 'solver', which it called"),
        (float("nan"), "expected a finite number"),
        ("right", "expected a finite number"),
        ({"solver": None}, "expected a finite number"),
        (1 + 2j, "expected a finite number"),
    ],
)
def test_reward_that_is_none_fails_its_episode(given, message):
    async def agent(question, models):
        async with Chat.client(models["solver"]) as client:
            await Chat.ask(client)
        return given

    with pytest.raises(AssertionError, match=message):
        advantages(agent_of(agent), by_row(), [question(1.0, 1)])


def test_rubric_scores_what_the_agent_returned():
    async def agent(question, models):
        async with Chat.client(models["solver"]) as client:
            return {"answer": Chat.text(await Chat.ask(client)), "rewards": "of the agent's own"}

    def right(extras):
        assert extras["result"]["rewards"] == "of the agent's own"
        return float(extras["answer"] == "a")

    episode = AgentEpisode(agent, Gateway(renderer="template"), actors=["solver"], rubric=Rubric([right]))
    attempts = advantages(episode, by_row(), [question(None, 1), question(None, 1)])
    assert sorted(value for row in values(attempts) for value in row) == pytest.approx([-(0.5**0.5), 0.5**0.5])

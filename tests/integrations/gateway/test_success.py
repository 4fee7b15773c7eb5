"""The success of an attempt is what its agent returned, whoever of the team it asked."""

from __future__ import annotations

import math

import pytest

from turnwise.arena import Rubric
from turnwise.integrations.gateway import AgentEpisode, Gateway
from turnwise.train.eval.evaluate import evaluate
from turnwise.types import EpisodeRequest

from .helpers import arena_of, scripted
from .wires import Chat

TEAM = ("worker", "leader")


async def agent(question, models):
    for name in question["asks"]:
        async with Chat.client(models[name]) as client:
            await Chat.ask(client, [{"role": "user", "content": "0"}], actor=name)
    return question["returns"]


def from_result(extras):
    return extras["result"]


def evaluated(attempts, metric="reported_reward", rubric=None):
    arena = arena_of(scripted("a"), actors=TEAM)
    arena.add_episode(AgentEpisode(agent, Gateway(renderer="template"), actors=TEAM, rubric=rubric))
    kind = next(iter(arena.episodes))
    requests = [EpisodeRequest(kind, {"asks": asks, "returns": returns}) for asks, returns in attempts]
    return evaluate(arena, requests, metric)


BOTH = {"worker": 0.0, "leader": 1.0}


@pytest.mark.parametrize(
    ("asks", "returns", "success"),
    [
        (["leader"], BOTH, 1.0),
        (["worker"], BOTH, 0.0),
        (["leader", "worker"], BOTH, 0.5),
        (["leader"], {"leader": 0.25}, 0.25),
        (["leader"], 0.75, 0.75),
        ([], 0.75, 0.75),
        ([], BOTH, 0.5),
    ],
)
async def test_success_is_of_whoever_was_asked(asks, returns, success):
    found = await evaluated([(asks, returns)])
    assert found.success == success and not found.gap and not found.failed


async def test_a_rubric_scores_attempts_that_ask_nobody():
    found = await evaluated([([], 0.5), (["leader"], 1.0)], "from_result", Rubric([from_result]))
    assert found.success == 0.75 and found.unmeasured == 0


async def test_a_named_actor_may_be_left_alone():
    one = await evaluated([(["worker"], 1.0), (["leader"], 1.0)], "reported_reward/worker")
    assert (one.success, one.unmeasured, one.gap) == (0.5, 1, "")
    none = await evaluated([(["leader"], 1.0)] * 2, "reported_reward/worker")
    assert math.isnan(none.success) and none.gap.endswith("expected one of reported_reward/leader")


async def test_what_an_agent_returns_is_checked_where_it_asks_nobody():
    with pytest.raises(ValueError, match="expected a finite number, or one by actor"):
        await evaluated([([], "a text")])

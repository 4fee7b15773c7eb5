"""Calls for titles, memories and the like: an actor of their own doesn't train, and others are counted and told of."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.integrations.gateway import AgentEpisode, Gateway
from turnwise.samples.collect import collect_samples
from turnwise.tasks import build_task
from turnwise.types import EpisodeRequest

from .helpers import USER, arena_of, play, scripted
from .wires import Chat, every

MAIN, TITLE = "You write code.", "You write titles."
SUMMARY = "The user wants the sum of two and two, which is four."


def system(text):
    return {"role": "system", "content": text}


async def chat_of(wire, client, text, rounds=1, said=USER):
    messages, options = wire.with_system(text)
    messages = [*messages[:-1], *said]
    for _ in range(rounds):
        answer = await wire.ask(client, messages=messages, **options)
        messages = [*messages, *wire.sent_back(answer), *USER]
    return wire.text(answer)


@every
@pytest.mark.parametrize(
    ("prompts", "rows"),
    [([MAIN, TITLE], 1), ([TITLE, MAIN, TITLE], 2), ([MAIN, MAIN], 0), ([MAIN], 0), ([MAIN, ""], 1)],
)
def test_chats_with_other_system_prompts_are_counted(wire, prompts, rows, monkeypatch):
    warned = []
    monkeypatch.setattr(
        "turnwise.integrations.gateway.sessions.unrelated.warn_once", lambda key, text: warned.append(text)
    )

    async def agent(seen, models):
        async with wire.client(models["solver"]) as client:
            for text in prompts:
                rounds = 3 if text == MAIN else 1
                await (chat_of(wire, client, text, rounds) if text else wire.ask(client))

    played = play(agent, ["4"])
    assert played.metrics.get("gateway/unrelated_rows/solver", 0) == rows and len(warned) == (rows > 0)
    if rows:
        assert f"{rows} of {len(played.steps)} rows of 'solver'" in warned[0] and "task_options.untrained" in warned[0]


def test_a_chat_that_goes_on_from_another_is_no_other_chat():
    """Other tools, and a summary under another system prompt."""

    async def agent(seen, models):
        async with Chat.client(models["solver"]) as client:
            first = {"role": "assistant", "content": await chat_of(Chat, client, MAIN)}
            await Chat.ask(client, [system(MAIN), *USER, first, *USER], tools=Chat.tools)
            await Chat.ask(client, [system("You go on."), {"role": "user", "content": f"So far: {SUMMARY}"}])

    played = play(agent, [SUMMARY])
    assert "gateway/unrelated_rows/solver" not in played.metrics
    assert [step.info.get("rewritten") for step in played.steps] == [None, "tools", None]
    assert [step.info.get("carries") for step in played.steps] == [None, None, 1]


def test_a_chat_that_another_system_prompt_reads_is_another_chat():
    """So some agents ask for what to remember; a system prompt with the time looks the same."""

    async def agent(seen, models):
        async with Chat.client(models["solver"]) as client:
            first = {"role": "assistant", "content": await chat_of(Chat, client, MAIN)}
            await Chat.ask(client, [system("You remember."), *USER, first, *USER])

    played = play(agent, [SUMMARY])
    assert [step.info.get("rewritten") for step in played.steps] == [None, "history"]
    assert played.metrics["gateway/unrelated_rows/solver"] == 1


@pytest.mark.parametrize("reward", [1.0, {"solver": 1.0}, {"solver": 1.0, "title": 0.5}])
def test_an_untrained_actor_needs_no_reward_and_trains_nothing(reward):
    async def agent(question, models):
        for name in ("title", "solver"):
            async with Chat.client(models[name]) as client:
                await Chat.ask(client, USER, actor=name)
            async with models[name].child() as child, Chat.client(child) as client:
                await Chat.ask(client, USER, actor=name)
        return reward

    arena = arena_of(scripted("4"), actors=("solver", "title"))
    gateway = Gateway(renderer="template")
    arena.add_episode(AgentEpisode(agent, gateway, actors=("solver", "title"), untrained=["title"]))
    kind = next(iter(arena.episodes))
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest(kind, "x")]))
    assert result.rollout.error is None and result.rollout.rewards == {"solver": 1.0}
    assert result.rollout.metrics["gateway/calls/title"] == 2
    assert [sample.step.actor_id for sample in collect_samples([result])] == ["solver", "solver"]


def test_untrained_actors_are_named_rightly():
    with pytest.raises(ValueError, match=r"untrained=\['titel'\]: 'titel' is none of the actors"):
        AgentEpisode(lambda question, models: 1.0, Gateway(), actors=("solver",), untrained=["titel"])
    task = build_task("gateway:json:dumps", {"untrained": ["title"], "questions": "json:__all__"})
    assert [actor.id for actor in task.actors] == ["agent", "title"]
    [episode] = task.episodes().values()
    assert episode.untrained == ["title"]

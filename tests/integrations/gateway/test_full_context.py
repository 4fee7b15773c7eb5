"""A full context ends the attempt there: what was sampled is scored and trains, whether or not the agent catches it."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.arena import Rubric
from turnwise.integrations.gateway import AgentEpisode, Gateway, ReplayedEpisode
from turnwise.samples.collect import collect_samples
from turnwise.samples.step_metrics import describe
from turnwise.types import EpisodeRequest

from .helpers import USER, arena_of, scripted
from .processes import play_process
from .wires import Chat, every

LONG = {"role": "user", "content": "x " * 300}


def attempt(agent, *, rubric=None, episode=AgentEpisode, actors=("solver",), script=("a",), **settings):
    arena = arena_of(scripted(*script), actors=actors, max_context=200)
    arena.add_episode(episode(agent, Gateway(renderer="template", **settings), actors=actors, rubric=rubric))
    kind = next(iter(arena.episodes))
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest(kind, "x")]))
    return result


def asks(wire, *chats):
    async def agent(question, models):
        async with wire.client(models["solver"]) as client:
            for chat in chats:
                await wire.ask(client, messages=chat)
        return 1.0

    return agent


def by_length(extras):
    return 0.25 if extras["result"] is None else 0.75


@every
@pytest.mark.parametrize(("rubric", "reward"), [(None, 0.0), (Rubric([by_length]), 0.25)])
def test_the_attempt_ends_there_and_trains(wire, rubric, reward):
    result = attempt(asks(wire, USER, USER, [*USER, LONG]), rubric=rubric)
    rollout = result.rollout
    assert rollout.error is None and rollout.meta["ended"] == "context"
    assert rollout.rewards == {"solver": reward} and len(rollout.steps) == 2
    assert len(collect_samples([result])) == 2
    assert describe([result])["ended/context"] == 1.0


@every
def test_fail_leaves_it_out(wire):
    result = attempt(asks(wire, USER, [*USER, LONG]), on_context="fail")
    assert "max_context=200 leaves no room" in result.rollout.error
    assert not collect_samples([result])


def test_an_attempt_without_any_answer_fails():
    assert "max_context=200 leaves no room" in attempt(asks(Chat, [LONG])).rollout.error


def test_another_failure_after_a_later_answer_fails():
    async def agent(question, models):
        async with Chat.client(models["solver"]) as client:
            with pytest.raises(Chat.sdk.BadRequestError):
                await Chat.ask(client, [*USER, LONG])
            await Chat.ask(client, USER)
            raise RuntimeError("a fault of its own")

    rollout = attempt(agent).rollout
    assert "a fault of its own" in rollout.error and "ended" not in rollout.meta


def test_an_agent_that_catches_it_at_its_end_reports_what_it_likes():
    async def agent(question, models):
        async with Chat.client(models["solver"]) as client:
            await Chat.ask(client, USER)
            with pytest.raises(Chat.sdk.BadRequestError):
                await Chat.ask(client, [*USER, LONG])
        return 0.5

    rollout = attempt(agent).rollout
    assert (rollout.rewards, rollout.meta["ended"], rollout.error) == ({"solver": 0.5}, "context", None)


def test_the_refused_one_of_two_calls_at_once_ends_it():
    async def agent(question, models):
        async with Chat.client(models["solver"]) as client:
            await Chat.ask(client, USER)
            await asyncio.gather(Chat.ask(client, [*USER, LONG]), Chat.ask(client, USER))
        return 1.0

    rollout = attempt(agent).rollout
    assert rollout.rewards == {"solver": 0.0} and rollout.error is None


def test_a_branch_of_a_tree_ends_there():
    async def agent(question, models):
        async with Chat.client(models["solver"]) as client:
            first = Chat.text(await Chat.ask(client, USER))
            await Chat.ask(client, [*USER, {"role": "assistant", "content": first}, LONG])
        return 1.0

    for on_context, rewards in (("end", {"solver": 0.0}), ("fail", {})):
        rollout = attempt(agent, episode=ReplayedEpisode, on_context=on_context).rollout
        assert rollout.rewards == rewards and (rollout.error is None) == bool(rewards)
        assert rollout.meta.get("ended") == ("context" if rewards else None)


CODE = "ask('y')\nopen('answer.txt', 'w').write('draft')\nask('x ' * 300)\n"


@pytest.mark.parametrize("collects", [False, True])
@pytest.mark.parametrize("on_context", ["end", "fail"])
def test_a_command_ends_there(tmp_path, on_context, collects):
    (tmp_path / "question").write_text("{}")
    right = Rubric([lambda extras: float(extras["files"]["answer.txt"] == "draft" and "code 1" in extras["failure"])])
    collected = {"collect": ["answer.txt"], "rubric": right, "env": {"TURNWISE_QUESTION": str(tmp_path / "question")}}
    options = {"arena_options": {"max_context": 200}, "settings": {"on_context": on_context}}
    [rollout], _ = play_process(tmp_path, CODE, **options, **(collected if collects else {}))
    assert (rollout.error is None) == (on_context == "end")
    assert rollout.rewards == ({"solver": float(collects)} if on_context == "end" else {})
    assert rollout.meta.get("ended") == ("context" if on_context == "end" else None)

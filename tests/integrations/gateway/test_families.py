"""An agent whose models are of different families: each call is rendered, continued and read in its model's tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

from turnwise.arena import Arena
from turnwise.inference import ScriptedClient
from turnwise.integrations.gateway import AgentEpisode, Gateway
from turnwise.types import Actor, EpisodeRequest, Sampling

from ...families import small_family

POLICIES = {"solver": "first", "checker": "second"}


async def agent(question: Any, models: Any) -> float:
    chat = [{"role": "user", "content": "2 + 2 = ?"}]
    for name in ("solver", "checker", "checker", "solver"):  # each goes on from its own earlier answer
        async with openai.AsyncOpenAI(base_url=models[name].base_url, api_key=models[name].api_key) as client:
            answer = await client.chat.completions.create(model=name, messages=chat, logprobs=True)
        [choice] = answer.choices
        assert choice.message.content == "four" and choice.finish_reason == "stop"
        read = [token.token for token in choice.logprobs.content]
        assert "".join(read[:-1]) == "four"
        chat += [{"role": "assistant", "content": "four"}, {"role": "user", "content": "Sure?"}]
    return 1.0


def test_each_model_of_an_agent_has_its_own_tokens() -> None:
    tokenizers = {name: small_family(which)[0] for which, name in enumerate(POLICIES.values())}
    client = ScriptedClient(lambda request: "four", tokenizer=tokenizers, versions=dict.fromkeys(tokenizers, 0))
    arena = Arena(client, sampling=Sampling(max_tokens=20))
    for name, policy in POLICIES.items():
        arena.add_actor(Actor(name, policy=policy))
    arena.add_episode(AgentEpisode(agent, Gateway(renderer="template"), actors=list(POLICIES)))
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("agent", "x")]))
    assert result.rollout.error is None, result.rollout.error
    for step in result.rollout.steps:
        tokenizer = tokenizers[POLICIES[str(step.actor_id)]]
        shown = tokenizer.apply_chat_template(list(step.prompt), add_generation_prompt=True, return_dict=False)
        assert list(step.prompt_token_ids) == shown
        assert step.completion_token_ids[-1] == tokenizer.eos_token_id and step.completion == "four"
    assert [step.info.get("extends") for step in result.rollout.steps] == [None, None, 0, 0], "its own earlier call"

"""Policies with tokenizers and contexts of their own in one arena, beside judges, tools of an agent and grammars."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from turnwise.arena import Arena, Episode, Judge, Rubric
from turnwise.chat import ChatFormat
from turnwise.chat.grammar import json_grammar
from turnwise.credit import ConstantCredit
from turnwise.inference import ScriptedClient, TransformersClient
from turnwise.types import Actor, ByPolicy, ContextLengthError, EpisodeRequest, ModelRequest, Sampling

from ..families import small_family

NAMES = ("first", "second")


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return dict(zip(NAMES, (small_family(which)[0] for which in range(2)), strict=True))


def shown(tokenizer: Any, *texts: str) -> list[int]:
    """The prompt of a chat between user and assistant, who speak in turn."""
    chat = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


class Called(Episode):
    """Calls a model as ``play`` does."""

    episode_type = "called"

    def __init__(self, play: Callable[[Any], Any], reward: Any = lambda: 1.0) -> None:
        self.play, self.rubric = play, Rubric([reward])

    async def rollout(self, arena: Any, artifact: Any, state: Any = None) -> Any:
        await self.play(arena)
        return state


def played(tokenizers: Any, episode: Episode, **options: Any) -> tuple[Arena, list[ModelRequest], Any]:
    """Play ``episode`` once with an actor for each tokenizer; every model says ``yes``."""
    client = ScriptedClient(lambda request: "yes", tokenizer=tokenizers, versions=dict.fromkeys(tokenizers, 0))
    arena = Arena(client, **{"sampling": Sampling(max_tokens=9), "failure_threshold": 1.0, **options})
    for name in NAMES:
        arena.add_actor(Actor(name, policy=name))
    arena.add_episode(episode)
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("called", "q")]))
    return arena, client.calls, result


def test_each_policy_is_asked_and_read_in_its_own_tokens(tokenizers: dict[str, Any]) -> None:
    """Also a judge, and an actor that another policy plays for one call: it goes on from no tokens of the first."""
    judge = Judge(policy="second")

    async def calls(arena: Any) -> None:
        first = await arena.call_model("first", "a")
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": first.text}]
        for policy in (*reversed(NAMES), None):
            await arena.call_model("first", [*chat, {"role": "user", "content": "b"}], policy=policy)

    async def reward(arena: Any) -> float:
        return float(await judge.ask("Rate", arena) == "yes")

    _, asked, result = played(tokenizers, Called(calls, reward))
    assert [call.policy for call in asked] == ["first", "second", "first", "first", "second"]
    for call, step in zip(asked, result.rollout.steps, strict=False):
        tokenizer = tokenizers[call.policy]
        texts = [message["content"] for message in call.messages or ()]
        assert list(call.prompt_token_ids) == shown(tokenizer, *texts)
        assert tokenizer.eos_token_id in call.sampling.stop_token_ids
        assert step.policy == call.policy and step.completion == "yes" and step.finish_reason == "stop"
        assert step.completion_token_ids[-1] == tokenizer.eos_token_id
    assert list(asked[-1].prompt_token_ids) == shown(tokenizers["second"], "Rate")
    assert result.rollout.rewards["first"] == 1.0


def test_each_policy_has_its_context(tokenizers: dict[str, Any]) -> None:
    lengths = {name: len(shown(tokenizer, "long " * 8)) for name, tokenizer in tokenizers.items()}

    async def calls(arena: Any) -> None:
        await arena.call_model("first", "long " * 8)
        with pytest.raises(ContextLengthError, match=f"max_context={lengths['second']} leaves no room"):
            await arena.call_model("second", "long " * 8)

    contexts = {"first": lengths["first"] + 4, "second": lengths["second"]}
    arena, asked, result = played(tokenizers, Called(calls), max_context=contexts)
    assert result.rollout.error is None and arena.max_context == contexts
    assert [call.sampling.max_tokens for call in asked] == [4]


def test_users_read_the_tokenizer_of_a_policy(tokenizers: dict[str, Any]) -> None:
    arena = Arena(ScriptedClient(["a"]), tokenizers)
    with pytest.raises(ValueError, match=r"policies 'first' and 'second' .*: expected arena.tokenizer_of\(policy\)"):
        _ = arena.tokenizer
    assert arena.tokenizer_of("second") is tokenizers["second"] is not arena.own_tokenizers["second"]
    with pytest.raises(ValueError, match=r"policy 'third': it has no tokenizer, expected one of \['first', 'second'\]"):
        arena.tokenizer_of("third")
    arena.tokenizer = tokenizers["first"]
    assert arena.tokenizer is arena.tokenizer_of("third") is tokenizers["first"]
    with pytest.raises(TypeError, match=r"tokenizer=3: expected the model's tokenizer, or a credit rule"):
        Arena(ScriptedClient(["a"]), {**tokenizers, "third": 3})
    with pytest.raises(ValueError, match="max_context=1: expected at least 2"):
        Arena(ScriptedClient(["a"]), tokenizers, max_context={"first": None, "second": 1})
    with pytest.raises(ValueError, match=r"tokenizer=\{\}: expected one for each policy"):
        ByPolicy.of({}, "tokenizer")


async def test_the_client_samples_each_family_as_it_does_alone(tokenizers: dict[str, Any]) -> None:
    """Bit for bit, also under a grammar; a batch of both trains on the tokens that each grammar allowed."""
    pytest.importorskip("llguidance")
    models = {name: small_family(which)[1] for which, name in enumerate(NAMES)}
    grammar = {name: json_grammar(ChatFormat(tokenizers[name]), {"enum": ["yes", "no"]}) for name in NAMES}

    def requests(*names: str) -> list[ModelRequest]:
        limits = {"max_tokens": 12, "stop": ("e",)}
        return [
            ModelRequest(shown(tokenizers[name], "a"), Sampling(seed=n, grammar=each, **limits), name)
            for name in names
            for n, each in ((1, None), (2, grammar[name]))
        ]

    client = TransformersClient(models, tokenizers)
    together = await client.generate(requests(*NAMES))
    alone = []
    for name in NAMES:
        one = TransformersClient({name: models[name]}, tokenizers[name])
        alone += await one.generate(requests(name))
        await one.close()
    assert together == alone
    assert {json.strip('"')[:1] for json in (together[1].text, together[3].text)} <= {"y", "n"}

    async def calls(arena: Any) -> None:
        for name in NAMES:
            await arena.call_model(name, "a", grammar=grammar[name], max_tokens=9)

    arena = Arena(client, credit=ConstantCredit())
    arena.stages["grammar_masks"].unsupported = ""
    for name in NAMES:
        arena.add_actor(Actor(name, policy=name))
    arena.add_episode(Called(calls))
    arena.source = lambda: [EpisodeRequest("called", "q")]
    batch = await arena.step()
    await client.close()
    allowed, starts = batch.columns["allowed"], batch.cu_targets[:-1]
    for row, name in enumerate(NAMES):
        bits = np.unpackbits(allowed.masks[allowed.mask_index[starts[row]]], bitorder="little")
        texts = [tokenizers[name].decode([token]) for token in np.flatnonzero(bits)]
        assert '"' in texts and all('"yes"'.startswith(text) or '"no"'.startswith(text) for text in texts)

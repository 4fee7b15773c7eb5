"""Trees for agents: a replayed tree equals a native one, and an agent that isn't a pure function is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from turnwise.arena import Arena, BatchFailedError, MultiTurnEpisode, Rubric, TreeSampler
from turnwise.credit import ATGRPOCredit
from turnwise.inference import ScriptedClient
from turnwise.integrations.gateway import Gateway, ReplayedEpisode
from turnwise.tasks import build_task
from turnwise.types import Actor, EpisodeRequest, GenerateResult, ModelRequest

from ...chat.families import chat_tokenizer
from .wires import Chat

WORTH = {"a": 1.0, "b": 4.0, "c": 2.5}
TREE = TreeSampler(branches=3, select="none")


async def ask(model: Any, messages: list[Any]) -> str:
    async with Chat.client(model) as client:
        return Chat.text(await Chat.ask(client, messages, actor=model.name))


async def agent(question: str, models: Any) -> dict[str, float]:
    """A writer, a critic that reads it, and the writer again, which reads the critic."""

    chat: list[Any] = [{"role": "user", "content": question}]
    draft = await ask(models["writer"], chat)
    advice = await ask(models["critic"], [{"role": "user", "content": f"{question} {draft}"}])
    chat += [{"role": "assistant", "content": draft}, {"role": "user", "content": advice}]
    final = await ask(models["writer"], chat)
    return {"writer": WORTH[draft] + len(final), "critic": float(len(advice))}


class Native(MultiTurnEpisode):
    """The same play, written for turnwise."""

    episode_type = "agent"
    max_turns = 2

    def setup(self, state: Any, arena: Any, artifact: Any) -> None:
        state.data["texts"] = []

    def get_initial_actor(self) -> str:
        return "writer"

    def build_messages(self, state: Any, arena: Any, artifact: Any) -> Any:
        texts = list(state.data["texts"])
        if len(texts) == 1:
            return [{"role": "user", "content": f"{artifact} {texts[0]}"}]
        turns = zip(("assistant", "user"), texts, strict=False)
        return [{"role": "user", "content": artifact}, *({"role": role, "content": text} for role, text in turns)]

    def env_response(self, state: Any, arena: Any, artifact: Any) -> None:
        state.data["texts"].append(state.last_completion_text)
        state.done = len(state.data["texts"]) == 3

    def next_actor(self, state: Any, arena: Any, artifact: Any) -> str:
        return "critic" if len(state.data["texts"]) == 1 else "writer"

    def get_extras(self, state: Any) -> dict[str, Any]:
        return {"texts": list(state.data["texts"])}

    @staticmethod
    def score(extras: Any) -> dict[str, float]:
        draft, advice, final = extras["texts"]
        return {"writer": WORTH[draft] + len(final), "critic": float(len(advice))}

    rubric = Rubric([score.__func__])  # type: ignore[attr-defined]


def script() -> Any:
    """The three drafts in turn; a critic of as many letters as the draft is worth; a final text that answers it."""
    drafts = iter("abc")
    tokenizer = chat_tokenizer("template")

    def answer(request: ModelRequest) -> str:
        assert request.messages is not None
        last, count = request.messages[-1]["content"], len(request.messages)
        if count == 1 and last == "Q":
            return next(drafts)
        return "c" * (1 + "abc".index(last[-1])) if count == 1 else "f" * (len(last) ** 2)

    return ScriptedClient(answer, tokenizer=tokenizer)


def play(episode: Any) -> GenerateResult:
    arena = Arena(script(), ATGRPOCredit())
    for actor in ("writer", "critic"):
        arena.add_actor(Actor(actor))
    arena.add_episode(episode)

    async def run() -> GenerateResult:
        [result] = await arena.generate_rollouts([EpisodeRequest("agent", "Q", seed=3)])
        arena.assign_credit([result])
        return result

    return asyncio.run(run())


def rows(result: GenerateResult) -> list[tuple[Any, ...]]:
    return sorted(
        (
            step.actor_id,
            step.turn,
            step.completion,
            tuple(step.prompt_token_ids),
            step.tree_node is None,
            round(step.advantage or 0.0, 6),
            round(result.rollout.rewards_of(step)[str(step.actor_id)], 6),
        )
        for step in result.rollout.steps
    )


def test_a_replayed_tree_equals_a_native_one() -> None:
    replayed = play(ReplayedEpisode(agent, Gateway(), actors=["writer", "critic"], sampler=TREE))
    native = play(Native(sampler=TREE))
    assert rows(replayed) == rows(native)
    assert len(rows(native)) == 9 and len({row[5] for row in rows(native)}) > 4, "advantages differ, so they are tested"
    assert replayed.rewards == native.rewards
    assert replayed.rollout.metrics["gateway/calls/writer"] == 6


def test_without_a_tree_it_plays_once() -> None:
    result = play(ReplayedEpisode(agent, Gateway(), actors=["writer", "critic"]))
    assert [step.completion for step in result.rollout.steps] == ["a", "c", "f"]
    assert [step.turn for step in result.rollout.steps] == [0, 0, 1]


def test_an_agent_of_plain_functions() -> None:
    def agent(question: str, models: Any) -> float:
        with openai.OpenAI(base_url=models["writer"].base_url, api_key=models["writer"].api_key) as client:
            chat: list[Any] = [{"role": "user", "content": question}]
            client.chat.completions.create(model="writer", messages=chat)
            client.chat.completions.create(model="writer", messages=[{"role": "user", "content": "Q a"}])
        return 1.0

    result = play(ReplayedEpisode(agent, Gateway(), actors=["writer"]))
    assert [step.completion for step in result.rollout.steps] == ["a", "c"]


def test_a_branch_continues_an_answer_by_its_id() -> None:
    async def agent(question: str, models: Any) -> float:
        async with Chat.client(models["writer"]) as client:
            first = await client.responses.create(model="writer", input=question)
            again = {"model": "writer", "input": "Q " + first.output_text, "previous_response_id": first.id}
            return float(len((await client.responses.create(**again)).output_text))

    result = play(ReplayedEpisode(agent, Gateway(), actors=["writer"], sampler=TREE))
    first, *later = sorted(result.rollout.steps, key=lambda step: step.turn)
    assert len(result.rollout.steps) == 6 and {step.turn for step in later} == {0, 1}
    prompts = [step.prompt_token_ids for step in later if step.turn == 1]
    assert all(prompt[: len(first.prompt_token_ids)] == first.prompt_token_ids for prompt in prompts)
    assert all(len(prompt) > len(first.prompt_token_ids) + 5 for prompt in prompts)


def test_an_impure_agent_is_refused_with_the_call() -> None:
    runs: list[int] = []

    async def agent(question: str, models: Any) -> float:
        runs.append(0)
        for text in ("Q", f"Q {len(runs)} a", "Q a"):
            await ask(models["writer"], [{"role": "user", "content": text}])
        return 1.0

    with pytest.raises(BatchFailedError, match="call 1 differs when the agent runs again, in messages"):
        play(ReplayedEpisode(agent, Gateway(), actors=["writer"], sampler=TREE))


def test_an_agent_that_ends_early_the_second_time_is_refused() -> None:
    runs: list[int] = []

    async def agent(question: str, models: Any) -> float:
        runs.append(0)
        for text in ("Q", "Q a", "Q b")[: 4 - len(runs)]:
            await ask(models["writer"], [{"role": "user", "content": text}])
        return 1.0

    with pytest.raises(BatchFailedError, match="the agent ended after 1 calls when it ran again"):
        play(ReplayedEpisode(agent, Gateway(), actors=["writer"]))


def test_only_agents_that_say_so_are_branched(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_agent.py").write_text(
        "questions = ['a', 'b']\nasync def agent(question, models):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert build_task("gateway:some_agent:agent", {"replayable": True}).episodes(TREE)
    with pytest.raises(ValueError, match=r"a branch runs the agent again: expected task_options\.replayable = true"):
        build_task("gateway:some_agent:agent").episodes(TREE)

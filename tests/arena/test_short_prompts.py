"""A line of ``rollouts.jsonl`` grows with what is new in each prompt, and gives back the whole ones."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from turnwise.arena import Arena, MultiTurnEpisode, Rubric, SingleTurnEpisode, TreeSampler
from turnwise.arena.recording.rollouts_jsonl import EpisodeRecord, plain_result
from turnwise.inference import ScriptedClient
from turnwise.inference.scripted import ByteTokenizer
from turnwise.types import Actor, EpisodeRequest, GenerateResult, Step
from turnwise.types.prompts import Prefix
from turnwise.types.short_prompts import FOLLOWS, ShortPrompts, WholePrompts, whole_episode, whole_steps

from ..chat.families import chat_tokenizer
from .replaying import play, row_of


class Talk(MultiTurnEpisode):
    episode_type = "talk"
    actors = ("a",)
    rubric = Rubric([lambda completion: float(len(completion))])

    def get_prompt(self, artifact: Any) -> str:
        return "Where is the ball?"

    def step_reward(self, state: Any, arena: Any, artifact: Any) -> float:
        return 1.0

    def env_response(self, state: Any, arena: Any, artifact: Any) -> str:
        return f"Not in room {len(state.trajectory)}."


class LookUp(SingleTurnEpisode):
    episode_type = "talk"
    actor = "a"
    rubric = Rubric([lambda completion: 1.0])

    def get_prompt(self, artifact: Any) -> str:
        return "Where is the ball?"


def look(room: int) -> str:
    """Look into a room.

    Args:
        room: Its number.
    """
    return f"Not in room {room}."


def talk(seed: int, turns: int, kind: str) -> tuple[Arena, GenerateResult]:
    """An arena, and an episode with random answers that it recorded."""
    rng, episode = random.Random(seed), Talk(max_turns=turns)
    if kind == "two":
        episode.actors = ("a", "b")
    elif kind == "tree":
        episode = Talk(max_turns=turns, sampler=TreeSampler(branches=2, select="best"))

    def answer(request: Any) -> str:
        room = rng.randrange(10**6)
        if kind == "tools":
            return f'<tool_call>{{"name": "look", "arguments": {{"room": {room}}}}}</tool_call>'
        return f"<think>Or {room}?</think>In room {room}." if kind == "thoughts" else f"In room {room}."

    tokenizer = chat_tokenizer("template") if kind in ("plain", "tools") else ByteTokenizer()
    arena = Arena(ScriptedClient(answer, tokenizer=tokenizer))
    arena.record_episodes = True
    for name in "ab":
        tools = {"tools": (look,), "max_tool_rounds": turns - 1} if kind == "tools" else {}
        arena.add_actor(Actor(name, "Be brief.", **tools))
    arena.add_episode(LookUp() if kind == "tools" else episode)
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("talk", seed)]))
    assert len(result.rollout.steps) == turns * (2 if kind in ("two", "tree") else 1)
    return arena, result


def whole_of(result: GenerateResult) -> list[tuple[str, list[int]]]:
    """All prompts of an episode: the text of the chat, in JSON, and the tokens."""
    return [(json.dumps(list(step.prompt)), list(step.prompt_token_ids)) for step in result.rollout.steps]


def read(steps: list[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    return [(json.dumps(list(step["prompt"])), list(step["prompt_token_ids"])) for step in whole_steps(steps)]


KINDS = ("plain", "thoughts", "two", "tools", "tree")


def test_a_longer_prompt_has_what_is_new() -> None:
    first = Step("a", 0, [{"role": "user", "content": "2 + 2"}], "4", [1, 17, 9], [20, 2], [-0.1, -0.1], [], "stop")
    chat = [*first.prompt, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]
    second = Step("a", 1, chat, "Yes", [1, 17, 9, 20, 2, 7, 9], [21, 2], [-0.1, -0.1], [], "stop")
    short = ShortPrompts()
    rows = [short.add(first), short.add(second)]
    assert FOLLOWS not in rows[0] and rows[0]["prompt_token_ids"] == [1, 17, 9]
    assert rows[1][FOLLOWS] == {"step": 0, "messages": 2, "tokens": 5}
    assert (rows[1]["prompt"], rows[1]["prompt_token_ids"]) == (chat[2:], [7, 9])
    again = whole_steps(rows)
    assert (again[1]["prompt"], again[1]["prompt_token_ids"]) == (chat, [1, 17, 9, 20, 2, 7, 9])
    assert again[0] == rows[0] and FOLLOWS not in again[1]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_prompts_come_back(kind: str) -> None:
    seed = random.randrange(10**6)
    print(f"seed={seed}")
    arena, result = talk(seed, 12, kind)
    row = row_of(result)
    assert read(row["steps"]) == whole_of(result)
    assert sum(FOLLOWS in step for step in row["steps"]) >= len(row["steps"]) - 2, "one of each actor is whole"
    alone = ShortPrompts()
    lists = [replace(step, prompt=step.prompt, prompt_token_ids=step.prompt_token_ids) for step in result.rollout.steps]
    follows = [alone.add(step).get(FOLLOWS) for step in lists]
    assert follows == [step.get(FOLLOWS) for step in row["steps"]], "lists, as after a resume, are written alike"
    assert play(arena, row)[1] is None, "it replays"


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_grows_as_its_turns(kind: str) -> None:
    sizes = (8, 64) if kind == "tools" else (32, 256)  # the template renders all results at each call
    few, many = (len(json.dumps(plain_result(talk(1, turns, kind)[1]))) for turns in sizes)
    assert many / few < 8**1.1


def test_calls_of_failed_attempts_are_short_in_the_recording() -> None:
    _, result = talk(1, 12, "plain")
    steps, result.rollout.steps = result.rollout.steps, []
    row = row_of(result)
    calls = [event[2]["call"] for event in row["replay"]["events"] if event[0] == "ask"]
    assert [FOLLOWS in call for call in calls] == [False] + [True] * 11
    record = EpisodeRecord(row)
    assert [list(call.step["prompt"]) for call in record.calls.values()] == [step.prompt for step in steps]


def test_any_steps_come_back() -> None:
    seed = random.randrange(10**6)
    print(f"seed={seed}")
    rng = random.Random(seed)
    for _ in range(60):
        short, steps = ShortPrompts(), []
        for _ in range(rng.randint(1, 9)):
            chat, ids = [], []
            if steps and rng.random() < 0.8:
                before = rng.choice(steps)
                chat, ids = rng.choice([(before.prompt, before.prompt_token_ids), grown(before)])
                chat, ids = (each[: len(each) - rng.choice([0, 0, 0, 1, 3])] for each in (chat, ids))
            chat = chat + [message(rng) for _ in range(rng.randint(0, 2))]
            ids = ids + rng.choices(range(3), k=rng.randint(0, 3))
            step = Step(
                rng.choice(["a", "b", None]), 0, chat, rng.choice("xy"), ids, rng.choices(range(3), k=2), [], [], "stop"
            )
            if steps and rng.random() < 0.3:  # what it shares with others is known
                step.prompt = Prefix.of_messages([]).followed(chat, [])
                step.prompt_token_ids = Prefix.of_tokens(ids[:1]).followed([], ids[1:])
            steps.append(step)
        rows = json.loads(json.dumps([short.add(step) for step in steps]))
        assert read(rows) == [(json.dumps(step.prompt), list(step.prompt_token_ids)) for step in steps]


def message(rng: random.Random) -> dict[str, Any]:
    """A message; some are equal and not written equally."""
    one = {"role": "user", "content": rng.choice("xyz")}
    return rng.choice([one, dict(reversed(one.items())), {**one, "round": rng.choice([1, 1.0, True])}])


def grown(step: Step) -> tuple[list[Any], list[int]]:
    answer = {"role": "assistant", "content": step.completion}
    return [*step.prompt, answer], [*step.prompt_token_ids, *step.completion_token_ids]


def test_older_records_are_read() -> None:
    arena, result = talk(1, 4, "plain")
    row = row_of(result)
    old = {**row, "steps": [dict(step) for step in whole_episode(row)["steps"]]}
    for step in old["steps"]:
        step["prompt"], step["prompt_token_ids"] = list(step["prompt"]), list(step["prompt_token_ids"])
    old["replay"]["format"] = 2
    old = json.loads(json.dumps(old))
    assert whole_episode(old) == old and read(old["steps"]) == read(row["steps"])
    assert play(arena, old)[1] is None


@pytest.mark.parametrize("damage", [{"step": 1}, {"step": -1}, {"messages": 9}, {"tokens": -1}])
def test_a_damaged_step_is_named(damage: dict[str, int]) -> None:
    whole = WholePrompts()
    step = {"prompt": [], "completion": "4", "prompt_token_ids": [1, 17, 9], "completion_token_ids": [20, 2]}
    whole.add(step)
    with pytest.raises(LookupError, match=FOLLOWS):
        whole.add({**step, FOLLOWS: {"step": 0, "messages": 1, "tokens": 1, **damage}})

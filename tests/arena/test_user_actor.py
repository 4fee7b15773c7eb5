"""A simulated user: what each side sees, how the talk ends, that it never trains, and that its goal stays its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnwise.arena import Arena, EpisodeCheckpoints, LeakError, Rubric, TreeSampler, UserActor, UserEpisode
from turnwise.arena.runtime import watch
from turnwise.arena.user_actor import stated
from turnwise.credit import GRPOCredit
from turnwise.inference import Endpoint, OpenAIClient, ScriptedClient
from turnwise.inference.scripted import ByteTokenizer
from turnwise.types import Actor, EpisodeRequest, GenerateResult, ModelRequest

from ..inference.fake_server import Say, faking
from .replaying import play as replayed
from .replaying import record
from .test_episode_checkpoints import kill

GOAL = "You want tea. It must be green tea from Uji."
ARTIFACT = {"goal": GOAL}
USER = UserActor("user", "You are a user. {goal} Say {stop} at the end.", stop="BYE", greeting="Hello?")


class Shop(UserEpisode):
    episode_type = "shop"
    actors = ("user", "agent")
    max_turns = 3
    rubric = Rubric([lambda rollout: {"agent": float(len(rollout.steps[-1].prompt))}])

    def env_response(self, state: Any, arena: Any, artifact: Any) -> str | None:
        return None


def by_role(user: Any, agent: Any) -> Any:
    """A script by who is asked: the user's prompt has the goal."""
    given = iter(user), iter(agent)
    return lambda request: next(given["You are a user." not in request.messages[0]["content"]])


def arena_of(script: Any, episode: UserEpisode | None = None, user: UserActor = USER, **options: Any) -> Arena:
    client = ScriptedClient(script)
    arena = Arena(client, client.tokenizer, GRPOCredit(), check_private=True, **options)
    for actor in (user, Actor("agent", "Sell tea.")):
        arena.add_actor(actor)
    arena.add_episode(Shop() if episode is None else episode)
    return arena


def talk(arena: Arena, artifact: Any = ARTIFACT) -> GenerateResult:
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("shop", artifact)]))
    return result


def chats(result: GenerateResult) -> list[list[tuple[str, str]]]:
    return [[(one["role"], one["content"]) for one in step.prompt] for step in result.rollout.steps]


def test_each_side_sees_its_own_chat_and_the_marker_ends_the_talk() -> None:
    result = talk(arena_of(by_role(["Tea, please.", "Green.", "Thanks, BYE"], ["Which?", "Here."])))
    brief = ("system", f"You are a user. {GOAL} Say BYE at the end.")
    agent = ("system", "Sell tea."), ("user", "Tea, please.")
    assert chats(result) == [
        [brief, ("user", "Hello?")],
        [*agent],
        [brief, ("user", "Hello?"), ("assistant", "Tea, please."), ("user", "Which?")],
        [*agent, ("assistant", "Which?"), ("user", "Green.")],
        [
            *(brief, ("user", "Hello?"), ("assistant", "Tea, please."), ("user", "Which?")),
            *(("assistant", "Green."), ("user", "Here.")),
        ],
    ]
    assert result.rollout.meta["ended"] == "done" and "goal_quoted/user" not in (result.rollout.facts.mishaps or {})
    assert result.rewards == {"agent": 6.0}


def test_its_calls_never_train_and_are_counted() -> None:
    arena = arena_of(lambda request: "BYE" if len(request.messages) > 4 else f"{request.sampling.seed}")
    arena.source = lambda: [EpisodeRequest("shop", ARTIFACT, group_id="a")] * 3
    arena.filters = replace(arena.filters, drop_zero_advantage=False)
    batch = asyncio.run(arena.step())
    assert batch.actors == ["agent"] and len(batch) == 6 and batch.dropped == {"not_trainable": 9}


def test_the_talk_ends_after_the_turns_of_the_user() -> None:
    result = talk(arena_of(lambda request: "Hm."))
    assert result.rollout.meta["ended"] == "max_turns" and len(result.rollout.steps) == 6


@pytest.mark.filterwarnings("ignore:'user' ended a talk:RuntimeWarning")
def test_a_talk_without_an_answer_is_counted() -> None:
    result = talk(arena_of(["BYE"]))
    assert result.rollout.facts.mishaps == {"ended_at_once/user": 1} and len(result.rollout.steps) == 1


def test_a_thought_reaches_no_one() -> None:
    script = by_role(
        ["<think>It must be green tea from Uji.</think>Tea.", "<think>Which one", "BYE"], ["Which?", "Well?"]
    )
    result = talk(arena_of(script))
    assert [content for _, content in chats(result)[1]] == ["Sell tea.", "Tea."]
    assert [content for _, content in chats(result)[3]] == ["Sell tea.", "Tea.", "Which?", "..."], "its thought was cut"
    assert [step.thought for step in result.rollout.steps[::2]] == ["It must be green tea from Uji.", "Which one", ""]
    assert result.rollout.facts.mishaps is not None and "goal_quoted/user" not in result.rollout.facts.mishaps


# -- the goal ----------------------------------------------------------------------------------------------------------
class Careless(Shop):
    """Puts the artifact into the agent's prompt."""

    def get_prompt(self, artifact: Any) -> str:
        return f"The customer's file: {artifact['goal']}"


def test_a_goal_in_the_prompt_of_another_actor_is_a_leak() -> None:
    with pytest.raises(LeakError, match="the prompt of actor 'agent' holds what is private to 'user': 'You want tea"):
        talk(arena_of(["Tea.", "Which?"], Careless()))
    talk(arena_of(["Tea.", "Which?", "BYE"]))


@pytest.mark.parametrize(
    ("said", "quoted"),
    [
        (f"Well: {GOAL}", 1),
        ("it must be  green tea from uji. Thanks", 1),
        ("It must be green tea.", 0),
        ("You want tea.", 0),
    ],
)
def test_a_user_that_quotes_its_goal_is_counted_and_no_leak(
    said: str, quoted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_warned", set())
    arena = arena_of([said, "I see.", "BYE"])
    if quoted:
        with pytest.warns(RuntimeWarning, match=r"'user' quoted its goal to the others: .* \(goal_quoted/user\)"):
            result = talk(arena)
    else:
        result = talk(arena)
    assert (result.rollout.facts.mishaps or {}).get("goal_quoted/user", 0) == quoted
    assert chats(result)[1][1] == ("user", said.strip())


def test_what_quotes_a_goal() -> None:
    assert stated(GOAL) == [GOAL, "It must be green tea from Uji."]
    assert stated("Tea\nas green as can be") == ["Tea\nas green as can be", "as green as can be"]
    assert stated("Tea.") == ["Tea."]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"system_prompt": "Buy."}, r"expected \{goal\} in it"),
        ({"stop": " "}, "UserActor.stop=' ' of actor 'user': expected a text"),
        ({"client": ScriptedClient(["x"]), "tools": [print]}, "its own client gets no tools"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(USER, **changes)


# -- trees, resume, replay, evaluation ---------------------------------------------------------------------------------
class Paid(Shop):
    def step_reward(self, state: Any, arena: Any, artifact: Any) -> float | None:
        return float(len(state.last_completion_text)) if state.current_actor == "agent" else None


def speak(request: ModelRequest) -> str:
    """Both sides, by the seed alone; the user ends its third message."""
    chat = [message["content"] for message in request.messages]
    is_user = "You are a user." in chat[0]
    return "BYE" if is_user and len(chat) > 5 else "x" * (1 + (request.sampling.seed or 0) % 7)


def test_a_tree_branches_at_the_others_alone_and_replays() -> None:
    arena = arena_of(speak, Paid(sampler=TreeSampler(branches=3, select="best")))
    [row] = record(arena, [EpisodeRequest("shop", ARTIFACT)])
    nodes = [(step["actor_id"], step["tree_node"] is not None, step["trainable"]) for step in row["steps"]]
    assert set(nodes) == {("user", False, False), ("agent", True, True)}
    assert len(nodes) == 3 + 2 * 3
    again = arena_of(
        lambda request: pytest.fail("a replay samples nothing"), Paid(sampler=TreeSampler(3, select="best"))
    )
    assert replayed(again, row)[1] is None
    [result] = asyncio.run(arena.evaluation().generate_rollouts([EpisodeRequest("shop", ARTIFACT)]))
    assert [step.actor_id for step in result.rollout.steps] == ["user", "agent", "user", "agent", "user"]


def test_a_killed_talk_goes_on(tmp_path: Path) -> None:
    def arena(script: Any) -> Arena:
        made = arena_of(script, seed=3)
        made.episode_checkpoints = EpisodeCheckpoints(tmp_path)
        return made

    whole = talk(arena_of(speak, seed=3))
    with pytest.raises(asyncio.CancelledError):
        talk(arena(lambda request: kill() if len(request.messages) > 3 else speak(request)))
    again = arena(speak)
    result = talk(again)
    assert chats(result) == chats(whole) and len(again.client.calls) == 3  # type: ignore[attr-defined]
    assert [step.trainable for step in result.rollout.steps] == [False, True, False, True, False]


# -- a client of its own -----------------------------------------------------------------------------------------------
def chat_answer(text: str, thought: str = "") -> Say:
    message = {"role": "assistant", "content": text, "reasoning_content": thought}
    return Say({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


@pytest.mark.needs("aiohttp")
def test_an_endpoint_plays_the_user() -> None:
    """Behind HTTP, with thoughts of its own. A replay asks nobody."""
    answers = [chat_answer("Tea.", "I want green tea."), chat_answer("Thanks. BYE")]
    with faking({"/v1/chat/completions": answers}) as server:
        user = replace(USER, client=OpenAIClient(Endpoint(server.url), "big-model", ByteTokenizer()))
        [row] = record(arena_of(["Here."], user=user), [EpisodeRequest("shop", ARTIFACT)])
    assert [step["completion"] for step in row["steps"]] == ["Tea.", "Here.", "Thanks. BYE"]
    assert [step["thought"] for step in row["steps"]] == ["I want green tea.", "", ""]
    assert [step["trainable"] for step in row["steps"]] == [False, True, False]
    _, body = server.asked[0]
    assert body["model"] == "big-model" and GOAL in body["messages"][0]["content"]
    assert replayed(arena_of([], user=user), row)[1] is None
    assert len(server.asked) == 2

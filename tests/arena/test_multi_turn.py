"""Turns, transcripts, privacy: what each actor is shown, and when the game ends."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.arena import MultiTurnEpisode, Rubric
from turnwise.types import Actor, EpisodeRequest


class Chat(MultiTurnEpisode):
    episode_type = "chat"
    actors = ("a", "b")
    max_turns = 2
    rubric = Rubric([lambda extras: 1.0])

    def get_prompt(self, artifact):
        return "OPENING"

    def get_observation(self, state, arena, artifact):
        return f"SECRET-{state.current_actor}-{state.turn}"

    def public(self, text):
        return text.split("|")[-1]

    def env_response(self, state, arena, artifact):
        state.data["last"] = state.last_completion_text
        state.data["moves"] = state.data.get("moves", 0) + 1
        return f"move {state.data['moves']}"

    def get_extras(self, state):
        return {**state.data, "turn": state.turn, "trajectory": len(state.trajectory)}


def play(make_arena, episode, reply=None, actors=("a", "b"), **options):
    arena = make_arena(reply, actors=actors, failure_threshold=1.0, **options, episodes=[episode])
    [result] = asyncio.run(arena.generate_rollouts([EpisodeRequest("chat", "q")]))
    return arena, result.rollout


def test_a_turn_begins_when_the_next_actor_has_already_acted(make_arena):
    class Uneven(Chat):
        max_turns = 3
        order = iter("abbab")

        def get_initial_actor(self):
            return next(self.order)

        def next_actor(self, state, arena, artifact):
            return next(self.order, "b")

    _, rollout = play(make_arena, Uneven())
    assert [(step.turn, step.actor_id) for step in rollout.steps] == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "b")]


def test_the_chat_from_each_seat(make_arena):
    said = iter(["think|one", "two", "hm|three", "four"])
    _, rollout = play(make_arena, Chat(), reply=lambda prompt, request: next(said))
    assert rollout.steps[2].prompt == [
        {"role": "user", "content": "OPENING"},
        {"role": "assistant", "content": "think|one"},
        {"role": "user", "content": "move 1\n\nb: two\n\nmove 2\n\nSECRET-a-1"},
    ]
    assert rollout.extras["moves"] == 4 and rollout.extras["last"] == "four", "the last action is answered, too"
    assert rollout.steps[3].prompt == [
        {"role": "user", "content": "OPENING\n\na: one\n\nmove 1"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "move 2\n\na: three\n\nmove 3\n\nSECRET-b-1"},
    ]


def test_is_done_ends_at_once_and_no_actor_is_asked_for(make_arena):
    class Short(Chat):
        def is_done(self, state, arena, artifact):
            return state.data["moves"] == 1

        def next_actor(self, state, arena, artifact):
            raise AssertionError("the game is over")

    _, rollout = play(make_arena, Short())
    assert len(rollout.steps) == 1 and rollout.error is None and rollout.meta["ended"] == "done"


def test_every_hook_may_be_async(make_arena):
    class Plain(Chat):
        max_turns = 3

        def setup(self, state, arena, artifact):
            state.data["moves"] = 10

        def get_initial_actor(self):
            return "b"

        def step_reward(self, state, arena, artifact):
            return state.data["moves"]

        def is_done(self, state, arena, artifact):
            return state.data["moves"] >= 14

        def next_actor(self, state, arena, artifact):
            return "b" if state.data["moves"] % 3 else "a"

    def later(hook):
        async def answer(self, *arguments):
            await asyncio.sleep(0)
            return hook(self, *arguments)

        return answer

    hooks = ("setup", "get_initial_actor", "get_prompt", "get_observation", "env_response", "step_reward", "is_done")
    hooks += ("next_actor", "get_extras", "public")
    awaited = type("Awaited", (Plain,), {name: later(getattr(Plain, name)) for name in hooks})
    rollouts = [play(make_arena, episode())[1] for episode in (Plain, awaited)]
    assert rollouts[0] == rollouts[1] and rollouts[1].error is None
    assert [(step.actor_id, step.reward) for step in rollouts[1].steps] == [("b", 11), ("b", 12), ("a", 13), ("b", 14)]


def test_skipping_passes_the_turn_on_and_is_done_is_not_asked_before_anyone_acted(make_arena):
    class Skip(Chat):
        async def build_messages(self, state, arena, artifact):
            return None if state.current_actor == "a" else f"only b, turn {state.turn}"

        def is_done(self, state, arena, artifact):
            return state.data["moves"] == 2

    _, rollout = play(make_arena, Skip(max_turns=3))
    assert rollout.error is None and [(step.actor_id, step.turn) for step in rollout.steps] == [("b", 0), ("b", 1)]
    assert rollout.steps[0].prompt == [{"role": "user", "content": "only b, turn 0"}]


def test_the_system_prompt_opens_every_chat_once(make_arena):
    actors = (Actor("a", system_prompt="You are a."), Actor("b"))
    _, rollout = play(make_arena, Chat(), actors=actors)
    assert rollout.steps[2].prompt[0] == {"role": "system", "content": "You are a."}
    assert sum(message["role"] == "system" for message in rollout.steps[2].prompt) == 1
    assert rollout.steps[1].prompt[0]["role"] == "user"


def test_tool_calls_in_hooks_are_recorded_and_no_part_of_the_transcript(make_arena):
    class Tool(Chat):
        async def env_response(self, state, arena, artifact):
            action = state.last_completion_text
            await self.call_model("b", "TOOL", arena)
            await self.call_model(None, "JUDGE", arena)
            state.data["action"] = action
            return "answered"

        def step_reward(self, state, arena, artifact):
            return float(state.last_completion_text)

    _, rollout = play(make_arena, Tool(max_turns=1))
    assert [step.actor_id for step in rollout.steps] == ["a", "b", None, "b", "b", None]
    assert rollout.steps[0].reward == float(rollout.steps[0].completion)
    assert "TOOL" not in str(rollout.steps[3].prompt) and "b:" not in str(rollout.steps[3].prompt)
    assert not rollout.steps[2].trainable


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actors": ()}, "Mistake.actors is empty"),
        (
            {"step_reward": lambda self, state, arena, artifact: float("nan")},
            "Mistake.step_reward for actor 'a': the reward is nan, expected a finite number",
        ),
        (
            {"get_prompt": MultiTurnEpisode.get_prompt, "get_observation": MultiTurnEpisode.get_observation},
            r"override get_prompt\(artifact\) or build_messages",
        ),
        ({"get_initial_actor": lambda self: "c"}, "actor_id='c': no such actor"),
        ({"get_initial_actor": lambda self: "b", "actors": ("a",)}, "lacks 'b': override next_actor"),
        ({"get_prompt": lambda self, artifact: None}, "Mistake.get_prompt: prompt=None: expected a string or a list"),
        (
            {"get_prompt": lambda self, artifact: [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"Mistake.get_prompt: messages\[0\].content\[0\]: got a part of type 'image_url'",
        ),
        (
            {"get_observation": lambda self, state, arena, artifact: 5},
            "Mistake.get_observation for actor 'a': got 5, expected text or None",
        ),
        (
            {"env_response": lambda self, state, arena, artifact: {"board": 1}},
            "Mistake.env_response for actor 'a': got {'board': 1}, expected text or None",
        ),
        (
            {"env_response": lambda self, state, arena, artifact: 0},
            "Mistake.env_response for actor 'a': got 0, expected text or None",
        ),
        ({"public": lambda self, text: [text]}, r"Mistake.public_to, or public, for actor 'b': got \["),
        (
            {"build_messages": lambda self, state, arena, artifact: 5},
            "Mistake.build_messages for actor 'a': prompt=5: expected a string or a list of messages",
        ),
        (
            {"next_actor": lambda self, state, arena, artifact: None},
            "Mistake.next_actor: got None, expected the id of an actor",
        ),
        ({"get_initial_actor": lambda self: None}, "Mistake.get_initial_actor: got None, expected the id of an actor"),
        ({"build_messages": lambda self, state, arena, artifact: []}, "expected a string or at least one message"),
        (
            {"build_messages": lambda self, state, arena, artifact: ["hi"]},
            r"messages\[0\]: got 'hi', expected an object with a role",
        ),
    ],
)
def test_mistakes_are_named(make_arena, changes, message):
    _, rollout = play(make_arena, type("Mistake", (Chat,), changes)())
    assert rollout.error is not None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(rollout.error)


@pytest.mark.parametrize("turns", [0, None, -1, "2", float("nan")])
def test_max_turns_must_be_positive(make_arena, turns):
    """A class with 0 turns played one, and ``None`` failed in play."""
    told = f"Mistake.max_turns={turns!r}: expected a number of turns, at least 1"
    with pytest.raises(ValueError, match=told):
        make_arena(episodes=[type("Mistake", (Chat,), {"max_turns": turns})()])
    with pytest.raises(ValueError, match="max_turns=0"):
        Chat(max_turns=0)
    assert make_arena(actors=("a", "b"), episodes=[Chat(max_turns=1)])


def test_an_opening_without_messages_leaves_the_observation(make_arena):
    _, rollout = play(make_arena, type("Silent", (Chat,), {"get_prompt": lambda self, artifact: []})())
    assert rollout.steps[0].prompt == [{"role": "user", "content": "SECRET-a-0"}]


def test_an_opening_of_parts_is_joined_with_what_follows(make_arena):
    parts = [{"role": "user", "content": [{"type": "text", "text": "OPEN"}, {"type": "text", "text": "ING"}]}]
    _, rollout = play(make_arena, type("Parts", (Chat,), {"get_prompt": lambda self, artifact: parts})())
    assert rollout.steps[0].prompt == [{"role": "user", "content": "OPENING\n\nSECRET-a-0"}]

"""What an action does to the answer that its actor was handed."""

from __future__ import annotations

import pytest

from turnwise.arena import InvalidActionError, MultiTurnEpisode, Rubric
from turnwise.arena.answers import Contribution, contribution_of, plain_answer
from turnwise.types import EpisodeRequest


def test_parts_are_compared_one_by_one():
    """Of three wrong parts two are fixed, of two right ones one is broken."""
    handed = ("_2__5", (False, True, False, False, True))
    left = ("1x3_5", (True, False, True, False, True))
    found = contribution_of(handed, left)
    assert found == Contribution(handed=1, changed=1, wrong=3, fixed=2, right=2, broken=1)
    assert found.rates() == {"changed": 1.0, "fixed": 2 / 3, "broken": 1 / 2}


def test_an_answer_that_is_kept_and_one_that_is_lost():
    handed = (["same"], (True, False))
    kept, lost = contribution_of(handed, (["same"], (True, False))), contribution_of(handed, None)
    assert kept == Contribution(handed=1, wrong=1, right=1)
    assert lost == Contribution(handed=1, changed=1, wrong=1, right=1, broken=1)
    assert kept + lost == Contribution(handed=2, changed=1, wrong=2, fixed=0, right=2, broken=1)
    assert Contribution(handed=4, changed=1, right=4).rates() == {"changed": 0.25, "broken": 0.0}, "no wrong part"


def test_bad_results_of_the_hook_name_it():
    assert plain_answer(("a", 1), "X.team_answer") == ("a", (True,))
    with pytest.raises(TypeError, match=r"X.team_answer gave 'a': expected \(answer, right\), or None"):
        plain_answer("a", "X.team_answer")
    with pytest.raises(ValueError, match=r"X.team_answer gave 1 parts before an action, then 2: expected as many"):
        contribution_of(("a", [True]), ("b", [True, True]), "X.team_answer")


class Relay(MultiTurnEpisode):
    """The writer writes a word and the editor may change it; right is "cat"."""

    episode_type = "relay"
    actors = ("writer", "editor")
    max_turns = 1
    rubric = Rubric([lambda extras: float(extras["right"])])

    def setup(self, state, arena, artifact):
        state.data = {"words": []}

    def get_prompt(self, artifact):
        return artifact

    def env_response(self, state, arena, artifact):
        if state.last_completion_text == "?":
            raise InvalidActionError("no word")
        state.data["words"][:] = [state.last_completion_text]  # in place, where a reference would see it

    async def team_answer(self, state, arena, artifact):
        return (state.data["words"], state.data["words"] == ["cat"]) if state.data["words"] else None

    def get_extras(self, state):
        return {"right": state.data["words"] == ["cat"]}


def script(prompt, request):
    """Answer a question such as ``dog cat``: the writer with its first word, the editor with its second."""
    question = prompt.removeprefix("<user>").split()
    return question["writer: " in prompt]


async def test_a_reviser_mends_two_of_three_and_breaks_one_of_two(make_arena):
    arena = make_arena(script, actors=("writer", "editor"), episodes=[Relay()])
    questions = ["dog cat", "cow cat", "pig pig", "cat cat", "cat dog"]
    requests = [EpisodeRequest("relay", question) for question in questions]
    results = await arena.evaluation().generate_rollouts(requests)
    assert all("handed" not in result.rollout.steps[0].info for result in results), "the writer is handed nothing"
    edited = [Contribution(**result.rollout.steps[1].info["handed"]) for result in results]
    assert sum(edited, Contribution()) == Contribution(handed=5, changed=3, wrong=3, fixed=2, right=2, broken=1)
    trained = await arena.generate_rollouts(requests)
    assert not any("handed" in step.info for result in trained for step in result.rollout.steps)


async def test_an_invalid_action_loses_the_answer(make_arena):
    arena = make_arena(script, actors=("writer", "editor"), episodes=[Relay()])
    (result,) = await arena.evaluation().generate_rollouts([EpisodeRequest("relay", "cat ?")])
    assert Contribution(**result.rollout.steps[1].info["handed"]) == Contribution(1, 1, 0, 0, 1, 1)

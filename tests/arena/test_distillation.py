"""Teachers of actors: which tokens they score, the advantages that follow, and the hints that they see."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from turnwise.arena import Distillation
from turnwise.arena.runtime.watch import take_counts
from turnwise.arena.stages.rewards.distillation import BETTER_ANSWER
from turnwise.credit import GRPOCredit
from turnwise.inference import OpenAIClient, RoutingClient
from turnwise.types import Actor, EpisodeRequest, ScoringClient

from .conftest import FakeClient
from .helpers import Guess

ANSWERS = ["1", "3", "3", "2"]


class TeachingClient(FakeClient):
    """A client whose every score is -0.25 for tokens with an even index and -2 for the others."""

    def __init__(self, reply=None):
        super().__init__(reply)
        self.scored = []

    async def score(self, requests, completions):
        self.scored += [("".join(map(chr, r.prompt_token_ids)), r.policy) for r in requests]
        return [[-0.25 if i % 2 == 0 else -2.0 for i in range(len(ids))] for ids in completions]


@pytest.fixture
def taught(make_arena):
    def make(episode=None, answers=ANSWERS, **options):
        arena = make_arena(actors=["solver"], episodes=[episode or Guess()], credit=GRPOCredit())
        left = iter(answers)
        arena.client = TeachingClient(lambda prompt, request: next(left))
        arena.source = lambda: [EpisodeRequest("guess", "a digit", group_id="q") for _ in answers]
        arena.add_stage(Distillation(teachers={"solver": "big"}, **options))
        return arena

    return make


async def test_the_advantage_of_a_token_is_the_teachers_logprob_minus_the_samplers(taught):
    """The sampler's log-probs are -0.5: gains of .25 and -1.5, times 2. All rows train, tied groups too."""
    arena = taught(coef=2.0, answers=["3", "3"])
    batch = await arena.step()
    assert arena.client.scored == [("<user>Guess a digit\n<assistant>", "big")] * 2
    assert len(batch) == 2 and batch.dropped == {} and batch.advantages.tolist() == [0.0, 0.0]
    assert batch.columns["token_advantages"].values.dtype == np.float32
    assert batch.columns["token_advantages"].values.tolist() == 2 * [0.5, -3.0]
    assert batch.metrics["teacher_kl/solver"] == pytest.approx((-0.25 + 1.5) / 2)


async def test_they_add_to_the_reward_if_asked(taught):
    pure, added = await taught().step(), await taught(add_to_reward=True).step()
    assert pure.advantages.tolist() == [0.0] * 4
    credit = np.array([1.0, 3.0, 3.0, 2.0])
    np.testing.assert_allclose(added.advantages, (credit - credit.mean()) / credit.std(ddof=1), rtol=1e-5)
    np.testing.assert_array_equal(pure.columns["token_advantages"].values, added.columns["token_advantages"].values)


async def test_an_actor_without_a_teacher_keeps_its_advantages(taught, make_arena):
    left = iter(ANSWERS)
    plain = make_arena(lambda prompt, request: next(left), episodes=[Guess()], credit=GRPOCredit())
    plain.source = lambda: [EpisodeRequest("guess", "a digit", group_id="q") for _ in ANSWERS]
    other = taught()
    other.add_stage(Distillation(teachers={"nobody": "big"}))
    batches = [await plain.step(), await other.step()]
    assert batches[1].columns == {} and other.client.scored == []
    np.testing.assert_array_equal(batches[0].advantages, batches[1].advantages)


async def test_the_hint_is_a_better_answer_to_the_same_prompt(taught):
    """1 and 2 see the first 3; both 3 have no better answer, so they have no teacher."""
    arena = taught(hint="best")
    batch = await arena.step()
    begin, end = "<user>Guess a digit\n\n", "\n<assistant>"
    assert [prompt for prompt, _ in arena.client.scored] == [begin + BETTER_ANSWER.format(hint="3") + end] * 2
    assert len(batch) == 2 and batch.dropped == {"untaught": 2}
    assert [bytes(batch.token_ids[end - 2 : end - 1].tolist()) for end in batch.cu_seqlens[1:]] == [b"1", b"2"]
    # With the reward those without a hint train on it.
    batch = await taught(hint="best", add_to_reward=True).step()
    assert len(batch) == 4 and (batch.columns["token_advantages"].values[-2:] != 0).all()


async def test_the_episode_may_give_the_hint(taught):
    class Told(Guess):
        def hint(self, rollout, step):
            if rollout.rewards["solver"] == 3:
                raise KeyError("no hint")
            return f"It was not {step.completion}."

    arena = taught(Told(), hint="episode")
    with pytest.warns(RuntimeWarning, match="no hint"):
        batch = await arena.step()
    assert [prompt for prompt, _ in arena.client.scored] == [
        f"<user>Guess a digit\n\nIt was not {digit}.\n<assistant>" for digit in (1, 2)
    ]
    assert len(batch) == 2 and batch.dropped == {"untaught": 2}
    assert take_counts()["hint_errors/guess"] == 2


async def test_a_hint_that_leaves_no_room_is_no_hint(taught):
    arena = taught(hint="best")
    arena.max_context = 40
    batch = await arena.step()
    assert arena.client.scored == [] and batch.dropped == {"untaught": 4}


async def test_a_token_in_the_last_place_of_the_context_is_not_scored(taught):
    arena = taught(answers=["3", "3"])
    arena.max_context = len("<user>Guess a digit\n<assistant>") + 2
    batch = await arena.step()
    assert (
        len(batch) == 2
        and batch.columns["token_advantages"].values.reshape(2, -1)[:, -2:].tolist() == [[0.25, 0.0]] * 2
    )
    assert batch.metrics["teacher_kl/solver"] == -0.25


async def test_an_evaluation_asks_no_teacher(taught):
    arena = taught()
    await arena.evaluation().generate_rollouts(arena.source())
    assert arena.client.scored == []


@pytest.mark.parametrize("scores", [True, False])
async def test_calls_under_a_grammar_have_no_teacher(taught, scores):
    """Their log-probs are those over the allowed tokens; they are counted, and don't train on nothing."""

    class Constrained(Guess):
        async def rollout(self, arena, artifact, state=None):
            state = await super().rollout(arena, artifact, state)
            if state.last_completion_text == "1":
                state.trajectory[-1].facts.grammar = "any"
            return state

    arena = taught(Constrained(), scores=scores)
    batch = await arena.step()
    assert len(batch) == 3 and batch.dropped == {"untaught": 1}
    assert len(arena.client.scored) == (3 if scores else 0)


def test_teachers_that_can_not_teach_are_refused():
    client = TeachingClient()

    def attach(distillation, client):
        distillation.attach(SimpleNamespace(actors={"solver": Actor("solver")}, client=client), None)

    assert isinstance(client, ScoringClient)
    attach(Distillation(teachers={"solver": "big"}), client)
    attach(Distillation(teachers={"solver": "default"}, hint="best"), client)
    with pytest.raises(ValueError, match=r"'solver' is taught by its own policy 'default'.*or a hint"):
        attach(Distillation(teachers={"solver": "default"}), client)
    with pytest.raises(ValueError, match=r"expected actors, \['solver'\], got 'nobody'"):
        attach(Distillation(teachers={"nobody": "big"}), client)
    with pytest.raises(ValueError, match=r"teacher 'big' of actor 'solver': FakeClient can't score tokens"):
        attach(Distillation(teachers={"solver": "big"}), FakeClient())
    routed = RoutingClient({"default": client, "big": FakeClient()})
    with pytest.raises(ValueError, match=r"teacher 'big' of actor 'solver': FakeClient can't score"):
        attach(Distillation(teachers={"solver": "big"}), routed)
    assert not isinstance(OpenAIClient, ScoringClient)
    for wrong in ({"coef": 0}, {"hint": "worst"}):
        with pytest.raises(ValueError, match=r"(coef=0|hint='worst'): expected"):
            Distillation(teachers={}, **wrong)

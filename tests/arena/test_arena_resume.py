"""A resumed run equals an uninterrupted one, and evaluation leaves training untouched."""

from __future__ import annotations

import asyncio
import json

import pytest

from turnwise.arena import Arena
from turnwise.types import Actor, Sampling

from .helpers import Baseline, Guess, columns, guess


class Collecting(Arena):
    def get_batch(self):
        store = self.stores["seen"]
        artifact = store.sample_one()
        topic = artifact.data if artifact and self.rng.random() < 0.5 else f"new {self.rng.random()}"
        return [guess(topic) for _ in range(4)]

    async def generate_rollouts(self, requests):
        results = await super().generate_rollouts(requests)
        if not self.is_evaluation:
            self.stores["seen"].add(requests[0].artifact)
        return results


def collecting(make_arena):
    arena = make_arena(arena_class=Collecting, credit=Baseline(), seed=2, episodes=[Guess()])
    arena.add_store("seen")
    return arena


def test_a_resumed_run_equals_an_uninterrupted_one(make_arena):
    whole = collecting(make_arena)
    expected = [columns(asyncio.run(whole.step())) for _ in range(6)]
    first = collecting(make_arena)
    for _ in range(3):
        asyncio.run(first.step())
    saved = json.dumps(first.state_dict())
    second = collecting(make_arena)
    second.load_state_dict(json.loads(saved))
    assert [columns(asyncio.run(second.step())) for _ in range(3)] == expected[3:]
    assert expected[0] != expected[3]


def test_loading_a_state_with_other_stores_is_refused(make_arena):
    with pytest.raises(ValueError, match=r"state has the stores \['seen'\], expected \[\]"):
        make_arena().load_state_dict(collecting(make_arena).state_dict())


# -- evaluation -------------------------------------------------------------------------------------------------------
def test_evaluation_leaves_training_untouched(make_arena):
    plain, evaluated = collecting(make_arena), collecting(make_arena)
    batches = []
    for arena in (plain, evaluated):
        rows = []
        for _ in range(4):
            rows.append(columns(asyncio.run(arena.step())))
            if arena is evaluated:
                view = arena.evaluation()
                view.assign_credit(asyncio.run(view.generate_rollouts([guess("held out")] * 3)))
                view.stores["seen"].add("written by evaluation")
                view.stores["seen"].sample_one()
        batches.append(rows)
    assert batches[0] == batches[1]
    assert plain.credit.state_dict() == evaluated.credit.state_dict()
    assert plain.state_dict() == evaluated.state_dict()


def test_evaluation_has_paired_seeds_and_its_own_sampling(make_arena):
    arena = make_arena(
        actors=(Actor("solver", max_tokens=9), Actor("other", sampling=Sampling(stop_token_ids=(3,), max_tokens=4))),
        sampling=Sampling(max_tokens=50),
    )
    arena.add_episode(Guess())

    def evaluate():
        view = arena.evaluation(Sampling(temperature=0.0, max_tokens=30))
        results = asyncio.run(view.generate_rollouts([guess("a"), guess("a")]))
        return [result.rollout.seed for result in results]

    first = evaluate()
    arena.source = lambda: [guess("b")] * 3
    asyncio.run(arena.step())
    assert evaluate() == first and len(set(first)) == 2
    assert [request.sampling.temperature for request in arena.client.requests] == [0, 0, 1, 1, 1, 0, 0]
    assert {request.sampling.max_tokens for request in arena.client.requests} == {9}, "the actor's own limit holds"
    view = arena.evaluation(Sampling(temperature=0.0))
    asyncio.run(view.call_model("other", "hi"))
    assert arena.client.requests[-1].sampling.stop_token_ids[0] == 3
    assert arena.client.requests[-1].sampling.max_tokens == 4
    with pytest.raises(RuntimeError, match="an evaluation makes no training batch"):
        asyncio.run(view.step())

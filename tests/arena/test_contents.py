"""What arenas tell stores of the episodes on their artifacts: once per batch, never of an evaluation."""

from __future__ import annotations

import asyncio
import json

import pytest

from turnwise.arena import Arena, ArtifactStore, Rubric, SingleTurnEpisode
from turnwise.arena.stores.contents import attempts_of, mean_reward
from turnwise.credit import GRPOCredit
from turnwise.types import Artifact, EpisodeRequest, GenerateResult, Rollout, RolloutFacts, Step

from .helpers import nested


class Digit(SingleTurnEpisode):
    """The reward is the digit that was written, less 5; the artifact's data "boom" fails."""

    episode_type = "digit"
    rubric = Rubric([lambda completion: float(completion) - 5])

    def get_prompt(self, artifact):
        data = artifact.data if isinstance(artifact, Artifact) else artifact
        if data == "boom":
            raise RuntimeError("boom")
        return str(data)


class Drawing(Arena):
    """Three copies of a question that is drawn from the store."""

    def get_batch(self):
        question = self.stores["q"].sample_one()
        return [EpisodeRequest("digit", question) for _ in range(3)]


def drawing(make_arena, path=None, **options):
    """The model writes the last digit of its seed for one question, 9 for another, 2 for the third."""

    def reply(prompt, request):
        return {"b": "9", "c": "2"}.get(prompt.split("\n")[0][-1], str(request.sampling.seed % 10))

    arena = make_arena(reply, arena_class=Drawing, credit=GRPOCredit(), **options, episodes=[Digit()])
    store = arena.add_store(ArtifactStore("q", path=path, sampling="learnability", seed=1))
    for letter in "abc":
        if letter not in store:
            store.add(letter, id=letter)
    return arena


def test_a_step_tells_the_store_what_it_played(make_arena):
    arena = drawing(make_arena)
    asyncio.run(arena.step())
    [played] = {result.rollout.artifact.id for result in arena.last_results}
    rewards = [result.rollout.rewards["solver"] for result in arena.last_results]
    outcome = arena.stores["q"].outcome(played)
    assert outcome.attempts == 3 == outcome.last
    assert outcome.reward == pytest.approx(sum(rewards) / 3)
    assert outcome.success == pytest.approx(sum(reward > 0 for reward in rewards) / 3)
    advantages = [step.advantage for result in arena.last_results for step in result.rollout.steps]
    assert outcome.score == pytest.approx(sum(map(abs, advantages)) / 3)
    # An evaluation is no attempt.
    view = arena.evaluation()
    question = arena.stores["q"].get("a")
    view.assign_credit_and_pack(asyncio.run(view.generate_rollouts([EpisodeRequest("digit", question)] * 3)))
    arena.record_attempts()
    view.record_attempts()
    assert sum(arena.stores["q"].outcome(id).attempts for id in "abc") == 3


def test_failed_and_dropped_episodes_are_no_attempts():
    step = Step("solver", 0, [], "", [1], [2], [0.0], [(1, 0)], "stop", advantage=-2.0)
    good = Rollout("r0", "e", Artifact("a", 1), [step], {"left": 3.0, "right": -1.0})
    failed = Rollout("r1", "e", Artifact("a", 1), error="traceback")
    dropped = Rollout("r2", "e", Artifact("a", 1), facts=RolloutFacts(dropped="raised"))
    named = Rollout("r3", "e", {"any": "thing"}, rewards={"solver": -1.0}, meta={"artifact_id": "b"})
    unknown = Rollout("r4", "e", "text", rewards={"solver": 1.0})
    tree = GenerateResult(good, children=[GenerateResult(r) for r in (failed, dropped, named, unknown)])
    found = [(a.id, a.reward, a.success, a.score) for a in attempts_of([tree], mean_reward)]
    assert found == [("a", 1.0, 1.0, 2.0), ("b", -1.0, 0.0, None)]


def test_nested_episodes_count_and_those_of_removed_artifacts_do_not(make_arena):
    arena = nested(make_arena, copies=4)
    store = arena.add_store("topics")
    store.add("maths", id="maths")
    store.add("gone", id="gone")
    requests = [EpisodeRequest("propose", name, meta={"artifact_id": name}) for name in ("maths", "gone")]
    arena.source = lambda: requests
    results = asyncio.run(arena.sample())
    arena.assign_credit_and_pack(results)
    store.remove("gone")
    assert store.outcome("maths").attempts == 0, "told before the next batch, not while one may be trained on"
    arena.record_attempts()
    assert (
        store.outcome("maths").attempts == 1 and store.outcome("maths").reward == results[0].rollout.rewards["proposer"]
    )
    arena.record_attempts()
    assert store.outcome("maths").attempts == 1, "once"


def test_the_judge_can_be_overridden(make_arena):
    class Strict(Drawing):
        def attempt_result(self, rollout):
            reward = rollout.rewards["solver"]
            return reward, float(reward >= 4)

    arena = drawing(make_arena)
    arena.__class__ = Strict
    for _ in range(4):
        asyncio.run(arena.step())
    store = arena.stores["q"]
    assert store.outcome("b").success == (1.0 if store.outcome("b").attempts else 0.0)
    assert store.outcome("c").success == 0.0


@pytest.mark.parametrize("kept", ["memory", "file"])
def test_a_resumed_run_draws_as_one_that_was_never_stopped(make_arena, tmp_path, kept):
    """Also where the state is taken after a batch was finished and before the next is drawn."""

    def path(name):
        return tmp_path / name if kept == "file" else None

    def step(arena):
        batch = arena.assign_credit_and_pack(asyncio.run(arena.sample()))
        return batch.rewards.tolist(), [result.rollout.artifact.id for result in arena.last_results]

    whole = drawing(make_arena, path("whole.db"))
    expected = [step(whole) for _ in range(8)]
    assert len({ids[0] for _, ids in expected}) > 1
    first = drawing(make_arena, path("run.db"))
    for _ in range(3):
        step(first)
    saved = json.dumps(first.state_dict())
    for _ in range(2):
        step(first)
    first.stores["q"].close()
    second = drawing(make_arena, path("run.db"))
    second.load_state_dict(json.loads(saved))
    assert [step(second) for _ in range(5)] == expected[3:]
    for arena in (whole, second):
        arena.record_attempts()
    outcomes = [[arena.stores["q"].outcome(id) for id in "abc"] for arena in (whole, second)]
    assert outcomes[0] == outcomes[1] and sum(outcome.attempts for outcome in outcomes[0]) == 24

"""Plays to the end that only measure what a state is worth: what they cost and leave, and that they never train."""

from __future__ import annotations

import asyncio
import random

import pytest

from turnwise.arena import Rubric, TreeSampler
from turnwise.arena.trees.value import mean_return
from turnwise.credit import VineCredit
from turnwise.types import EpisodeRequest, ModelError

from .helpers import run
from .test_episode_checkpoints import Ask
from .test_sampler import Count, grown
from .test_search import Outcome


def without(rollout):
    """The steps as they are without what playouts told."""
    return [(s.actor_id, s.branch, s.completion, s.reward, s.selected, s.facts.seed) for s in rollout.steps]


@pytest.mark.parametrize(
    "options", [{"branches": 2}, {"branches": 3, "beam_width": 2}, {"branches": 2, "select": "none"}]
)
def test_they_change_nothing_but_what_is_known(make_arena, options):
    plain_arena, [plain] = grown(make_arena, Count(sampler=TreeSampler(**options)), "q")
    arena, [result] = grown(make_arena, Count(sampler=TreeSampler(**options, playouts=2)), "q")
    assert without(result.rollout) == without(plain.rollout)
    assert result.rollout.rewards == plain.rollout.rewards and result.rollout.extras == plain.rollout.extras
    # from each action of turn t and place p in the round of two, 3 - (2t + p) actions are left in each of 2 plays
    left = [3 - (2 * step.turn + "ab".index(step.actor_id)) for step in result.rollout.steps]
    assert len(arena.client.requests) == len(plain_arena.client.requests) + 2 * sum(left)
    assert result.rollout.metrics["tree/playouts"] == 2 * sum(count > 0 for count in left)
    for step, count in zip(result.rollout.steps, left, strict=True):
        found = step.info["playouts"]
        assert [len(one["rewards"]) for one in found] == ([count] * 2 if count else [0])
    arena.credit = VineCredit()
    arena.filters = type(arena.filters)(drop_zero_advantage=False)
    batch = arena.assign_credit_and_pack([result])
    assert len(batch) == len(result.rollout.steps), "what was played to measure never trains"
    assert batch.metrics["playout_tokens"] == 2 * 2 * sum(left), "a digit and the stop token each"
    assert batch.metrics["sampled_tokens"] == 2 * len(arena.client.requests)


def test_a_plain_trajectory_with_the_value_of_each_of_its_states(make_arena):
    arena, [result] = grown(make_arena, Outcome(sampler=TreeSampler(1, playouts=3)), "q", credit=VineCredit())
    rollout = result.rollout
    assert [step.tree_node for step in rollout.steps] == [None] * 4
    assert len(arena.client.requests) == 4 + 3 * (4 + 3 + 2 + 1)
    records = [rollout.facts.playouts, *(step.info["playouts"] for step in rollout.steps)]
    assert [len(one) for one in records] == [3, 3, 3, 3, 1]
    for one in records[0]:
        assert [actor for actor, _ in one["rewards"]] == ["a", "b", "a", "b"]
        assert set(one["outcome"]) == {"a", "b"} and one["outcome"]["a"] == one["outcome"]["b"]
    assert records[-1][0]["outcome"] == rollout.rewards
    values = [mean_return(one) / 2 for one in records]  # both actors get the outcome
    arena.assign_credit([result])
    for step, before, after in zip(rollout.steps, values, values[1:], strict=False):
        assert step.advantage == pytest.approx(after - before, abs=1e-6)


def test_the_better_state_is_selected_though_its_action_earned_less(make_arena):
    def reply(prompt, request):
        return "9" if "a1" in prompt else "0" if "a2" in prompt else str(1 + (request.sampling.seed or 0) % 2)

    for seed in range(8):
        sampler = TreeSampler(6, score_by="value", playouts=2)
        _, [result] = grown(make_arena, Count(sampler=sampler, max_turns=1), "q", reply=reply, seed=seed)
        first = [step for step in result.rollout.steps if step.actor_id == "a"]
        if len({step.completion for step in first}) == 2:
            assert [step.completion for step in first if step.selected] == ["1"]
            assert max(step.reward for step in first) == 2.0
            return
    raise AssertionError("no seed drew both")


def test_failed_ones_are_left_out_and_counted(make_arena):
    calls = iter(range(1000))

    def reply(prompt, request):
        number = next(calls)
        return ModelError("down") if number >= 2 and number % 3 == 0 else str((request.sampling.seed or 0) % 10)

    sampler = TreeSampler(2, playouts=6)
    _, [result] = grown(make_arena, Count(sampler=sampler, max_turns=1), "q", reply=reply)
    metrics = result.rollout.metrics
    lost = sum(6 - len(step.info["playouts"]) for step in result.rollout.steps if step.actor_id == "a")
    assert 0 < lost == metrics["tree/failed_playouts"] < metrics["tree/playouts"] == 12


def test_a_branch_of_which_none_came_to_its_end_is_ranked_last(make_arena):
    def reply(prompt, request):
        return ModelError("down") if "a9" in prompt else str((request.sampling.seed or 0) % 10)

    for seed in range(20):
        sampler = TreeSampler(4, score_by="value", playouts=2)
        _, [result] = grown(make_arena, Count(sampler=sampler, max_turns=1), "q", reply=reply, seed=seed)
        first = [step for step in result.rollout.steps if step.actor_id == "a"]
        if "9" in {step.completion for step in first} != {"9"}:
            [chosen] = [step for step in first if step.selected]
            assert chosen.completion != "9" and result.rollout.error is None
            return
    raise AssertionError("no seed drew a 9")


class Nesting(Count):
    async def env_response(self, state, arena, artifact):
        state.data["log"].append(f"{state.current_actor}{state.last_completion_text}")
        [child] = await arena.generate_rollouts([EpisodeRequest("ask", state.last_completion_text)])
        return child.rollout.extras.get("text", "")


def test_what_they_spawn_is_counted_and_no_part_of_the_episode(make_arena):
    arena = make_arena(actors=("a", "b", "solver"), max_concurrency=1)
    arena.add_episode(Nesting(sampler=TreeSampler(2, playouts=2)))
    arena.add_episode(Ask())
    [result] = run(arena, EpisodeRequest("count", "q"))
    assert len(result.children) == 8 == len({child.rollout.id for child in result.children}), "one for each branch"
    assert len(arena.client.requests) == 2 * 32
    batch = arena.assign_credit_and_pack([result])
    assert len(batch) == 16 and batch.metrics["sampled_tokens"] == 2 * 64
    assert batch.metrics["playout_tokens"] == 2 * 2 * 24


def test_they_meet_luck_of_their_own(make_arena):
    class Dice(Outcome):
        rubric = Rubric([lambda extras: dict.fromkeys("ab", float(extras["log"][-1][1:]))])

        def env_response(self, state, arena, artifact):
            state.data["log"].append(f"x{self.rng.random()}")

    _, [result] = grown(make_arena, Dice(sampler=TreeSampler(1, playouts=8), max_turns=1), "q")
    outcomes = [one["outcome"]["a"] for one in result.rollout.steps[0].info["playouts"]]
    assert len(set(outcomes)) == 8


@pytest.mark.parametrize("options", [{"beam_width": 2}, {"select": "none"}, {"score_by": "value"}])
def test_who_answers_first_changes_nothing(make_arena, options):
    def slow(seed):
        luck = random.Random(seed)

        async def reply(prompt, request):
            await asyncio.sleep(luck.random() / 500)
            return str((request.sampling.seed or 0) % 10)

        return reply

    rollouts = []
    for reply, concurrency in ((None, 64), (slow(1), 64), (slow(2), 3)):
        episode = Count(sampler=TreeSampler(3, playouts=1, **options))
        _, [result] = grown(make_arena, episode, "q", reply=reply, max_concurrency=concurrency)
        rollouts.append(result.rollout)
    assert rollouts[0] == rollouts[1] == rollouts[2]


def test_a_retry_counts_what_was_lost_to_them(make_arena):
    scored = iter(range(1000))

    def once_wrong(extras):
        if next(scored) == 5:  # after 2 plays from the start, 2 from the first action and the end of the second
            raise KeyError("the episode's own")
        return 1.0

    class Fragile(Outcome):
        rubric = Rubric([once_wrong])

    episode = Fragile(sampler=TreeSampler(1, playouts=2), max_turns=1)
    arena, [result] = grown(make_arena, episode, "q", retries=1)
    assert result.rollout.error is None and result.rollout.facts.attempt == 1
    batch = arena.assign_credit_and_pack([result])
    assert len(arena.client.requests) == 2 * (2 + 2 * (2 + 1))
    assert batch.metrics["sampled_tokens"] == 2 * len(arena.client.requests)

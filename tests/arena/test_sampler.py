"""Tree sampling, with a regression test for each error of the published code (D1 to D5 and those beside them)."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections import defaultdict

import pytest

from turnwise.arena import MultiTurnEpisode, Rubric, TreeSampler
from turnwise.arena.trees.sampler import SelectBySoftmax, select_best, select_first
from turnwise.credit import ATGRPOCredit
from turnwise.types import EpisodeRequest, ModelError, Step

from .helpers import run


class Count(MultiTurnEpisode):
    """Each actor writes a digit; the digit is its reward; the log is public and stands in the state."""

    episode_type = "count"
    actors = ("a", "b")
    max_turns = 2
    rubric = Rubric([lambda extras: float(len(extras["log"]))])

    def setup(self, state, arena, artifact):
        state.data = {"log": [], "seen_by_env": []}

    def get_prompt(self, artifact):
        return f"Question {artifact}."

    def env_response(self, state, arena, artifact):
        state.data["seen_by_env"].append(list(state.data["log"]))
        state.data["log"].append(f"{state.current_actor}{state.last_completion_text}")
        return "log " + "-".join(state.data["log"])

    def step_reward(self, state, arena, artifact):
        return float(state.last_completion_text)

    def get_extras(self, state):
        return dict(state.data)


def by_node(rollout):
    nodes = defaultdict(list)
    for step in rollout.steps:
        nodes[step.tree_node].append(step)
    return list(nodes.values())


def grown(make_arena, episode, *artifacts, reply=None, **options):
    arena = make_arena(reply, actors=("a", "b"), **options, episodes=[episode])
    return arena, run(arena, *(EpisodeRequest("count", artifact) for artifact in artifacts))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_d1_to_d3_own_rewards_own_forks_and_what_was_said_in_the_same_turn(make_arena, seed):
    _, [result] = grown(make_arena, Count(sampler=TreeSampler(branches=4)), "q", seed=seed)
    nodes = by_node(result.rollout)
    assert [(node[0].turn, node[0].actor_id) for node in nodes] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    path = [f"{step.actor_id}{step.completion}" for step in result.rollout.steps if step.selected]
    for node, before in zip(nodes, range(4), strict=True):
        assert [step.branch for step in node] == [0, 1, 2, 3] and len({step.facts.seed for step in node}) == 4
        # D1: every actor is scored by its own action, so siblings of the second actor differ too.
        assert [step.reward for step in node] == [float(step.completion) for step in node]
        assert len({step.reward for step in node}) > 1
        # D2: each branch steps its own fork.
        for step in node:
            own = [*path[:before], f"{step.actor_id}{step.completion}"]
            assert step.facts.env_response == "log " + "-".join(own)
    # D2: the winners' state goes on, with their moves and no other.
    assert result.rollout.extras["log"] == path
    assert result.rollout.extras["seen_by_env"] == [path[:index] for index in range(4)]
    # D3: a later actor sees what the earlier one wrote in the same turn.
    winner = next(step.completion for step in nodes[0] if step.selected)
    assert all(f"a: {winner}\n\nlog a{winner}" in step.prompt[-1]["content"] for step in nodes[1])


def test_d4_a_group_holds_one_state_of_one_problem(make_arena):
    artifacts = [f"{number}" for number in range(6)]
    episode = Count(sampler=TreeSampler(branches=3))
    arena, results = grown(make_arena, episode, *artifacts, *artifacts, credit=ATGRPOCredit())
    arena.assign_credit(results)
    groups = defaultdict(list)
    for result in results:
        for step in result.rollout.steps:
            groups[result.group_id, step.actor_id, step.turn, step.tree_node].append((result.rollout.id, step))
    assert len(groups) == 12 * 4
    for members in groups.values():
        assert len(members) == 3
        assert len({rollout for rollout, _ in members}) == 1
        assert len({tuple(step.prompt_token_ids) for _, step in members}) == 1, "siblings share their prompt"
        rewards = [step.reward for _, step in members]
        mean, std = statistics.mean(rewards), statistics.stdev(rewards)
        expected = [(reward - mean) / (std + 1e-8) if std else 0.0 for reward in rewards]
        assert [step.advantage for _, step in members] == pytest.approx(expected, abs=1e-5)
    assert any(step.advantage for members in groups.values() for _, step in members)


@pytest.mark.parametrize("seed", [0, 1])
def test_d5_without_a_tree_early_successes_keep_all_their_rows(make_arena, seed):
    class Race(Count):
        max_turns = 3

        def is_done(self, state, arena, artifact):
            return int(state.last_completion_text) >= 7

    arena, results = grown(make_arena, Race(), *["q"] * 12, seed=seed)
    lengths = {len(result.rollout.steps) for result in results}
    assert len(lengths) > 1 and min(lengths) < 6, f"some succeed early: {lengths}"
    assert len(arena.assign_credit_and_pack(results)) == sum(len(result.rollout.steps) for result in results)


def test_a_failed_call_is_no_row_and_costs_only_its_branch(make_arena):
    calls = iter(range(100))

    def reply(prompt, request):
        return ModelError("server gone") if next(calls) in (1, 4) else str((request.sampling.seed or 0) % 10)

    arena, [result] = grown(make_arena, Count(sampler=TreeSampler(branches=4), max_turns=1), "q", reply=reply)
    assert result.rollout.error is None
    assert [[step.branch for step in node] for node in by_node(result.rollout)] == [[0, 2, 3], [1, 2, 3]]
    assert result.rollout.metrics["tree/failed_branches"] == 2
    assert result.rollout.metrics["tree/branches"] == 8
    assert len(arena.assign_credit_and_pack([result])) == 6, "one row per answered call: none made up, none doubled"


def test_what_a_failed_branch_left_behind_is_logged_and_never_trains(make_arena):
    class Judged(Count):
        async def env_response(self, state, arena, artifact):
            state.data["log"].append((await arena.call_model(None, "JUDGE")).text)

    judged = iter(range(100))

    def reply(prompt, request):
        return ModelError("judge down") if "JUDGE" in prompt and next(judged) == 1 else "3"

    arena, [result] = grown(make_arena, Judged(sampler=TreeSampler(branches=3), max_turns=1), "q", reply=reply)
    lost = [step for step in result.rollout.steps if step.facts.error is not None]
    assert [(step.actor_id, step.branch, step.selected, step.trainable) for step in lost] == [("a", 1, False, False)]
    assert result.rollout.extras["log"] == ["3", "3"]
    batch = arena.assign_credit_and_pack([result])
    assert len(batch) == 5 and batch.dropped == {"failed": 1}


def test_a_bug_in_the_game_fails_the_episode_rather_than_a_branch(make_arena):
    class Buggy(Count):
        def env_response(self, state, arena, artifact):
            if int(state.last_completion_text) % 2:
                raise KeyError("odd numbers")

    arena, [result] = grown(make_arena, Buggy(sampler=TreeSampler(branches=6)), "q", failure_threshold=1.0)
    assert "odd numbers" in result.rollout.error
    assert len(arena.assign_credit_and_pack([result])) == 0


def test_branches_per_actor_and_branch_at(make_arena):
    _, [result] = grown(make_arena, Count(sampler=TreeSampler(branches={"a": 4, "b": 2})), "q")
    assert [len(node) for node in by_node(result.rollout)] == [4, 2, 4, 2]
    _, [result] = grown(make_arena, Count(sampler=TreeSampler(branches=3, branch_at=["b"])), "q")
    assert [len(node) for node in by_node(result.rollout) if node[0].tree_node is not None] == [3, 3]
    assert sum(step.tree_node is None for step in result.rollout.steps) == 2
    later = TreeSampler(branches=3, branch_at=lambda state: state.turn == 1)
    _, [result] = grown(make_arena, Count(sampler=later), "q")
    assert [(s.turn, s.tree_node is None) for s in result.rollout.steps] == [(0, True)] * 2 + [(1, False)] * 6


def test_siblings_meet_the_same_luck_and_the_winners_generator_goes_on(make_arena):
    class Dice(Count):
        def env_response(self, state, arena, artifact):
            state.data["log"].append(self.rng.random())
            return str(state.data["log"][-1])

    _, [result] = grown(make_arena, Dice(sampler=TreeSampler(branches=4)), "q")
    draws = [{step.facts.env_response for step in node} for node in by_node(result.rollout)]
    assert [len(draw) for draw in draws] == [1, 1, 1, 1]
    assert len(set.union(*draws)) == 4, "each action draws anew"


def steps_with(*rewards):
    return [Step("a", 0, [], "", [], [], [], [], "stop", reward=reward) for reward in rewards]


def test_selectors(make_arena):
    rng = random.Random(0)
    assert select_best(steps_with(0.5, 2.0, 2.0, 1.0), rng) == 1, "the first of equals"
    soft = SelectBySoftmax(temperature=0.5)
    drawn = [soft(steps_with(0.0, 1.0), rng) for _ in range(4000)]
    expected = math.exp(2) / (1 + math.exp(2))
    assert sum(drawn) / 4000 == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 4000))
    assert soft(steps_with(-1e308, 0.0, -1e308), rng) == 1, "no overflow"
    for select, wanted in (("first", lambda step, node: step.branch == 0), (lambda steps, rng: 2, None)):
        _, [result] = grown(make_arena, Count(sampler=TreeSampler(branches=4, select=select)), "q")
        wanted = wanted or (lambda step, node: step.branch == 2)
        assert all(wanted(step, None) == step.selected for step in result.rollout.steps)


def chosen_by(results):
    """What a mixed selection says of each node, with what it chose from: ``(by, the one, all of the node)``."""
    nodes = [node for result in results for node in by_node(result.rollout)]
    found = []
    for node in nodes:
        [one] = [step for step in node if step.selected]
        assert ["selected_by" in step.info for step in node] == [step is one for step in node]
        found.append((one.info["selected_by"], one, node))
    return found


def within(successes, trials, probability):
    return successes / trials == pytest.approx(probability, abs=4 * math.sqrt(probability * (1 - probability) / trials))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_mixed_selection_plays_the_best_or_any(make_arena, share):
    sampler = TreeSampler(branches=4, select="mixed", best_share=share)
    options = {"seed": 3, "max_concurrency": 64}
    _, results = grown(make_arena, Count(sampler=sampler, max_turns=4), *map(str, range(30)), **options)
    nodes = chosen_by(results)
    assert len(nodes) == 30 * 8
    assert all(one.reward == max(step.reward for step in node) for by, one, node in nodes if by == "best")
    drawn = [one.branch for by, one, _ in nodes if by == "draw"]
    assert within(len(nodes) - len(drawn), len(nodes), share)
    assert all(within(drawn.count(branch), len(drawn), 1 / 4) for branch in range(4) if drawn), "the policy's own"
    for result in results:
        own = [by for by, _, _ in chosen_by([result])]
        assert result.rollout.metrics["tree/draw_share"] == own.count("draw") / 8
    _, again = grown(make_arena, Count(sampler=sampler, max_turns=4), *map(str, range(3)), **options)
    assert [one.rollout for one in again] == [one.rollout for one in results[:3]], "fixed by the seed"


def test_the_share_of_the_best_moves_over_the_batches(make_arena):
    def arena_at(state=None):
        sampler = TreeSampler(branches=3, select="mixed", best_share=[1.0, 0.0], share_steps=3)
        arena = make_arena(actors=("a", "b"), seed=2, episodes=[Count(sampler=sampler, max_turns=4)])
        arena.source = lambda: [EpisodeRequest("count", "q", group_id=number) for number in range(8)]
        if state is not None:
            arena.load_state_dict(state)
        return arena

    arena, batches, states = arena_at(), [], []
    for _ in range(4):
        states.append(arena.state_dict())
        batches.append(asyncio.run(arena.sample()))
    shares = [[by for by, _, _ in chosen_by(results)].count("best") / 64 for results in batches]
    assert shares[0] == 1.0 and shares[2] == shares[3] == 0.0 and 0.3 < shares[1] < 0.7
    for state, results in zip(states, batches, strict=True):
        again = asyncio.run(arena_at(state).sample())
        assert [result.rollout for result in again] == [result.rollout for result in results], "a resumed run goes on"
    assert [TreeSampler(2, "mixed", best_share=(0.8, 0.4), share_steps=5).best_share_at(n) for n in (0, 2, 4, 9)] == (
        pytest.approx([0.8, 0.6, 0.4, 0.4])
    )
    assert TreeSampler(2, "mixed").best_share_at(7) == 0.5


def test_a_tree_needs_a_reward_for_each_action(make_arena):
    class Unscored(Count):
        def step_reward(self, state, arena, artifact):
            return None

    _, [result] = grown(make_arena, Unscored(sampler=TreeSampler(branches=2)), "q", failure_threshold=1.0)
    assert "Override step_reward" in result.rollout.error


def test_tool_calls_of_a_losing_branch_stay_out_of_the_winners_history(make_arena):
    class Tool(Count):
        async def env_response(self, state, arena, artifact):
            await arena.call_model("b", f"check {state.last_completion_text}")
            return "ok"

    _, [result] = grown(make_arena, Tool(sampler=TreeSampler(branches=3), max_turns=1), "q", seed=5)
    assert len(result.rollout.steps) == 12
    assert sum(step.selected for step in result.rollout.steps) == 4
    assert len([step for step in result.rollout.steps if step.tree_node is not None]) == 6
    last = next(step for step in result.rollout.steps if step.tree_node is not None and step.actor_id == "b")
    assert "check" not in str(last.prompt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branches": 0}, "branches=0"),
        ({"branches": {"a": -1}}, "branches="),
        ({"branches": {}}, "branches={}"),
        ({"branches": 1, "beam_width": 2}, "beam_width=2: needs branches > 1"),
        ({"beam_width": 0}, "beam_width=0: expected a whole number >= 1"),
        ({"beam_width": True}, "beam_width=True"),
        ({"branch_at": "a"}, "branch_at='a'"),
        ({"score_by": "rewards"}, "score_by='rewards': expected one of"),
        ({"score_by": "value"}, "needs playouts > 0"),
        ({"playouts": -1}, "playouts=-1"),
        ({"select": "none", "beam_width": 2}, "select='none' lets all branches go on"),
        ({"select": "bst"}, "select='bst'"),
        ({"select": "sample", "temperature": 0.0}, "temperature=0.0"),
        ({"select": "mixed", "beam_width": 2}, "select='mixed': beam_width=2 compete across states"),
        ({"best_share": 0.2}, "best_share=0.2: has no effect with select='first'"),
        ({"select": "mixed", "best_share": 1.5}, "best_share=1.5: expected a number from 0 to 1"),
        ({"select": "mixed", "best_share": "0.5"}, "best_share='0.5': expected a number from 0 to 1"),
        ({"select": "mixed", "best_share": [0.5]}, r"best_share=\[0.5\]: expected a number from 0 to 1, or a pair"),
        ({"select": "mixed", "best_share": [1.0, 0.0]}, r"best_share=\[1.0, 0.0\]: needs share_steps"),
        ({"select": "mixed", "share_steps": -1}, "share_steps=-1: expected a whole number >= 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(TypeError if "branch_at" in options else ValueError, match=message):
        TreeSampler(**options)


def test_the_default_selection():
    """The first branch goes on, unless an option asks for a comparison."""
    assert TreeSampler(4).select is select_first and not TreeSampler(4).favours
    assert TreeSampler(4, beam_width=2).favours
    assert TreeSampler(4, score_by="value", playouts=1).favours
    assert TreeSampler(4, "first", beam_width=2).select is select_first, "what is said holds"

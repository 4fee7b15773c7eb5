"""Rewards token by token: their sum over the tokens that train is the step's reward, and the step keeps them."""

from __future__ import annotations

import asyncio
import json
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from turnwise import GRPOCredit
from turnwise.arena import MultiTurnEpisode, Rubric, SingleTurnEpisode, TreeSampler
from turnwise.arena.rewards.token_rewards import set_reward
from turnwise.types import EpisodeRequest, Rollout, Step

from .helpers import said
from .replaying import play as play_again
from .replaying import record


def step_of(tokens=3, **info):
    ids = list(range(tokens))
    return Step("a", 0, [], "text", [1], ids, [0.0] * tokens, [(tokens, 0)], "stop", info=info)


class Chat(MultiTurnEpisode):
    """Each answer is a digit and the stop token; these are paid apart, by ``pay(digit)``."""

    episode_type = "chat"
    actors = ("solver",)
    max_turns = 2
    rubric = Rubric([lambda completion: 7.0])

    def __init__(self, pay, mask=None, **options):
        super().__init__(**options)
        self.pay, self.mask = pay, mask

    def get_prompt(self, artifact):
        return f"Say {artifact}"

    def env_response(self, state, arena, artifact):
        if self.mask is not None:
            state.trajectory[-1].info["loss_mask"] = self.mask

    def step_reward(self, state, arena, artifact):
        return self.pay(float(state.last_completion_text))


class Once(SingleTurnEpisode):
    episode_type = "once"

    def __init__(self, *funcs, pay=None, **options):
        self.rubric, self.pay = Rubric(list(funcs) or [lambda completion: 7.0], **options), pay

    def get_prompt(self, artifact):
        return f"Say {artifact}"

    async def rollout(self, arena, artifact, state=None):
        state = await super().rollout(arena, artifact, state)
        if self.pay is not None:
            state.trajectory[-1].reward = self.pay(float(state.last_completion_text))
        return state


def run(make_arena, episode, *replies, count=None, **options):
    arena = make_arena(said(*replies), credit=GRPOCredit(), **options, episodes=[episode])
    requests = [EpisodeRequest(episode.episode_type, "x", group_id="q") for _ in range(count or len(replies))]
    results = asyncio.run(arena.generate_rollouts(requests))
    return arena, results


def check_batch(arena, results, rewards, advantages):
    """The sums reach credit and the batch."""
    batch = arena.assign_credit_and_pack(results)
    assert batch.rewards.tolist() == pytest.approx(rewards)
    assert batch.advantages.tolist() == pytest.approx(advantages, abs=1e-4)


FORMS = {
    "list": lambda digit: [digit, 0.25],
    "tuple": lambda digit: (int(digit), 0.25),
    "array": lambda digit: np.array([digit, 0.25], dtype=np.float32),
    "tensor": lambda digit: torch.tensor([digit, 0.25], dtype=torch.bfloat16, requires_grad=True),
    "numbers of torch": lambda digit: [torch.tensor(digit), np.float64(0.25)],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["step_reward", "step", "rubric", "a reward function on the step"])
def test_sums_reach_credit_and_the_batch(make_arena, form, where):
    """Digits 1 and 3 with 0.25 for the stop token: rewards 1.25 and 3.25, so mean 2.25, std sqrt 2, A = 1 / sqrt 2."""
    pay = FORMS[form]

    def paid(rollout, completion):
        rollout.steps[0].reward = pay(float(completion))
        return 7.0

    episode = {
        "step_reward": Chat(pay, max_turns=1),
        "step": Once(pay=pay),
        "rubric": Once(lambda completion: pay(float(completion))),
        "a reward function on the step": Once(paid),
    }[where]
    arena, results = run(make_arena, episode, "1", "3")
    steps = [result.rollout.steps[0] for result in results]
    assert [step.info["token_rewards"] for step in steps] == [[1.0, 0.25], [3.0, 0.25]]
    assert all(type(value) is float for step in steps for value in step.info["token_rewards"])
    if where == "rubric":
        assert [result.rollout.rewards for result in results] == [{"solver": 1.25}, {"solver": 3.25}]
    else:
        assert [step.reward for step in steps] == [1.25, 3.25] and type(steps[0].reward) is float
    check_batch(arena, results, [1.25, 3.25], [-(0.5**0.5), 0.5**0.5])


@pytest.mark.parametrize("mask", [[0, 1], np.array([False, True]), torch.tensor([0, 1])])
def test_tokens_that_do_not_train_are_not_paid(make_arena, mask):
    """Without the digit's reward both episodes earn the stop token's 0.25."""
    episode = Chat(lambda digit: [digit, 0.25], mask=mask, max_turns=1)
    _, results = run(make_arena, episode, "1", "3")
    assert [result.rollout.steps[0].reward for result in results] == [0.25, 0.25]
    assert results[1].rollout.steps[0].info["token_rewards"] == [3.0, 0.25]


class PaidByHook(Chat):
    def env_response(self, state, arena, artifact):
        state.trajectory[-1].reward = self.pay(float(state.trajectory[-1].completion))

    def step_reward(self, state, arena, artifact):
        return None


@pytest.mark.parametrize("kind", [Chat, PaidByHook])
def test_branches_are_compared_by_sums(make_arena, kind):
    """1 is followed by 9, 5 by nothing: by their sums 10 is ahead of 5, and goes on."""
    episode = kind(
        lambda digit: [digit, 9.0 * (digit == 1)], sampler=TreeSampler(branches=2, select="best"), max_turns=1
    )
    _, [result] = run(make_arena, episode, "5", "1", count=1)
    told = {step.completion: (step.reward, step.selected) for step in result.rollout.steps}
    assert told == {"5": (5.0, False), "1": (10.0, True)}


def test_each_end_of_a_tree_keeps_its_own(make_arena):
    episode = Chat(lambda digit: None, sampler=TreeSampler(branches=2, select="none"), max_turns=1)
    episode.rubric = Rubric([lambda completion: [float(completion), 1.0]])
    _, [result] = run(make_arena, episode, "5", "2", count=1)
    told = {step.completion: step.info["token_rewards"] for step in result.rollout.steps}
    assert told == {"5": [5.0, 1.0], "2": [2.0, 1.0]}
    assert sorted(end["rewards"]["solver"] for end in result.rollout.meta["ends"]) == [3.0, 6.0]


def test_functions_by_token_add_up_by_weight(make_arena):
    """0.5 * [3, 0.25] + [1, 1] is [2.5, 1.125]; a plain number is part of the sum alone; weight 0 of nothing."""
    funcs = [lambda completion: {"solver": [float(completion), 0.25]}, lambda: [1, 1], lambda: 10.0, lambda: [100, 0]]
    _, [result] = run(make_arena, Once(*funcs, weights=[0.5, 1.0, 1.0, 0.0]), "3")
    assert result.rollout.rewards == {"solver": 13.625}
    assert result.rollout.steps[0].info["token_rewards"] == [2.5, 1.125]
    assert sorted(result.rollout.metrics.values()) == [2.0, 3.25, 10.0, 100.0]


def test_it_stands_in_the_record_and_replays(make_arena):
    """Those of a group function too, which a replay takes from the record."""

    def group(rollouts):
        return [[float(place), 0.5] for place, _ in enumerate(rollouts)]

    def fresh(reply=None):
        arena = make_arena(reply)
        arena.add_episode(Chat(lambda digit: [digit, 0.1]))
        arena.add_episode(Once(lambda completion: [0.1, float(completion)], group))
        return arena

    requests = [EpisodeRequest(kind, "x") for kind in ("chat", "once", "once")]
    rows = record(fresh(said("1", "2", "3", "4")), requests)
    told = [[step["info"]["token_rewards"] for step in row["steps"]] for row in rows]
    digits = [[float(step["completion"]) for step in row["steps"]] for row in rows]
    assert told[0] == [[digit, 0.1] for digit in digits[0]] and len(told[0]) == 2
    assert told[1:] == [[[0.1 + place, digits[1 + place][0] + 0.5]] for place in range(2)]
    for row in rows:
        _, divergence, _ = play_again(fresh(lambda prompt, request: 1 / 0), json.loads(json.dumps(row)))
        assert divergence is None, str(divergence)


def test_a_sum_is_exact_to_double_and_numbers_stay_numbers():
    step = step_of(3)
    set_reward(step, [0.1, 0.2, 1e-12], "here")
    assert step.reward == 0.1 + 0.2 + 1e-12
    set_reward(step, torch.tensor(2), "here")
    assert (step.reward, step.info) == (2.0, {})


NUMBERS = [
    True, np.bool_(True), 1, np.int64(1), np.float32(1), np.array(1.0), Decimal(1), Fraction(1), torch.tensor(1),
    torch.tensor(True), torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0, requires_grad=True),
]  # fmt: skip


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: f"{type(value).__name__}-{value}")
def test_every_kind_of_number_is_a_reward_and_becomes_a_float(value):
    set_reward(step := step_of(), value, "here")
    by_hand = Rollout("r", "chat", None, steps=[step_of()])
    by_hand.steps[0].reward = value
    rubric = Rubric([lambda: value, lambda: {"a": value}])
    scored = asyncio.run(rubric.score(by_hand))
    [grouped] = asyncio.run(Rubric([lambda rollouts: value]).score_group([by_hand]))
    found = [step.reward, by_hand.steps[0].reward, *scored.metrics.values(), *grouped.metrics.values()]
    assert found == [1.0] * 5 and {type(each) for each in found} == {float}


@pytest.mark.parametrize(
    ("value", "info", "error", "said"),
    [
        ([1.0, 2.0], {}, ValueError, r"here: got 2 rewards by token, .* for each of the 3 tokens"),
        (np.array([1.0]), {}, ValueError, "here: got 1 rewards by token"),
        ([], {}, ValueError, "here: got 0 rewards by token"),
        ([1.0, float("nan"), 0.0], {}, ValueError, "here, token 1: the reward is nan, expected a finite number"),
        (torch.tensor([1.0, 0.0, float("inf")]), {}, ValueError, "here, token 2: the reward is inf"),
        ([1.0, None, 0.0], {}, TypeError, "here, token 1: got None, expected a number"),
        (np.zeros((3, 1)), {}, TypeError, r"here, token 0: got \[0.0\], expected a number"),
        ([1e308, 1e308, 0.0], {}, ValueError, "here, the sum over its tokens: the reward is inf"),
        ("123", {}, TypeError, "here: got '123', expected a number"),
        ({1, 2, 3}, {}, TypeError, "expected a number"),
        (1j, {}, TypeError, "here: got 1j, expected a number"),
        (bytearray(b"1"), {}, TypeError, "expected a number"),
        (torch.empty((), device="meta"), {}, TypeError, "expected a number"),
        (10**400, {}, ValueError, "here: the reward is too large"),
        (Fraction(10**400), {}, ValueError, "here: the reward is too large"),
        (Decimal("NaN"), {}, ValueError, "here: the reward is nan"),
        (Decimal("sNaN"), {}, TypeError, "expected a number"),
        ([1.0, 2.0, 3.0], {"loss_mask": [1, 0]}, ValueError, "here: loss_mask has 2 entries, .* each of 3 tokens"),
    ],
)
def test_wrong_ones_say_whose_they_are(value, info, error, said):
    with pytest.raises(error, match=said):
        set_reward(step_of(3, **info), value, "here")


class OfTwo(Chat):
    rubric = Rubric([lambda: [1.0, 2.0]])


@pytest.mark.parametrize(
    ("episode", "said"),
    [
        (Chat(lambda digit: [1.0]), "Chat.step_reward for actor 'solver': got 1 rewards by token"),
        (Once(pay=lambda digit: [1.0]), r"reward of step 0 \(actor 'solver'\) of rollout 'e0', .* got 1 rewards"),
        (Once(lambda: {"solver": [1.0, 2.0, 3.0]}), "reward function 'lambda', actor 'solver': got 3 rewards by token"),
        (Once(lambda: {"critic": [1.0, 2.0]}), "actor 'critic': .* the actor has 0 model calls"),
        (OfTwo(lambda digit: None), "the actor has 2 model calls here: expected a number"),
    ],
)
def test_a_wrong_one_fails_its_episode(make_arena, episode, said):
    _, [result] = run(make_arena, episode, "1", "1", count=1, failure_threshold=1.0)
    assert re.search(said, result.rollout.error.strip().splitlines()[-1])

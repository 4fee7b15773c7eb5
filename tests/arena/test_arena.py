"""The arena from requests to a batch with credit, what it refuses, and an episode as a user would write it."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest

from turnwise.arena import Arena, Filters, MultiTurnEpisode, Rubric, SingleTurnEpisode, TreeSampler
from turnwise.credit import GiGPOCredit, GRPOCredit, TurnReturnsCredit
from turnwise.types import Actor, EpisodeRequest

from .helpers import Baseline, Guess, guess, run


# -- a step -----------------------------------------------------------------------------------------------------------
def test_step_makes_a_packed_batch_and_keeps_its_results(arena):
    arena.source = lambda: [guess(str(number)) for number in range(5)]
    batch = asyncio.run(arena.step())
    assert len(batch) == len(arena.last_results) == 5
    completions = [float(result.rollout.steps[0].completion) for result in arena.last_results]
    assert batch.rewards.tolist() == completions
    assert batch.advantages.tolist() == completions, "with no credit rule the advantage is the reward"
    assert batch.metrics["episodes"] == 5 and batch.metrics["sampled_tokens"] == 10
    assert batch.metrics["reward/solver"] == pytest.approx(np.mean(completions))


def test_get_batch_may_be_overridden_and_asynchronous(make_arena):
    class Mine(Arena):
        async def get_batch(self):
            return [guess("a"), guess("b")]

    arena = make_arena(arena_class=Mine)
    arena.add_episode(Guess())
    assert len(asyncio.run(arena.step())) == 2


def test_without_a_source_the_step_says_what_to_do(arena):
    with pytest.raises(NotImplementedError, match=r"override get_batch\(\), or set arena.source"):
        asyncio.run(arena.step())


def test_an_empty_batch_is_valid(arena):
    arena.source = lambda: []
    batch = asyncio.run(arena.step())
    assert len(batch) == 0 and batch.token_ids.shape == (0,) and batch.cu_seqlens.tolist() == [0]


def test_zero_advantages_are_dropped_counted_and_switchable(make_arena):
    class Centred(Baseline):
        def compute_columns(self, samples):
            return np.array([sample.reward - 5 for sample in samples], dtype=np.float32)

    for drop, rows in ((True, 2), (False, 3)):
        arena = make_arena(partial(lambda replies, *call: next(replies), iter("567")), credit=Centred())
        arena.filters = Filters(drop_zero_advantage=drop)
        arena.add_episode(Guess())
        arena.source = lambda: [guess(), guess(), guess()]
        batch = asyncio.run(arena.step())
        assert len(batch) == rows
        assert batch.dropped == ({"zero_advantage": 1} if drop else {})


@pytest.mark.parametrize("drop", [False, True])
def test_truncated_answers_count_in_their_group_whether_they_train_or_not(make_arena, response, drop):
    """Rewards 5, 6 and 7, the 5 cut off: the others' advantages are those of a group of three, so it pays nobody to
    be cut off. A tied question and a question with one answer lose their rows for causes of their own."""
    texts = {"q": "567", "tied": "44", "one": "9"}
    said = {uid: iter(text) for uid, text in texts.items()}

    def reply(prompt, request):
        text = next(said[next(uid for uid in texts if uid in prompt)])
        return response(text, finish_reason="length" if text == "5" else "stop")

    arena = make_arena(reply, credit=GRPOCredit(normalize=False), filters=Filters(drop_truncated=drop))
    arena.add_episode(Guess())
    arena.source = lambda: [EpisodeRequest("guess", uid) for uid, text in texts.items() for _ in text]
    batch = asyncio.run(arena.step())
    assert batch.advantages.tolist() == ([0.0, 1.0] if drop else [-1.0, 1.0])[drop:]
    assert batch.dropped == {
        **({"truncated": 1} if drop else {}), "zero_advantage": 1, "equal_rewards": 2, "alone": 1,
    }  # fmt: skip
    assert len(batch) + sum(batch.dropped.values()) == 6 and {actor for actor, _ in batch.drops} == {"solver"}


def test_credit_is_asked_once_per_batch_and_must_answer_with_finite_numbers(make_arena):
    class Broken(Baseline):
        def compute_columns(self, samples):
            return np.full(len(samples), np.nan)

    arena = make_arena(credit=Baseline())
    arena.add_episode(Guess())
    arena.source = lambda: [guess(str(number)) for number in range(4)]
    asyncio.run(arena.step())
    assert arena.credit.calls == 1
    arena.credit = Broken()
    with pytest.raises(ValueError, match="compute_columns gave shape"):
        asyncio.run(arena.step())


def test_a_batch_without_credit_assigned_is_refused(arena):
    results = run(arena, guess())
    with pytest.raises(ValueError, match="call assign_credit"):
        arena.build_training_batch(results)


def test_lifecycle_hooks_run_also_when_training_fails(make_arena):
    class Hooked(Arena):
        async def on_train_start(self):
            self.seen = ["start"]

        async def on_train_end(self):
            self.seen.append("end")

    async def train(arena):
        async with arena.training():
            raise RuntimeError("training failed")

    class Plain(Arena):
        def on_train_start(self):
            self.seen = ["start"]

        def on_train_end(self):
            self.seen.append("end")

    for arena_class in (Hooked, Plain):
        arena = make_arena(arena_class=arena_class)
        with pytest.raises(RuntimeError, match="training failed"):
            asyncio.run(train(arena))
        assert arena.seen == ["start", "end"]


# -- questions and groups ---------------------------------------------------------------------------------------------
def test_different_questions_never_share_a_top_level_group(arena):
    questions = [{"q": 1}, {"q": 2}, {"q": 1}, {"q": True}, {"q": 1.0}]
    uids = [result.group_id for result in run(arena, *map(guess, questions))]
    assert uids[0] == uids[2] and len(set(uids)) == 4
    assert [r.group_id for r in run(arena, guess("x", group_id="g"), guess("y", group_id="g"))] == ["g", "g"]
    with pytest.raises(TypeError, match="group_id"):
        run(arena, guess([bytearray(b"no key")]))


# -- what is refused --------------------------------------------------------------------------------------------------
def test_an_episode_without_a_rubric_is_refused_when_added(make_arena):
    class Bare(SingleTurnEpisode):
        episode_type = "bare"

        def get_prompt(self, artifact):
            return ""

    class Wrong(Bare):
        rubric = None

    for episode in (Bare(), Wrong()):
        with pytest.raises(ValueError, match=r"has no rubric.*rubric = Rubric\(\[\.\.\.\]\)"):
            make_arena().add_episode(episode)


def test_what_is_registered_twice_or_unknown_is_refused(arena):
    with pytest.raises(ValueError, match="actor id 'solver' is already registered"):
        arena.add_actor(Actor("solver"))
    with pytest.raises(ValueError, match="episode 'guess' is already registered"):
        arena.add_episode(Guess())
    arena.add_store("questions")
    with pytest.raises(ValueError, match="store 'questions' is already registered"):
        arena.add_store("questions")
    with pytest.raises(ValueError, match=r"episode_type='gues': no such episode, expected one of \['guess'\]"):
        run(arena, EpisodeRequest("gues", "x"))
    with pytest.raises(TypeError, match=r"got the class Guess, expected an Episode object, as Guess\(\)"):
        arena.add_episode("x", Guess)
    with pytest.raises(TypeError, match="got 3, expected an Episode object"):
        arena.add_episode("x", 3)
    with pytest.raises(ValueError, match=r"actor_id='nobody': no such actor, expected one of \['solver'\]"):
        asyncio.run(arena.call_model("nobody", "hi"))


def test_an_episode_may_go_by_another_name(make_arena):
    arena = make_arena()
    arena.add_episode("easy", Guess())
    assert run(arena, EpisodeRequest("easy", "x"))[0].rollout.episode_type == "easy"


def test_a_prompt_longer_than_the_context_names_the_lengths(make_arena):
    arena = make_arena(max_context=40, failure_threshold=1.0)
    arena.add_episode(Guess())
    length = len("<user>Guess \n<assistant>")
    fits, full, long = (guess("y" * (size - length)) for size in (39, 40, 50))
    results = run(arena, fits, full, long)
    assert results[0].rollout.error is None
    assert arena.client.requests[0].sampling.max_tokens == 1
    assert "ContextLengthError: the prompt of actor 'solver' has 50 tokens, and max_context=40" in (
        results[2].rollout.error
    )
    assert "has 40 tokens" in results[1].rollout.error and len(arena.client.requests) == 1


# -- a whole episode, as a user would write it ------------------------------------------------------------------------
def test_a_users_episode_in_forty_lines(make_arena):
    def won(rollout, extras):
        return {player: float(extras["winner"] == player) for player in ("left", "right")}

    class Nim(MultiTurnEpisode):
        """Take 1 to 3 stones; whoever takes the last one wins. A move that is no number takes one."""

        episode_type = "nim"
        actors = ("left", "right")
        max_turns = 12
        rubric = Rubric([won])

        def setup(self, state, arena, artifact):
            state.data = {"stones": artifact, "winner": None}

        def get_prompt(self, artifact):
            return f"Nim with {artifact} stones. Say how many you take: 1, 2 or 3."

        def get_observation(self, state, arena, artifact):
            return f"{state.data['stones']} left."

        def env_response(self, state, arena, artifact):
            text = state.last_completion_text
            take = min(int(text) if text.isdigit() and 1 <= int(text) <= 3 else 1, state.data["stones"])
            state.data["stones"] -= take
            if not state.data["stones"]:
                state.data["winner"] = state.current_actor
            return f"{state.current_actor} takes {take}."

        def is_done(self, state, arena, artifact):
            return state.data["stones"] == 0

        def step_reward(self, state, arena, artifact):
            return float(state.data["stones"] % 4 == 0)  # the winning strategy leaves a multiple of four

        def get_extras(self, state):
            return {"winner": state.data["winner"]}

    arena = make_arena(lambda prompt, request: str(request.sampling.seed % 4), actors=("left", "right"), seed=1)
    arena.add_episode(Nim(sampler=TreeSampler(branches=16, select="best")))
    [result] = run(arena, EpisodeRequest("nim", 11))
    assert result.rollout.error is None
    assert sorted(result.rollout.rewards.values()) == [0.0, 1.0]
    assert result.rollout.rewards["left"] == 1.0, "best of sixteen finds the winning strategy"


# -- credit over the turns of an episode ------------------------------------------------------------------------------
class Corridor(MultiTurnEpisode):
    """Walk from 0 to 2: the digit is odd for a step ahead, even to stay; each step is named by where it began."""

    episode_type = "corridor"
    actors = ("solver",)
    max_turns = 4
    rubric = Rubric([lambda extras: float(extras["at"] == 2)])

    def setup(self, state, arena, artifact):
        state.data["at"] = 0

    def build_messages(self, state, arena, artifact):
        return [{"role": "user", "content": f"{artifact} turn {state.turn}"}]

    def env_response(self, state, arena, artifact):
        state.trajectory[-1].info["state"] = state.data["at"]
        state.data["at"] += int(state.last_completion_text) % 2

    def is_done(self, state, arena, artifact):
        return state.data["at"] == 2

    def get_extras(self, state):
        return {"at": state.data["at"]}


@pytest.mark.parametrize("rule", [GiGPOCredit, TurnReturnsCredit])
def test_rules_over_turns_follow_real_episodes(make_arena, rule):
    """The win is earned once, at the end, though all calls of the episode share it as their reward."""
    moves = {"a": "11", "b": "0011", "c": "0000"}
    arena = make_arena(
        lambda prompt, request: moves[prompt.partition(">")[2][0]][int(prompt.partition("turn ")[2][0])],
        credit=rule(gamma=0.5, scale="none"),
    )
    arena.add_episode(Corridor())
    arena.source = lambda: [EpisodeRequest("corridor", name, group_id="q") for name in moves]
    asyncio.run(arena.step())
    steps = {result.rollout.artifact: result.rollout.steps for result in arena.last_results}
    assert [step.info["state"] for step in steps["b"]] == [0, 0, 0, 1]
    if rule is GiGPOCredit:
        at_start = [0.5, *(0.5**3, 0.5**2, 0.5), *(0.0,) * 4]  # the returns of all calls that began at 0
        expected = (1 - 2 / 3) + 0.5 - np.mean(at_start)
    else:
        expected = 0.5 - np.mean([0.5, 0.5**3, 0.0])  # the first turns of the three
    assert steps["a"][0].advantage == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (None, "requests=None: expected a list of EpisodeRequests"),
        (guess(), r"requests=EpisodeRequest\(.*expected a list"),
        (["guess"], "requests holds 'guess': expected EpisodeRequests"),
        ([guess(group_id=("q", []))], r"group_id=\('q', \[\]\): expected a hashable value"),
        ([guess(seed="7")], "seed='7': expected a whole number, or None"),
    ],
)
def test_what_is_no_list_of_requests_is_named(arena, requests, message):
    arena.source = lambda: requests
    with pytest.raises(TypeError, match=message):
        asyncio.run(arena.step())


def test_requests_may_come_from_a_generator(arena):
    arena.source = lambda: (guess(str(number)) for number in range(3))
    assert len(asyncio.run(arena.step())) == 3

"""The arena's stages: batches, isolation of failures, evaluation, resume, and flaws that must not come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from turnwise.arena import Arena, BatchFailedError, Episode, MultiTurnEpisode, Rubric, SingleTurnEpisode, TreeSampler
from turnwise.types import Actor, EpisodeRequest, GenerateResult, Sample, Sampling


class Guess(SingleTurnEpisode):
    """The reward is the digit that was written; the artifact "boom" fails."""

    episode_type = "guess"
    rubric = Rubric([lambda completion: float(completion)])

    def get_prompt(self, artifact):
        if artifact == "boom":
            raise RuntimeError("the boom artifact")
        return f"Guess {artifact}"


class Baseline:
    """A credit rule with a memory: reward less the mean of all rewards of earlier batches."""

    def __init__(self) -> None:
        self.total, self.count, self.calls = 0.0, 0, 0

    def compute(self, results: Sequence[GenerateResult]) -> dict[tuple[str, int], float]:
        raise AssertionError("the arena uses compute_columns")

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        rewards = np.array([sample.reward for sample in samples])
        advantages = rewards - (self.total / self.count if self.count else 0.0)
        self.total, self.count, self.calls = self.total + rewards.sum(), self.count + len(rewards), self.calls + 1
        return advantages.astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self.count = state["total"], state["count"]


@pytest.fixture
def arena(make_arena):
    arena = make_arena(seed=3)
    arena.add_episode(Guess())
    return arena


def run(arena, *requests):
    return asyncio.run(arena.generate_rollouts(list(requests)))


def guess(artifact="x", **options):
    return EpisodeRequest("guess", artifact, **options)


def columns(batch):
    names = ("token_ids", "cu_seqlens", "loss_mask", "rollout_logprobs", "advantages", "rewards", "min_version")
    return {name: getattr(batch, name).tolist() for name in names}


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
        arena.drop_zero_advantage = drop
        arena.add_episode(Guess())
        arena.source = lambda: [guess(), guess(), guess()]
        batch = asyncio.run(arena.step())
        assert len(batch) == rows
        assert batch.dropped == ({"zero_advantage": 1} if drop else {})


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

    arena = make_arena(arena_class=Hooked)
    with pytest.raises(RuntimeError, match="training failed"):
        asyncio.run(train(arena))
    assert arena.seen == ["start", "end"]


# -- questions and groups ---------------------------------------------------------------------------------------------
def test_different_questions_never_share_a_top_level_group(arena):
    questions = [{"q": 1}, {"q": 2}, {"q": 1}, {"q": True}, {"q": 1.0}]
    uids = [result.uid for result in run(arena, *map(guess, questions))]
    assert uids[0] == uids[2] and len(set(uids)) == 4
    assert [r.uid for r in run(arena, guess("x", group_id="g"), guess("y", group_id="g"))] == ["g", "g"]
    with pytest.raises(TypeError, match="group_id"):
        run(arena, guess([bytearray(b"no key")]))


# -- failures ---------------------------------------------------------------------------------------------------------
def test_one_exception_is_one_failed_result_and_its_siblings_go_on(arena):
    results = run(arena, guess("a"), guess("boom"), guess("b"))
    assert [result.rollout.error is None for result in results] == [True, False, True]
    assert "RuntimeError: the boom artifact" in results[1].rollout.error and "get_prompt" in results[1].rollout.error
    arena.assign_credit(results)
    batch = arena.build_training_batch(results)
    assert len(batch) == 2 and batch.metrics["episodes/failed"] == 1


def test_a_failed_episode_keeps_its_steps_for_the_log_and_out_of_the_batch(make_arena):
    class Late(Guess):
        def get_extras(self, state):
            raise RuntimeError("late")

    arena = make_arena(failure_threshold=1.0, credit=Baseline())
    arena.add_episode(Late())
    arena.source = lambda: [guess()]
    batch = asyncio.run(arena.step())
    assert len(arena.last_results[0].rollout.steps) == 1
    assert len(batch) == 0 and batch.dropped == {"failed": 1}
    assert arena.credit.calls == 0, "a failed episode enters no statistics"


def test_too_many_failures_stop_the_batch_with_the_first_traceback(arena):
    with pytest.raises(BatchFailedError, match=r"(?s)2 of 3 episodes failed.*failure_threshold=0.5.*the boom artifact"):
        run(arena, guess("boom"), guess("a"), guess("boom"))


def test_stopping_a_batch_leaves_no_orphan(make_arena):
    async def slow(prompt, request):
        await asyncio.sleep(60)

    async def main():
        with pytest.raises(BatchFailedError):
            await arena.generate_rollouts([guess("boom"), guess("a")])
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    arena = make_arena(slow, failure_threshold=0.0)
    arena.add_episode(Guess())
    assert asyncio.run(main()) == []


def test_retries_use_new_seeds_and_count_their_tokens(make_arena):
    calls = []

    def reply(prompt, request):
        calls.append(request.sampling.seed)
        return "x" if len(calls) < 3 else "4"  # "x" is no number: the rubric raises

    arena = make_arena(reply, retries=2)
    arena.add_episode(Guess())
    arena.source = lambda: [guess()]
    batch = asyncio.run(arena.step())
    assert len(set(calls)) == 3 and batch.rewards.tolist() == [4.0]
    assert batch.metrics["episodes/retried"] == 2 and batch.metrics["sampled_tokens"] == 6
    assert batch.metrics["episodes/failed"] == 0


def test_a_client_that_breaks_fails_the_episode(make_arena):
    arena = make_arena(lambda prompt, request: ConnectionError("refused"), failure_threshold=1.0)
    arena.add_episode(Guess())
    [result] = run(arena, guess())
    assert "ModelError: ConnectionError in the inference client: refused" in result.rollout.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_get_through(make_arena, error):
    class Interrupt(Guess):
        def get_prompt(self, artifact):
            raise error

    arena = make_arena(failure_threshold=1.0)
    arena.add_episode(Interrupt())
    with pytest.raises(error):
        run(arena, guess())


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
    with pytest.raises(ValueError, match="actor 'solver' is already there"):
        arena.add_actor(Actor("solver"))
    with pytest.raises(ValueError, match="episode 'guess' is already there"):
        arena.add_episode(Guess())
    arena.add_store("questions")
    with pytest.raises(ValueError, match="store 'questions' is already there"):
        arena.add_store("questions")
    with pytest.raises(ValueError, match=r"episode_type='gues': no such episode, expected one of \['guess'\]"):
        run(arena, EpisodeRequest("gues", "x"))
    with pytest.raises(TypeError, match="expected an Episode object"):
        arena.add_episode("x", Guess)
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


# -- nested episodes --------------------------------------------------------------------------------------------------
class Propose(Episode):
    """Writes a question, has it solved ``copies`` times, and is paid by how far the pass rate is from 0 and 1."""

    episode_type = "propose"

    def __init__(self, copies=4, trainable=True, retain=False):
        self.copies, self.trainable, self.retain = copies, trainable, retain
        self.rubric = Rubric([self.balance])

    def balance(self, extras):
        return {"proposer": 1.0 - abs(2 * extras["pass_rate"] - 1)}

    async def rollout(self, arena, artifact, state=None):
        question = (await self.call_model("proposer", f"Topic {artifact}", arena)).text
        requests = [EpisodeRequest("solve", question, is_trainable=self.trainable) for _ in range(self.copies)]
        results = await arena.generate_rollouts(requests)
        if self.retain:
            state.child_results.extend(results)
        return state

    def get_extras(self, state):
        wins = [result.rollout.rewards["solver"] > 0 for result in state.child_results]
        return {"pass_rate": sum(wins) / len(wins), "children": len(wins)}


class Solve(Guess):
    episode_type = "solve"
    rubric = Rubric([lambda completion: float(int(completion) >= 5)])


def nested(make_arena, reply=None, **options):
    proposer = {name: options.pop(name) for name in ("copies", "trainable", "retain") if name in options}
    arena = make_arena(reply, actors=("proposer", "solver"), **options)
    arena.add_episode(Propose(**proposer))
    arena.add_episode(Solve())
    return arena


def test_a_proposer_spawns_solvers_grouped_by_parent(make_arena):
    arena = nested(make_arena)
    arena.source = lambda: [EpisodeRequest("propose", topic) for topic in ("sums", "primes")]
    batch = asyncio.run(arena.step())
    assert len(batch) == 10 and batch.metrics["episodes"] == 10
    for parent in arena.last_results:
        assert parent.parent_id is None and len(parent.children) == 4
        assert {child.parent_id for child in parent.children} == {parent.rollout.id}
        passed = np.mean([child.rollout.rewards["solver"] for child in parent.children])
        assert parent.rollout.rewards["proposer"] == pytest.approx(1 - abs(2 * passed - 1))
    ids = [result.rollout.id for top in arena.last_results for result in top.walk()]
    assert len(set(ids)) == 10
    seeds = [step.info["seed"] for top in arena.last_results for r in top.walk() for step in r.rollout.steps]
    assert len(set(seeds)) == 10


@pytest.mark.parametrize("retain", [False, True])
def test_each_child_counts_once_whether_or_not_the_episode_keeps_it_itself(make_arena, retain):
    [result] = run(nested(make_arena, retain=retain), EpisodeRequest("propose", "sums"))
    assert result.rollout.extras["children"] == len(result.children) == 4


def test_untrainable_children_stay_out_and_trainable_children_of_an_untrainable_parent_stay_in(make_arena):
    arena = nested(make_arena, trainable=False)
    arena.source = lambda: [EpisodeRequest("propose", "sums")]
    batch = asyncio.run(arena.step())
    assert batch.actors == ["proposer"] and len(batch) == 1 and batch.dropped == {"untrainable": 4}
    arena = nested(make_arena)
    arena.source = lambda: [EpisodeRequest("propose", "sums", is_trainable=False)]
    batch = asyncio.run(arena.step())
    assert batch.actors == ["solver"] and len(batch) == 4 and batch.dropped == {"untrainable": 1}


def test_children_inherit_the_policy_version_and_priority(make_arena):
    [result] = run(nested(make_arena), EpisodeRequest("propose", "sums", meta={"tag": 1}))
    versions = [node.rollout.meta["policy_versions"] for node in result.walk()]
    assert versions == [{"default": 7}] * 5
    assert "tag" in result.rollout.meta and "tag" not in result.children[0].rollout.meta


def test_the_limit_of_concurrent_calls_holds_over_all_levels(make_arena):
    arena = nested(make_arena, copies=8, max_concurrency=2)
    run(arena, *(EpisodeRequest("propose", str(number)) for number in range(8)))
    assert arena.client.peak == 2


class Deep(Guess):
    """Two children per level, five levels; every parent waits for its children."""

    episode_type = "deep"

    async def rollout(self, arena, artifact, state=None):
        if artifact:
            await arena.generate_rollouts([EpisodeRequest("deep", artifact - 1) for _ in range(2)])
        await self.call_model("solver", f"level {artifact}", arena)
        return state


def test_nesting_cannot_deadlock_a_budget_of_one(make_arena):
    arena = make_arena(max_concurrency=1)
    arena.add_episode(Deep())
    [result] = asyncio.run(asyncio.wait_for(arena.generate_rollouts([EpisodeRequest("deep", 4)]), 10))
    assert sum(1 for _ in result.walk()) == 31 and arena.client.peak == 1


def test_children_come_before_new_roots(make_arena):
    arena = nested(make_arena, copies=2, max_concurrency=1)
    run(arena, *(EpisodeRequest("propose", f"T{number}") for number in range(3)))
    kinds = ["propose" if "Topic" in prompt else "solve" for prompt in arena.client.prompts]
    assert kinds == ["propose", "solve", "solve"] * 3


def test_priority_goes_first(make_arena):
    arena = make_arena(max_concurrency=1)
    arena.add_episode(Guess())
    run(arena, *(guess(str(number), priority=number) for number in range(4)))
    asked = [prompt.split("Guess ")[1][0] for prompt in arena.client.prompts]
    assert asked == ["0", "3", "2", "1"], "0 found the slot free; then the highest priority"


def test_children_that_fail_too_often_fail_the_parent_rather_than_pay_it_zero(make_arena):
    def reply(prompt, request):
        return "3" if "Topic" in prompt else RuntimeError("no solver")

    arena = nested(make_arena, reply, failure_threshold=0.5)
    arena.failure_threshold = 1.0
    [result] = run(arena, EpisodeRequest("propose", "sums"))
    assert "KeyError: 'solver'" in result.rollout.error, "all children failed: their rewards are not there"
    arena.failure_threshold = 0.5
    with pytest.raises(BatchFailedError, match=r"(?s)1 of 1 episodes failed.*of 4 episodes failed.*no solver"):
        run(arena, EpisodeRequest("propose", "sums"))


# -- deadlines and cancellation ---------------------------------------------------------------------------------------
def hang_on(word):
    async def reply(prompt, request):
        if word in prompt:
            await asyncio.sleep(60)
        return "3"

    return reply


def test_a_timeout_bounds_the_whole_subtree_and_no_other(make_arena):
    arena = nested(make_arena, hang_on("Guess"), failure_threshold=1.0)
    arena.add_episode(Guess())

    async def main():
        requests = [EpisodeRequest("propose", "sums", timeout=0.05), EpisodeRequest("propose", "primes", timeout=0.05)]
        async with asyncio.timeout(10):
            results = await arena.generate_rollouts(requests)
        return results, len(asyncio.all_tasks())

    results, tasks = asyncio.run(main())
    assert all("ran past its deadline" in result.rollout.error for result in results)
    assert tasks == 1, "nothing of the subtree runs on"
    assert arena.client.in_flight == arena._budget.in_use == 0


def test_a_child_may_time_out_alone(make_arena):
    class Patient(Propose):
        async def rollout(self, arena, artifact, state=None):
            await self.call_model("proposer", "Topic", arena)
            quick = EpisodeRequest("solve", "slow", timeout=0.05)
            results = await arena.generate_rollouts([quick, EpisodeRequest("solve", "fast")])
            state.data["errors"] = [result.rollout.error is not None for result in results]
            return state

        def get_extras(self, state):
            return {"pass_rate": 0.5, **state.data}

    arena = make_arena(hang_on("Guess slow"), actors=("proposer", "solver"))
    arena.add_episode(Patient())
    arena.add_episode(Solve())
    [result] = run(arena, EpisodeRequest("propose", "sums"))
    assert result.rollout.error is None and result.rollout.extras["errors"] == [True, False]


def test_cancelling_the_step_ends_everything_and_gives_all_slots_back(make_arena):
    arena = nested(make_arena, hang_on("Guess"), max_concurrency=3)

    async def main():
        task = asyncio.create_task(arena.generate_rollouts([EpisodeRequest("propose", str(n)) for n in range(4)]))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(asyncio.all_tasks())

    assert asyncio.run(main()) == 1
    assert arena.client.in_flight == arena._budget.in_use == 0


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_bad_timeouts_are_refused(arena, timeout):
    with pytest.raises(ValueError, match="timeout="):
        run(arena, guess(timeout=timeout))


# -- seeds and resume -------------------------------------------------------------------------------------------------
def test_results_do_not_depend_on_scheduling(make_arena):
    def completions(max_concurrency):
        arena = nested(make_arena, max_concurrency=max_concurrency, seed=11)
        results = run(arena, *(EpisodeRequest("propose", str(number)) for number in range(6)))
        return [[s.completion for s in r.rollout.steps] for top in results for r in top.walk()]

    assert completions(1) == completions(3) == completions(256)


def test_copies_with_one_seed_differ_and_are_the_same_in_any_batch(make_arena):
    def seeds(*requests):
        arena = make_arena(seed=5)
        arena.add_episode(Guess())
        return [result.rollout.seed for result in run(arena, *requests)]

    copies = seeds(guess(seed=9), guess(seed=9))
    assert copies[0] != copies[1]
    assert seeds(guess("other"), guess(seed=9), guess("other"), guess(seed=9))[1::2] == copies
    assert seeds(guess(seed=8))[0] not in copies


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
    arena = make_arena(arena_class=Collecting, credit=Baseline(), seed=2)
    arena.add_episode(Guess())
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
    assert arena.client.requests[-1].sampling.stop_token_ids == (3,)
    assert arena.client.requests[-1].sampling.max_tokens == 4
    with pytest.raises(RuntimeError, match="an evaluation makes no training batch"):
        asyncio.run(view.step())


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
    arena.add_episode(Nim(sampler=TreeSampler(branches=16)))
    [result] = run(arena, EpisodeRequest("nim", 11))
    assert result.rollout.error is None
    assert sorted(result.rollout.rewards.values()) == [0.0, 1.0]
    assert result.rollout.rewards["left"] == 1.0, "best of sixteen finds the winning strategy"

"""Results to rows: the packed columns, the filters and what they count."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from turnwise.arena import Filters, Rubric, SingleTurnEpisode, drop_stale, pack, select
from turnwise.credit import ConstantCredit
from turnwise.samples.collect import collect_samples
from turnwise.samples.step_metrics import describe, with_zero_counts
from turnwise.samples.training_samples import penalize, training_samples
from turnwise.types import Actor, EpisodeRequest, GenerateResult, Rollout, Sample, Sampling, Step, StepFacts


def step(actor="a", completion=(5, 6, 0), **changes):
    tokens = list(completion)
    fields = {
        "reward": 1.0,
        "facts": StepFacts(temperature=0.7),
        "policy_versions": [(1, 4), (len(tokens) - 1, 3)],
        "finish_reason": "stop",
    } | changes
    logprobs = [-0.25 * (index + 1) for index in range(len(tokens))]
    return Step(actor, 0, [], "", [1, 2], tokens, logprobs, **fields)


def result(*steps, id="r", rewards=None, error=None, **options):
    rollout = Rollout(id, "e", "q", steps=list(steps), rewards=rewards or {}, error=error)
    return GenerateResult(rollout, group_id="q", **options)


def packed(*results, **filters):
    for number, sample in enumerate(collect_samples(results)):
        steps = {top.rollout.id: top.rollout.steps for top in results}[sample.rollout_id]
        steps[sample.step_index].advantage = float(number)
    samples, drops = training_samples(results, Filters(drop_zero_advantage=False, **filters))
    return pack(samples, drops, {})


def test_columns_of_the_packed_batch():
    batch = packed(
        result(step(), step("b", (7, 0), policy="small", reward=0.5), id="r1"),
        result(step("b", (8, 9), policy="small", finish_reason="length"), id="r2"),
    )
    assert batch.token_ids.tolist() == [1, 2, 5, 6, 0, 1, 2, 7, 0, 1, 2, 8, 9]
    assert batch.cu_seqlens.tolist() == [0, 5, 9, 13]
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1], "the stop token 0 trains"
    assert batch.rollout_logprobs.tolist() == [0, 0, -0.25, -0.5, -0.75, 0, 0, -0.25, -0.5, 0, 0, -0.25, -0.5]
    assert batch.actors == ["a", "b"] and batch.actor_index.tolist() == [0, 1, 1]
    assert batch.policies == ["default", "small"] and batch.policy_index.tolist() == [0, 1, 1]
    assert batch.min_version.tolist() == [3, 3, 3]
    assert batch.rewards.tolist() == [1.0, 0.5, 1.0]
    assert batch.temperatures == pytest.approx([0.7] * 3)
    columns = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    kinds = {name: column.dtype for name, column in columns.items() if isinstance(column, np.ndarray)}
    whole = ("targets", "cu_targets", "actor_index", "policy_index", "min_version")
    real = ("target_logprobs", "advantages", "rewards", "temperatures")
    assert kinds == {"target_mask": np.uint8, **dict.fromkeys(whole, np.int64), **dict.fromkeys(real, np.float32)}


def test_no_samples_make_an_empty_batch_of_the_right_types():
    batch = pack([], {("a", "failed"): 2}, {})
    assert len(batch) == 0 and batch.cu_seqlens.tolist() == [0]
    assert batch.token_ids.dtype == np.int64 and batch.rewards.shape == (0,) and batch.dropped == {"failed": 2}


def test_each_call_that_is_no_row_is_counted_once_by_its_reason():
    dropped_by_rubric = result(step(), id="r5", is_trainable=False)
    dropped_by_rubric.rollout.facts.dropped = "judge down"
    batch = packed(
        result(step(), step(None), id="r1"),
        result(step(), step(), id="r2", error="Traceback"),
        result(step(), id="r3", is_trainable=False),
        result(step(finish_reason="abort"), step(trainable=False), id="r4"),
        dropped_by_rubric,
        result(step(trainable=False, facts=StepFacts(error="call failed")), id="r6"),
    )
    assert len(batch) == 1
    assert batch.dropped == {"failed": 3, "not_trainable": 2, "aborted": 1, "reward_error": 1}


def test_each_dropped_row_has_one_cause():
    """Prompts of 2 and completions of 1 to 5; the fourth is tied, the fifth truncated, tied and too long at once."""
    results = [result(step(completion=range(length + 1)), id=f"r{length}") for length in range(5)]
    samples = collect_samples(results)
    for sample in samples:
        sample.advantage = float(sample.rollout_id not in ("r3", "r4"))
    samples[4].finish_reason = "length"
    filters = Filters(max_length=4, drop_truncated=True)
    assert filters.causes(samples) == [None, None, "max_length", "zero_advantage", "truncated"]
    causes = {("r3", 0): "equal_rewards"}
    assert filters.causes(samples, causes) == [None, None, "max_length", "equal_rewards", "truncated"]
    with pytest.raises(ValueError, match="max_length=1"):
        Filters(max_length=1)
    with pytest.raises(ValueError, match="dynamic_sampling_rounds=-1"):
        Filters(dynamic_sampling_rounds=-1)


def mixed_batch():
    """Rows of 5, 4 and 3 tokens by ``default``, ``small`` and ``default``, whose oldest weights are 3, 5 and 4."""
    return packed(
        result(step(), id="r1"),
        result(step("b", (7, 0), policy="small", policy_versions=[(2, 5)]), id="r2"),
        result(step(completion=(9,), policy_versions=[(1, 4)]), id="r3"),
    )


def test_selected_rows_are_what_packing_them_alone_gives():
    batch = mixed_batch()
    for rows, order in (([2, 0], [2, 0]), (np.array([True, False, True]), [0, 2]), ([], []), ([0, 1, 2], [0, 1, 2])):
        chosen = select(batch, rows)
        assert len(chosen) == len(order) and chosen.actors == ["a", "b"] and chosen.policies == ["default", "small"]
        assert chosen.advantages.tolist() == [float(row) for row in order]
        assert [chosen.policy_index.tolist(), chosen.min_version.tolist()] == [
            [batch.policy_index[row] for row in order],
            [batch.min_version[row] for row in order],
        ]
        for new, row in enumerate(order):
            own, before = (slice(*b.cu_seqlens[r : r + 2]) for b, r in ((chosen, new), (batch, row)))
            for name in ("token_ids", "loss_mask", "rollout_logprobs"):
                assert getattr(chosen, name)[own].tolist() == getattr(batch, name)[before].tolist()
        for name in batch.__dataclass_fields__:
            column = getattr(batch, name)
            assert not isinstance(column, np.ndarray) or getattr(chosen, name).dtype == column.dtype, name


def test_stale_rows_leave_by_the_bound_of_their_own_policy():
    batch = mixed_batch()
    batch.drops["a", "stale"] = 1
    kept = drop_stale(batch, {"default": 4, "small": 5})
    assert kept.min_version.tolist() == [5, 4] and kept.dropped == {"stale": 2} and batch.dropped == {"stale": 1}
    both = drop_stale(batch, {"default": 4, "small": 6})
    assert both.drops == {("a", "stale"): 2, ("b", "stale"): 1} and both.dropped == {"stale": 3}
    assert drop_stale(batch, {"default": 3}) is batch, "small has no bound"
    assert len(drop_stale(batch, {"default": 5, "small": 6})) == 0


def test_rewards_of_the_step_and_of_the_trajectory():
    samples = collect_samples([result(step(reward=0.25), step(reward=None), rewards={"a": 2.0})])
    assert [(sample.reward, sample.trajectory_reward) for sample in samples] == [(0.25, 2.0), (2.0, 2.0)]
    samples = collect_samples([result(step(reward=0.25))])
    assert samples[0].trajectory_reward == 0.25


def sample_of(**changes):
    sample = Sample("q", "e", "a", 0, 0, None, "r", 3, "default", [1], [5, 6], [-1.0, -1.0], [(2, 0)], 1.0, 1.0, 0.5)
    return replace(sample, **changes)


def test_a_sample_may_bring_its_own_mask():
    for mask in ([0, 1], (False, True), np.array([0.0, 1.0]), [0, np.int8(1)]):
        batch = pack([sample_of(), sample_of(loss_mask=mask), sample_of()], {}, {})
        assert batch.loss_mask.tolist() == [0, 1, 1, 0, 0, 1, 0, 1, 1] and batch.loss_mask.dtype == np.uint8
    for wrong in ([1], [], [0, 1, 1], 1, [[0, 1]]):
        with pytest.raises(ValueError, match=r"step 3 of rollout 'r': .* 2 completion tokens.*, loss_mask of "):
            pack([sample_of(loss_mask=wrong)], {}, {})
    for wrong in ([0, 2], [0, 0.5], [0, None], [float("nan"), 1], [0, -1], "01"):
        with pytest.raises(ValueError, match=r"step 3 of rollout 'r': .*loss_mask"):
            pack([sample_of(loss_mask=wrong)], {}, {})


def random_results(rng, depth=2):
    """Episodes of all kinds of steps, some with children of the same kind."""
    results = []
    for number in range(rng.randrange(5)):
        steps = [
            step(
                rng.choice(("a", "b", None)),
                [rng.randrange(9) for _ in range(rng.randrange(4))] or (5,),
                policy=rng.choice(("default", "small")),
                reward=rng.choice((None, 0.0, rng.random())),
                advantage=rng.choice((0.0, rng.random())),
                finish_reason=rng.choice(("stop", "stop", "length", "abort")),
                trainable=rng.random() < 0.9,
                facts=StepFacts(**rng.choice(({}, {"temperature": 0.5}, {"error": "no answer"}))),
            )
            for _ in range(rng.randrange(5))
        ]
        for one in steps:
            if rng.random() < 0.2:
                one.completion_token_ids, one.completion_logprobs = [], []
            elif rng.random() < 0.3:
                one.info["loss_mask"] = [rng.randrange(2) for _ in one.completion_token_ids]
        options = {"error": "Traceback"} if rng.random() < 0.1 else {"is_trainable": rng.random() < 0.9}
        name, rewards = f"r{depth}-{number}-{rng.random()}", {"a": rng.random(), "b": 1}
        below = random_results(rng, depth - 1) if depth else []
        results.append(result(*steps, id=name, rewards=rewards, children=below, **options))
    return results


def test_each_call_trains_or_is_counted_once():
    for seed in range(60):
        rng = random.Random(seed)
        results = random_results(rng)
        filters = Filters(
            drop_truncated=rng.random() < 0.5, drop_zero_advantage=rng.random() < 0.5, max_length=rng.choice((None, 4))
        )
        causes = filters.causes(collect_samples(results))
        samples, drops = training_samples(results, filters)
        assert Counter(causes) <= Counter({**pack(samples, drops, {}).dropped, None: len(samples)}), f"seed {seed}"
        calls = [s for top in results for n in top.walk() for s in n.rollout.steps if s.actor_id is not None]
        assert len(samples) + sum(drops.values()) == len(calls), f"seed {seed}"


def test_random_rows_are_packed_one_after_the_other():
    rng = random.Random(0)
    token_ids = (lambda: rng.randrange(300), lambda: rng.randrange(200_000), lambda: rng.choice((0, 2**31 - 1)))
    for _ in range(60):
        token, longest, samples = rng.choice(token_ids), rng.choice((0, 1, 5, 300)), []
        for _ in range(rng.randrange(12)):
            prompt, completion = ([token() for _ in range(rng.randint(0, longest))] for _ in range(2))
            logprobs = [-rng.expovariate(0.1) * rng.choice((1, 1e-42, 1e30)) for _ in completion]
            samples.append(
                sample_of(prompt_token_ids=prompt, completion_token_ids=completion, rollout_logprobs=logprobs)
            )
        batch, lists = pack(samples, {}, {}), [(s.prompt_token_ids, s.completion_token_ids) for s in samples]
        assert batch.token_ids.tolist() == [token for prompt, completion in lists for token in prompt + completion]
        assert batch.loss_mask.tolist() == [bit for p, c in lists for bit in [0] * len(p) + [1] * len(c)]
        values = [value for s in samples for value in [0.0] * len(s.prompt_token_ids) + s.rollout_logprobs]
        np.testing.assert_array_equal(batch.rollout_logprobs, np.array(values, dtype=np.float32))
        assert np.diff(batch.cu_seqlens).tolist() == [len(prompt) + len(completion) for prompt, completion in lists]
        assert batch.targets.flags.writeable and batch.target_mask.flags.writeable


def test_numbers_of_other_types_and_rows_that_are_no_lists():
    for prompt in ([1, True, np.int64(9)], (1, 1, 9), np.array([1, 1, 9], dtype=np.int32), array("q", [1, 1, 9])):
        for completion in ([np.int64(3), 4], torch.tensor([3, 4]), range(3, 5)):
            for logprobs in ([-1, 0], [np.float32(-1), -0.0], np.array([-1, 0], np.float16), torch.tensor([-1.0, 0])):
                changes = {"prompt_token_ids": prompt, "completion_token_ids": completion, "rollout_logprobs": logprobs}
                batch = pack([sample_of(**changes)], {}, {})
                assert batch.token_ids.tolist() == [1, 1, 9, 3, 4]
                assert batch.rollout_logprobs.tolist() == [0, 0, 0, -1, 0]


class Joined:
    """A sequence that is made where it is read."""

    def __init__(self, parts):
        self.parts = parts

    def __len__(self):
        return sum(map(len, self.parts))

    def __iter__(self):
        raise AssertionError("one number at a time")

    def __array__(self, dtype=None, copy=None):
        return np.concatenate([np.array(part, np.int32) for part in self.parts])


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_arrays_of_all_kinds_are_packed_as_lists_are():
    """Rows of one kind, and of several in one batch."""
    rng = random.Random(1)
    ids = {
        "list": list,
        "tuple": tuple,
        "int32": lambda row: np.array(row, np.int32),
        "uint16": lambda row: np.array(row, np.uint16),
        "every second": lambda row: np.repeat(np.array(row, np.int64), 2)[::2],
        "array": lambda row: array("i", row),
        "tensor": lambda row: torch.tensor(row, dtype=torch.long),
        "lazy": lambda row: Joined([row[:1], row[1:]]),
    }
    values = {
        "list": list,
        "float32": lambda row: np.array(row, np.float32),
        "float64": lambda row: np.array(row, np.float64),
        "array": lambda row: array("d", row),
        "tensor": lambda row: torch.tensor(row, dtype=torch.float64).requires_grad_(),
    }
    rows = [
        ([rng.randrange(60_000) for _ in range(rng.randrange(5))], [rng.randrange(9)], [-rng.expovariate(1.0)])
        for _ in range(40)
    ]
    whole = pack(
        [sample_of(prompt_token_ids=p, completion_token_ids=c, rollout_logprobs=v) for p, c, v in rows], {}, {}
    )
    for kinds in (
        [[(name, name if name in values else "float32")] for name in ids]
        + [[("list", name)] for name in values]
        + [[(p, v) for p in ids for v in values]]
    ):
        samples = []
        for prompt, completion, logprobs in rows:
            of_ids, of_values = rng.choice(kinds)
            samples.append(
                sample_of(
                    prompt_token_ids=ids[of_ids](prompt),
                    completion_token_ids=ids[of_ids](completion),
                    rollout_logprobs=values[of_values](logprobs),
                )
            )
        batch = pack(samples, {}, {})
        for name in ("token_ids", "cu_seqlens", "loss_mask", "rollout_logprobs"):
            mine, other = getattr(batch, name), getattr(whole, name)
            assert mine.dtype == other.dtype and mine.tobytes() == other.tobytes(), (kinds, name)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt_token_ids": np.array([1.0, 2.0])}, TypeError, r"prompt_token_ids\[0\]=.*1\.0.*: expected a token id"),
        ({"prompt_token_ids": np.array([1, -2])}, ValueError, r"prompt_token_ids\[1\]=.*-2.*: expected a token id"),
        ({"prompt_token_ids": np.array([2**63], np.uint64)}, ValueError, r"prompt_token_ids\[0\]=.*expected a token"),
        ({"prompt_token_ids": np.array([[1], [2]])}, TypeError, r"prompt_token_ids\[0\]=.*: expected a token id"),
        ({"rollout_logprobs": np.array([-1.0, np.nan])}, ValueError, r"logprobs\[1\]=.*nan.*: expected a log-prob"),
        ({"rollout_logprobs": np.array([-1e39, 0.0])}, ValueError, r"logprobs\[0\]=.*: expected a log-prob"),
        ({"rollout_logprobs": np.array(["a", "b"])}, TypeError, r"logprobs\[0\]=.*: expected a log-prob"),
    ],
)
@pytest.mark.parametrize("others", [list, np.array])
def test_a_wrong_array_is_named(changes, error, message, others):
    fine = sample_of(
        prompt_token_ids=others([1]), completion_token_ids=others([5, 6]), rollout_logprobs=others([-1.0, -1.0])
    )
    with pytest.raises(error, match=f"^step 3 of rollout 'r': {message}"):
        pack([fine, sample_of(**changes)], {}, {})


TOKEN = "a token id, a whole number from 0 to 2147483647"
LOGPROB = "a log-probability, a finite number"
NO_TOKENS = [
    *((bad, TypeError) for bad in (None, 1.0, "1", [1], np.float64(2))),
    *((bad, ValueError) for bad in (-1, 2**31, 2**63, -(2**200), np.int64(-1))),
]
NO_LOGPROBS = [
    *((bad, TypeError) for bad in (None, "-1")),
    *((bad, ValueError) for bad in (float("nan"), float("-inf"), 1e39, np.float32("nan"), 10**400)),
]


@pytest.mark.parametrize(
    ("column", "bad", "error", "expected"),
    [
        *(("prompt_token_ids", *case, TOKEN) for case in NO_TOKENS),
        *(("completion_token_ids", *case, TOKEN) for case in NO_TOKENS),
        *(("rollout_logprobs", *case, LOGPROB) for case in NO_LOGPROBS),
    ],
)
def test_an_invalid_number_is_named(column, bad, error, expected):
    with pytest.raises(error) as caught:
        pack([sample_of(), sample_of(**{column: [0, bad]})], {}, {})
    column = column.removeprefix("rollout_")
    assert str(caught.value) == f"step 3 of rollout 'r': {column}[1]={bad!r:.80}: expected {expected}"


def test_lists_of_unequal_length_and_other_objects_are_named():
    name = "^step 3 of rollout 'r': "
    with pytest.raises(
        ValueError, match=name + "expected equal lengths, got 2 completion tokens, 1 log-probabilities$"
    ):
        pack([sample_of(rollout_logprobs=[-1.0])], {}, {})
    for column, value in (("prompt_token_ids", None), ("completion_token_ids", 3), ("rollout_logprobs", 0.5)):
        with pytest.raises(TypeError, match=f"{name}{column.removeprefix('rollout_')}={value}: expected a list$"):
            pack([sample_of(**{column: value})], {}, {})


def test_errors_of_a_users_own_types_come_through():
    class Broken:
        def __index__(self):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pack([sample_of(prompt_token_ids=[Broken()])], {}, {})


def test_rows_name_the_step_that_is_wrong():
    def wrong(problem, error, **changes):
        bad = step(**({"advantage": 1.0} | changes))
        results = [result(step(advantage=1.0), id="fine"), result(step(None), bad, id="here")]
        with pytest.raises(error, match=f"^step 1 of rollout 'here'.*{problem}"):
            pack(training_samples(results, Filters())[0], {}, {})

    wrong("has no advantage: call assign_credit", ValueError, advantage=None)
    wrong(r"completion_token_ids\[1\]=None: expected a token id", TypeError, completion=(5, None))
    wrong(r"completion_token_ids\[2\]=4294967296: expected a token id", ValueError, completion=(5, 6, 2**32))
    wrong("loss_mask=.*: expected 0 or 1", ValueError, info={"loss_mask": [0, 1, 2]})


def test_describe_leaves_failed_episodes_out_of_means_and_in_the_token_count():
    parent = result(step(), rewards={"a": 1.0}, children=[result(step(), id="c", rewards={"a": 0.0})])
    failed = result(step("a", (1, 2, 3, 4)), id="f", rewards={"a": 9.0}, error="Traceback")
    numbers = describe([parent, failed])
    assert numbers["episodes"] == 3 and numbers["episodes/failed"] == 1
    assert numbers["reward/a"] == 0.5 and numbers["sampled_tokens"] == 10
    assert numbers["completion_tokens/a"] == pytest.approx(10 / 3)


def test_means_of_causes_add_up_to_that_of_their_total():
    """A count that an episode lacks is 0, for the actors that took part in it."""
    counted = [{"rewritten_rows": 2.0, "rewritten_rows/history": 2.0}, {"rewritten_rows": 0.0}, None]
    rollouts = [result(step(), id=f"r{place}") for place in range(3)]
    for one, counts in zip(rollouts, counted, strict=True):
        one.rollout.metrics = {f"gateway/{n}/a": v for n, v in (counts | {"calls": 1.0}).items()} if counts else {}
    numbers = describe(rollouts)
    assert numbers["metric/gateway/rewritten_rows/a"] == numbers["metric/gateway/rewritten_rows/history/a"] == 1.0
    assert numbers["metric/gateway/calls/a"] == 1.0


def test_describe_tells_cut_episodes_from_truncated_calls():
    """Of four that tell how they ended one failed; of the other three one was cut: a third."""

    def ended(how, id, *steps, **options):
        told = result(*steps, id=id, **options)
        told.rollout.meta["ended"] = how
        return told

    nested = [ended("max_turns", "cut", step()), result(step(), id="one turn")]
    over = ended("done", "over", step(), step(finish_reason="length"), children=nested)
    numbers = describe([over, ended("done", "too", step()), ended("max_turns", "f", error="Traceback")])
    assert numbers["ended/max_turns"] == 1 / 3 and numbers["truncated/a"] == 1 / 5
    assert describe([ended("done", "all", step())])["ended/max_turns"] == 0.0
    assert "ended/max_turns" not in describe([result(step())]), "no episode with turns"


def test_a_penalty_is_taken_from_rows_and_from_their_trajectories():
    samples = collect_samples([result(step(), step("b"), step(), id="r1", rewards={"a": 4.0, "b": 2.0})])
    penalize(samples, [0.5, 1.0, -0.25])
    assert [sample.reward for sample in samples] == [0.5, 0.0, 1.25]
    assert [sample.trajectory_reward for sample in samples] == [3.75, 1.0, 3.75]
    for wrong in ([1.0], [1.0, 2.0, float("nan")]):
        with pytest.raises(ValueError, match="expected 3 finite numbers, one per sample"):
            penalize(samples, wrong)


GREEDY = {
    "its own sampling": (Actor("solver", sampling=Sampling(temperature=0)), {}),
    "the call": (Actor("solver"), {"temperature": 0}),
    "one candidate": (Actor("solver"), {"top_k": 1}),
}


@pytest.mark.parametrize("case", GREEDY)
def test_greedy_completions_do_not_train(make_arena, case):
    """The likeliest token is no draw from the policy, so its log-probability is not that of what was sampled."""
    actor, options = GREEDY[case]

    class Ask(SingleTurnEpisode):
        episode_type, actor, rubric = "ask", "solver", Rubric([lambda completion: 1.0])

        async def call_model(self, actor_id, prompt, arena, **given):
            await arena.call_model("other", prompt, temperature=0.5)
            return await super().call_model(actor_id, prompt, arena, **given, **options)

        def get_prompt(self, artifact):
            return "?"

    arena = make_arena(lambda *_: "4", actors=[actor, "other"], episodes=[Ask()], credit=ConstantCredit())
    requests = [EpisodeRequest("ask", "q") for _ in range(2)]
    results = asyncio.run(arena.generate_rollouts(requests))
    arena.assign_credit(results)
    batch = arena.build_training_batch(results)
    assert (batch.actors, len(batch), batch.dropped) == (["other"], 2, {"greedy": 2})
    held_out = asyncio.run(arena.evaluation().generate_rollouts(requests))
    assert all(step.trainable and not step.facts.greedy for one in held_out for step in one.rollout.steps)


def test_what_an_override_changes_after_the_rule_is_packed(make_arena):
    """The samples that the rule saw are packed, with what the steps have by then."""

    class Ask(SingleTurnEpisode):
        episode_type, actor, rubric = "ask", "solver", Rubric([lambda completion: 1.0])

        def get_prompt(self, artifact):
            return "?"

    arena = make_arena(lambda *_: "4", episodes=[Ask()], credit=ConstantCredit())
    results = asyncio.run(arena.generate_rollouts([EpisodeRequest("ask", "q") for _ in range(5)]))
    arena.assign_credit(results)
    first, second, third, *_ = (result.rollout.steps[0] for result in results)
    first.advantage, second.advantage, third.trainable = 7.0, 0.0, False
    first.info["loss_mask"], first.reward = [0] * len(first.completion_token_ids), 3.0
    batch = arena.build_training_batch(results)
    assert batch.advantages.tolist() == [7.0, 1.0, 1.0] and batch.rewards.tolist() == [3.0, 1.0, 1.0]
    assert batch.dropped == {"zero_advantage": 1, "not_trainable": 1}
    assert not batch.loss_mask[: batch.cu_seqlens[1]].any() and batch.loss_mask.any()
    again = arena.build_training_batch(results)
    assert again.token_ids.tobytes() == batch.token_ids.tobytes() and again.metrics == batch.metrics


def test_means_by_cause_add_up_to_the_mean_of_the_total():
    """Episodes without a cause count as 0 of it; an actor that took no part in an episode counts for none."""
    counted = [
        {"gateway/calls/a": 2.0, "gateway/rewritten_rows/a": 2.0, "gateway/rewritten_rows/text/a": 2.0},
        {"gateway/calls/a": 1.0, "gateway/rewritten_rows/a": 1.0, "gateway/rewritten_rows/tools/a": 1.0},
        {"gateway/calls/a": 1.0, "gateway/rewritten_rows/a": 0.0},
        {"gateway/calls/b": 1.0, "other": 1.0},
    ]
    found = with_zero_counts(counted)
    mean = {}
    for name in {name for one in found for name in one}:
        having = [one[name] for one in found if name in one]
        mean[name] = sum(having) / len(having)
    parts = mean["gateway/rewritten_rows/text/a"] + mean["gateway/rewritten_rows/tools/a"]
    assert parts == mean["gateway/rewritten_rows/a"] == 1.0
    assert found[3] == counted[3] and "other" not in found[0]

"""The cross entropy of observations: which tokens are observed, and that nothing else counts them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from turnwise.arena import Arena, MultiTurnEpisode, Rubric
from turnwise.credit import GRPOCredit
from turnwise.inference import ScriptedClient
from turnwise.run.build import build_run
from turnwise.samples.collect import collect_samples
from turnwise.samples.pack import pack, select
from turnwise.train.config.optimization import CriticConfig, LossConfig, MasksConfig, UpdateConfig
from turnwise.train.model.policy import Policy
from turnwise.train.terms.columns.observations import ObservationMarks, Observed
from turnwise.train.terms.critic import HEAD, value_head
from turnwise.train.update.update import update_policy
from turnwise.train.validate import load_config
from turnwise.types import Actor, EpisodeRequest, GenerateResult, Rollout, RowColumn, Sampling, Step
from turnwise.utils.threads import run_to_end

UPDATE = UpdateConfig()
ROWS = np.arange(4)


def step(actor, answers, prompt, completion):
    chat = [{"role": "user", "content": "?"}, *[{"role": "assistant", "content": "!"}] * answers]
    return Step(
        actor, 0, chat, "", prompt, completion, [-1.0] * len(completion), [(len(completion), 0)], "stop", reward=1.0,
        advantage=1.0,
    )  # fmt: skip


def test_what_follows_an_actors_answer_is_observed():
    """The second call of ``a`` goes on after its answer 8, 2 with 5, 6, and so does its third one after 9. That of
    ``b`` begins with the tokens of ``a``, which is another actor. The chat of the last call has another answer, in the
    place of 9: it does not go on after the first call."""
    steps = [
        step("a", 0, [1, 7], [8, 2]),
        step("b", 1, [1, 7, 8, 2, 4], [3]),
        step("a", 1, [1, 7, 8, 2, 5, 6], [9]),
        step("a", 2, [1, 7, 8, 2, 5, 6, 9, 4], [2]),
        step("a", 2, [1, 7, 8, 2, 5, 6, 3, 4], [2]),
    ]
    results = [GenerateResult(Rollout("r", "team", None, steps), group_id=0, is_trainable=True)]
    samples = collect_samples(results)
    unmarked = pack(samples, {}, {})
    assert ObservationMarks().selected(None, results, samples) == {"observations/unmatched/a": pytest.approx(1 / 3)}
    batch = pack(samples, {}, {})
    marked = [batch.targets[span][marks_of(batch)[span] != 0].tolist() for span in spans(batch)]
    assert marked == [[], [], [5, 6], [4], []]
    chosen = select(batch, [3, 2])
    assert chosen.targets[marks_of(chosen) != 0].tolist() == [4, 5, 6]
    assert unmarked.columns == {} and select(unmarked, [3, 2]).columns == {}


def marks_of(batch):
    return batch.columns["observation_mask"].values


def spans(batch):
    return [slice(begin, end) for begin, end in zip(batch.cu_targets, batch.cu_targets[1:], strict=False)]


@pytest.fixture
def chats(random_batch):
    """Rows ``prompt, observed, completion``; the last row has nothing observed, and the third one's prompt is only
    that."""
    lengths = np.array([[3, 2, 4], [2, 4, 3], [0, 5, 2], [6, 0, 3]])
    cu_seqlens = np.concatenate([[0], lengths.sum(1).cumsum()])
    batch, rng = random_batch(0, rows=4), np.random.default_rng(0)
    kind = np.repeat(np.tile([0, 1, 2], 4), lengths.flatten())
    mask = (kind == 2).astype(np.uint8)
    mask[7] = 0
    return replace(
        batch,
        targets=rng.integers(0, 200, cu_seqlens[-1]),
        cu_targets=cu_seqlens,
        target_mask=mask,
        target_logprobs=(-rng.random(cu_seqlens[-1]) * 3).astype(np.float32) * mask,
        temperatures=np.array([0.7, 1.0, 0.7, 0.7], dtype=np.float32),
        columns={"observation_mask": Observed((kind == 1).astype(np.uint8))},
    )


def double_policy(small_model, **settings):
    return Policy("default", small_model()[0].double(), UPDATE, total_steps=100, **settings)


@pytest.mark.parametrize(
    "changes",
    [
        {"aggregation": "seq-mean-token-mean"},
        {"aggregation": "agent-mean", "entropy_coef": 0.1},
        {"type": "gspo"},
        {"type": "clip-cov"},
        {"masks": MasksConfig(second_moment=0.5, top_entropy=0.5, rejection={"seq-mean-k1": (0.2, 5.0)})},
        {"critic": CriticConfig()},
        {"baseline": "optimal_token"},
    ],
)
def test_no_other_sum_counts_observed_tokens(small_model, chats, changes):
    """Marked, and with a coefficient of next to nothing, they change nothing."""
    update = UpdateConfig(old_logprobs="recompute", ppo_epochs=2, num_minibatches=2)
    groups, results = {"group_index": RowColumn(np.zeros(4, dtype=np.int64))}, []
    for columns, coef in ((groups, 0.0), (chats.columns | groups, 1e-30)):
        batch = replace(chats, columns=columns)
        policy = double_policy(small_model)
        if "critic" in changes:
            policy.add_head(HEAD, value_head(policy).double(), 1e-2)
        config = LossConfig(observation_coef=coef, **changes)
        results.append((update_policy(policy, batch, update, config, np.random.default_rng(0)), policy))
    (plain, one), (marked, other) = results
    assert marked.pop("observation_tokens") == 20 and marked.pop("loss_observations") > 0
    assert marked.keys() == plain.keys()
    for name, value in plain.items():
        assert marked[name] == pytest.approx(value, rel=1e-5, abs=1e-8), name
    for mine, theirs in zip(one.trained_parameters(), other.trained_parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


class Digits(MultiTurnEpisode):
    """The environment answers with digits."""

    episode_type = "digits"
    actors = ("player",)
    max_turns = 5
    rubric = Rubric([lambda extras: {"player": 1.0}])

    def get_prompt(self, artifact):
        return f"{artifact}"

    async def build_messages(self, state, arena, artifact):
        chat = await self.transcript(state, arena, artifact)
        return chat if len(chat) < 9 else [{"role": "user", "content": "99"}, *chat[1:]]

    def env_response(self, state, arena, artifact):
        return "".join("0123456789"[ord(c) % 10] for c in state.last_completion_text[:3]) + "7"


def test_a_batch_marks_what_the_environment_answers(small_model):
    """The second answer is cut off, so the template closes it. The third one is half of a character, whose token stays.
    The fifth chat begins with other tokens."""
    tokenizer = small_model()[1]
    digits = [tokenizer.encode(each)[-1] for each in "0123456789"]
    end = tokenizer.encode("<|end|>")[-1]
    replies = [[digits[3], end], [digits[4]] * 4, [tokenizer.encode("\u00e9")[0], end], *[[digits[5], end]] * 2]
    client = ScriptedClient(replies * 2, tokenizer=tokenizer)
    arena = Arena(client, tokenizer, credit=GRPOCredit(center="none", scale="none"), sampling=Sampling(max_tokens=4))
    arena.add_actor(Actor("player"))
    arena.add_episode(Digits())
    arena.source = lambda: [EpisodeRequest("digits", "12")]
    assert "observation_mask" not in run_to_end(arena.step()).columns
    arena.add_stage(ObservationMarks())
    batch = run_to_end(arena.step())
    marked = [tokenizer.decode(batch.targets[span][marks_of(batch)[span] != 0]) for span in spans(batch)]
    asked = [f"<|user|>{text}<|end|><|assistant|>" for text in ("17", "2227", "37")]
    assert marked == ["", asked[0], "<|end|>" + asked[1], asked[2], ""]
    assert batch.metrics["observations/unmatched/player"] == pytest.approx(1 / 4)


def test_without_marks_or_observations_it_says_so(small_model, chats):
    policy, config = double_policy(small_model), LossConfig(observation_coef=0.1)
    with pytest.raises(ValueError, match="columns has no 'observation_mask': expected marked observations"):
        update_policy(policy, replace(chats, columns={}), UPDATE, config, np.random.default_rng(0))
    nothing = replace(chats, columns={"observation_mask": Observed(np.zeros_like(marks_of(chats)))})
    with pytest.warns(RuntimeWarning, match="loss.observation_coef, policy 'default': no chat of this batch"):
        metrics = update_policy(policy, nothing, UPDATE, config, np.random.default_rng(0))
    assert metrics["observation_tokens"] == 0 and metrics["loss_observations"] == 0


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_a_config_sets_the_marks(tmp_path, coef):
    settings = {"run_dir": tmp_path, "loss.observation_coef": coef, "task_options.blanks": [1, 1]}
    run = build_run(load_config(None, settings))
    try:
        assert ("observation_marks" in run.arena.stages) == bool(coef)
    finally:
        run.close()

"""Every term of an update by its definition in float64, in any layout and any cut into micro-batches; what it keeps of
a skipped update; the list's order; and that a new term is one file and one line."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.samples.pack import select
from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.model.policy import Policy
from turnwise.train.terms import registry
from turnwise.train.terms.columns.observations import Observed
from turnwise.train.terms.columns.sampling_mask import KeptTokens
from turnwise.train.terms.critic import HEAD
from turnwise.train.terms.registry import TERMS, classes, terms_of
from turnwise.train.terms.teaching import Teaching, forward_kl, teach
from turnwise.train.update.log import UpdateLog
from turnwise.train.update.update import accumulate, update_policy
from turnwise.types import RowColumn, SamplingMask

UPDATE = UpdateConfig()
COEF, LAM, TOP_K, DRIFT = 0.3, 0.9, 4, 10.0


@dataclass
class Token:
    """A token that trains, or is observed, in float64 and with gradients."""

    row: int
    position: int
    actor: str
    logs: torch.Tensor
    reference: torch.Tensor
    teacher: torch.Tensor
    state: torch.Tensor
    own: int
    sampled: float
    observed: bool

    @property
    def logprob(self) -> torch.Tensor:
        return self.logs[self.own]

    @property
    def entropy(self) -> torch.Tensor:
        return -(self.logs.exp() * self.logs).sum()


def tokens_of(policy: Policy, teacher: Any, batch: Any) -> list[Token]:
    found, marks = [], batch.columns["observation_mask"].values
    for row in range(len(batch)):
        start, end = batch.cu_seqlens[row : row + 2].tolist()
        ids = torch.from_numpy(batch.token_ids[start:end])
        states = policy.model.model(ids[None]).last_hidden_state[0]
        logits = policy.model.lm_head(states)
        others = [model(ids[None]).logits[0].detach() for model in (policy.reference, teacher)]
        position = 0
        for at in range(1, end - start):
            trained, observed = bool(batch.loss_mask[start + at]), bool(marks[start + at])
            if trained or observed:
                heat = 1.0 if observed else float(batch.temperatures[row])
                left_out = torch.zeros(logits.shape[1], dtype=torch.bool)
                if "sampling_mask" in batch.columns and trained:
                    left_out[[each for each in range(0, len(left_out), 3) if each != ids[at]]] = True
                scaled = [(each[at - 1] / heat).masked_fill(left_out, -torch.inf) for each in (logits, *others)]
                logs, *of_others = (torch.log_softmax(each, -1) for each in scaled)
                actor = batch.actors[batch.actor_index[row]]
                state, sampled = states[at - 1].detach(), float(batch.rollout_logprobs[start + at])
                found.append(Token(row, position, actor, logs, *of_others, state, int(ids[at]), sampled, observed))
                position += trained
    return found


def mean(values: list[torch.Tensor], count: int) -> torch.Tensor:
    return torch.stack(values).sum() / count


@dataclass
class Defined:
    """A term by its definition: what it adds to the loss, its advantages by place, and its metrics."""

    loss: torch.Tensor | float = 0.0
    advantages: Mapping[int, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


def plain(tokens: list[Token], batch: Any) -> Defined:
    return Defined()


def kl(tokens: list[Token], batch: Any) -> Defined:
    """k3: ``exp(d) - d - 1`` of the difference to the reference."""
    differences = [token.reference[token.own] - token.logprob for token in tokens]
    value = mean([difference.exp() - difference - 1 for difference in differences], len(tokens))
    return Defined(COEF * value, metrics={"kl": float(value)})


def entropy(tokens: list[Token], batch: Any) -> Defined:
    value = mean([token.entropy for token in tokens], len(tokens))
    return Defined(-COEF * value, metrics={"entropy": float(value)})


def teaching(tokens: list[Token], batch: Any) -> Defined:
    values = []
    for token in tokens:
        likely, ids = token.teacher.topk(TOP_K)
        values.append(forward_kl(likely, token.logs[ids]) * (token.actor == "second"))
    value, seconds = mean(values, len(tokens)), sum(token.actor == "second" for token in tokens)
    metrics = {"teacher_forward_kl": float(value), "first/teacher_forward_kl": 0.0}
    return Defined(COEF * value, metrics={**metrics, "second/teacher_forward_kl": float(value) * len(tokens) / seconds})


def observations(tokens: list[Token], batch: Any) -> Defined:
    observed = [token for token in tokens if token.observed]
    value = mean([-token.logprob for token in observed], len(observed))
    metrics = {"loss_observations": float(value), "observation_tokens": len(observed)}
    return Defined(COEF * value, metrics=metrics)


def masks(tokens: list[Token], batch: Any) -> Defined:
    """Rows with a negative advantage that are on average less likely than when sampled, by ``DRIFT``, have none."""
    drifts: dict[int, list[float]] = {}
    for token in tokens:
        drifts.setdefault(token.row, []).append(token.sampled - float(token.logprob))
    dropped = {row for row, own in drifts.items() if batch.advantages[row] < 0 and np.mean(own) > DRIFT}
    assert 0 < len(dropped) < sum(float(batch.advantages[row]) < 0 for row in drifts)
    advantages = {place: 0.0 for place, token in enumerate(tokens) if token.row in dropped}
    return Defined(advantages=advantages, metrics={"masked/off_policy": len(advantages) / len(tokens)})


def critic(tokens: list[Token], batch: Any) -> Defined:
    """The head's weights are 0 and its bias is the mean reward, so each value is that; GAE whitened by actor."""
    value = float(np.mean([batch.advantages[token.row] for token in tokens]))
    raw: dict[int, float] = {}
    for place in reversed(range(len(tokens))):
        last = place + 1 == len(tokens) or tokens[place + 1].row != tokens[place].row
        # Each value is the next one's, so only the last token has a temporal difference.
        raw[place] = float(batch.advantages[tokens[place].row]) - value if last else LAM * raw[place + 1]
    advantages = {}
    for actor in batch.actors:
        own = [place for place, token in enumerate(tokens) if token.actor == actor]
        spread = np.std([raw[place] for place in own], ddof=1)
        advantages |= {place: (raw[place] - np.mean([raw[each] for each in own])) / spread for place in own}
    # The targets are raw + value: half the mean of squared errors, of which the head has the gradient.
    error = torch.tensor([-raw[place] for place in range(len(tokens))], dtype=torch.float64)
    states = torch.stack([token.state for token in tokens])
    metrics = {"value_loss": float(error.square().mean() / 2), "value_mean": value, "explained_variance": 0.0}
    return Defined(advantages=advantages, metrics={**metrics, HEAD: (error @ states / len(error), error.mean())})


def baseline(tokens: list[Token], batch: Any) -> Defined:
    """``G - B``, with B the mean of the group's G at this position, each weighed by its energy so far."""
    energies: list[float] = []
    for place, token in enumerate(tokens):
        before = energies[-1] if place and tokens[place - 1].row == token.row else 0.0
        square = float(token.logs.exp().square().sum())
        energies.append(before + 1 - 2 * float(token.logprob.exp()) + square)
    rewards = [float(batch.advantages[token.row]) for token in tokens]
    advantages = {}
    for place, token in enumerate(tokens):
        groups = batch.columns["group_index"].values
        key = groups[token.row], token.position
        like = [at for at, each in enumerate(tokens) if (groups[each.row], each.position) == key]
        mean_of_like = sum(energies[at] * rewards[at] for at in like) / sum(energies[at] for at in like)
        advantages[place] = rewards[place] - (mean_of_like if len(like) > 1 else 0.0)
    taken = [reward - advantages[place] for place, reward in enumerate(rewards)]
    return Defined(advantages=advantages, metrics={"token_baseline": float(np.mean(taken))})


CASES: dict[str, tuple[dict[str, Any], Callable[[list[Token], Any], Defined]]] = {
    "masks": ({"masks": {"off_policy": DRIFT}}, masks),
    "kl": ({"kl": {"coef": COEF}}, kl),
    "policy_loss": ({}, plain),
    "entropy": ({"entropy_coef": COEF}, entropy),
    "teaching": ({}, teaching),
    "critic": ({"critic": {"lam": LAM}}, critic),
    "observations": ({"observation_coef": COEF}, observations),
    "baseline": ({"baseline": "optimal_token"}, baseline),
    "routing_replay": ({}, plain),
    "sampling_mask": ({"kl": {"coef": COEF}}, kl),
}
"""Settings and definition of each term, by its name. :data:`ADAPTIVE` has those whose state an update changes."""


@pytest.fixture
def made(small_model: Any, tree_batch: Any) -> Callable[..., tuple[Policy, Any, Any]]:
    """A policy in float64 that has left its reference, a teacher, and rows with shared prompts and observed tokens."""

    def make(name: str, layout: str = "auto") -> tuple[Policy, Any, Any]:
        model, teacher = (small_model(seed)[0].double() for seed in (0, 3))
        for each in (model, teacher):
            with torch.no_grad():
                each.lm_head.weight.mul_(20)  # far from uniform
        policy = Policy("default", model, UPDATE, total_steps=9, with_reference=True, layout=layout)
        with torch.no_grad():
            policy.model.lm_head.weight.mul_(0.9)
        if name == "teaching":
            frozen = Policy("teacher", teacher, UPDATE, total_steps=1, trainable=False, layout=layout)
            teach(policy, Teaching({"second": frozen}, TOP_K, COEF))
        batch, rng = select(tree_batch(1), range(14)), np.random.default_rng(0)
        observed = (rng.random(len(batch.token_ids)) < 0.2) & (batch.loss_mask == 0) & (name == "observations")
        temperatures = np.resize(np.array([1.0, 0.7], np.float32), len(batch))
        groups = RowColumn(rng.integers(0, 4, len(batch)))
        columns: dict[str, Any] = {"group_index": groups, "observation_mask": Observed(observed.astype(np.uint8))}
        if name == "sampling_mask":  # two thirds of the tokens, and the sampled one
            size = model.config.vocab_size
            kept = [sorted({each for each in range(size) if each % 3} | {int(token)}) for token in batch.targets]
            mask = SamplingMask.of([each if on else [] for each, on in zip(kept, batch.target_mask, strict=True)])
            columns["sampling_mask"] = KeptTokens(mask.counts, mask.ids)
        return policy, teacher, replace(batch, temperatures=temperatures, columns=columns)

    return make


def test_the_table_has_every_term() -> None:
    assert list(CASES) == [term.name for term in classes(TERMS)], "CASES needs each term's definition, in their order"


LAYOUTS = [("padded", 30), ("packed", 1), ("packed", 10_000), ("trie", 60)]


@pytest.mark.parametrize(
    ("name", "layout", "budget"),
    [(name, *layout) for name in CASES for layout in LAYOUTS if (name, layout[0]) != ("critic", "padded")],
)
def test_the_gradient_is_that_of_the_definition(made: Any, name: str, layout: str, budget: int) -> None:
    """The first gradient of plain policy gradient, ``-A * log p`` over all tokens, with the term."""
    settings, define = CASES[name]
    policy, teacher, batch = made(name, layout)
    config, rows = LossConfig(type="reinforce", **settings), np.arange(len(batch))
    # By the definition.
    tokens = tokens_of(policy, teacher, batch)
    trained = [token for token in tokens if not token.observed]
    defined = define(tokens, batch)
    losses = [
        -defined.advantages.get(place, float(batch.advantages[token.row])) * token.logprob
        for place, token in enumerate(trained)
    ]
    loss = mean(losses, len(trained)) + defined.loss
    loss.backward()
    wanted = [parameter.grad.clone() for parameter in policy.model.parameters()]
    policy.discard_gradient()
    # By the trainer.
    terms = terms_of(policy).begin(config, batch.actors)
    log = UpdateLog(batch.actors, terms.weights)
    prepared = terms.prepare(policy, batch, rows, budget)
    micros = policy.cut(prepared, rows, budget)
    accumulate(policy, micros, [micro.rollout_logprobs_N for micro in micros], terms, log)
    for parameter, gradient in zip(policy.model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=2e-6)
    assert max(float(gradient.abs().max()) for gradient in wanted) > 1e-2
    log.join(policy.ranks)
    log.add_step(1.0)
    measured = log.result() | terms.metrics(log.result(), len(rows))
    assert measured["loss"] == pytest.approx(float(loss), rel=1e-4, abs=1e-5)
    heads = dict(defined.metrics)
    if (of_head := heads.pop(HEAD, None)) is not None:
        head = policy.heads[HEAD].module
        torch.testing.assert_close(head.weight.grad[0].double(), of_head[0], rtol=1e-3, atol=1e-5)
        assert float(head.bias.grad) == pytest.approx(float(of_head[1]), abs=1e-5)
    assert {key: measured[key] for key in heads} == pytest.approx(heads, rel=1e-3, abs=1e-5)


ADAPTIVE = {
    "kl": {"kl": {"coef": 0.1, "target": 1e-3, "horizon": 10}},
    "entropy": {"entropy_coef": 0.02, "entropy_target": 9.0, "entropy_step": 0.01},
}
"""Terms whose state an update changes, and the settings beside those of :data:`CASES` with which it does."""


@pytest.mark.parametrize("name", CASES)
def test_a_skipped_update_leaves_the_state(made: Any, name: str) -> None:
    """A sound update afterwards is that of a policy which never skipped one."""
    config = LossConfig(**(CASES[name][0] | ADAPTIVE.get(name, {})))
    policy, _, batch = made(name)
    other, *_ = made(name)
    torn = copy.deepcopy(batch)
    torn.target_logprobs[torn.target_mask != 0] = np.nan
    before = terms_of(policy).state_dict()
    skipped = update_policy(policy, torn, UPDATE, config, np.random.default_rng(0))
    assert skipped["updates"] == 0 and terms_of(policy).state_dict() == before
    metrics = [update_policy(each, batch, UPDATE, config, np.random.default_rng(0)) for each in (policy, other)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-6) and metrics[0]["updates"] == 1
    changed = terms_of(policy).state_dict()
    assert changed == terms_of(other).state_dict() and (changed != before) == (name in ADAPTIVE or name == "kl")
    for mine, theirs in zip(policy.trained_parameters(), other.trained_parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


# -- the list ----------------------------------------------------------------------------------------------------------
TOY = """
from turnwise.train.terms.term import Added, Term

class Toy(Term):
    name = "toy"
    after = ("policy_loss",)
    batches = 0

    def loss(self, read, part):
        square = part.aggregate(read.logprobs_N.square())
        return Added(0.5 * square, {"toy_square": square.detach()})

    def metrics(self, measured, rows):
        self.batches += 1
        return {"toy_batches": self.batches}

    def state_dict(self):
        return {"toy_batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state.get("toy_batches", 0)
"""


def test_a_new_term_is_one_file_and_one_line(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from turnwise.train.checkpoint.checkpoint import load_checkpoint, save_checkpoint

    plain_policy, _, batch = made("policy_loss")
    without = update_policy(plain_policy, batch, UPDATE, LossConfig(), np.random.default_rng(0))
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr("turnwise.train.terms.__path__", [*sys.modules["turnwise.train.terms"].__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "TERMS", (*TERMS, "toy:Toy"))
    policy, other = made("policy_loss")[0], made("policy_loss")[0]
    metrics = update_policy(policy, batch, UPDATE, LossConfig(), np.random.default_rng(0))
    assert metrics["toy_batches"] == 1
    assert metrics["loss"] == pytest.approx(without["loss"] + 0.5 * metrics["toy_square"], rel=1e-5)
    load_checkpoint(save_checkpoint(tmp_path, 1, {"default": policy}, {}), {"default": other})
    again = update_policy(other, batch, UPDATE, LossConfig(), np.random.default_rng(0))
    assert again["toy_batches"] == 2 and "toy_square" not in without
    sys.modules.pop("turnwise.train.terms.toy")


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (("policy_loss:PolicyLossTerm", "kl:KLTerm"), "'kl' on the other side of .'policy_loss'."),
        (("entropy:EntropyBonus", "policy_loss:PolicyLossTerm"), "'entropy' on the other side of .'policy_loss'."),
        (("kl:KLTerm", "kl:KLTerm"), "one name for each"),
    ],
)
def test_the_order_of_the_list_is_checked(terms: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classes(terms)


def test_two_terms_that_replace_the_advantages_are_refused(made: Any) -> None:
    policy, _, batch = made("critic")
    config = LossConfig(critic={}, baseline="optimal_token")
    with pytest.raises(ValueError, match=r"terms \['critic', 'baseline'\]: expected one that replaces"):
        update_policy(policy, batch, UPDATE, config, np.random.default_rng(0))

"""Forward KL of local teachers: a loss term over the most likely tokens of the teacher at each position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnwise.train.config.optimization import LossConfig
from turnwise.train.config.schema import TrainConfig
from turnwise.train.model.policy import Policy
from turnwise.train.terms.registry import teachers_replace_rewards, terms_of
from turnwise.train.terms.term import Added, Part, Term
from turnwise.types import Actor, Sample
from turnwise.types.passes import ENTROPIES, Needs, Read

LEAST_REST = 1e-6
"""Smallest probability of the tokens that are not among the most likely ones."""


METRIC = "teacher_forward_kl"
"""Metric: the forward KL per token of the teachers."""


@dataclass(frozen=True, slots=True)
class Teaching:
    """Teachers of a policy's actors, by actor; ``coef`` times the KL over their ``top_k`` tokens joins the loss."""

    teachers: Mapping[str, Policy]
    top_k: int
    coef: float


def teach(policy: Policy, teaching: Teaching) -> None:
    """Let the ``teaching`` train ``policy`` from its next update on."""
    terms_of(policy)["teaching"].teaching = teaching
    policy.reads = list(teaching.teachers.values())


def attach_teachers(policies: Mapping[str, Policy], actors: Sequence[Actor], config: TrainConfig) -> None:
    """Give each policy the teachers of its actors, if their forward KL is in the loss (``distill.top_k``).

    Every rank calls it, and knows then which actors learn from their teachers alone.
    """
    teachers_replace_rewards(policies, () if config.distill.add_to_reward else config.teachers())
    policy_of = {actor.id: actor.policy for actor in actors}
    by_policy: dict[str, dict[str, Policy]] = {}
    for actor, teacher in config.teachers().items() if config.distill.top_k else ():
        by_policy.setdefault(policy_of[actor], {})[actor] = policies[teacher]
    for name, teachers in by_policy.items():
        teach(policies[name], Teaching(teachers, config.distill.top_k, config.distill.coef))


class TeacherKL(Term):
    """Adds the KL of the teachers' distributions from the policy's, which is 0 for tokens of actors without a teacher,
    and for tokens that were sampled from some tokens alone. :func:`teach` sets the teachers."""

    name = "teaching"
    after = ("policy_loss",)
    needs = ENTROPIES
    teaching: Teaching | None = None

    def is_on(self, config: LossConfig) -> bool:
        return self.teaching is not None

    def beside_advantage(self, config: LossConfig) -> list[str]:
        return ["distill.top_k"] if self.teaching is not None else []

    def trains(self, policy: Policy, sample: Sample) -> bool:
        return self.teaching is not None and sample.actor in self.teaching.teachers

    def others(self, policy: Policy, part: Part) -> Tensor | None:
        """Read the most likely tokens of the teachers, and return their ids ``[N, k]``."""
        assert self.teaching is not None
        micro, teachers, top_k = part.micro, self.teaching.teachers, self.teaching.top_k
        ids_Nk = torch.zeros(len(micro.targets_N), top_k, dtype=torch.int64, device=micro.targets_N.device)
        self._top_Nk = torch.zeros(ids_Nk.shape, device=ids_Nk.device)
        self._taught_N = torch.zeros(len(ids_Nk), dtype=torch.bool, device=ids_Nk.device)
        free_N: Any = True if micro.allowed is None else micro.allowed.mask_index < 0
        for column in micro.columns.values():
            if (restriction := column.restriction(slice(None))) is not None:
                free_N = free_N & ~restriction.where_n
        likely = Needs(logprobs=False, top_k=top_k, rows=policy.forward.rows)
        for teacher in {id(each): each for each in teachers.values()}.values():
            pupils = [index for index, name in enumerate(self.actors) if teachers.get(name) is teacher]
            own_N = torch.isin(micro.actor_ids_B, micro.actor_ids_B.new_tensor(pupils))[micro.row_N] & free_N
            if own_N.any() or policy.ranks.size > 1:  # the ranks of a sharded teacher make each pass together
                teacher.model.eval()
                with torch.no_grad():
                    read = teacher.read(micro.for_another_model(), likely)
                ids_Nk[own_N], self._top_Nk[own_N] = read.top_ids_Nk[own_N], read.top_Nk[own_N].to(self._top_Nk.dtype)
                self._taught_N |= own_N
        return ids_Nk

    def loss(self, read: Read, part: Part) -> Added | None:
        assert self.teaching is not None
        kl_N = torch.where(self._taught_N, forward_kl(self._top_Nk, read.others_Nk), 0.0)
        loss = self.teaching.coef * part.aggregate(kl_N)
        mask_N, actor_N = part.micro.mask_N, part.micro.actor_ids_B[part.micro.row_N]
        sums, tokens = (
            torch.zeros(len(self.actors), device=kl_N.device).index_add_(0, actor_N, values.float())
            for values in (kl_N.detach() * mask_N, mask_N)
        )
        return Added(loss, {METRIC: sums.sum() / tokens.sum().clamp_min(1)}, {METRIC: sums / tokens.clamp_min(1)})


def forward_kl(teacher_Nk: Tensor, student_Nk: Tensor) -> Tensor:
    """Return ``KL(teacher || student)`` ``[N]``, in nats, with all but the teacher's ``k`` tokens joined to one.

    Both have the log-probs of these ``k`` tokens. Joining makes it a lower bound of the KL over all tokens, which is
    never negative.

    Example: ``forward_kl(torch.tensor([[0.8]]).log(), torch.tensor([[0.5]]).log())`` is
    ``0.8 log(0.8 / 0.5) + 0.2 log(0.2 / 0.5) = 0.1927``
    """
    kl_N = (teacher_Nk.exp() * (teacher_Nk - student_Nk)).sum(-1)
    rest, own_rest = (1 - each.exp().sum(-1) for each in (teacher_Nk, student_Nk))
    log_ratio = rest.clamp_min(LEAST_REST).log() - own_rest.clamp_min(LEAST_REST).log()
    return kl_N + torch.where(rest > LEAST_REST, rest * log_ratio, 0.0)

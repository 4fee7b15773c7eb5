"""Forward KL of local teachers: a loss term over the most likely tokens of the teacher at each position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.train.model.head import Needs
from turnwise.train.model.micro_batch import MicroBatch
from turnwise.train.model.policy import Policy

LEAST_REST = 1e-6
"""Smallest probability of the tokens that are not among the most likely ones."""


@dataclass(frozen=True, slots=True)
class Teaching:
    """Teachers of a policy's actors, by actor; ``coef`` times the KL over their ``top_k`` tokens joins the loss."""

    teachers: Mapping[str, Policy]
    top_k: int
    coef: float

    def logprobs(self, policy: Policy, micro: MicroBatch, actors: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs ``[N]`` and entropies ``[N]`` of ``policy``, and the KL ``[N]`` of the teachers from it.

        The KL is 0 for tokens of actors without a teacher, and for tokens under a grammar.
        """
        ids_Nk = torch.zeros(len(micro.targets_N), self.top_k, dtype=torch.int64, device=micro.targets_N.device)
        top_Nk = torch.zeros(ids_Nk.shape, device=ids_Nk.device)
        taught_N = torch.zeros(len(ids_Nk), dtype=torch.bool, device=ids_Nk.device)
        free_N = True if micro.mask_index_N is None else micro.mask_index_N < 0
        for teacher in {id(each): each for each in self.teachers.values()}.values():
            pupils = [index for index, name in enumerate(actors) if self.teachers.get(name) is teacher]
            own_N = torch.isin(micro.actor_ids_B, micro.actor_ids_B.new_tensor(pupils))[micro.row_N] & free_N
            if own_N.any() or policy.ranks.size > 1:  # the ranks of a sharded teacher make each pass together
                teacher.model.eval()
                likely = Needs(logprobs=False, top_k=self.top_k, rows=policy.forward.rows)
                with torch.no_grad():
                    read = teacher.read(micro.without_experts(), likely)
                ids_Nk[own_N], top_Nk[own_N] = read.top_ids_Nk[own_N], read.top_Nk[own_N].to(top_Nk.dtype)
                taught_N |= own_N
        read = policy.read(micro, Needs(entropy=True, others_Nk=ids_Nk))
        logprobs_N, entropies_N, others_Nk = read.logprobs_N, read.entropies_N, read.others_Nk
        return logprobs_N, entropies_N, torch.where(taught_N, forward_kl(top_Nk, others_Nk), 0.0)


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

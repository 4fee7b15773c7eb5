"""The policy loss by its definition: a batch, and what every variant makes of it token by token, in Python floats."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from turnwise import ops

Pair = tuple[float, float]  # a value, and its derivative by the log-probability
CLIPPED = ("clip_fraction_low", "clip_fraction_high", "dual_clip_fraction")


def clamp(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


# ---------------------------------------------------------------------------------------------------------------------
# A row
# ---------------------------------------------------------------------------------------------------------------------
def surrogate(ratio: float, a: float, low: float, high: float) -> Pair:
    """PPO's clipped loss, and its derivative by the log-ratio."""
    plain, clipped = -a * ratio, -a * clamp(ratio, 1 - low, 1 + high)
    return max(plain, clipped), (plain if plain >= clipped else 0.0)


def policy_terms(
    v: ops.Variant, lp: list[float], old: list[float], a: list[float], w: list[float], chosen: list[bool]
) -> list[Pair]:
    """The terms of a row's trained tokens, ``w`` their importance weights, before KL and aggregation."""
    if isinstance(v, ops.VESPO):  # which has the weights in its ratio
        total = sum(clamp(x - y, -20, 20) for x, y in zip(lp, old, strict=True))
        total += sum(clamp(math.log(y) if y else -math.inf, math.log(1e-8), 20) for y in w)
        total = clamp(total, math.log(1e-8), 20)
        terms = []
        for x, adv in zip(lp, a, strict=True):
            k, lam = (v.k_positive, v.lam_positive) if adv >= 0 else (v.k_negative, v.lam_negative)
            phi = math.exp(lam + k * total - lam * math.exp(total))
            terms.append((-phi * adv * x, -phi * adv))
        return terms
    tokens = zip(lp, old, a, chosen, strict=True)
    by_row = isinstance(v, ops.GSPO | ops.GMPO)
    terms = _row_terms(v, lp, old, a) if by_row else [_token_term(v, *token) for token in tokens]
    return [(loss * y, slope * y) for (loss, slope), y in zip(terms, w, strict=True)]


def _row_terms(v: ops.GSPO | ops.GMPO, lp: list[float], old: list[float], a: list[float]) -> list[Pair]:
    n = max(len(lp), 1)
    if isinstance(v, ops.GSPO):
        whole = math.exp(clamp(sum(x - y for x, y in zip(lp, old, strict=True)) / n, -20, 20))
        return [surrogate(whole, adv, v.low, v.high) for adv in a]
    d = [clamp(x - y, -20, 20) for x, y in zip(lp, old, strict=True)]
    bounded = [min(x, v.high) if adv > 0 else max(x, -v.low) if adv < 0 else 0.0 for x, adv in zip(d, a, strict=True)]
    loss = -sum(a) / n * math.exp(sum(bounded) / n)
    return [(loss, loss if adv != 0 and x == b else 0.0) for x, b, adv in zip(d, bounded, a, strict=True)]


def _token_term(v: ops.Variant, lp: float, old: float, a: float, chosen: bool) -> Pair:
    d = clamp(lp - old, -20, 20)
    ratio = math.exp(d)
    match v:
        case ops.Clip():
            loss, slope = surrogate(ratio, a, v.low, v.high)
            dual = v.dual_clip is not None and a < 0 and loss > -a * v.dual_clip
            return (-a * v.dual_clip, 0.0) if dual else (loss, slope if abs(lp - old) < 20 else 0.0)
        case ops.CISPO():
            weight = clamp(ratio, 1 - v.low, 1 + v.high)
            return -weight * a * lp, -weight * a
        case ops.GPG() | ops.Reinforce():
            return -a * lp, -a
        case ops.SAPO():
            tau = v.tau_positive if a > 0 else v.tau_negative
            gate = 1 / (1 + math.exp(clamp(-tau * (ratio - 1), -700, 700)))
            return -a * gate * 4 / tau, -a * 4 * gate * (1 - gate) * ratio
        case ops.ClipCov():
            return (0.0, 0.0) if chosen else surrogate(ratio, a, v.low, v.high)
        case ops.KLCov():
            return -a * ratio + chosen * v.coef * abs(d), -a * ratio + chosen * v.coef * math.copysign(1, d)
        case ops.DRO():
            return -a * lp + v.beta / 2 * (lp - old) ** 2, -a + v.beta * (lp - old)
    assert isinstance(v, ops.DPPO)
    p, q = math.exp(lp), math.exp(old)
    moved = abs(p - q) if v.divergence == "tv" else q * (old - lp) + (1 - q) * math.log((1 - q) / (1 - p))
    low, high, cap = v.bounds
    too_far = (a > 0 and p > q and moved > high) or (a < 0 and p < q and moved > low)
    weight = 0.0 if too_far else min(ratio, cap)
    return -a * weight * lp, -a * weight


def kl_term(kind: str, lp: float, ref: float) -> Pair:
    """An estimate and its derivative; kinds with ``+`` have that of k2."""
    d = ref - lp
    match kind.rstrip("+"):
        case "k1":
            value, slope = -d, 1.0
        case "abs":
            value, slope = abs(d), -math.copysign(1, d)
        case "k2":
            value, slope = d * d / 2, -d
        case _:
            value = math.exp(clamp(d, -20, 20)) - clamp(d, -20, 20) - 1
            slope = 1 - math.exp(d) if value < 10 and abs(d) < 20 else 0.0
            value = min(value, 10.0)
    return value, (-d if kind.endswith("+") else slope)


def kl_terms(kl: ops.KL, v: ops.Variant, lp: list[float], old: list[float], ref: list[float]) -> list[Pair]:
    """A row's KL terms, weighed by the ratio, which is the row's in GSPO."""
    terms = [kl_term(kl.estimator, x, y) for x, y in zip(lp, ref, strict=True)]
    if not kl.importance_weighted or not lp:
        return terms
    d = [clamp(x - y, -20, 20) for x, y in zip(lp, old, strict=True)]
    if isinstance(v, ops.GSPO):
        ratio, mean = math.exp(sum(d) / len(d)), sum(k for k, _ in terms) / len(d)
        return [(ratio * k, ratio * (mean + slope)) for k, slope in terms]
    pairs = zip(d, lp, old, terms, strict=True)
    return [(math.exp(x) * k, math.exp(x) * (k * (abs(y - z) < 20) + slope)) for x, y, z, (k, slope) in pairs]


# ---------------------------------------------------------------------------------------------------------------------
# A batch, and a call
# ---------------------------------------------------------------------------------------------------------------------
def run(arguments: dict[str, Any], **changes: Any) -> tuple[Any, torch.Tensor]:
    """The result, and the gradient under a loss scale of 2."""
    arguments = {**arguments, **changes}
    logprobs = arguments.pop("logprobs").clone().requires_grad_()
    result = ops.policy_loss(logprobs, **arguments)
    (result.loss * 2).backward()
    return result, logprobs.grad / 2


@dataclass
class Batch:
    """Padded rows ``[B, T]`` and the options of one call, in float64."""

    logprobs: Tensor
    old: Tensor
    ref: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor
    actors: Tensor
    num_actors: int = 3
    max_length: int = 40
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def draw(
        cls, seed: int, rows: int = 9, width: int = 37, *, spread: float = 0.5, per_token: bool = False, **options: Any
    ) -> Batch:
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        logprobs = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 4
        lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
        mask = (torch.arange(width)[None] < lengths) & (torch.rand(rows, width, generator=generator) < 0.8)
        if rows > 2:
            mask[1] = False
        return cls(
            logprobs=logprobs,
            old=logprobs + spread * noise(rows, width),
            ref=logprobs + spread * noise(rows, width),
            rollout=logprobs + 0.3 * noise(rows, width),
            advantages=noise(rows, width) if per_token else noise(rows),
            mask=mask,
            actors=torch.randint(0, 3, (rows,), generator=generator),
            options=options,
        )

    @property
    def kept(self) -> Tensor:
        """The places of packed streams: a row ends with its last trained token, masked ones before stay."""
        return self.mask.flip(1).cumsum(1).flip(1) > 0

    def padded(self, dtype: torch.dtype = torch.float64, **changes: Any) -> dict[str, Any]:
        """Return the arguments of ``policy_loss`` in padded form."""
        options = {**self.options, **changes}
        arguments = {
            "logprobs": self.logprobs.to(dtype),
            "old_logprobs": self.old.to(dtype),
            "advantages": self.advantages.to(dtype),
            "mask": self.mask,
            "actor_ids": self.actors,
            "num_actors": self.num_actors,
            "max_length": self.max_length,
            **options,
        }
        if options.get("kl"):
            arguments["ref_logprobs"] = self.ref.to(dtype)
        if options.get("correction"):
            arguments["rollout_logprobs"] = self.rollout.to(dtype)
        return arguments

    def packed(self, dtype: torch.dtype = torch.float64, **changes: Any) -> dict[str, Any]:
        """Return the arguments as packed streams."""
        arguments = self.padded(dtype, **changes)
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.shape == self.mask.shape:
                arguments[name] = value[self.kept]
        arguments["cu_seqlens"] = torch.nn.functional.pad(self.kept.sum(1).cumsum(0), (1, 0))
        return arguments

    def selection(self, v: ops.ClipCov | ops.KLCov) -> Tensor:
        """The tokens singled out. ClipCov draws only when there are more candidates than it may take."""
        a = self.advantages if self.advantages.dim() == 2 else self.advantages[:, None].expand_as(self.logprobs)
        covariance = (a - a[self.mask].mean()) * (self.logprobs - self.logprobs[self.mask].mean())
        if isinstance(v, ops.KLCov):
            count = max(1, int(v.share * int(self.mask.sum())))
            return self.mask & (covariance >= covariance[self.mask].sort(descending=True).values[count - 1])
        ratio = (self.logprobs - self.old).exp()
        free = -a * ratio >= -a * ratio.clamp(1 - v.low, 1 + v.high)
        return self.mask & free & (covariance > v.lower) & (covariance < v.upper)

    def expected(self, aggregation: str = "token-mean") -> tuple[float, Tensor, dict[str, float]]:
        """Compute loss, gradient and metrics. Clip fractions are among them for a `Clip` alone."""
        v: ops.Variant = self.options.get("variant") or self.options.get("clip") or ops.Clip()
        kl: ops.KL | None = self.options.get("kl")
        correction: ops.ImportanceCorrection | None = self.options.get("correction")
        chosen = self.selection(v) if isinstance(v, ops.ClipCov | ops.KLCov) else torch.zeros_like(self.mask)
        shares, loss, grad = self._shares(aggregation), 0.0, torch.zeros_like(self.logprobs)
        tokens: list[dict[str, float]] = []
        for b, row in enumerate(self.mask.tolist()):
            at = [t for t, trains in enumerate(row) if trains]
            a = [float(self.advantages[b] if self.advantages.dim() == 1 else self.advantages[b, t]) for t in at]
            lp, old, ref = ([float(x[b, t]) for t in at] for x in (self.logprobs, self.old, self.ref))
            mismatch = [float(self.old[b, t] - self.rollout[b, t]) for t in at]
            raw = [sum(mismatch)] * len(at) if correction and correction.level == "sequence" else mismatch
            raw = [math.exp(clamp(x, -20, 20)) for x in raw]
            low, high = (correction and correction.bounds) or (0.0, math.inf)
            kept = [low <= x <= high for x in raw]
            w = [k * min(x, correction.cap) if correction else 1.0 for x, k in zip(raw, kept, strict=True)]
            terms = policy_terms(v, lp, old, a, w, [bool(chosen[b, t]) for t in at])
            estimates = kl_terms(kl, v, lp, old, ref) if kl else [(0.0, 0.0)] * len(at)
            for i, t in enumerate(at):
                coef = kl.coef if kl else 0.0
                loss += shares[b] * (terms[i][0] + coef * estimates[i][0])
                grad[b, t] = shares[b] * (terms[i][1] + coef * estimates[i][1])
                d = clamp(lp[i] - old[i], -20, 20)
                ratio = math.exp(d)
                found = {"approx_kl_k1": -d, "approx_kl_k3": ratio - 1 - d, "ratio_mean": ratio}
                if isinstance(v, ops.Clip):
                    bounds = a[i] < 0 and ratio < 1 - v.low, a[i] > 0 and ratio > 1 + v.high
                    dual = v.dual_clip is not None and a[i] < 0 and max(ratio, 1 - v.low) > v.dual_clip
                    found |= dict(zip(CLIPPED, (*bounds, dual), strict=True))
                if kl:
                    found["kl"] = kl_term(kl.estimator, lp[i], ref[i])[0]
                if correction:
                    found |= {"mismatch_kl": -mismatch[i], "rejected": not kept[i], "weight": w[i]}
                tokens.append(found)
        return loss, grad, self._metrics(tokens)

    def _shares(self, aggregation: str) -> list[float]:
        """The weight of a row's tokens in the loss."""
        sizes = self.mask.sum(1).tolist()
        rows = max(sum(size > 0 for size in sizes), 1)
        match aggregation:
            case "token-mean":
                return [1 / max(sum(sizes), 1)] * len(sizes)
            case "seq-mean-token-sum":
                return [1 / rows] * len(sizes)
            case "seq-mean-token-mean":
                return [1 / rows / max(size, 1) for size in sizes]
            case "seq-mean-token-sum-norm":
                return [1 / self.max_length] * len(sizes)
        of_actor = [0] * self.num_actors
        for actor, size in zip(self.actors.tolist(), sizes, strict=True):
            of_actor[actor] += size
        trained = max(sum(size > 0 for size in of_actor), 1)
        return [1 / trained / max(of_actor[actor], 1) for actor in self.actors.tolist()]

    def _metrics(self, tokens: list[dict[str, float]]) -> dict[str, float]:
        n = max(len(tokens), 1)
        names = [name for name in (tokens[0] if tokens else {}) if name != "weight"]
        metrics = {name: sum(t[name] for t in tokens) / n for name in names}
        metrics["tokens"] = float(len(tokens))
        metrics["ratio_max"] = max((t["ratio_mean"] for t in tokens), default=0.0)
        if tokens and "weight" in tokens[0]:
            weights = [t["weight"] for t in tokens]
            squares = sum(w * w for w in weights)
            metrics["ess"] = sum(weights) ** 2 / (n * squares) if squares else 0.0
        return metrics

"""The table of ops: how each is called, and the axes of its streams. `test_contracts.py` holds every entry to the same.

A stream may lie in a larger buffer whose other elements would change the result: NaN, a mask's ones, ids out of range.
An element read from the wrong place shows as a wrong number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnwise import ops


class Size(NamedTuple):
    rows: int
    width: int


# More tokens than a tile of each backend's kernels takes, and no multiple of any: the CPU's, CUDA's and Triton's.
LONG, LARGE = Size(2, 1037), Size(3, 181)
MIDDLE, SMALL = Size(3, 75), Size(2, 5)
DEGENERATE = (Size(0, 7), Size(4, 0), Size(1, 9), Size(6, 1), Size(1, 1))
MANY = Size(24, 900)  # more than one piece of work for several threads
HIDDEN, VOCABULARY, IDS, OUT_OF_RANGE = 12, 150, 3, 10_000


# ---------------------------------------------------------------------------------------------------------------------
# Ops
# ---------------------------------------------------------------------------------------------------------------------
class Case(NamedTuple):
    """An op: ``call(streams, backend=...)`` gives its results. ``axes`` of each stream: sequences ``B``, tokens of each
    ``T``, of all ``N``, boundaries ``C``, hidden size ``H``, vocabulary ``V``, actors ``A``. ``leaves`` get a gradient
    and stay float32. ``many`` is a size that several threads share."""

    call: Callable[..., Sequence[Tensor]]
    axes: Mapping[str, str]
    leaves: Sequence[str] = ()
    size: Size = LARGE
    many: Size = MANY
    atol: float = 3e-6


def loss(function: Callable[..., Any], *order: str, **options: Any) -> Callable[..., list[Tensor]]:
    """A call of a loss; ``order``: its first arguments."""

    def call(s: Mapping[str, Any], **more: Any) -> list[Tensor]:
        rest = {name: value for name, value in s.items() if name not in order}
        if "actor_ids" in s:
            rest["num_actors"] = IDS
        got = function(*(s[name] for name in order), **{**rest, **options, **more})
        return [got.loss, *got.metrics.values(), *getattr(got, "actor_metrics", {}).values(), *got[3:]]

    return call


def packed(axes: Mapping[str, str]) -> dict[str, str]:
    return {**{name: axis.replace("BT", "N") for name, axis in axes.items()}, "cu_seqlens": "C"}


def both(name: str, case: Case) -> dict[str, Case]:
    return {name: case, f"{name}, packed": case._replace(axes=packed(case.axes))}


STREAMS = {"logprobs": "BT", "old_logprobs": "BT", "mask": "BT"}
MORE = {"ref_logprobs": "BT", "rollout_logprobs": "BT", "actor_ids": "B", "normalizer": "A"}
ALL = {**STREAMS, **MORE, "entropy": "BT"}
POLICY = (ops.policy_loss, "logprobs", "old_logprobs", "advantages")
GROUPED = (ops.grouped_policy_loss, "logprobs", "old_logprobs", "token_rewards", "group_ids")
LINEAR = (ops.linear_policy_loss, "hidden", "weight", "targets", "old_logprobs", "advantages")
HEAD = {"hidden": "NH", "weight": "VH", "bias": "V", "targets": "N"}
FULL: dict[str, Any] = {
    "aggregation": "agent-mean",
    "kl": ops.KL("k3", 0.1),
    "correction": ops.ImportanceCorrection("token", bounds=(0.2, 3.0)),
}
BY_SEQUENCE = {"correction": ops.ImportanceCorrection("sequence"), "aggregation": "seq-mean-token-sum"}
REWARDS = {"token_rewards": "BT", "mask": "BT"}
TRAINED = {"rewards": "BT", "values": "BT", "mask": "BT"}
LOGITS = ({"logits": "BTV", "targets": "BT"}, ("logits",), SMALL, Size(24, 60))
LP = ("logprobs",)

# A name without a comma is an op's plainest call. The first entries of an op differ in what must be known before the
# first gradient: counts of the batch, rows or actors; sums of rows.
CASES: dict[str, Case] = {
    "factorize": Case(
        lambda s, **_: [ops.factorize(s["group_ids"], s["trajectory_ids"])[0]],
        {"group_ids": "B", "trajectory_ids": "B"},
    ),
    "group_advantage": Case(
        lambda s, **o: [
            ops.group_advantage(**s, **{"pool": "trajectory", "center": "length_weighted", "num_groups": IDS, **o})
        ],
        {"rewards": "N", "group_ids": "N", "trajectory_ids": "N", "lengths": "N", "valid": "N"},
        size=Size(7, 5),
    ),
    **both("token_reward_sum", Case(lambda s, **o: [ops.token_reward_sum(**s, **o)], REWARDS)),
    "token_reward_sum, lengths": Case(
        lambda s, **o: [ops.token_reward_sum(**s, **o)], {"token_rewards": "BT", "lengths": "B"}
    ),
    **both("token_returns", Case(lambda s, **o: [ops.token_returns(**s, gamma=0.9, **o)], REWARDS, size=MIDDLE)),
    **both("gae", Case(lambda s, **o: ops.gae(**s, gamma=0.9, lam=0.8, **o), TRAINED, size=MIDDLE)),
    **both("policy_loss", Case(loss(*POLICY, clip=ops.Clip(dual_clip=3.0)), {**STREAMS, "advantages": "B"}, LP)),
    **both("policy_loss, all streams", Case(loss(*POLICY, **FULL), {**ALL, "advantages": "BT"}, LP)),
    **both(
        "policy_loss, GSPO",
        Case(
            loss(*POLICY, variant=ops.GSPO(), aggregation="seq-mean-token-mean", kl=ops.KL("k2", 0.1)),
            {**STREAMS, "advantages": "B", "ref_logprobs": "BT"},
            LP,
        ),
    ),
    "policy_loss, GMPO by sequence": Case(
        loss(*POLICY, variant=ops.GMPO(), **BY_SEQUENCE), {**STREAMS, "advantages": "BT", "rollout_logprobs": "BT"}, LP
    ),
    "policy_loss, Clip-Cov": Case(
        loss(*POLICY, variant=ops.ClipCov()), {**STREAMS, "advantages": "BT", "selected": "BT", "actor_ids": "B"}, LP
    ),
    **both(
        "grouped_policy_loss", Case(loss(*GROUPED, num_groups=IDS, **FULL), {**ALL, **REWARDS, "group_ids": "B"}, LP)
    ),
    "grouped_policy_loss, GMPO by sequence": Case(
        loss(*GROUPED, num_groups=IDS, variant=ops.GMPO(), center="length_weighted", **BY_SEQUENCE),
        {**STREAMS, **REWARDS, "group_ids": "B", "rollout_logprobs": "BT", "lengths": "B", "valid": "B"},
        LP,
    ),
    "logprob": Case(lambda s, **o: ops.logprob(**s, entropy=True, temperature=0.7, **o), *LOGITS),
    "logprob, in place": Case(lambda s, **o: [ops.logprob(**s, inplace_backward=True, **o)], *LOGITS),
    "logprob, a matrix": Case(
        lambda s, **o: [ops.logprob(**s, softcap=3.0, ignore_index=7, **o)],
        *({"logits": "NV", "targets": "N"}, ("logits",), SMALL, Size(24, 60)),
    ),
    "linear_logprob": Case(
        lambda s, **o: ops.linear_logprob(**s, entropy=True, temperature=0.7, **o),
        *({**HEAD, "positions": "N"}, ("hidden", "weight", "bias"), SMALL, Size(24, 60)),
        atol=1e-3,  # sums of which nothing is left where all weights are the same
    ),
    "linear_logprob, frozen": Case(
        lambda s, **o: [ops.linear_logprob(**s, temperature=0.7, **o)],
        *({"hidden": "NH", "weight": "VH", "targets": "N"}, ("hidden",), SMALL, Size(24, 60)),
        atol=1e-3,
    ),
    "linear_policy_loss": Case(
        loss(*LINEAR, **FULL),
        {**HEAD, **packed({"old_logprobs": "BT", "mask": "BT", **MORE}), "advantages": "N"},
        *(("hidden", "weight", "bias"), SMALL, Size(24, 60)),
        atol=1e-3,
    ),
}
# What is plain PyTorch on every device, and takes no `backend`.
PLAIN: dict[str, Case] = {
    **both("value_loss", Case(loss(ops.value_loss, "values", "old_values", "returns"),
        {"values": "BT", "old_values": "BT", "returns": "BT", "mask": "BT", "actor_ids": "B"}, ("values",))),
    **both(
        "aggregate",
        Case(
            lambda s, **o: [ops.aggregate(**s, **{"aggregation": "agent-mean", "num_actors": IDS, **o})],
            {"values": "BT", "mask": "BT", "actor_ids": "B"},
            ("values",),
        ),
    ),
    **both(
        "loss_normalizer",
        Case(lambda s, **_: [ops.loss_normalizer("agent-mean", **s, num_actors=IDS)], {"mask": "BT", "actor_ids": "B"}),
    ),
    **both("optimal_token_baseline", Case(lambda s, **_: ops.optimal_token_baseline(**s),
        {**REWARDS, "old_logprobs": "BT", "sum_pi_squared": "BT", "group_ids": "B", "weights": "BT"})),
    "top_entropy_mask": Case(lambda s, **_: [ops.top_entropy_mask(**s)], {"entropy": "BT", "mask": "BT"}),
    **both("off_policy_mask", Case(lambda s, **_: [ops.off_policy_mask(**s, threshold=0.5)],
        {"logprobs": "BT", "rollout_logprobs": "BT", "advantages": "B", "mask": "BT"})),
    **both("second_moment_mask", Case(lambda s, **_: [ops.second_moment_mask(**s, threshold=0.5)],
        {"logprobs": "BT", "rollout_logprobs": "BT", "mask": "BT"})),
    **both("rejection_mask", Case(
        lambda s, **_: [ops.rejection_mask(**s, criteria=ops.Rejection("seq-mean", "k2", 0.5)).keep],
        {"old_logprobs": "BT", "rollout_logprobs": "BT", "mask": "BT"})),
    **both(
        "select_tokens",
        Case(lambda s, **_: [ops.select_tokens(**s, variant=ops.KLCov(0.2))], {**STREAMS, "advantages": "B"}),
    ),
}  # fmt: skip
OPS = [name for name in CASES if "," not in name and name != "factorize"]
LOSSES = [name for name in OPS if name.endswith("loss")]
DIFFERENTIABLE = [name for name in OPS if CASES[name].leaves]


# ---------------------------------------------------------------------------------------------------------------------
# Streams
# ---------------------------------------------------------------------------------------------------------------------
RTOL = {torch.float32: 3e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.int64: 0}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.int32)
FLAGS = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


def stream(name: str, axes: str, size: Size, generator: torch.Generator) -> tuple[Tensor, float, Sequence[torch.dtype]]:
    """Values, contiguous; the values around them; the types that they may have."""
    tokens = size.rows * size.width
    lengths = {"B": size.rows, "T": size.width, "N": tokens, "H": HIDDEN, "V": VOCABULARY, "A": IDS, "C": size.rows + 1}
    shape = tuple(lengths[axis] for axis in axes)

    def below(count: int) -> Tensor:
        return torch.randint(max(count, 1), shape, generator=generator)

    noise = torch.randn(shape, generator=generator)
    match name:
        case "cu_seqlens":
            return torch.arange(size.rows + 1) * size.width, OUT_OF_RANGE, WHOLE
        case "targets":
            return below(VOCABULARY), OUT_OF_RANGE, WHOLE
        case "positions":
            return below(tokens), OUT_OF_RANGE, WHOLE
        case "lengths":
            return below(size.width + 1), OUT_OF_RANGE, WHOLE
        case "group_ids" | "trajectory_ids" | "actor_ids":
            return below(IDS), OUT_OF_RANGE, WHOLE
        case "mask" | "valid":
            return noise > -0.5, 1, FLAGS
        case "selected":
            return noise > 0.5, 1, (torch.bool,)
        case "normalizer":
            return noise.abs() + 1, torch.nan, (torch.float32,)
    return (-noise.abs() if "logprobs" in name else noise), torch.nan, FLOATS


def draw(case: Case, size: Size | None = None, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The streams of a call, contiguous, their floats in ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: stream(name, axes, size or case.size, generator)[0] for name, axes in case.axes.items()}
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in drawn.items()}


def results(case: Case, streams: Mapping[str, Tensor], leaves: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """What the op gives, then the gradients of ``leaves``."""
    out = case.call(dict(streams), **options)
    weights = [torch.linspace(0.5, 1.5, value.numel(), device=value.device).reshape(value.shape) for value in out]
    weighted = [value * weight for value, weight in zip(out, weights, strict=True)]
    total = sum(value.sum() for value in weighted if value.requires_grad)
    grads = torch.autograd.grad(total, leaves) if leaves else ()
    return [*(value.detach() for value in out), *grads]


def outcome(case: Case, streams: Mapping[str, Tensor], **options: Any) -> list[Tensor]:
    """The same, with the leaves made to need a gradient."""
    given = dict(streams)
    leaves = [given[name].detach().clone().requires_grad_() for name in case.leaves]
    given |= dict(zip(case.leaves, leaves, strict=True))
    # Heads and `logprob` that write into their input get what is no leaf.
    views = {name: leaf.view_as(leaf) for name, leaf in zip(case.leaves, leaves, strict=True)}
    return results(case, given | views, leaves, **options)


# ---------------------------------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------------------------------
Strides = tuple[int, ...]


def contiguous(shape: Strides) -> Strides:
    return torch.empty(shape, device="meta").stride()


def times(factor: int, strides: Strides) -> Strides:
    return tuple(factor * stride for stride in strides)


def transposed(shape: Strides, apart: int = 0) -> Strides:
    """The last two axes the other way round, ``apart`` elements between two columns."""
    *rest, rows, columns = shape
    return (*times(columns * (rows + apart), contiguous(tuple(rest))), 1, rows + apart)


# Strides by shape, of streams of two or three axes and of one. Their numbers are primes, see `runs`.
WIDE: dict[str, Callable[[Strides], Strides]] = {
    "contiguous": contiguous,
    "offset": contiguous,
    "sliced": lambda s: (*times(s[-1] + 16, contiguous(s[:-1])), 1),
    "every other column": lambda s: times(2, contiguous(s)),
    "transposed": transposed,
    "transposed and sliced": lambda s: transposed(s, 16 - s[-2] % 16),
    "one row expanded": lambda s: (*times(0, s[:-1]), 1),
    "one column expanded": lambda s: (*contiguous(s[:-1]), 0),
    "one column of a matrix expanded": lambda s: (*times(7, contiguous(s[:-1])), 0),
    "one value expanded": lambda s: times(0, s),
    "overlapping windows": lambda s: (1,) * len(s),
}
FLAT: dict[str, Callable[[Strides], Strides]] = {
    "contiguous": contiguous,
    "offset": contiguous,
    "every other": lambda s: (2,),
    "a column of a matrix": lambda s: (16,),
    "one value expanded": lambda s: (0,),
}
MARGIN = 16  # elements around a stream; one more before it is off the addresses that wide loads need


class Laid(NamedTuple):
    """A stream in a buffer: ``buffer[places]`` is its contiguous copy."""

    buffer: Tensor
    places: Tensor
    strides: Strides

    def view(self) -> Tensor:
        first = int(self.places.min()) if self.places.numel() else 0
        return self.buffer.as_strided(self.places.shape, self.strides, first)


def lay(values: Tensor, layout: str, poison: float) -> Laid:
    """``values`` in a layout; where elements share a place, one of them is in it."""
    strides = (WIDE if values.dim() > 1 else FLAT)[layout](tuple(values.shape))
    place = torch.tensor(MARGIN if layout == "contiguous" else MARGIN + 1)
    for axis, stride in enumerate(strides):
        steps = torch.arange(values.shape[axis]) * stride
        place = place + steps.reshape(-1, *[1] * (values.dim() - 1 - axis))
    # Large enough for code that takes the stream for a contiguous one.
    last = int(place.max()) if values.numel() else 0
    buffer = torch.full((max(last, values.numel()) + 3 * MARGIN,), poison).to(values.dtype)
    buffer[place] = values
    return Laid(buffer, place, strides)


class Run(NamedTuple):
    """Which layout the streams of a call have, and which types: ``index + step * k`` of the k-th."""

    index: int
    step: int

    def pick(self, k: int, table: Sequence[Any]) -> Any:
        return table[(self.index + self.step * k) % len(table)]


def runs(steps: Iterable[int]) -> Iterator[Run]:
    """Each stream meets each layout in every step; any two of them meet in other pairs in the next, as the number of
    layouts is a prime. In step 0 all have the same."""
    return itertools.starmap(Run, itertools.product(range(len(WIDE)), steps))


def laid_out(case: Case, size: Size, run: Run) -> dict[str, Laid]:
    """The streams of a call, in layouts and types that the run picks."""
    generator = torch.Generator().manual_seed(run.index)
    laid = {}
    for k, (name, axes) in enumerate(case.axes.items()):
        values, poison, dtypes = stream(name, axes, size, generator)
        dtype = torch.float32 if name in (*case.leaves, "weight") else run.pick(k + 1, dtypes)
        layouts = list(WIDE if len(axes) > 1 else FLAT)
        if name == "cu_seqlens":
            layouts.remove("one value expanded")
        laid[name] = lay(values.to(dtype), run.pick(k, layouts), poison)
    return laid


def expected(case: Case, laid: Mapping[str, Laid]) -> list[tuple[Tensor, float]]:
    """Results by the reference on contiguous copies, and how far off each may be. Where elements of a leaf share a
    place, it gets the sum of their gradients."""
    copies = {name: stream.buffer[stream.places] for name, stream in laid.items()}
    leaves = [copies[name].requires_grad_() for name in case.leaves]
    found = results(case, copies, leaves, backend="torch")
    out, gradients = found[: len(found) - len(leaves)], found[len(found) - len(leaves) :]
    wanted = [(value, case.atol) for value in out]
    for name, gradient in zip(case.leaves, gradients, strict=True):
        total, magnitude = (
            torch.zeros_like(laid[name].buffer).index_add_(0, laid[name].places.flatten(), part.flatten())
            for part in (gradient, gradient.abs())
        )
        wanted.append((total, case.atol * max(1.0, float(magnitude.max()))))
    return wanted

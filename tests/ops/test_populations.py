"""The policy loss of many actors and of rows of few tokens, its workspace, and the exact sums behind its metrics."""

from __future__ import annotations

import itertools
import math
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise import ops

MEGABYTE = 1 << 20
FEW, MANY = 24, 25  # the most actors whose sums shared memory holds, and one more


# ---------------------------------------------------------------------------------------------------------------------
# The workspace
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_workspace_does_not_grow_with_the_blocks(emulator, monkeypatch) -> None:
    """A row of totals per actor, whatever the device: at most 8 MB for 1,000 actors."""
    sizes = {}
    for processors, actors in itertools.product((3, 132, 1000), (1, 10, 1000, 10_000)):
        monkeypatch.setenv("TURNWISE_EMULATED_MULTIPROCESSORS", str(processors))
        sizes[processors, actors] = emulator.cuda_policy_loss_workspace(8192, 1 << 25, actors, -1)
    for (processors, actors), size in sizes.items():
        assert size <= (8 * MEGABYTE if actors <= 1000 else 16 * MEGABYTE), (processors, actors)
        # 14 columns of 12 words, and the actor's tokens.
        assert size - sizes[processors, 1] == pytest.approx((actors - 1) * (14 * 12 * 8 + 8), abs=16)


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------
def batch(seed: int, lengths: Tensor, *, packed: bool = True, dtype: torch.dtype = torch.float32, near: float = 0.3):
    """Streams in float64 that `dtype` holds too. About every fourth token is masked, with NaN, and the first row."""
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    shape = (int(lengths.sum()),) if packed else (rows, 13)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    logprobs = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    given = {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.4 * noise(*shape),
        "ref_logprobs": logprobs + near * noise(*shape),
        "rollout_logprobs": logprobs + near * noise(*shape),
        "entropy": noise(*shape).abs(),
        "advantages": noise(rows),
        "token_advantages": noise(*shape),
    }
    given = {name: value.to(dtype).double() for name, value in given.items()}
    mask = torch.rand(shape, generator=generator) < 0.75
    mask[: int(lengths[0]) if packed else 1] = False
    given["logprobs"][~mask] = torch.nan
    given["mask"] = mask
    if packed:
        given["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return given


def run(
    given: dict[str, Any], backend: str, device: str, dtype: torch.dtype, loss: Any = ops.policy_loss, **options: Any
):
    """Loss, gradient, metrics and metrics by actor, on the CPU."""
    tensors = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
    tensors = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in tensors.items()}
    logprobs = tensors.pop("logprobs").detach().clone().requires_grad_()
    out = loss(logprobs, backend=backend, **tensors, **options)
    out.loss.backward()
    by_actor = {f"{name} by actor": value for name, value in out.actor_metrics.items()}
    found = {"loss": out.loss.detach(), "gradient": logprobs.grad, **out.metrics, **by_actor}
    return {name: value.cpu() for name, value in found.items()}


def check(got: dict[str, Tensor], want: dict[str, Tensor], rtol: float, exact: float) -> None:
    """Loss and gradient within ``rtol``, metrics within ``exact``; a tenth of it for what is near 0."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        close = {"rtol": rtol if name in ("loss", "gradient") else exact, "atol": exact / 10}
        if name == "gradient":
            close["atol"] = rtol / 10 * value.abs().max().item()
        torch.testing.assert_close(got[name].double(), value.double(), **close, msg=lambda text, n=name: f"{n}: {text}")


def without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in (*names, "token_advantages")}


OPTIONS: dict[str, dict[str, Any]] = {
    "minimal": {"clip": ops.Clip(0.2, 0.28, dual_clip=3.0), "kl": ops.KL("k3", 0.1), "aggregation": "agent-mean"},
    "full": {
        "clip": ops.Clip(0.2, 0.2),
        "kl": ops.KL("k1", 0.1),
        "correction": ops.ImportanceCorrection(level="token", cap=2.0, bounds=(0.5, 5.0)),
    },
}


@pytest.mark.parametrize("actors", [1, FEW, MANY, 300])
@pytest.mark.parametrize("order", ["sorted", "interleaved"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", OPTIONS)
def test_metrics_of_many_actors(kernel, actors: int, order: str, packed: bool, name: str) -> None:
    """Every target against float64. A second run gives the same bits."""
    actors = min(actors, 60) if kernel.interpreted else actors
    rows = max(30, actors + actors // 2)
    # Most actors have one or two rows; the last quarter of the ids has none.
    ids = torch.arange(rows) * 7919 % max(actors * 3 // 4, 1)
    if order == "sorted":
        ids = ids.sort().values
    lengths = torch.randint(0, 9, (rows,), generator=torch.Generator().manual_seed(actors))
    lengths[:4] = torch.tensor([90, 0, 300, 1])
    given = batch(actors + packed, lengths, packed=packed) | {"actor_ids": ids, "num_actors": actors}
    given = without(given, *(("rollout_logprobs", "entropy") if name == "minimal" else ()))
    want = run(given, "torch", "cpu", torch.float64, **OPTIONS[name])
    got, again = (run(given, kernel.backend, kernel.device, torch.float32, **OPTIONS[name]) for _ in range(2))
    check(got, want, 2e-5, 2e-5)
    assert all(torch.equal(value, again[key]) for key, value in got.items())


# Lengths of rows, repeated until there are enough tokens. Short rows share a warp on a GPU; 600 has whole steps of it.
LENGTHS = {
    "1": [1],
    "7": [7],
    "33": [33],
    "200": [200],
    "empty": [0, 0, 3, 0, 1, 0, 0, 0, 0, 2],
    "short and long": [600, 1, 1, 2, 0, 700, 5, 300, 3, 0, 0, 130],
}


def lengths_of(pattern: str, seed: int, kernel: Any) -> Tensor:
    """Rows of more tokens than the emulator's warps take in one turn; in Triton's interpreter, where each row takes
    milliseconds, more rows than one step of a search. In a pattern of several lengths each is up to 2 longer."""
    generator, found = random.Random(seed), []
    while sum(found) < (300 if kernel.interpreted else 2300):
        for length in LENGTHS[pattern]:
            found.append(length + generator.randrange(3) * (length > 0 and len(LENGTHS[pattern]) > 1))
    return torch.tensor(found)


@pytest.mark.parametrize("pattern", LENGTHS)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("actors", [0, 3])
@pytest.mark.parametrize("per_token", [False, True])
def test_short_rows(kernel, pattern: str, dtype: torch.dtype, rtol: float, actors: int, per_token: bool) -> None:
    """The mask is bytes for advantages per row, and floats per token."""
    seed = len(pattern) + 10 * actors + per_token
    lengths = lengths_of(pattern, seed, kernel)
    given = batch(seed, lengths, dtype=dtype)
    if per_token:
        given |= {"mask": given["mask"].double(), "advantages": given["token_advantages"]}
    if actors:
        given |= {"actor_ids": torch.arange(len(lengths)) * 7919 % actors, "num_actors": actors}
    given = without(given, "rollout_logprobs", "entropy")
    options = OPTIONS["minimal"] | {"aggregation": "agent-mean" if actors else "token-mean"}
    want = run(given, "torch", "cpu", torch.float64, **options)
    check(run(given, kernel.backend, kernel.device, dtype, **options), want, rtol, 1e-5)


@pytest.mark.parametrize("pattern", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_reward_sums_of_short_rows(kernel, pattern: str, dtype: torch.dtype) -> None:
    """Packed rows over more than a block's chunk, with a mask."""
    lengths = lengths_of(pattern, 3, kernel).repeat(3)
    given = batch(3, lengths, dtype=dtype)
    rewards, layout = given["token_advantages"], {name: given[name] for name in ("mask", "cu_seqlens")}
    got = ops.token_reward_sum(kernel.on(rewards.to(dtype)), **kernel.on(layout), backend=kernel.backend)
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    want = torch.zeros(len(lengths), dtype=torch.float64).index_add(0, row, rewards * given["mask"])
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-6, atol=1e-6)


# What the first launch of the loss on a GPU counts and adds up: tokens per row, per actor, and sums per row.
COUNTED: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "seq-mean-token-mean": {"aggregation": "seq-mean-token-mean"},
    "seq-mean-token-sum": {"aggregation": "seq-mean-token-sum"},
    "agent-mean, 3": {"aggregation": "agent-mean", "num_actors": 3},
    "agent-mean, 40": {"aggregation": "agent-mean", "num_actors": 40},  # more than a warp has lanes
    "GSPO": {"variant": ops.GSPO(0.1, 0.2), "kl": ops.KL("k3", 0.1, importance_weighted=True)},
    "GMPO": {"variant": ops.GMPO(0.2, 0.3)},
    "sequence": {"correction": ops.ImportanceCorrection("sequence", cap=1.5)},
}


@pytest.mark.parametrize("pattern", LENGTHS)
@pytest.mark.parametrize("counted", COUNTED)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.int64])
def test_counts_and_sums_of_rows(kernel, pattern: str, counted: str, mask_dtype: torch.dtype) -> None:
    """Both losses, from packed rows: ``policy_loss``, and ``grouped_policy_loss`` with rewards per token."""
    seed, options = len(pattern) + len(counted), COUNTED[counted]
    lengths = lengths_of(pattern, seed, kernel)
    rows, given = len(lengths), batch(seed, lengths, near=0.1)
    layout = {"mask": given["mask"].to(mask_dtype), "cu_seqlens": given["cu_seqlens"]}
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, max(rows // 4, 1), (rows,), generator=generator)
    if "num_actors" in options:
        given["actor_ids"] = torch.randint(0, options["num_actors"], (rows,), generator=generator)
    rewards = given["token_advantages"]
    sums = ops.token_reward_sum(rewards, **layout, backend="torch")
    needed = {"kl": "ref_logprobs", "correction": "rollout_logprobs"}
    unused = ["entropy", *(stream for option, stream in needed.items() if option not in options)]
    given = without(given | layout | {"advantages": ops.group_advantage(sums, ids, backend="torch")}, *unused)
    want = run(given, "torch", "cpu", torch.float64, **options)
    grouped = without(given, "advantages") | {"token_rewards": rewards, "group_ids": ids}
    for streams, loss in ((given, ops.policy_loss), (grouped, ops.grouped_policy_loss)):
        check(run(streams, kernel.backend, kernel.device, torch.float32, loss, **options), want, 1e-4, 1e-4)


@pytest.mark.parametrize("actors", [2, 40])
def test_what_is_not_finite_stays_with_its_actor(kernel, actors: int) -> None:
    generator = torch.Generator().manual_seed(5)
    logprobs = -torch.rand(80, 6, generator=generator)
    given = {"logprobs": logprobs, "old_logprobs": logprobs - 0.1, "advantages": torch.ones(80)}
    given |= {"actor_ids": torch.arange(80) % actors, "num_actors": actors, "entropy": torch.ones(80, 6)}
    given["old_logprobs"][1, 3] = math.nan
    given["entropy"][0, 0] = math.inf
    found = run(given, kernel.backend, kernel.device, torch.float32)
    for name in ("approx_kl_k1", "ratio_max"):
        assert found[f"{name} by actor"].isnan().tolist() == [actor == 1 for actor in range(actors)]
    assert found["entropy by actor"].isinf().tolist() == [actor == 0 for actor in range(actors)]
    assert math.isnan(found["approx_kl_k1"]) and math.isinf(found["entropy"])


@pytest.mark.parametrize("given", [False, True], ids=["counted", "given"])
def test_agent_mean_leaves_out_actors_without_tokens(kernel, given: bool) -> None:
    """90 actors, of which 30 have a row; the loss is the mean over those 30."""
    ids = torch.arange(60) % 30 * 3
    lengths = 1 + torch.arange(60) % 5
    mask = torch.arange(8) < lengths[:, None]
    logprobs = -torch.rand(60, 8, generator=torch.Generator().manual_seed(3))
    arguments: dict[str, Any] = {"logprobs": logprobs, "old_logprobs": logprobs.clone(), "mask": mask}
    arguments |= {"advantages": torch.arange(60.0), "actor_ids": ids, "num_actors": 90}
    counts = torch.zeros(90).index_add(0, ids, lengths.float())
    if given:
        arguments["normalizer"] = counts
    expected = -sum(float((torch.arange(60.0) * lengths)[ids == actor].sum() / counts[actor]) for actor in ids.unique())
    found = run(arguments, kernel.backend, kernel.device, torch.float32, aggregation="agent-mean")
    assert float(found["loss"]) == pytest.approx(expected / 30, rel=1e-6)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("per_token", [False, True])
def test_rows_in_wider_memory_and_threads(aggregation: str, per_token: bool) -> None:
    """On a CPU: rows of 7 side by side, the same rows apart from one another, and several threads."""
    generator = torch.Generator().manual_seed(5)
    rows, width = 6000, 7  # more tokens than one thread takes
    wide = {name: torch.randn(rows, 2 * width, generator=generator) for name in ("lp", "old", "ref", "a")}
    mask = torch.rand(rows, 2 * width, generator=generator) < 0.8
    near = {name: value[:, :width] if name == "lp" else wide["lp"] + 0.3 * value for name, value in wide.items()}

    def run(side_by_side: bool, threads: int) -> list[Tensor]:
        def take(tensor: Tensor) -> Tensor:
            return tensor[:, :width].contiguous() if side_by_side else tensor[:, :width]

        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            leaf = take(wide["lp"]).detach().requires_grad_()
            result = ops.policy_loss(
                leaf,
                take(near["old"]),
                take(wide["a"]) if per_token else wide["a"][:, 0],
                mask=take(mask),
                ref_logprobs=take(near["ref"]),
                kl=ops.KL("k3", 0.1),
                aggregation=aggregation,
                backend="native",
            )
            result.loss.backward()
        finally:
            torch.set_num_threads(before)
        assert leaf.grad is not None
        return [result.loss.detach(), *result.metrics.values(), leaf.grad]

    joined = run(True, 1)
    for threads in (2, 3):
        assert all(map(torch.equal, run(True, threads), joined))
    torch.testing.assert_close(run(False, 1), joined, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------------------------------------------------------
# Exact sums
# ---------------------------------------------------------------------------------------------------------------------
PROGRAM = """
#include <cstdio>
#include <vector>
#include "cuda/exact_sums.h"
using namespace turnwise;
using namespace turnwise::cuda;
__global__ void add(const double* values, int count, Word* words, double* out) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) add_exact(words, 1, values[i]);
    __syncthreads();
    if (threadIdx.x == 0) *out = read_exact(words, 1);
}
int main() {
    int count = 0;
    while (std::scanf("%d", &count) == 1) {
        std::vector<double> values(count);
        for (double& value : values) std::scanf("%la", &value);
        std::vector<Word> words(kSumWords);
        double out = 0;
        emulation::allow(values.data(), 8 * values.size());
        emulation::allow(words.data(), 8 * words.size());
        emulation::allow(&out, 8);
        launch(add, 1, 64, 0, Stream{}, values.data(), count, words.data(), &out);
        std::printf("%a\\n", out);
    }
}
"""


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def test_exact_sums_in_any_order(tmp_path, compile_and_run) -> None:
    """As ``math.fsum``, to a few units in the last place, and bit for bit the same in every order."""
    seed = 11
    print("seed", seed)
    draw = random.Random(seed)
    spread = [float32(draw.uniform(-1, 1) * 2.0 ** draw.randrange(-140, 120)) for _ in range(300)]
    near = [draw.uniform(-1, 1) for _ in range(300)]
    cases = [
        [],
        [0.0, -0.0],
        [2.0**-149] * 3,
        [float32(3e38)] * 40,
        [1e30, 1.0, -1e30],
        [2.0**100, 2.0**-149, -(2.0**100)],
        [-(2.0**-126), 2.0**-127],
        [1.0] * 200 + [-(2.0**-40)],
        [1 / 3, -1 / 3, 1e-30],
        spread,
        near,
    ]
    cases += [draw.sample(case, len(case)) for case in cases]
    not_finite = [([math.inf, 1.0], math.inf), ([-math.inf, 2.0], -math.inf), ([2.0**200], math.inf)]
    not_finite += [([math.inf, -math.inf], math.nan), ([math.nan, 1.0, math.inf], math.nan)]
    lines = [f"{len(case)} {' '.join(value.hex() for value in case)}" for case in cases + [c for c, _ in not_finite]]
    program = Path(tmp_path) / "exact.cpp"
    program.write_text(PROGRAM)
    found = [float.fromhex(line) for line in compile_and_run(program, "\n".join(lines))]
    for case, sum_ in zip(cases, found[: len(cases)], strict=True):
        assert sum_ == pytest.approx(math.fsum(case), rel=2**-50, abs=2.0**-149), case[:5]
    half = len(cases) // 2
    assert found[:half] == found[half : 2 * half]
    for (case, expected), sum_ in zip(not_finite, found[len(cases) :], strict=True):
        assert sum_ == expected or (math.isnan(sum_) and math.isnan(expected)), case

"""Populations: the policy loss with many actors, its workspace, and the exact sums behind its metrics."""

from __future__ import annotations

import itertools
import math
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from turnwise.ops import KL, Clip, ImportanceCorrection, policy_loss

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
def batch(actors: int, order: str, seed: int, packed: bool) -> dict[str, Any]:
    """Streams in float64 whose float32 copies hold the same values. About every fifth token is masked, with NaN."""
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    rows = max(30, actors + actors // 2)
    # Most actors have one or two rows; the last quarter of the ids has none.
    ids = torch.arange(rows) * 7919 % max(actors * 3 // 4, 1)
    if order == "sorted":
        ids = ids.sort().values
    if packed:
        lengths = torch.randint(0, 9, (rows,), generator=generator)
        lengths[:4] = torch.tensor([90, 0, 300, 1])
        shape: tuple[int, ...] = (int(lengths.sum()),)
    else:
        shape = (rows, 13)

    def draw(scale: float) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator)).double()

    logprobs = -3 * torch.rand(shape, generator=generator).double()
    given = {
        "logprobs": logprobs,
        "old_logprobs": logprobs + draw(0.3),
        "ref_logprobs": logprobs + draw(0.3),
        "rollout_logprobs": logprobs + draw(0.3),
        "entropy": draw(1).abs(),
        "advantages": torch.randn(rows, generator=generator).double(),
    }
    given = {name: value.float().double() for name, value in given.items()}
    mask = torch.rand(shape, generator=generator) < 0.8
    given["logprobs"][~mask] = torch.nan
    given |= {"mask": mask, "actor_ids": ids, "num_actors": actors}
    if packed:
        given["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return given


def run(given: dict[str, Any], backend: str, device: str, dtype: torch.dtype, **options: Any):
    """Loss, gradient, metrics and metrics by actor, on the CPU."""
    tensors = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    tensors = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in tensors.items()}
    logprobs = tensors.pop("logprobs").detach().clone().requires_grad_()
    out = policy_loss(logprobs, backend=backend, **tensors, **options)
    out.loss.backward()
    return (
        out.loss.detach().cpu(),
        logprobs.grad.cpu(),
        *({name: value.cpu() for name, value in table.items()} for table in (out.metrics, out.actor_metrics)),
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "minimal": {"clip": Clip(0.2, 0.28, dual_clip=3.0), "kl": KL("k3", 0.1), "aggregation": "agent-mean"},
    "full": {
        "clip": Clip(0.2, 0.2),
        "kl": KL("k1", 0.1),
        "correction": ImportanceCorrection(level="token", cap=2.0, bounds=(0.5, 5.0)),
    },
}


@pytest.mark.parametrize("actors", [1, FEW, MANY, 300])
@pytest.mark.parametrize("order", ["sorted", "interleaved"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", OPTIONS)
def test_metrics_of_many_actors(kernel, actors: int, order: str, packed: bool, name: str) -> None:
    """Every target against float64. A second run gives the same bits."""
    given = batch(actors, order, seed=actors + packed, packed=packed)
    if name == "minimal":
        del given["rollout_logprobs"], given["entropy"]
    want = run(given, "torch", "cpu", torch.float64, **OPTIONS[name])
    got = run(given, kernel.backend, kernel.device, torch.float32, **OPTIONS[name])
    again = run(given, kernel.backend, kernel.device, torch.float32, **OPTIONS[name])
    for mine, same, true in zip(got, again, want, strict=True):
        assert type(mine) is type(true)
        if isinstance(mine, torch.Tensor):
            mine, same, true = {"": mine}, {"": same}, {"": true}
        assert mine.keys() == true.keys()
        for key, value in mine.items():
            assert torch.equal(value, same[key]), key
            torch.testing.assert_close(
                value.double(), true[key].double(), rtol=2e-5, atol=2e-6, msg=lambda t, k=key: f"{k}: {t}"
            )


@pytest.mark.parametrize("actors", [2, 40])
def test_what_is_not_finite_stays_with_its_actor(kernel, actors: int) -> None:
    generator = torch.Generator().manual_seed(5)
    logprobs = -torch.rand(80, 6, generator=generator)
    given = {"logprobs": logprobs, "old_logprobs": logprobs - 0.1, "advantages": torch.ones(80)}
    given |= {"actor_ids": torch.arange(80) % actors, "num_actors": actors, "entropy": torch.ones(80, 6)}
    given["old_logprobs"][1, 3] = math.nan
    given["entropy"][0, 0] = math.inf
    _, _, metrics, by_actor = run(given, kernel.backend, kernel.device, torch.float32)
    assert by_actor["approx_kl_k1"].isnan().tolist() == [actor == 1 for actor in range(actors)]
    assert by_actor["ratio_max"].isnan().tolist() == [actor == 1 for actor in range(actors)]
    assert by_actor["entropy"].isinf().tolist() == [actor == 0 for actor in range(actors)]
    assert math.isnan(metrics["approx_kl_k1"]) and math.isinf(metrics["entropy"])


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
    loss, *_ = run(arguments, kernel.backend, kernel.device, torch.float32, aggregation="agent-mean")
    assert float(loss) == pytest.approx(expected / 30, rel=1e-6)


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

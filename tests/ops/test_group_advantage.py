from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from typing import Any

import pytest
import torch

from turnwise.ops import factorize, group_advantage
from turnwise.utils.grouping import CENTERS, POOLS, SCALES

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
STEPS = 1e-8  # of float64 on a GPU, where offsets count in steps of 2**-31 of the group's span


def on_gpu(target) -> bool:
    return target.device == "cuda" or target.emulated or target.backend == "triton"


def advantage(target, rewards: torch.Tensor, ids: torch.Tensor, **options) -> torch.Tensor:
    """``group_advantage`` on the target, with the result on the CPU."""
    options = {k: v.to(target.device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return group_advantage(rewards.to(target.device), ids.to(target.device), backend=target.backend, **options).cpu()


def same(target, got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bits; but PyTorch's own sums on a GPU have no order."""
    unordered = target.device == "cuda" and target.backend == "torch"
    return torch.allclose(got, want, rtol=1e-12, atol=1e-12) if unordered else torch.equal(got, want)


def by_loop(rewards, groups, *, trajectories, lengths, valid, pool, center, scale, ddof=1, eps=1e-6, min_std=0.0):
    """The definition, in Python's exact ``statistics`` over dictionaries; singletons get 0."""
    members = defaultdict(list)
    for row, group in enumerate(groups):
        if valid[row]:
            members[group].append(row)
    result = [0.0] * len(rewards)
    for rows in members.values():
        units = [[row] for row in rows]
        if pool == "trajectory":
            by_trajectory = defaultdict(list)
            for row in rows:
                by_trajectory[trajectories[row]].append(row)
            units = list(by_trajectory.values())
        values = [statistics.fmean(rewards[row] for row in unit) for unit in units]
        sizes = [sum(lengths[row] for row in unit) for unit in units]
        n, mean = len(values), statistics.fmean(values)
        std = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - ddof)) if n > ddof else 0.0
        for unit, value in zip(units, values, strict=True):
            middle = {
                "mean": mean,
                "leave_one_out": (sum(values) - value) / max(n - 1, 1),
                "none": 0.0,
                "length_weighted": sum(s * v for s, v in zip(sizes, values, strict=True)) / sum(sizes),
            }[center]
            advantage = (value - middle) / (std + eps if scale == "std" else 1)
            if std < min_std or (scale == "std" and max(values) == min(values)):
                advantage = 0.0
            if n == 1 and (center, scale) != ("none", "none"):
                advantage = 0.0
            for row in unit:
                result[row] = advantage
    return torch.tensor(result, dtype=torch.float64)


def batch(seed: int, rows: int = 60, groups: int = 9):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(rows, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, groups, (rows,), generator=generator)
    trajectories = torch.randint(0, 4, (rows,), generator=generator) * 1_000_003 - 5
    lengths = torch.randint(1, 50, (rows,), generator=generator)
    valid = torch.rand(rows, generator=generator) < 0.8
    return rewards, ids, trajectories, lengths, valid


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("center", CENTERS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("ddof", [0, 1])
def test_every_rule_equals_its_definition(target, seed, pool, center, scale, ddof) -> None:
    rewards, ids, trajectories, lengths, valid = batch(seed)
    if seed == 1:  # groups that stand together take another way on the CPU
        ids = ids.sort().values
    options = {"pool": pool, "center": center, "scale": scale, "ddof": ddof}
    expected = by_loop(
        rewards.tolist(),
        ids.tolist(),
        trajectories=trajectories.tolist(),
        lengths=lengths.tolist(),
        valid=valid,
        **options,
    )
    for dtype, tolerance in TOLERANCE.items():  # narrow floats round the rewards first: a test of their own, below
        columns = {"trajectory_ids": trajectories, "lengths": lengths, "valid": valid}
        got = advantage(target, rewards.to(dtype), ids, **columns, **options)
        assert got.dtype == dtype
        tolerance = max(tolerance, STEPS) if on_gpu(target) else tolerance
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_narrow_and_integer_rewards(target, dtype) -> None:
    rewards = torch.tensor([3, -1, 2, 2, 5, 7]).to(dtype)
    ids = torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32)
    expected = group_advantage(rewards.double(), ids.long(), backend="torch")
    got = advantage(target, rewards, ids)
    assert got.dtype == (dtype if dtype.is_floating_point else torch.float32)
    torch.testing.assert_close(got.double(), expected, rtol=8e-3, atol=8e-3)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint32], ids=str
)
def test_ids_of_any_integer_type(target, dtype) -> None:
    rewards, ids, trajectories, *_ = batch(6)
    options = {"pool": "trajectory", "trajectory_ids": trajectories % 100}
    expected = advantage(target, rewards, ids, **options)
    narrow = {**options, "trajectory_ids": options["trajectory_ids"].to(dtype)}
    assert torch.equal(advantage(target, rewards, ids.to(dtype), **narrow), expected)
    assert torch.equal(
        advantage(target, rewards, ids.to(dtype), num_groups=9), advantage(target, rewards, ids, num_groups=9)
    )


class TestWorkedValues:
    def test_one_group(self, target) -> None:
        got = advantage(target, torch.tensor([1.0, 0, 1, 1]), torch.zeros(4, dtype=torch.int64))
        torch.testing.assert_close(got, torch.tensor([0.499999, -1.499997, 0.499999, 0.499999]), rtol=0, atol=1e-6)

    def test_a_team(self, target) -> None:
        rewards = torch.tensor([0.9, 1, 1, 0, 0])
        by_actor, _ = factorize(["solver", "solver", "verifier", "solver", "verifier"])
        got = advantage(target, rewards, by_actor)
        torch.testing.assert_close(
            got, torch.tensor([0.48418, 0.66575, 0.70711, -1.14993, -0.70711]), rtol=0, atol=1e-5
        )
        got = advantage(target, rewards, by_actor, scale="none")
        torch.testing.assert_close(got, torch.tensor([0.26667, 0.36667, 0.5, -0.63333, -0.5]), rtol=0, atol=1e-5)
        trajectories, _ = factorize(["a", "a", "a", "b", "b"])
        together = torch.zeros(5, dtype=torch.int64)
        got = advantage(target, rewards, together, pool="trajectory", trajectory_ids=trajectories)
        torch.testing.assert_close(
            got, torch.tensor([0.70711, 0.70711, 0.70711, -0.70711, -0.70711]), rtol=0, atol=1e-5
        )

    def test_an_offset_costs_no_accuracy(self, target) -> None:
        rewards = torch.tensor([1000.0, 1000.1, 1000.2, 1000.3])
        got = advantage(target, rewards, torch.zeros(4, dtype=torch.int64))
        assert got[0].item() == pytest.approx(-1.162, abs=1e-3)
        exact = group_advantage(rewards.double(), torch.zeros(4, dtype=torch.int64), backend="torch")
        torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-6)

    def test_raw_singleton(self, target) -> None:
        got = advantage(target, torch.tensor([2.0]), torch.tensor([0]), singleton="raw")
        assert got.item() == pytest.approx(2 / (1 + 1e-6), rel=1e-6)
        got = advantage(target, torch.tensor([2.0]), torch.tensor([0]), singleton="raw", scale="none")
        assert got.item() == 2.0


@pytest.mark.parametrize("center", ["mean", "leave_one_out", "length_weighted"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.7, -3e-9])
def test_ties_are_exactly_zero(target, center, value) -> None:
    rewards = torch.full((21,), value)
    ids = torch.arange(21) % 3
    got = advantage(target, rewards, ids, center=center, lengths=torch.arange(1, 22), eps=0.0)
    assert got.tolist() == [0.0] * 21


@pytest.mark.parametrize("center", CENTERS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("sort", [True, False])
def test_rounding_is_no_difference(target, center, scale, sort) -> None:
    """Groups of three: tied by rounding, and by 0.1 + 0.2; one that differs; and one tied beside an invalid row."""
    for dtype, step in ((torch.float64, 2.0**-52), (torch.float32, 2.0**-23)):
        near, far = 1 + 4 * step, 1 + 5 * step
        rows = [[1.0, near, 1.0], [0.1 + 0.2, 0.3, 0.3], [-1e6, -1e6 * far, -1e6], [7.0, 7.0, 9.0]]
        rewards = torch.tensor(rows, dtype=torch.float64).to(dtype)
        ids, valid = torch.arange(4).repeat_interleave(3), torch.ones(12, dtype=torch.bool)
        valid[11] = False
        order = torch.arange(12) if sort else torch.arange(12).view(4, 3).t().reshape(-1)
        columns = {"lengths": torch.arange(1, 13)[order], "valid": valid[order]}
        got = advantage(target, rewards.flatten()[order], ids[order], center=center, scale=scale, eps=0.0, **columns)
        got = got[order.argsort()].view(4, 3)
        if (center, scale) == ("none", "none"):
            assert torch.equal(got[:3], rewards[:3])
            continue
        assert got[[0, 1, 3]].abs().max() == 0
        assert (got[2] != 0).any()


def test_means_of_trajectories_tie_by_the_magnitude_of_their_rows(target) -> None:
    """0.1 + 0.2 - 0.3 leaves 1e-17, and two of 1000.1 - 999.8 and 0.3 differ in the 13th digit; 0.30001 is another."""
    units = [[0.1, 0.2, -0.3], [0.0], [1000.1, -999.8], [0.1, 0.2], [0.1, 0.2], [0.10001, 0.2]]
    group = torch.tensor([0, 0, 1, 1, 2, 2])
    counts = torch.tensor([len(unit) for unit in units])
    trajectories = torch.arange(6).repeat_interleave(counts)
    for dtype in TOLERANCE:
        rewards = torch.tensor([reward for unit in units for reward in unit], dtype=torch.float64).to(dtype)
        options = {"pool": "trajectory", "trajectory_ids": trajectories, "eps": 0.0, "num_groups": 3}
        got = advantage(target, rewards, group.repeat_interleave(counts), **options)
        assert got[:8].abs().max() == 0 and got[8:].abs().min() > 0.7


def test_min_std_counts_small_differences_as_ties(target) -> None:
    rewards, ids = torch.tensor([1.0, 1.001, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    got = advantage(target, rewards, ids, min_std=0.01)
    assert got[:2].tolist() == [0.0, 0.0]
    assert got[3].item() == pytest.approx(0.70711, abs=1e-4)


def test_rows_that_are_not_valid_change_nothing(target) -> None:
    rewards, ids, *_ = batch(3)
    padded = torch.cat([rewards, torch.tensor([math.nan, 5.0])])
    padded_ids = torch.cat([ids, torch.tensor([0, -7])])
    valid = torch.ones(62, dtype=torch.uint8)
    valid[60:] = 0
    got = advantage(target, padded, padded_ids, num_groups=9, valid=valid)
    assert same(target, got[:60], advantage(target, rewards, ids, num_groups=9))
    assert got[60:].tolist() == [0.0, 0.0]


def test_ids_far_apart(target) -> None:
    rewards, ids, *_ = batch(4)
    expected = advantage(target, rewards, ids)
    if not on_gpu(target):  # there ids are below the number of rows, or num_groups is given
        assert torch.equal(advantage(target, rewards, ids * 10_000), expected)
        assert torch.equal(advantage(target, rewards, ids * 2**58), expected)
    assert same(target, advantage(target, rewards, ids * 100, num_groups=900), expected)


def test_a_gpu_that_checks_nothing_gives_nan(target, monkeypatch) -> None:
    if target.backend == "torch":  # as on a GPU, where an index out of range would end the process's work
        monkeypatch.setattr(sys.modules["turnwise.ops.advantage.group_advantage"], "sees_values", lambda _: False)
    elif not on_gpu(target):  # a CPU checks
        return
    rewards = torch.tensor([1.0, 2.0, math.nan, 4.0, 7.0, 8.0, math.inf, 1.0])
    ids = torch.tensor([0, 0, 1, 1, -1, 9, 3, 3])
    got = advantage(target, rewards, ids, num_groups=4)
    assert got[:2].tolist() == pytest.approx([-0.70711, 0.70711], abs=1e-4)
    assert got[2:].isnan().all()
    got = advantage(target, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1]), singleton="error")
    assert got[2].isnan()
    assert not got[:2].isnan().any()
    lengths = torch.tensor([1, 2, 3, -1])
    options = {"center": "length_weighted", "scale": "none", "lengths": lengths}
    got = advantage(target, torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([0, 0, 1, 1]), **options)
    assert got.isnan().tolist() == [False, False, True, True]


def test_lengths_of_zero_weigh_alike(target) -> None:
    """A group without tokens has its plain mean as centre, beside one whose lengths count."""
    rewards, ids = torch.tensor([1.0, 2.0, 6.0, 1.0, 3.0]), torch.tensor([0, 0, 0, 1, 1])
    lengths = torch.tensor([0, 0, 0, 3, 1])
    got = advantage(target, rewards, ids, center="length_weighted", scale="none", lengths=lengths)
    assert got.tolist() == pytest.approx([-2.0, -1.0, 3.0, -0.5, 1.5], abs=1e-6)


# 513 and more: squares are beyond float64; less than 900: the power of two that makes them smaller still shows.
@pytest.mark.parametrize("exponent", [513, 700, 900])
@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("scale", SCALES)
def test_rewards_too_large_to_be_squared(target, sort: bool, scale: str, exponent: int) -> None:
    small, large = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 4.0]) * 2.0
    rewards = torch.cat([small.double(), large.double() * 2.0**exponent])
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    if not sort:
        rewards, ids = rewards.view(2, 3).t().reshape(-1), ids.view(2, 3).t().reshape(-1)
    got = advantage(target, rewards, ids, scale=scale, eps=0.0)
    a = small.double()
    one = (a - a.mean()) / (a.std() if scale == "std" else 1)
    two = one if scale == "std" else one * 2.0 ** (exponent + 1)
    torch.testing.assert_close(got[ids == 0], one, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(got[ids == 1], two, rtol=1e-8, atol=1e-8)
    extremes = torch.tensor([1.7e308, -1.7e308], dtype=torch.float64)
    got = advantage(target, extremes, torch.zeros(2, dtype=torch.int64))
    assert got.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_a_group_of_one_without_centre_or_scale(target) -> None:
    one, group = torch.tensor([3.0]), torch.tensor([0])
    assert advantage(target, one, group, center="none", scale="none").item() == 3.0
    assert advantage(target, one, group, center="none", scale="none", min_std=0.5).item() == 0.0


def test_many_rows_and_a_lone_outlier(target) -> None:
    """Groups over several blocks and warps, of one row up to thousands; a spread far above the deviation."""
    rows = 3000 if target.emulated or target.backend == "triton" else 50_000
    generator = torch.Generator().manual_seed(0)
    rewards = 1000 + torch.randn(rows, generator=generator)
    rewards[0] = 1e6
    ids = (torch.rand(rows, generator=generator) ** 4 * rows).long()
    for order in (torch.arange(rows), ids.argsort(stable=True)):
        exact = group_advantage(rewards[order].double(), ids[order], backend="torch")
        got = advantage(target, rewards[order], ids[order])
        torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-6)
        assert torch.equal(advantage(target, rewards[order], ids[order]), got)


def test_many_small_squares_beside_a_large_one(target) -> None:
    """Each is below what is left of the largest, all together are not."""
    rewards = torch.zeros(3000, dtype=torch.float64)
    rewards[::2] = 2.1e-5
    rewards[7] = 1.0
    group = torch.zeros(3000, dtype=torch.int64)
    exact = group_advantage(rewards, group, backend="torch")
    torch.testing.assert_close(advantage(target, rewards, group), exact, rtol=3e-9, atol=3e-9)


def test_one_trajectory_id_in_many_groups(target) -> None:
    rewards = torch.randn(600, generator=torch.Generator().manual_seed(2))
    ids = torch.arange(600) % 300
    options = {"pool": "trajectory", "trajectory_ids": torch.full((600,), 7), "singleton": "raw", "scale": "none"}
    expected = ((rewards[:300] + rewards[300:]) / 2).repeat(2)
    torch.testing.assert_close(advantage(target, rewards, ids, num_groups=300, **options), expected)


def test_order_and_threads_change_no_bit() -> None:
    """Groups that stand together are summed in another way, by as many threads as there are."""
    generator = torch.Generator().manual_seed(1)
    rewards, ids = torch.randn(70_000, generator=generator), torch.randint(0, 9000, (70_000,), generator=generator)
    order = ids.argsort(stable=True)
    expected = group_advantage(rewards, ids)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            assert torch.equal(group_advantage(rewards[order], ids[order]), expected[order])
    finally:
        torch.set_num_threads(before)


def test_a_rule_of_before_does_not_stick() -> None:
    """Rules are kept once they were checked."""
    rewards, ids = torch.tensor([0.0, 1.0, 2.0, 5.0]), torch.tensor([0, 0, 1, 1])

    def both(**rule: Any) -> None:
        expected = group_advantage(rewards, ids, **rule, backend="torch")
        for _ in range(2):
            torch.testing.assert_close(group_advantage(rewards, ids, **rule), expected)

    eps: Any = torch.tensor(1.0)
    both(eps=eps)
    eps.fill_(3.0)
    both(eps=eps)
    for number in range(1200):
        both(eps=number / 7, ddof=number % 2, center=("mean", "leave_one_out", "none")[number % 3])
    for wrong in ({"eps": -1.0}, {"center": "median"}, {"ddof": 2}, {"min_std": math.nan}):
        for _ in range(2):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                group_advantage(rewards, ids, **wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# What reaches memory on a GPU
# ---------------------------------------------------------------------------------------------------------------------
COUNT_ATOMICS = """
#include <cstdio>
#include <vector>
#include "cuda/group_advantage.cu"
using namespace turnwise;
namespace turnwise {
void check_group_advantage(const GroupAdvantageInput&, const GroupAdvantageOptions&, const View&) {}
}
template <class T>
View view(std::vector<T>& column, DType dtype) {
    View v;
    v.data = column.data(); v.dtype = dtype; v.dims = 1; v.shape[0] = int64_t(column.size()); v.stride[0] = 1;
    emulation::allow(v.data, column.size() * sizeof(T));
    return v;
}
int main() {
    int rows = 0, groups = 0;
    while (std::scanf("%d %d", &rows, &groups) == 2) {
        std::vector<float> rewards(rows), advantages(rows);
        std::vector<int64_t> ids(rows);
        std::vector<unsigned char> space(size_t(cuda::group_advantage_workspace(rows, groups, false, false)));
        for (int i = 0; i < rows; ++i) {
            int id = 0;
            std::scanf("%d", &id);
            ids[i] = id;
            rewards[i] = float(i * 7919 % 1009);
        }
        GroupAdvantageInput input{};
        input.rewards = view(rewards, DType::f32);
        input.group_ids = view(ids, DType::i64);
        input.num_groups = groups;
        const GroupAdvantageOptions options{false, Center::mean, Scale::std, Singleton::zero, 1, 1e-6, 0};
        emulation::atomics = 0;
        const View out = view(advantages, DType::f32);
        cuda::group_advantage(input, options, out, view(space, DType::u8), cuda::Stream{});
        std::printf("%lld\\n", (long long)emulation::atomics);
    }
}
"""


@pytest.mark.slow
def test_atomics_of_large_groups_are_few(tmp_path, compile_and_run) -> None:
    """A block joins the rows of a group before it touches memory: 6 atomics for each block of 512 rows and group."""
    rows, seed = 16_384, 3  # the counts per row are those of 65,536 rows, as blocks are alike
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    cases = {
        "groups of 8": torch.arange(rows) // 8,
        "4 large groups": torch.arange(rows) % 4,
        "4 large groups, at random": torch.randint(0, 4, (rows,), generator=generator),
        "4 large groups, sorted": torch.arange(rows) * 4 // rows,
        "4 large groups whose ids are far apart": torch.arange(rows) % 4 * 1000 + torch.arange(rows) % 4,
        "one group": torch.zeros(rows, dtype=torch.int64),
    }
    lines = [f"{rows} {int(ids.max()) + 1} {' '.join(map(str, ids.tolist()))}" for ids in cases.values()]
    program = tmp_path / "atomics.cpp"
    program.write_text(COUNT_ATOMICS)
    counts = dict(zip(cases, map(int, compile_and_run(program, "\n".join(lines))), strict=True))
    for name, count in counts.items():
        assert count <= (rows if name == "groups of 8" else rows / 16), (name, count)
    assert counts["groups of 8"] / rows == 6 / 8
    assert counts["4 large groups"] / rows == 6 * 4 / 512


@pytest.mark.parametrize("groups", [1, 4, 40, 700])
@pytest.mark.parametrize("order", ["sorted", "interleaved", "random"])
def test_large_groups_with_an_offset(kernel, groups: int, order: str) -> None:
    """Against float64, with rewards around 1e3; ids that want one place in a block; two runs of equal bits."""
    rows, seed = 1700, groups
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(rows) % groups
    if order == "sorted":
        ids = ids.sort().values
    elif order == "random":
        ids = torch.randint(0, groups, (rows,), generator=generator) * 32  # all at one place of a warp's table
    rewards = 1e3 + torch.randn(rows, generator=generator)
    tied = (ids == ids.max()) & (groups > 1)
    rewards[tied] = 1000.3
    lengths = torch.randint(1, 50, (rows,), generator=generator)
    for options in ({}, {"center": "length_weighted", "lengths": lengths, "scale": "none"}):
        options["num_groups"] = int(ids.max()) + 1
        got = advantage(kernel, rewards, ids, **options)
        exact = group_advantage(rewards.double(), ids, backend="torch", **options)
        torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-6)
        assert (got[tied] == 0).all()
        assert torch.equal(advantage(kernel, rewards, ids, **options), got)

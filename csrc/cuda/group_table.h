// Group statistics in kernels, in steps that group_advantage and the fused kernel share.
//
// All sums are of integers, so they don't depend on the order of the atomics. A value counts as its offset from the
// group's smallest in steps of 2^-31 of the group's span: equal values give exactly 0, an offset of all values costs
// nothing, and the mean is off by 2^-32 of the span at most.
//
//     clear_table -> barrier -> add_extremes -> barrier -> add_offsets -> barrier -> advantage_of each row
#pragma once

#include "cuda/block.h"
#include "ops/group_advantage.h"

namespace turnwise::cuda {

using Word = unsigned long long;

constexpr double kSteps = 2147483648.0;

struct GroupSums {
    Word low, high;                // the smallest and the largest value, as keys
    Word count;                    // members
    Word sum;                      // of offsets, in steps
    Word square_high, square_low;  // the sum of squares is square_high 2^31 + square_low
};

struct GroupWeights {
    Word longest;                      // the bits of the largest length; lengths count in steps of 2^-31 of it
    Word total;                        // of lengths, in steps
    Word weighted_high, weighted_low;  // sum of length times offset, split like the squares
};

struct GroupTable {
    GroupSums* sums;        // [slots]
    GroupWeights* weights;  // [slots]; null: lengths don't count
    int64_t slots;          // groups, or trajectories
};

// A row's part in the statistics.
struct Member {
    int64_t slot = -1;  // of its group; -1: it has no part
    double value = 0;   // reward
    double length = 1;  // weight
};

// Doubles as integers in the same order; NaN is beyond the infinities, so it shows as an extreme.
__device__ __forceinline__ Word key_of(double value) {
    const Word bits = Word(__double_as_longlong(value));
    return bits >> 63 ? ~bits : bits | Word(1) << 63;
}
__device__ __forceinline__ double value_of_key(Word key) {
    return __longlong_as_double((long long)(key >> 63 ? key ^ Word(1) << 63 : ~key));
}

// Half of the difference, which is finite for any two finite values.
__device__ __forceinline__ double half_difference(double a, double b) {
    return a * 0.5 - b * 0.5;
}

// A part of a whole in steps; 0 where either is not finite, which the extremes show.
__device__ __forceinline__ Word steps_of(double part, double whole) {
    const double ratio = whole > 0 ? part / whole : 0;
    return ratio >= 0 && ratio <= 1 ? Word(ratio * kSteps + 0.5) : 0;
}

__device__ __forceinline__ int64_t thread_of_grid() {
    return int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t threads_of_grid() {
    return int64_t(gridDim.x) * blockDim.x;
}

__device__ __forceinline__ void clear_table(const GroupTable& table) {
    for (int64_t slot = thread_of_grid(); slot < table.slots; slot += threads_of_grid()) {
        table.sums[slot] = {~Word(0), 0, 0, 0, 0, 0};
        if (table.weights) table.weights[slot] = {0, 0, 0, 0};
    }
}

// A run of neighbouring lanes with one slot, as rows of a group often are adjacent: its first lane adds for all.
struct LaneRun {
    int last;    // the run's last lane
    bool first;  // this lane is the run's first
    bool alone;  // every run of the warp has one lane

    __device__ explicit LaneRun(int64_t slot) {
        const int lane = int(threadIdx.x) % kWarp;
        const int64_t before = __shfl_up_sync(kFullWarp, (long long)slot, 1);
        first = lane == 0 || before != slot;
        const unsigned firsts = __ballot_sync(kFullWarp, first);
        const unsigned behind = lane == kWarp - 1 ? 0 : firsts & (~0u << (lane + 1));
        last = behind ? __ffs(int(behind)) - 2 : kWarp - 1;
        alone = firsts == kFullWarp;
    }
    __device__ int count() const { return last - int(threadIdx.x) % kWarp + 1; }

    // The first lane of a run gets `join` over the run.
    template <class Join>
    __device__ Word reduce(Word value, const Join& join) const {
        if (alone) return value;
        const int lane = int(threadIdx.x) % kWarp;
#pragma unroll
        for (int by = 1; by < kWarp; by *= 2) {
            const Word other = __shfl_down_sync(kFullWarp, value, by);
            if (lane + by <= last) value = join(value, other);
        }
        return value;
    }
    __device__ Word sum(Word value) const {
        return reduce(value, [](Word a, Word b) { return a + b; });
    }
};

// body(row, is_row) by whole warps: lanes beyond the last row come along.
template <class Body>
__device__ __forceinline__ void each_row(int64_t rows, const Body& body) {
    const int lane = int(threadIdx.x) % kWarp;
    for (int64_t first = thread_of_grid() - lane; first < rows; first += threads_of_grid()) {
        body(first + lane, first + lane < rows);
    }
}

// member(row) -> Member, for every row.
template <class Get>
__device__ __forceinline__ void add_extremes(const GroupTable& table, int64_t rows, const Get& member) {
    each_row(rows, [&](int64_t row, bool is_row) {
        const Member m = is_row ? member(row) : Member{};
        const LaneRun run(m.slot);
        const Word key = key_of(m.value);
        const Word low = run.reduce(key, [](Word a, Word b) { return a < b ? a : b; });
        const Word high = run.reduce(key, [](Word a, Word b) { return a < b ? b : a; });
        const Word bits = Word(__double_as_longlong(m.length >= 0 ? m.length : __longlong_as_double(0x7ff8LL << 48)));
        const Word longest = table.weights ? run.reduce(bits, [](Word a, Word b) { return a < b ? b : a; }) : 0;
        if (!run.first || m.slot < 0) return;
        GroupSums& sums = table.sums[m.slot];
        atomicMin(&sums.low, low);
        atomicMax(&sums.high, high);
        atomicAdd(&sums.count, Word(run.count()));
        if (table.weights) atomicMax(&table.weights[m.slot].longest, longest);
    });
}

template <class Get>
__device__ __forceinline__ void add_offsets(const GroupTable& table, int64_t rows, const Get& member) {
    constexpr Word kLow = (Word(1) << 31) - 1;
    each_row(rows, [&](int64_t row, bool is_row) {
        const Member m = is_row ? member(row) : Member{};
        const LaneRun run(m.slot);
        Word offset = 0, length = 0;
        if (m.slot >= 0) {
            const GroupSums& sums = table.sums[m.slot];
            const double low = value_of_key(__ldcg(&sums.low)), high = value_of_key(__ldcg(&sums.high));
            offset = steps_of(half_difference(m.value, low), half_difference(high, low));
            if (table.weights) {
                length = steps_of(m.length, __longlong_as_double((long long)__ldcg(&table.weights[m.slot].longest)));
            }
        }
        const Word square = offset * offset, weighted = length * offset;  // at most 2^62
        const Word sum = run.sum(offset), high = run.sum(square >> 31), low = run.sum(square & kLow);
        Word total = 0, weighted_high = 0, weighted_low = 0;
        if (table.weights) {
            total = run.sum(length);
            weighted_high = run.sum(weighted >> 31);
            weighted_low = run.sum(weighted & kLow);
        }
        if (!run.first || m.slot < 0) return;
        GroupSums& sums = table.sums[m.slot];
        if (sum == 0 && total == 0) return;
        atomicAdd(&sums.sum, sum);
        atomicAdd(&sums.square_high, high);
        atomicAdd(&sums.square_low, low);
        if (!table.weights) return;
        GroupWeights& weights = table.weights[m.slot];
        atomicAdd(&weights.total, total);
        atomicAdd(&weights.weighted_high, weighted_high);
        atomicAdd(&weights.weighted_low, weighted_low);
    });
}

__device__ __forceinline__ double joined(Word high, Word low) {
    return double(high) * kSteps + double(low);
}

// The mean of a slot's values.
__device__ __forceinline__ double mean_of(const GroupSums& g) {
    const double low = value_of_key(g.low), span = half_difference(value_of_key(g.high), low);
    return low + 2 * (double(g.sum) / double(g.count) / kSteps * span);
}

// The sum of a slot's lengths.
__device__ __forceinline__ double length_of(const GroupWeights& w) {
    return double(w.total) / kSteps * __longlong_as_double((long long)w.longest);
}

// The rules of ops/group_advantage.cpp. NaN where the group holds a value that is not finite, or is a single member
// with Singleton::error. `weights`: null unless the center is length_weighted.
__device__ __forceinline__ double advantage_of(double value, const GroupSums& g, const GroupWeights* weights,
                                               const GroupAdvantageOptions& o) {
    const double nan = __longlong_as_double(0x7ff8LL << 48);
    const bool grouped = o.center != Center::none || o.scale != Scale::none;
    const double low = value_of_key(g.low), n = double(g.count);
    const double span = half_difference(value_of_key(g.high), low);  // halves: the whole may be beyond the largest
    if (!(span - span == 0)) return nan;
    if (g.count == 1 && grouped) {
        if (o.singleton == Singleton::error) return nan;
        if (o.singleton == Singleton::zero) return 0;
        return o.scale == Scale::std ? value / (1 + o.eps) : value;
    }
    const double mean = double(g.sum) / n;  // in steps
    const double squares = joined(g.square_high, g.square_low) - double(g.sum) * mean;
    const double std = span == 0 || squares <= 0 ? 0 : sqrt(squares / (n - o.ddof)) / kSteps * span;
    if (2 * std < o.min_std || (o.scale == Scale::std && std == 0)) return 0;
    double center = mean, factor = 1;
    if (o.center == Center::leave_one_out) factor = n / (n - 1);
    if (o.center == Center::length_weighted) {
        const double longest = __longlong_as_double((long long)weights->longest);
        if (!(longest - longest == 0)) return nan;
        if (weights->total > 0) center = joined(weights->weighted_high, weights->weighted_low) / double(weights->total);
    }
    const double centred =
        o.center == Center::none ? value * 0.5 : half_difference(value, low) - center / kSteps * span;
    return o.scale == Scale::std ? centred * factor / (std + 0.5 * o.eps) : 2 * centred * factor;
}

}  // namespace turnwise::cuda

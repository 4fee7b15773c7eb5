// Group statistics in kernels, in steps that group_advantage and grouped_policy_loss share.
//
// All sums are sums of integers, so they do not depend on the order of the atomics. A value enters as its offset from
// the group's smallest value, in steps of 2^-31 of the group's span. So equal values give exactly 0, a constant added
// to all values costs no accuracy, and the error of the mean is at most 2^-32 of the span.
//
//     clear_table -> barrier -> add_extremes -> barrier -> add_offsets -> barrier -> advantage_of each row
#pragma once

#include "cuda/exact_sums.h"
#include "ops/group_advantage.h"

namespace turnwise::cuda {

constexpr double kSteps = 2147483648.0;  // 2^31, steps per span

struct GroupSums {
    Word low, high;                // the smallest and the largest value, as keys
    Word count;                    // members
    Word sum;                      // sum of offsets, in steps
    Word square_high, square_low;  // the sum of squared offsets is square_high 2^31 + square_low
};

// Sums for Center::length_weighted. A step of length is 2^-31 of the largest length.
struct GroupWeights {
    Word longest;                      // the bits of the largest length, a double
    Word total;                        // sum of lengths, in steps
    Word weighted_high, weighted_low;  // the sum of length times offset is weighted_high 2^31 + weighted_low
};

struct GroupTable {
    GroupSums* sums;        // [slots]
    GroupWeights* weights;  // [slots]; null: lengths are not used
    int64_t slots;          // number of groups or trajectories
};

// A row's part in the statistics.
struct Member {
    int64_t slot = -1;  // its group or trajectory; -1: it is not a member
    double value = 0;   // its reward
    double length = 1;  // its weight
};

// Maps doubles to integers in the same order. NaN comes out beyond the infinities, so a group with NaN has it as an
// extreme.
__device__ __forceinline__ Word key_of(double value) {
    const Word bits = Word(__double_as_longlong(value));
    return bits >> 63 ? ~bits : bits | Word(1) << 63;
}
__device__ __forceinline__ double value_of_key(Word key) {
    return __longlong_as_double((long long)(key >> 63 ? key ^ Word(1) << 63 : ~key));
}

// Half of a - b, which is finite for any two finite values.
__device__ __forceinline__ double half_difference(double a, double b) {
    return a * 0.5 - b * 0.5;
}

// part / whole in steps. 0 if either is not finite; the extremes then tell.
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

// A run of adjacent lanes with the same slot, because rows of a group are often adjacent. Its first lane adds for all.
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

    // Combines the values of a run by `join`. Only the first lane of the run gets the result.
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

// Calls body(row, is_row) in whole warps, so also for lanes after the last row.
template <class Body>
__device__ __forceinline__ void each_row(int64_t rows, const Body& body) {
    const int lane = int(threadIdx.x) % kWarp;
    for (int64_t first = thread_of_grid() - lane; first < rows; first += threads_of_grid()) {
        body(first + lane, first + lane < rows);
    }
}

// Adds every row to its slot: smallest and largest value, count, longest length. member(row) returns a Member.
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

// Adds every row to the sums of its slot, once the extremes are known.
template <class Get>
__device__ __forceinline__ void add_offsets(const GroupTable& table, int64_t rows, const Get& member) {
    constexpr Word kLow = (Word(1) << 31) - 1;
    each_row(rows, [&](int64_t row, bool is_row) {
        const Member m = is_row ? member(row) : Member{};
        const LaneRun run(m.slot);
        // Offset and length in steps.
        Word offset = 0, length = 0;
        if (m.slot >= 0) {
            const GroupSums& sums = table.sums[m.slot];
            const double low = value_of_key(__ldcg(&sums.low)), high = value_of_key(__ldcg(&sums.high));
            offset = steps_of(half_difference(m.value, low), half_difference(high, low));
            if (table.weights) {
                length = steps_of(m.length, __longlong_as_double((long long)__ldcg(&table.weights[m.slot].longest)));
            }
        }
        // Sums over the run of lanes, in two halves where they could overflow.
        const Word square = offset * offset, weighted = length * offset;  // at most 2^62
        const Word sum = run.sum(offset), high = run.sum(square >> 31), low = run.sum(square & kLow);
        Word total = 0, weighted_high = 0, weighted_low = 0;
        if (table.weights) {
            total = run.sum(length);
            weighted_high = run.sum(weighted >> 31);
            weighted_low = run.sum(weighted & kLow);
        }
        // The first lane of a run adds its sums; zeros change nothing.
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

// A sum from its two halves.
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

// The advantage of a value, by the rules of ops/group_advantage.cpp. NaN if the group has a value that is not finite,
// or if it has one member and the option is Singleton::error. `weights`: null unless the center is length_weighted.
__device__ __forceinline__ double advantage_of(double value, const GroupSums& g, const GroupWeights* weights,
                                               const GroupAdvantageOptions& o) {
    const double nan = __longlong_as_double(0x7ff8LL << 48);
    const bool grouped = o.center != Center::none || o.scale != Scale::none;
    const double low = value_of_key(g.low), n = double(g.count);
    const double span =
        half_difference(value_of_key(g.high), low);  // half of the span, because the whole could overflow
    if (!(span - span == 0)) return nan;
    if (g.count == 1 && grouped) {
        if (o.singleton == Singleton::error) return nan;
        if (o.singleton == Singleton::zero) return 0;
        return o.scale == Scale::std ? value / (1 + o.eps) : value;
    }
    // Mean and standard deviation; std is half of it, like span.
    const double mean = double(g.sum) / n;  // in steps
    const double squares = joined(g.square_high, g.square_low) - double(g.sum) * mean;
    const double std = span == 0 || squares <= 0 ? 0 : sqrt(squares / (n - o.ddof)) / kSteps * span;
    if (2 * std < o.min_std || (o.scale == Scale::std && std == 0)) return 0;
    // The centre in steps, then the centred value (half of it) and its scale.
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

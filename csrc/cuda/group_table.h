// Group statistics in kernels, in steps that group_advantage and grouped_policy_loss share.
//
// All sums are sums of integers, so they do not depend on the order of the atomics. A value enters as its offset from
// the group's smallest value, in steps of 2^-31 of the group's span. So equal values give exactly 0, a constant added
// to all values costs no accuracy, and the error of the mean is at most 2^-32 of the span.
//
// Rows of one group meet in three places. The lanes of a warp join theirs, the warps of a block join what they have,
// and only that goes to memory. So a few large groups do not make a queue at their addresses, however their rows are
// mixed.
//
//     clear_table -> barrier -> add_extremes -> barrier -> add_offsets -> barrier -> advantage_of each row
#pragma once

#include "cuda/exact_sums.h"
#include "ops/group_advantage.h"

namespace turnwise::cuda {

constexpr double kSteps = 2147483648.0;  // 2^31, steps per span

struct GroupSums {
    Word low, high;                // keys of the smallest and the largest value; of the smallest all bits are inverted
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
    Word* largest;          // [slots]: bits of the largest magnitude of a row; null: that of the slot's values
    int64_t slots;          // number of groups or trajectories
};

constexpr int64_t kNotValid = -1;  // the slot of a row that is left out
constexpr int64_t kOutside = -2;   // the slot of a row whose group id is out of range

// A row's part in the statistics.
struct Member {
    int64_t slot = kNotValid;  // its group or trajectory; negative: it is not a member
    double value = 0;          // its reward
    double length = 1;         // its weight
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

// All words of the table are 0 at first.
__device__ __forceinline__ void clear_table(const GroupTable& table) {
    const auto clear = [](void* words, int64_t bytes) {
#pragma unroll 1
        for (int64_t i = thread_of_grid(); i < bytes / 8; i += threads_of_grid()) static_cast<Word*>(words)[i] = 0;
    };
    clear(table.sums, table.slots * int64_t(sizeof(GroupSums)));
    if (table.weights) clear(table.weights, table.slots * int64_t(sizeof(GroupWeights)));
    if (table.largest) clear(table.largest, table.slots * int64_t(sizeof(Word)));
}

// ---- Joining rows of one slot ---------------------------------------------------------------------------------------
// Joins the values of all lanes with the same slot, in as many steps as their number has bits. Only the lowest of these
// lanes gets the result. `peers`: the lanes with this lane's slot. join(k, a, b): of two values number k.
template <int count, class Join>
__device__ __forceinline__ void join_peers(unsigned peers, Word (&values)[count], const Join& join) {
    const int lane = int(threadIdx.x) % kWarp;
    unsigned later = peers & ~1u << lane;  // the peers that this lane has not joined
    int rank = __popc(peers & ((1u << lane) - 1));
    while (__any_sync(kFullWarp, later != 0)) {
        const int next = __ffs(int(later)) - 1;
#pragma unroll
        for (int k = 0; k < count; ++k) {
            const Word other = __shfl_sync(kFullWarp, values[k], next & (kWarp - 1));
            if (next >= 0) values[k] = join(k, values[k], other);
        }
        // Every second of the peers that are left has been joined by the one before it.
        later &= ~__ballot_sync(kFullWarp, rank & 1);
        rank /= 2;
    }
}

// Data of each warp of a block for up to 32 slots, in shared memory: for slot s at place s % 32.
struct BlockTable {
    static constexpr int kValues = 6;       // most values of a slot
    static constexpr int kRow = kWarp + 1;  // places of a warp, and one that keeps the warps in different banks
    static constexpr int bytes(int threads) { return threads / kWarp * kRow * (8 + 8 * kValues); }

    __device__ explicit BlockTable(void* memory)
        : size(int(blockDim.x) / kWarp * kRow),
          slots(static_cast<int64_t*>(memory)),
          values(reinterpret_cast<Word*>(slots + size)) {}

    int size;        // kRow for each warp
    int64_t* slots;  // [size]; kNotValid: none
    Word* values;    // [kValues, size]
};

// Joins the values of the lanes with the same slot, see join_peers. True in the lane that has the result.
template <int count, class Join>
__device__ __forceinline__ bool join_warp(int64_t slot, Word (&values)[count], const Join& join) {
    const int lane = int(threadIdx.x) % kWarp;
    const unsigned same = __match_any_sync(kFullWarp, (long long)slot), peers = slot >= 0 ? same : 1u << lane;
    join_peers(peers, values, join);
    return slot >= 0 && __ffs(int(peers)) - 1 == lane;
}

// Joins the values of a block's rows by slot. Calls add(slot, values) with what the block has: once per slot, or more
// often if slots want the same place. Called by whole blocks.
template <int count, class Join, class Add>
__device__ __forceinline__ void join_block(const BlockTable& block, int64_t slot, Word (&values)[count],
                                           const Join& join, const Add& add) {
    const int thread = int(threadIdx.x), lane = thread % kWarp, warps = int(blockDim.x) / kWarp;
    const bool leads = join_warp(slot, values, join);
    // The lane that has a slot takes the slot's place. Where several want one, the lowest gets it, and the others add
    // their values themselves.
    const int place = int(slot & (kWarp - 1)), at = thread / kWarp * BlockTable::kRow + place;
    block.slots[thread / kWarp * BlockTable::kRow + lane] = kNotValid;
    const unsigned rivals = __match_any_sync(kFullWarp, leads ? place : kWarp + lane);
    const bool owns = leads && __ffs(int(rivals)) - 1 == lane;
    __syncwarp();
    if (owns) {
        block.slots[at] = slot;
#pragma unroll
        for (int k = 0; k < count; ++k) block.values[k * block.size + at] = values[k];
    }
    __syncthreads();
    // Now a warp has a few places of all warps.
    const int from = thread % warps * BlockTable::kRow + thread / warps;
    const int64_t joined_slot = block.slots[from];
    Word all[count];
#pragma unroll
    for (int k = 0; k < count; ++k) all[k] = block.values[k * block.size + from];  // garbage where there is no slot
    const bool has_all = join_warp(joined_slot, all, join);
    if (has_all) add(joined_slot, all);
    if (leads && !owns) add(slot, values);
    __syncthreads();
}

// Calls body(row, is_row) in whole blocks, so also for threads after the last row.
template <class Body>
__device__ __forceinline__ void each_row(int64_t rows, const Body& body) {
    for (int64_t first = int64_t(blockIdx.x) * blockDim.x; first < rows; first += threads_of_grid()) {
        const int64_t row = first + threadIdx.x;
        body(row, row < rows);
    }
}

// ---- Statistics -----------------------------------------------------------------------------------------------------
// Adds every row to its slot: smallest and largest value, count, longest length. member(row) returns a Member.
template <bool weighted, class Get>
__device__ __forceinline__ void add_extremes(const GroupTable& table, const BlockTable& block, int64_t rows,
                                             const Get& member) {
    constexpr int kCount = 2;  // of the values, the only one that is a sum
    const auto join = [](int k, Word a, Word b) { return k == kCount ? a + b : a < b ? b : a; };
    const auto add = [&](int64_t slot, const auto& values) {
        GroupSums& sums = table.sums[slot];
        atomicMax(&sums.low, values[0]);
        atomicMax(&sums.high, values[1]);
        atomicAdd(&sums.count, values[kCount]);
        if constexpr (weighted) atomicMax(&table.weights[slot].longest, values[3]);
    };
    each_row(rows, [&](int64_t row, bool is_row) {
        const Member m = is_row ? member(row) : Member{};
        Word values[weighted ? 4 : 3] = {~key_of(m.value), key_of(m.value), 1};
        if constexpr (weighted) {
            const double length = m.length >= 0 ? m.length : __longlong_as_double(0x7ff8LL << 48);
            values[3] = Word(__double_as_longlong(length));
        }
        join_block(block, m.slot, values, join, add);
    });
}

// Adds every row to the sums of its slot, once the extremes are known.
template <bool weighted, class Get>
__device__ __forceinline__ void add_offsets(const GroupTable& table, const BlockTable& block, int64_t rows,
                                            const Get& member) {
    constexpr Word kLow = (Word(1) << 31) - 1;
    const auto join = [](int, Word a, Word b) { return a + b; };
    const auto add = [&](int64_t slot, const auto& values) {
        GroupSums& sums = table.sums[slot];
        if (values[0] != 0) {  // else all values are the smallest
            atomicAdd(&sums.sum, values[0]);
            atomicAdd(&sums.square_high, values[1]);
            atomicAdd(&sums.square_low, values[2]);
        }
        if constexpr (weighted) {
            GroupWeights& weights = table.weights[slot];
            atomicAdd(&weights.total, values[3]);
            atomicAdd(&weights.weighted_high, values[4]);
            atomicAdd(&weights.weighted_low, values[5]);
        }
    };
    each_row(rows, [&](int64_t row, bool is_row) {
        const Member m = is_row ? member(row) : Member{};
        // Offset and length in steps.
        Word offset = 0, length = 0;
        if (m.slot >= 0) {
            const GroupSums& sums = table.sums[m.slot];
            const double low = value_of_key(~__ldcg(&sums.low)), high = value_of_key(__ldcg(&sums.high));
            offset = steps_of(half_difference(m.value, low), half_difference(high, low));
            if (weighted) {
                length = steps_of(m.length, __longlong_as_double((long long)__ldcg(&table.weights[m.slot].longest)));
            }
        }
        // What could overflow is summed in two halves.
        const Word square = offset * offset;  // at most 2^62
        Word values[weighted ? 6 : 3] = {offset, square >> 31, square & kLow};
        if constexpr (weighted) {
            const Word product = length * offset;
            values[3] = length;
            values[4] = product >> 31;
            values[5] = product & kLow;
        }
        join_block(block, m.slot, values, join, add);
    });
}

// A sum from its two halves.
__device__ __forceinline__ double joined(Word high, Word low) {
    return double(high) * kSteps + double(low);
}

// The mean of a slot's values.
__device__ __forceinline__ double mean_of(const GroupSums& g) {
    const double low = value_of_key(~g.low), span = half_difference(value_of_key(g.high), low);
    return low + 2 * (double(g.sum) / double(g.count) / kSteps * span);
}

// The largest magnitude of a slot's values.
__device__ __forceinline__ double magnitude_of(const GroupSums& g) {
    return fmax(fabs(value_of_key(~g.low)), fabs(value_of_key(g.high)));
}

// The sum of a slot's lengths.
__device__ __forceinline__ double length_of(const GroupWeights& w) {
    return double(w.total) / kSteps * __longlong_as_double((long long)w.longest);
}

// The advantage of a row, by the rules of ops/group_advantage.cpp: 0 for one that is left out, NaN for an id out of
// range. NaN if the group has a value that is not finite, or if it has one member and the option is Singleton::error.
// `tie`: see kTie.
__device__ __forceinline__ double advantage_of(const Member& m, const GroupTable& table, const GroupAdvantageOptions& o,
                                               double tie) {
    const double nan = __longlong_as_double(0x7ff8LL << 48);
    if (m.slot < 0) return m.slot == kOutside ? nan : 0;
    const double value = m.value;
    const GroupSums g = table.sums[m.slot];
    const bool grouped = o.center != Center::none || o.scale != Scale::none;
    const double low = value_of_key(~g.low), n = double(g.count);
    const double span =
        half_difference(value_of_key(g.high), low);  // half of the span, because the whole could overflow
    if (!(span - span == 0)) return nan;
    if (g.count == 1 && grouped) {
        if (o.singleton == Singleton::error) return nan;
        if (o.singleton == Singleton::zero) return 0;
        return o.scale == Scale::std ? value / (1 + o.eps) : value;
    }
    const double largest = table.largest ? __longlong_as_double((long long)table.largest[m.slot]) : magnitude_of(g);
    if (grouped && span <= 0.5 * tie * largest) return 0;
    // Mean and standard deviation; std is half of it, like span.
    const double mean = double(g.sum) / n;  // in steps
    const double squares = joined(g.square_high, g.square_low) - double(g.sum) * mean;
    const double std = span == 0 || squares <= 0 ? 0 : sqrt(squares / (n - o.ddof)) / kSteps * span;
    if (2 * std < o.min_std || (o.scale == Scale::std && std == 0)) return 0;
    // The centre in steps, then the centred value (half of it) and its scale.
    double center = mean, factor = 1;
    if (o.center == Center::leave_one_out) factor = n / (n - 1);
    if (o.center == Center::length_weighted) {
        const GroupWeights& w = table.weights[m.slot];
        const double longest = __longlong_as_double((long long)w.longest);
        if (!(longest - longest == 0)) return nan;
        if (w.total > 0) center = joined(w.weighted_high, w.weighted_low) / double(w.total);
    }
    const double centred =
        o.center == Center::none ? value * 0.5 : half_difference(value, low) - center / kSteps * span;
    return o.scale == Scale::std ? centred * factor / (std + 0.5 * o.eps) : 2 * centred * factor;
}

}  // namespace turnwise::cuda

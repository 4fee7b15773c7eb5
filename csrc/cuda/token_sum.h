// Sums of rewards over the rows of a token stream, as device functions that a fused kernel can use too.
#pragma once

#include "cuda/token_stream.h"

namespace turnwise::cuda {

// A block sums a chunk of adjacent tokens. Each warp has a unit of them in registers and adds up the rows in it. The
// block adds up the parts of rows that several units hold, and a second kernel those that several chunks hold. The
// order of additions is fixed.
constexpr int kSumWarps = 8, kSumThreads = kSumWarps * kWarp;
constexpr int kSumPack = 4, kSumPacks = 4, kSumUnit = kSumPack * kSumPacks * kWarp, kSumChunk = kSumUnit * kSumWarps;

// Parts of the rows that a chunk cuts; undefined if there is no such row.
struct Edges {
    double head;  // the chunk's part of the row that began before it
    double tail;  // the chunk's part of the row that continues after it
};

// Parts of the rows that a unit cuts.
struct UnitParts {
    double head, tail;  // as in Edges
    int64_t tail_row;   // the row that continues after the unit; -1: none
    int64_t tail_end;   // the end of that row
    int64_t head_end;   // the end of the row that began before the unit; equals the unit's begin if none did
};

// The position in a unit of a lane's token k of pack `pack`. A pack is kSumPack adjacent tokens, or single tokens a
// warp apart if the memory is not aligned.
__device__ __forceinline__ int place_in_unit(int pack, int k, int lane, bool aligned) {
    return pack * kSumPack * kWarp + (aligned ? lane * kSumPack + k : k * kWarp + lane);
}

// Loads a whole unit; masked tokens are 0, and tokens after a row's length have no meaning. It requests all packs
// before it uses the first: a load that waits for the one before it would leave the memory idle.
template <class T, class Mask>
__device__ __forceinline__ void load_whole_unit(const TokenRows& r, const T* rewards, const Mask* mask, int64_t begin,
                                                float (&values)[kSumPacks][kSumPack]) {
    const int64_t first = begin + place_in_unit(0, 0, int(threadIdx.x) % kWarp, true);
    Loaded<T, kSumPack> packs[kSumPacks]{};
    Loaded<Mask, kSumPack> on[kSumPacks];
    // Skip tokens after a row's length, if finding the length is cheap.
    const bool lengths = r.lengths != nullptr && r.width % kSumPack == 0 && r.width >= kSumPack * kWarp;
    int64_t row = lengths ? first / r.width : 0, place = first - row * r.width;
    bool counts[kSumPacks];
#pragma unroll
    for (int p = 0; p < kSumPacks; ++p, place += kSumPack * kWarp) {
        if (lengths && place >= r.width) {
            place -= r.width;
            ++row;
        }
        counts[p] = !lengths || place < row_length(r, row, r.width);
    }
    // Request all packs.
#pragma unroll
    for (int p = 0; p < kSumPacks; ++p) {
        if (counts[p]) packs[p] = load_streaming<T, kSumPack>(rewards + first + p * kSumPack * kWarp);
    }
    if (mask != nullptr) {
#pragma unroll
        for (int p = 0; p < kSumPacks; ++p) {
            on[p] = load_streaming<Mask, kSumPack>(mask + first + p * kSumPack * kWarp);
        }
    }
#pragma unroll
    for (int p = 0; p < kSumPacks; ++p) {
#pragma unroll
        for (int k = 0; k < kSumPack; ++k) {
            const bool hidden = mask != nullptr && on[p][k] == Mask(0);  // a masked value may be NaN
            values[p][k] = hidden ? 0.0f : to_float(packs[p][k]);
        }
    }
}

// Loads any unit; tokens from `end` on are 0.
template <class T, class Mask>
__device__ __forceinline__ void load_unit(const TokenRows& r, const T* rewards, const Mask* mask, int64_t begin,
                                          int64_t end, bool aligned, float (&values)[kSumPacks][kSumPack]) {
    if (aligned && begin + kSumUnit <= end) return load_whole_unit(r, rewards, mask, begin, values);
    const int lane = int(threadIdx.x) % kWarp;
#pragma unroll
    for (int p = 0; p < kSumPacks; ++p) {
#pragma unroll
        for (int k = 0; k < kSumPack; ++k) {
            const int64_t token = begin + place_in_unit(p, k, lane, aligned);
            const float value = token < end ? to_float(rewards[token]) : 0.0f;
            const bool trains = token < end && (mask == nullptr || mask[token] != Mask(0));
            values[p][k] = trains ? value : 0.0f;
        }
    }
}

// The warp's sum of the tokens at positions [from, to) of its unit.
__device__ __forceinline__ double sum_between(const float (&values)[kSumPacks][kSumPack], int from, int to,
                                              bool aligned) {
    const int lane = int(threadIdx.x) % kWarp;
    double sum = 0;
#pragma unroll
    for (int p = 0; p < kSumPacks; ++p) {
#pragma unroll
        for (int k = 0; k < kSumPack; ++k) {
            const int place = place_in_unit(p, k, lane, aligned);
            if (place >= from && place < to) sum += double(values[p][k]);
        }
    }
    return warp_sum(sum);
}

// Adds up a unit's rows. Writes whole rows to `sums` and returns the parts of the others.
__device__ __forceinline__ UnitParts sum_rows(const TokenRows& r, const float (&values)[kSumPacks][kSumPack],
                                              int64_t begin, int64_t end, bool aligned, float* sums) {
    UnitParts parts{0, 0, -1, 0, begin};
    for (int64_t row = warp_find_row(r, begin); row < r.rows; ++row) {
        const int64_t start = row_start(r, row), stop = row_start(r, row + 1);
        if (start >= end) break;
        if (stop <= start) continue;
        // The tokens of the row that count and are in this unit.
        const int64_t used = min(start + row_length(r, row, stop - start), end);
        const double sum = sum_between(values, int(max(start, begin) - begin), int(used - begin), aligned);
        if (start < begin) {
            parts.head = sum;
            parts.head_end = stop;
        } else if (stop > end) {
            parts.tail = sum;
            parts.tail_row = row;
            parts.tail_end = stop;
        } else if (threadIdx.x % kWarp == 0) {
            sums[row] = float(sum);
        }
    }
    return parts;
}

// Shared memory of a warp for the values of its unit. A gap after every 32 keeps lanes whose rows lie a multiple of 32
// apart in different banks.
constexpr int kSumStaged = kSumUnit + kSumUnit / kWarp;
__device__ __forceinline__ int staged_place(int place) {
    return place + place / kWarp;
}

// The same as sum_rows for short rows: `lanes` neighbours take a row.
__device__ __forceinline__ void sum_short_rows(const TokenRows& r, const float (&values)[kSumPacks][kSumPack],
                                               int64_t begin, int64_t end, bool aligned, int lanes, float* staged,
                                               float* sums, UnitParts* parts) {
    const int lane = int(threadIdx.x) % kWarp, part = lane % lanes;
#pragma unroll
    for (int p = 0; p < kSumPacks; ++p) {
#pragma unroll
        for (int k = 0; k < kSumPack; ++k) staged[staged_place(place_in_unit(p, k, lane, aligned))] = values[p][k];
    }
    if (lane == 0) *parts = {0, 0, -1, 0, begin};
    __syncwarp();
    int64_t next = warp_find_row(r, begin) + lane / lanes;
    bool more;
    do {
        const int64_t row = next;
        next += kWarp / lanes;
        const bool exists = row < r.rows;
        const int64_t start = exists ? row_start(r, row) : end, stop = exists ? row_start(r, row + 1) : end;
        more = start < end;
        const bool here = more && start < stop;
        double sum = 0;
        if (here) {
            const int last = int(min(start + row_length(r, row, stop - start), end) - begin);
#pragma unroll 1
            for (int i = int(max(start, begin) - begin) + part; i < last; i += lanes) sum += staged[staged_place(i)];
        }
        for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
        if (here && part == 0) {
            if (start < begin) {
                parts->head = sum;
                parts->head_end = stop;
            } else if (stop > end) {
                parts->tail = sum;
                parts->tail_row = row;
                parts->tail_end = stop;
            } else {
                sums[row] = float(sum);
            }
        }
    } while (__any_sync(kFullWarp, more));
}

// Adds up the parts of rows that several units hold. Called by the first warp of a block, with one lane per unit.
__device__ __forceinline__ void join_units(const UnitParts* parts, int units, int64_t begin, int64_t end, float* sums,
                                           Edges* edges) {
    const int unit = int(threadIdx.x);
    const auto with_heads = [&](double sum, int next, int64_t stop) {
        for (; next < units && stop > begin + int64_t(next) * kSumUnit; ++next) sum += parts[next].head;
        return sum;
    };
    if (unit == 0 && parts[0].head_end > begin) edges->head = with_heads(parts[0].head, 1, parts[0].head_end);
    if (unit >= units || parts[unit].tail_row < 0) return;
    const double sum = with_heads(parts[unit].tail, unit + 1, parts[unit].tail_end);
    if (parts[unit].tail_end > end) {
        edges->tail = sum;
    } else {
        sums[parts[unit].tail_row] = float(sum);
    }
}

// Sums the rows of chunk number `chunk`. chunk_tokens: tokens per chunk, kSumChunk or fewer if chunks hold whole rows.
// Called by a block of kSumThreads threads. lanes: lanes_per_row. parts: shared memory for kSumWarps elements,
// and behind them for kSumWarps * kSumStaged floats unless lanes is 0. edges: null if no row is cut.
template <class T, class Mask>
__device__ __forceinline__ void sum_chunk(const T* rewards, const Mask* mask, const TokenRows& rows, int64_t chunk,
                                          int64_t chunk_tokens, bool aligned, int lanes, UnitParts* parts, float* sums,
                                          Edges* edges) {
    const int64_t begin = chunk * chunk_tokens, end = min(begin + chunk_tokens, rows.tokens);
    const int units = int((end - begin + kSumUnit - 1) / kSumUnit), warp = int(threadIdx.x) / kWarp;
    if (warp < units) {
        const int64_t first = begin + int64_t(warp) * kSumUnit, last = min(first + kSumUnit, end);
        float values[kSumPacks][kSumPack];
        load_unit(rows, rewards, mask, first, last, aligned, values);
        if (lanes > 0) {
            float* staged = reinterpret_cast<float*>(parts + kSumWarps) + warp * kSumStaged;
            sum_short_rows(rows, values, first, last, aligned, lanes, staged, sums, parts + warp);
        } else {
            const UnitParts mine = sum_rows(rows, values, first, last, aligned, sums);
            if (threadIdx.x % kWarp == 0) parts[warp] = mine;
        }
    }
    __syncthreads();
    if (warp == 0) join_units(parts, units, begin, end, sums, edges == nullptr ? nullptr : edges + chunk);
    __syncthreads();  // now the next call may write the parts
}

// Adds up the parts of rows that several chunks hold; empty rows get 0. Called by a warp with a row per lane, once all
// chunks are summed.
__device__ __forceinline__ void join_rows(const TokenRows& rows, int64_t row, const Edges* edges, float* sums) {
    const RowRange range = row < rows.rows ? row_range(rows, row) : RowRange{0, 0};
    const int64_t first = range.begin / kSumChunk, last = (range.end - 1) / kSumChunk;
    const bool empty = range.end <= range.begin;
    if (empty && row < rows.rows) sums[row] = 0.0f;
    // The whole warp adds up each row that chunks cut.
    for (unsigned cut = __ballot_sync(kFullWarp, !empty && first < last); cut; cut &= cut - 1) {
        const int lane = int(threadIdx.x) % kWarp, owner = __ffs(int(cut)) - 1;
        const int64_t from = __shfl_sync(kFullWarp, first, owner), to = __shfl_sync(kFullWarp, last, owner);
        double sum = 0;
        for (int64_t chunk = from + 1 + lane; chunk <= to; chunk += kWarp) sum += edges[chunk].head;
        sum = warp_sum(sum) + edges[from].tail;
        if (lane == owner) sums[row] = float(sum);
    }
}

}  // namespace turnwise::cuda

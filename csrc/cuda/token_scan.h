// Scans over the tokens of each row, from the last to the first: discounted returns and generalised advantages.
//
// A block takes a chunk of adjacent tokens, and each thread kRun of them. A run of tokens is a map from the state after
// it (the return R and the value V of the next trained token) to the state before it. A scan over the block composes
// the threads' maps. If chunks may cut rows, each block publishes the map of its chunk. If a row continues after the
// chunk, the block then composes the maps of the following chunks, in order, up to the row's end. So blocks of long
// rows do not wait for each other's results, and the bits of the result do not depend on timing.
#pragma once

#include "cuda/token_stream.h"

namespace turnwise::cuda {

constexpr int kScanThreads = 512, kScanWarps = kScanThreads / kWarp, kRun = 8, kScanChunk = kScanThreads * kRun;

// R[t] = r[t] + value * V[t + 1] + returns * R[t + 1]; see ops/token_rewards_kernel.cpp for why advantages are R - V.
struct ScanFactors {
    float returns;  // gamma, or gamma * lambda
    float value;    // 0, or gamma * (1 - lambda)
};

// The map from (R', V') after a run to (R, V) before it: R = constant + by_returns R' + by_value V'; V = value, or V'
// if the run has no value. A closed map ignores (R', V'), because a row ends in the run. Factors of 0 would not be
// enough: 0 times NaN is NaN.
struct ScanMap {
    double constant = 0;   // R for R' = V' = 0
    float by_returns = 1;  // factor of R'
    float by_value = 0;    // factor of V'
    float value = 0;       // V of the run's first trained token
    int flags = 0;         // kHasValue: V = value; kClosed: a row ends in the run

    static constexpr int kHasValue = 1, kClosed = 2;  // bits of flags
};

// The map that applies `behind` (the later tokens) first, then `before`.
__device__ __forceinline__ ScanMap compose(const ScanMap& before, const ScanMap& behind) {
    if (before.flags & ScanMap::kClosed) return before;
    ScanMap out;
    const bool has_value = behind.flags & ScanMap::kHasValue;
    out.by_returns = before.by_returns * behind.by_returns;
    out.by_value = before.by_returns * behind.by_value + (has_value ? 0.0f : before.by_value);
    out.constant = before.constant + double(before.by_returns) * behind.constant +
                   (has_value ? double(before.by_value) * double(behind.value) : 0.0);
    out.value = before.flags & ScanMap::kHasValue ? before.value : behind.value;
    out.flags = before.flags | behind.flags;
    return out;
}

__device__ __forceinline__ ScanMap shuffle_down(const ScanMap& map, int by) {
    ScanMap out;
    out.constant = __shfl_down_sync(kFullWarp, map.constant, by);
    out.by_returns = __shfl_down_sync(kFullWarp, map.by_returns, by);
    out.by_value = __shfl_down_sync(kFullWarp, map.by_value, by);
    out.value = __shfl_down_sync(kFullWarp, map.value, by);
    out.flags = __shfl_down_sync(kFullWarp, map.flags, by);
    return out;
}

// Gives each lane the composition of its own map and those of all higher lanes.
__device__ __forceinline__ ScanMap warp_scan(ScanMap map) {
    const int lane = int(threadIdx.x) % kWarp;
#pragma unroll
    for (int by = 1; by < kWarp; by *= 2) {
        const ScanMap behind = shuffle_down(map, by);
        if (lane + by < kWarp) map = compose(map, behind);
    }
    return map;
}

// R and V after some token.
struct ScanState {
    double returns = 0;  // R of the next trained token
    float value = 0;     // V of the next trained token
};

__device__ __forceinline__ ScanState apply(const ScanMap& map, const ScanState& behind) {
    if (map.flags & ScanMap::kClosed) return {map.constant, map.value};
    return {map.constant + double(map.by_returns) * behind.returns + double(map.by_value) * double(behind.value),
            map.flags & ScanMap::kHasValue ? map.value : behind.value};
}

// A chunk's map in the workspace.
struct alignas(16) PublishedMap {
    ScanMap map;      // from the state after the chunk to the state before it
    unsigned ready;   // 1 once `map` is written
    unsigned unused;  // pads to a multiple of 16 bytes
};

// The shared memory of a block.
struct ScanShared {
    unsigned row_ends[kScanChunk / 32];  // one bit per token: set if it is the last of its row
    ScanMap warps[kScanWarps];           // first the map of each warp, then that of all warps after it
    ScanState behind;                    // R and V after the chunk
    int64_t chunk;                       // the block's chunk, taken from the counter
};

// Marks the tokens in [begin, end) that are the last of their row. Called by all threads.
__device__ __forceinline__ void mark_row_ends(const TokenRows& r, int64_t begin, int64_t end, unsigned* row_ends) {
    for (int i = int(threadIdx.x); i < kScanChunk / 32; i += kScanThreads) row_ends[i] = 0;
    const int64_t first = warp_find_row(r, begin);
    __syncthreads();
    for (int64_t row = first + threadIdx.x; row < r.rows; row += kScanThreads) {
        const int64_t start = row_start(r, row), last = row_start(r, row + 1) - 1;
        if (start >= end) break;
        if (last >= start && last >= begin && last < end) {
            const int place = int(last - begin);
            atomicOr(&row_ends[place / 32], 1u << (place % 32));
        }
    }
    __syncthreads();
}

// The state after a chunk whose last row continues there. Called by one warp. The maps of the following chunks are
// published or being computed, because blocks take chunks from the last to the first.
__device__ __forceinline__ ScanState look_behind(PublishedMap* published, int64_t chunk, int64_t chunks) {
    const int lane = int(threadIdx.x) % kWarp;
    ScanMap total;
    for (int64_t base = chunk + 1; base < chunks; base += kWarp) {
        // Each lane waits for one chunk's map; after the last chunk a closed map ends the search.
        ScanMap map;
        map.flags = ScanMap::kClosed;
        if (base + lane < chunks) {
            PublishedMap& from = published[base + lane];
            while (atomicAdd(&from.ready, 0u) == 0) {
            }
            __threadfence();
            const volatile ScanMap& there = from.map;
            map.constant = there.constant;
            map.by_returns = there.by_returns;
            map.by_value = there.by_value;
            map.value = there.value;
            map.flags = there.flags;
        }
        __syncwarp();
        total = compose(total, warp_scan(map));  // in lane 0: the maps of the whole window
        const int flags = __shfl_sync(kFullWarp, total.flags, 0);
        if (flags & ScanMap::kClosed) break;
    }
    return apply(total, {});
}

// The map of a thread's run of tokens.
template <bool has_values>
__device__ __forceinline__ ScanMap map_of_run(const float* rewards, const float* values, unsigned trained,
                                              unsigned row_ends, const ScanFactors& factors) {
    ScanMap map;
#pragma unroll
    for (int i = kRun - 1; i >= 0; --i) {
        if (row_ends >> i & 1) {
            map = ScanMap{};
            map.flags = ScanMap::kHasValue | ScanMap::kClosed;
        }
        if (!(trained >> i & 1)) continue;
        const bool has_value = map.flags & ScanMap::kHasValue;
        map.constant = double(factors.returns) * map.constant + double(rewards[i]);
        map.by_returns *= factors.returns;
        if constexpr (has_values) {
            if (has_value) map.constant += double(factors.value) * double(map.value);
            map.by_value = factors.returns * map.by_value + (has_value ? 0.0f : factors.value);
            map.value = values[i];
        }
        map.flags |= ScanMap::kHasValue;
    }
    return map;
}

__device__ __forceinline__ void store_run(float* to, int64_t first, int64_t end, bool aligned, const float* values) {
    if (aligned && first + kRun <= end) {
#pragma unroll
        for (int i = 0; i < kRun; i += 4) {
            Pack<float, 4> pack;
#pragma unroll
            for (int k = 0; k < 4; ++k) pack.value[k] = values[i + k];
            store_streaming<float, 4>(to + first + i, pack);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
        if (first + i < end) to[first + i] = values[i];
    }
}

// The state after this thread's run, from the maps of the higher lanes, the following warps and the following chunks.
// Publishes the chunk's map if other blocks may need it.
__device__ __forceinline__ ScanState state_behind(const ScanMap& run, ScanShared& s, PublishedMap* published,
                                                  int64_t chunk, int64_t chunks) {
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
    const ScanMap scanned = warp_scan(run);
    ScanMap behind = shuffle_down(scanned, 1);
    if (lane == kWarp - 1) behind = ScanMap{};
    if (lane == 0) s.warps[warp] = scanned;
    __syncthreads();
    // The first warp scans the maps of all warps, publishes the result and gets the state after the chunk.
    if (warp == 0) {
        const ScanMap warps = warp_scan(lane < kScanWarps ? s.warps[lane] : ScanMap{});
        const ScanMap next = shuffle_down(warps, 1);
        __syncwarp();
        if (lane < kScanWarps) s.warps[lane] = next;
        if (published != nullptr) {
            if (lane == 0) {
                published[chunk].map = warps;
                __threadfence();
                atomicExch(&published[chunk].ready, 1u);
            }
            const bool row_goes_on = !(s.row_ends[kScanChunk / 32 - 1] >> 31);
            const ScanState state = row_goes_on ? look_behind(published, chunk, chunks) : ScanState{};
            if (lane == 0) s.behind = state;
        } else if (lane == 0) {
            s.behind = ScanState{};
        }
    }
    __syncthreads();
    return apply(behind, apply(s.warps[warp], s.behind));
}

// One block per chunk. `counter` and `published` are null if no row crosses the edge of a chunk.
template <class T, class Mask, bool has_values>
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(const T* rewards, const T* values, const Mask* mask, TokenRows rows, int64_t chunk_tokens, bool aligned,
                ScanFactors factors, unsigned* counter, PublishedMap* published, float* advantages, float* returns) {
    // Take a chunk: the last one that no block has taken, if blocks may have to wait for later chunks.
    ScanShared& s = *shared<ScanShared>();
    int64_t chunk = blockIdx.x;
    if (counter != nullptr) {
        if (threadIdx.x == 0) s.chunk = int64_t(gridDim.x) - 1 - int64_t(atomicAdd(counter, 1u));
        __syncthreads();
        chunk = s.chunk;
    }
    const int64_t begin = chunk * chunk_tokens, end = min(begin + chunk_tokens, rows.tokens);
    const int64_t first = begin + int64_t(threadIdx.x) * kRun;
    // Start the loads here; the ends of rows are found while they are in flight.
    const TokenRun<T, kRun> rewards_here(rewards, first, end, aligned);
    const TokenRun<T, kRun> values_here(has_values ? values : nullptr, first, end, aligned);
    const TokenRun<Mask, kRun> mask_here(mask, first, end, aligned);
    mark_row_ends(rows, begin, end, s.row_ends);
    const unsigned row_ends = s.row_ends[threadIdx.x / 4] >> (threadIdx.x % 4 * kRun) & 0xff;

    // The map of this thread's run, and the state after it.
    float r[kRun], v[kRun];
    unsigned trained = 0;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
        r[i] = to_float(rewards_here[i]);
        v[i] = to_float(values_here[i]);
        trained |= unsigned(mask == nullptr ? first + i < end : mask_here[i] != Mask(0)) << i;
    }
    const ScanMap run = map_of_run<has_values>(r, v, trained, row_ends, factors);
    ScanState state = state_behind(run, s, published, chunk, gridDim.x);
    // Apply the recursion token by token, and write returns and advantages.
    float result[kRun], difference[kRun];
#pragma unroll
    for (int i = kRun - 1; i >= 0; --i) {
        if (row_ends >> i & 1) state = ScanState{};
        result[i] = difference[i] = 0.0f;
        if (!(trained >> i & 1)) continue;
        state.returns = double(factors.returns) * state.returns + double(r[i]);
        if constexpr (has_values) {
            state.returns += double(factors.value) * double(state.value);
            state.value = v[i];
            difference[i] = float(state.returns - double(v[i]));
        }
        result[i] = float(state.returns);
    }
    store_run(returns, first, end, aligned, result);
    if constexpr (has_values) store_run(advantages, first, end, aligned, difference);
}

// Bytes of workspace: the counter, then the published maps.
inline int64_t scan_workspace(int64_t tokens) {
    return 16 + (tokens / kScanChunk + 1) * int64_t(sizeof(PublishedMap));
}

// ---- Host: check_inputs, plan, launch -------------------------------------------------------------------------------
// The tensors of one scan.
struct ScanCall {
    View rewards, values, mask, advantages, returns;  // one value per token; no values and advantages for token_returns
    TokenRows rows;                                   // of all tensors
    ScanFactors factors;                              // of the recursion
};

// The launch of scan_kernel.
struct ScanPlan {
    int64_t chunk;            // tokens per block
    int64_t chunks;           // blocks
    bool aligned;             // chunks of every stream begin at multiples of 16 bytes
    unsigned* counter;        // number of chunks taken so far; null if no row crosses the edge of a chunk
    PublishedMap* published;  // [chunks]; null if `counter` is
};

// `name`: the argument of the rewards, for messages.
inline void check_inputs(const char* name, const ScanCall& call, const View& workspace) {
    check_kernel_mask(name, call.rewards, call.mask);
    require_float_stream(name, call.rewards);
    require(is_contiguous(call.rewards), "rewards: expected a contiguous tensor");
    if (call.values) {
        require_shape_of("values", call.values, name, call.rewards);
        require_dtype("values", call.values, {call.rewards.dtype});
        require(is_contiguous(call.values), "values: expected a contiguous tensor");
    }
    const auto check_output = [&](const char* output_name, const View& output) {
        require_shape_of(output_name, output, name, call.rewards);
        require_dtype(output_name, output, {DType::f32});
        require(is_contiguous(output), "advantages, returns: expected contiguous tensors");
    };
    if (call.advantages) check_output("advantages", call.advantages);
    check_output("returns", call.returns);
    require_one_device(call.rewards, {&call.values, &call.mask, &call.advantages, &call.returns, &workspace});
    require_bytes("workspace", workspace, scan_workspace(call.rows.tokens));
}

inline ScanPlan plan(const ScanCall& call, const View& workspace) {
    ScanPlan p{};
    // Padded rows that fit into a chunk are never cut.
    const bool whole = call.rows.starts == nullptr && call.rows.width <= kScanChunk;
    p.chunk = whole ? kScanChunk / call.rows.width * call.rows.width : kScanChunk;
    p.chunks = (call.rows.tokens + p.chunk - 1) / p.chunk;
    p.aligned = p.chunk % kRun == 0;
    for (const View* view : {&call.rewards, &call.values, &call.mask, &call.advantages, &call.returns}) {
        p.aligned = p.aligned && is_aligned(view->data, 16);
    }
    if (whole) return p;
    p.counter = workspace.as<unsigned>();
    p.published = reinterpret_cast<PublishedMap*>(workspace.as<char>() + 16);
    return p;
}

template <class T, class Mask, bool has_values>
void launch_scan(const ScanCall& call, const ScanPlan& p, Stream stream) {
    if (p.counter) fill_bytes(p.counter, 0, 16 + p.chunks * int64_t(sizeof(PublishedMap)), stream);
    launch(scan_kernel<T, Mask, has_values>, p.chunks, kScanThreads, int(sizeof(ScanShared)), stream,
           call.rewards.as<const T>(), call.values.as<const T>(), call.mask.as<const Mask>(), call.rows, p.chunk,
           p.aligned, call.factors, p.counter, p.published, call.advantages.as<float>(), call.returns.as<float>());
}

template <bool has_values>
void scan(const char* name, const ScanCall& call, const View& workspace, Stream stream) {
    check_inputs(name, call, workspace);
    if (call.rows.tokens == 0 || call.rows.rows == 0) {
        return fill_bytes(call.returns.data, 0, call.rows.tokens * 4, stream);
    }
    const DeviceGuard guard(call.rewards.device);
    const ScanPlan p = plan(call, workspace);
    const auto launch_for = [&](auto type) {
        using T = decltype(type);
        const bool float_mask = call.mask && call.mask.dtype == DType::f32;
        float_mask ? launch_scan<T, float, has_values>(call, p, stream)
                   : launch_scan<T, uint8_t, has_values>(call, p, stream);
    };
    if (call.rewards.dtype == DType::bf16) return launch_for(BFloat16{});
    if (call.rewards.dtype == DType::f16) return launch_for(Half{});
    launch_for(float{});
}

}  // namespace turnwise::cuda

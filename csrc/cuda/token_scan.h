// Scans over the tokens of each row, from the last to the first: discounted returns and generalised advantages.
//
// A block takes a chunk of neighbouring tokens, a thread kRun of them. A run of tokens is a map from what lies behind
// it (the returns R and the value V of the next trained token) to the same before it; maps of threads are composed by a
// scan over the block. Where a row goes on behind a chunk, the block publishes its own map first and then composes the
// maps of the chunks behind, up to the row's end, in that order: long rows don't wait for one another, and the bits of
// the result don't depend on who came first.
#pragma once

#include "cuda/token_stream.h"

namespace turnwise::cuda {

constexpr int kScanThreads = 512, kScanWarps = kScanThreads / kWarp, kRun = 8, kScanChunk = kScanThreads * kRun;

// R[t] = r[t] + value * V[t + 1] + returns * R[t + 1]; see ops/token_rewards_kernel.cpp for why advantages are R - V.
struct ScanFactors {
    float returns;  // gamma, or gamma * lambda
    float value;    // 0, or gamma * (1 - lambda)
};

// R = constant + by_returns R' + by_value V'; V = value if it has one, else V'. Closed: what lies behind doesn't count,
// as a row ended in between (and not by factors of 0, which NaN would survive).
struct ScanMap {
    double constant = 0;
    float by_returns = 1, by_value = 0, value = 0;
    int flags = 0;

    static constexpr int kHasValue = 1, kClosed = 2;
};

// First `behind`, then `before`.
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

// Each lane: its own map after those of all lanes behind it.
__device__ __forceinline__ ScanMap warp_scan(ScanMap map) {
    const int lane = int(threadIdx.x) % kWarp;
#pragma unroll
    for (int by = 1; by < kWarp; by *= 2) {
        const ScanMap behind = shuffle_down(map, by);
        if (lane + by < kWarp) map = compose(map, behind);
    }
    return map;
}

// R and V behind some token.
struct ScanState {
    double returns = 0;
    float value = 0;
};

__device__ __forceinline__ ScanState apply(const ScanMap& map, const ScanState& behind) {
    if (map.flags & ScanMap::kClosed) return {map.constant, map.value};
    return {map.constant + double(map.by_returns) * behind.returns + double(map.by_value) * double(behind.value),
            map.flags & ScanMap::kHasValue ? map.value : behind.value};
}

struct alignas(16) PublishedMap {
    ScanMap map;
    unsigned ready;
    unsigned unused;
};

struct ScanShared {
    unsigned row_ends[kScanChunk / 32];  // a bit for each token that is the last of its row
    ScanMap warps[kScanWarps];           // in the end: the maps of all warps behind
    ScanState behind;                    // of the chunk
    int64_t chunk;
};

// Marks the last tokens of the rows in [begin, end). By all threads.
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

// By one warp: what lies behind a chunk whose row goes on. `published` of the chunks behind are ready or on their way,
// as chunks are taken from the last to the first.
__device__ __forceinline__ ScanState look_behind(PublishedMap* published, int64_t chunk, int64_t chunks) {
    const int lane = int(threadIdx.x) % kWarp;
    ScanMap total;
    for (int64_t base = chunk + 1; base < chunks; base += kWarp) {
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

// What lies behind this thread's run: first within its warp, then in the warps behind, then behind the chunk. Publishes
// the chunk's map where others may ask for it.
__device__ __forceinline__ ScanState state_behind(const ScanMap& run, ScanShared& s, PublishedMap* published,
                                                  int64_t chunk, int64_t chunks) {
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
    const ScanMap scanned = warp_scan(run);
    ScanMap behind = shuffle_down(scanned, 1);
    if (lane == kWarp - 1) behind = ScanMap{};
    if (lane == 0) s.warps[warp] = scanned;
    __syncthreads();
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

// `counter` and `published` are null where no row crosses the edge of a chunk.
template <class T, class Mask, bool has_values>
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(const T* rewards, const T* values, const Mask* mask, TokenRows rows, int64_t chunk_tokens, bool aligned,
                ScanFactors factors, unsigned* counter, PublishedMap* published, float* advantages, float* returns) {
    ScanShared& s = *shared<ScanShared>();
    int64_t chunk = blockIdx.x;
    if (counter != nullptr) {
        if (threadIdx.x == 0) s.chunk = int64_t(gridDim.x) - 1 - int64_t(atomicAdd(counter, 1u));
        __syncthreads();
        chunk = s.chunk;
    }
    const int64_t begin = chunk * chunk_tokens, end = min(begin + chunk_tokens, rows.tokens);
    const int64_t first = begin + int64_t(threadIdx.x) * kRun;
    // Asked for here, and looked at when the ends of rows are known.
    const TokenRun<T, kRun> rewards_here(rewards, first, end, aligned);
    const TokenRun<T, kRun> values_here(has_values ? values : nullptr, first, end, aligned);
    const TokenRun<Mask, kRun> mask_here(mask, first, end, aligned);
    mark_row_ends(rows, begin, end, s.row_ends);
    const unsigned row_ends = s.row_ends[threadIdx.x / 4] >> (threadIdx.x % 4 * kRun) & 0xff;

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

inline int64_t scan_workspace(int64_t tokens) {
    return 16 + (tokens / kScanChunk + 1) * int64_t(sizeof(PublishedMap));
}

template <class T, class Mask, bool has_values>
void run_scan(const View& rewards, const View& values, const View& mask, const TokenRows& rows, ScanFactors factors,
              const View& advantages, const View& returns, const View& workspace, Stream stream) {
    const bool whole = rows.starts == nullptr && rows.width <= kScanChunk;
    const int64_t chunk = whole ? kScanChunk / rows.width * rows.width : kScanChunk;
    bool aligned = chunk % kRun == 0;
    for (const View* view : {&rewards, &values, &mask, &advantages, &returns}) {
        aligned = aligned && is_aligned(view->data, 16);
    }
    const int64_t chunks = (rows.tokens + chunk - 1) / chunk;
    unsigned* counter = nullptr;
    PublishedMap* published = nullptr;
    if (!whole) {
        counter = workspace.as<unsigned>();
        published = reinterpret_cast<PublishedMap*>(workspace.as<char>() + 16);
        fill_bytes(workspace.data, 0, 16 + chunks * int64_t(sizeof(PublishedMap)), stream);
    }
    launch(scan_kernel<T, Mask, has_values>, chunks, kScanThreads, int(sizeof(ScanShared)), stream,
           rewards.as<const T>(), values.as<const T>(), mask.as<const Mask>(), rows, chunk, aligned, factors, counter,
           published, advantages.as<float>(), returns.as<float>());
}

// Checks what both ops ask of their tensors, and runs the kernel for their types.
template <bool has_values>
void scan(const View& rewards, const View& values, const View& mask, const TokenRows& rows, ScanFactors factors,
          const View& advantages, const View& returns, const View& workspace, Stream stream) {
    require(is_contiguous(rewards) && is_contiguous(values), "rewards, values: expected contiguous tensors");
    require(!has_values || values.dtype == rewards.dtype, "values: expected the type of rewards");
    require(is_contiguous(returns) && returns.dtype == DType::f32, "returns: expected float32, contiguous");
    require(is_contiguous(advantages) && advantages.dtype == DType::f32, "advantages: expected float32, contiguous");
    require_one_device(rewards, {&values, &mask, &advantages, &returns, &workspace});
    require(workspace.size() >= scan_workspace(rows.tokens), "workspace: too small");
    if (rows.tokens == 0 || rows.rows == 0) return fill_bytes(returns.data, 0, rows.tokens * 4, stream);
    const DeviceGuard guard(rewards.device);
    const auto with_mask = [&](auto type) {
        using T = decltype(type);
        const auto run =
            mask && mask.dtype == DType::f32 ? run_scan<T, float, has_values> : run_scan<T, uint8_t, has_values>;
        run(rewards, values, mask, rows, factors, advantages, returns, workspace, stream);
    };
    switch (rewards.dtype) {
        case DType::f32:
            return with_mask(float{});
        case DType::bf16:
            return with_mask(BFloat16{});
        case DType::f16:
            return with_mask(Half{});
        default:
            throw InvalidInput("rewards: expected float32, bf16 or f16");
    }
}

}  // namespace turnwise::cuda

#include "cuda/token_rewards.h"

#include <algorithm>

#include "cuda/token_scan.h"
#include "cuda/token_stream.h"

namespace turnwise::cuda {
namespace {

// A block sums a chunk of neighbouring tokens; each of its warps holds a unit of them in registers and adds up the rows
// that it meets there. What a row has in several units is added up by the block, what it has in several chunks by a
// second kernel; always in one order.
constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kPack = 4, kPacks = 4, kUnit = kPack * kPacks * kWarp, kChunk = kUnit * kWarps;

// Parts of rows that cross a chunk's edges: `head` of the row that began before, `tail` of the one that goes on behind.
struct Edges {
    double head, tail;
};

struct UnitParts {
    double head, tail;  // the same for a unit
    int64_t tail_row;   // -1: no row goes on behind
    int64_t tail_end;
    int64_t head_end;  // where the row that began before the unit ends; its begin: none did
};

// A lane's tokens are kPacks packs of kPack neighbours, or single ones a warp apart where the memory is not aligned.
__device__ __forceinline__ int place_of(int pack, int k, int lane, bool aligned) {
    return pack * kPack * kWarp + (aligned ? lane * kPack + k : k * kWarp + lane);
}

template <class T, class Mask>
__device__ __forceinline__ void load_unit(const T* rewards, const Mask* mask, int64_t begin, int64_t end, bool aligned,
                                          float (&values)[kPacks][kPack]) {
    const int lane = int(threadIdx.x) % kWarp;
    unsigned bits[kPacks];
    if (aligned) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            const int64_t first = begin + place_of(p, 0, lane, true);
            load_tokens<kPack>(rewards, first, end, true, values[p]);
            bits[p] = load_mask_bits<kPack>(mask, first, end, true);
        }
    } else {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            bits[p] = 0;
#pragma unroll
            for (int k = 0; k < kPack; ++k) {
                const int64_t token = begin + place_of(p, k, lane, false);
                values[p][k] = token < end ? to_float(rewards[token]) : 0.0f;
                bits[p] |= unsigned(token < end && (mask == nullptr || mask[token] != Mask(0))) << k;
            }
        }
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
            if (!(bits[p] >> k & 1)) values[p][k] = 0.0f;  // what a mask hides may be NaN
        }
    }
}

__device__ __forceinline__ double sum_between(const float (&values)[kPacks][kPack], int from, int to, bool aligned) {
    const int lane = int(threadIdx.x) % kWarp;
    double sum = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
            const int place = place_of(p, k, lane, aligned);
            if (place >= from && place < to) sum += double(values[p][k]);
        }
    }
    return warp_sum(sum);
}

// Adds up a unit's rows: whole ones go to `sums`, the others are returned.
__device__ __forceinline__ UnitParts sum_rows(const TokenRows& r, const float (&values)[kPacks][kPack], int64_t begin,
                                              int64_t end, bool aligned, float* sums) {
    UnitParts parts{0, 0, -1, 0, begin};
    for (int64_t row = warp_find_row(r, begin); row < r.rows; ++row) {
        const int64_t start = row_start(r, row), stop = row_start(r, row + 1);
        if (start >= end) break;
        if (stop <= start) continue;
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

// By the first lanes of a block, one for each unit: joins what its units hold of one row.
__device__ void join_units(const UnitParts* parts, int units, int64_t begin, int64_t end, float* sums, Edges* edges) {
    const int unit = int(threadIdx.x);
    const auto with_heads = [&](double sum, int next, int64_t stop) {
        for (; next < units && stop > begin + int64_t(next) * kUnit; ++next) sum += parts[next].head;
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

template <class T, class Mask>
__global__ void __launch_bounds__(kThreads) sum_kernel(const T* rewards, const Mask* mask, TokenRows rows,
                                                       int64_t chunk, bool aligned, float* sums, Edges* edges) {
    const int64_t begin = int64_t(blockIdx.x) * chunk, end = min(begin + chunk, rows.tokens);
    const int units = int((end - begin + kUnit - 1) / kUnit), warp = int(threadIdx.x) / kWarp;
    UnitParts* parts = shared<UnitParts>();
    if (warp < units) {
        const int64_t first = begin + int64_t(warp) * kUnit, last = min(first + kUnit, end);
        float values[kPacks][kPack];
        load_unit(rewards, mask, first, last, aligned, values);
        const UnitParts mine = sum_rows(rows, values, first, last, aligned, sums);
        if (threadIdx.x % kWarp == 0) parts[warp] = mine;
    }
    __syncthreads();
    if (warp == 0) join_units(parts, units, begin, end, sums, edges == nullptr ? nullptr : edges + blockIdx.x);
}

// One warp for each row: adds up the parts that lie in several chunks; an empty row gets 0.
__global__ void __launch_bounds__(kThreads) join_kernel(TokenRows rows, const Edges* edges, float* sums) {
    const int lane = int(threadIdx.x) % kWarp;
    const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    if (row >= rows.rows) return;
    const int64_t start = row_start(rows, row), stop = row_start(rows, row + 1);
    if (stop <= start) {
        if (lane == 0) sums[row] = 0.0f;
        return;
    }
    const int64_t first = start / kChunk, last = (stop - 1) / kChunk;
    if (first == last) return;
    double sum = 0;
    for (int64_t chunk = first + 1 + lane; chunk <= last; chunk += kWarp) sum += edges[chunk].head;
    sum = warp_sum(sum) + edges[first].tail;
    if (lane == 0) sums[row] = float(sum);
}

void set_lengths(TokenRows& rows, const TokenRewardsInput& in) {
    const View& lengths = in.lengths;
    require(!in.mask && !in.cu_seqlens, "lengths: expected neither a mask nor cu_seqlens");
    require(is_contiguous_1d(lengths) && lengths.shape[0] == rows.rows, "lengths: expected [B], contiguous");
    require(lengths.dtype == DType::i64 || lengths.dtype == DType::i32, "lengths: expected int32 or int64");
    rows.lengths = lengths.data;
    rows.wide_lengths = lengths.dtype == DType::i64;
}

template <class T, class Mask>
void run(const TokenRewardsInput& in, const TokenRows& rows, float* sums, const View& workspace, Stream stream) {
    // Padded rows that fit a chunk are never cut.
    const bool whole = rows.starts == nullptr && rows.width <= kChunk;
    const int64_t chunk = whole ? kChunk / rows.width * rows.width : kChunk;
    const bool aligned = chunk % kPack == 0 && is_aligned(in.rewards.data, 16) && is_aligned(in.mask.data, 16);
    Edges* edges = whole ? nullptr : workspace.as<Edges>();
    const int64_t chunks = (rows.tokens + chunk - 1) / chunk;
    if (chunks > 0) {
        launch(sum_kernel<T, Mask>, chunks, kThreads, int(sizeof(UnitParts)) * kWarps, stream, in.rewards.as<const T>(),
               in.mask.as<const Mask>(), rows, chunk, aligned, sums, edges);
    }
    if (!whole) launch(join_kernel, (rows.rows + kWarps - 1) / kWarps, kThreads, 0, stream, rows, edges, sums);
}

template <class T>
void run(const TokenRewardsInput& in, const TokenRows& rows, float* sums, const View& workspace, Stream stream) {
    if (in.mask.dtype == DType::f32 && in.mask) return run<T, float>(in, rows, sums, workspace, stream);
    run<T, uint8_t>(in, rows, sums, workspace, stream);
}

}  // namespace

int64_t token_reward_sum_workspace(int64_t tokens) {
    return (tokens / kChunk + 1) * int64_t(sizeof(Edges));
}

void token_reward_sum(const TokenRewardsInput& input, const View& sums, const View& workspace, Stream stream) {
    check_kernel_mask(input.rewards, input.mask);
    TokenRows rows = token_rows(input.rewards, input.cu_seqlens, "token_rewards");
    if (input.lengths) set_lengths(rows, input);
    require(is_contiguous(input.rewards), "token_rewards: expected a contiguous tensor");
    require(is_contiguous_1d(sums) && sums.shape[0] == rows.rows && sums.dtype == DType::f32, "sums: expected [B]");
    require(workspace.size() >= token_reward_sum_workspace(rows.tokens), "workspace: too small");
    if (rows.rows == 0) return;
    const DeviceGuard guard(input.rewards.device);
    if (rows.tokens == 0) return fill_bytes(sums.data, 0, rows.rows * 4, stream);
    float* to = sums.as<float>();
    switch (input.rewards.dtype) {
        case DType::f32:
            return run<float>(input, rows, to, workspace, stream);
        case DType::bf16:
            return run<BFloat16>(input, rows, to, workspace, stream);
        case DType::f16:
            return run<Half>(input, rows, to, workspace, stream);
        default:
            throw InvalidInput("token_rewards: expected float32, bf16 or f16");
    }
}

int64_t token_scan_workspace(int64_t tokens) {
    return scan_workspace(tokens);
}

void token_returns(const TokenRewardsInput& input, double gamma, const View& returns, const View& workspace,
                   Stream stream) {
    const TokenRows rows = token_rows(input.rewards, input.cu_seqlens, "token_rewards");
    check_kernel_mask(input.rewards, input.mask);
    check_same_shape(input.rewards, returns, "returns: wrong shape");
    const ScanFactors factors{float(gamma), 0.0f};
    scan<false>(input.rewards, {}, input.mask, rows, factors, {}, returns, workspace, stream);
}

}  // namespace turnwise::cuda

#include "cuda/token_rewards.h"

#include <algorithm>

#include "cuda/token_scan.h"
#include "cuda/token_sum.h"

namespace turnwise::cuda {
namespace {

template <class T, class Mask>
__global__ void __launch_bounds__(kSumThreads, 3)
    sum_kernel(const T* rewards, const Mask* mask, TokenRows rows, int64_t chunk, bool aligned, int lanes, float* sums,
               Edges* edges) {
    sum_chunk(rewards, mask, rows, blockIdx.x, chunk, aligned, lanes, shared<UnitParts>(), sums, edges);
}

__global__ void __launch_bounds__(kSumThreads) join_kernel(TokenRows rows, const Edges* edges, float* sums) {
    join_rows(rows, int64_t(blockIdx.x) * kSumThreads + threadIdx.x, edges, sums);
}

// The launch of sum_kernel.
struct SumPlan {
    int64_t chunk;   // tokens per block
    int64_t chunks;  // blocks
    bool aligned;    // all chunks of both streams begin at multiples of 16 bytes
    int lanes;       // lanes that share a row; 0: the warp adds up one row after the other
    Edges* edges;    // [chunks]: the parts of rows that chunks cut; null if no row is cut
};

void check_inputs(const TokenRewardsInput& in, const View& sums, const View& workspace) {
    check_kernel_mask("token_rewards", in.rewards, in.mask);
    require_float_stream("token_rewards", in.rewards);
    require(is_contiguous(in.rewards), "token_rewards: expected a contiguous tensor");
    const TokenRows rows = token_rows(in.rewards, in.cu_seqlens, "token_rewards");
    if (in.lengths) {
        require(!in.mask && !in.cu_seqlens, "lengths: expected neither a mask nor cu_seqlens");
        require_shape("lengths", in.lengths, {rows.rows});
        require_dtype("lengths", in.lengths, {DType::i64, DType::i32});
        require(is_contiguous_1d(in.lengths), "lengths: expected a contiguous tensor");
    }
    require_shape("sums", sums, {rows.rows});
    require_dtype("sums", sums, {DType::f32});
    require(is_contiguous_1d(sums), "sums: expected a contiguous tensor");
    require_one_device(in.rewards, {&in.mask, &in.lengths, &sums, &workspace});
    require_bytes("workspace", workspace, token_reward_sum_workspace(rows.tokens));
}

TokenRows bind(const TokenRewardsInput& in) {
    TokenRows rows = token_rows(in.rewards, in.cu_seqlens, "token_rewards");
    if (!in.lengths) return rows;
    rows.lengths = in.lengths.data;
    rows.wide_lengths = in.lengths.dtype == DType::i64;
    return rows;
}

SumPlan plan(const TokenRewardsInput& in, const TokenRows& rows, const View& workspace) {
    SumPlan p{};
    // Padded rows that fit into a chunk are never cut.
    const bool whole = rows.starts == nullptr && rows.width <= kSumChunk;
    p.chunk = whole ? kSumChunk / rows.width * rows.width : kSumChunk;
    p.chunks = (rows.tokens + p.chunk - 1) / p.chunk;
    p.aligned = p.chunk % kSumPack == 0 && is_aligned(in.rewards.data, 16) && is_aligned(in.mask.data, 16);
    p.lanes = lanes_per_row(rows);
    p.edges = whole ? nullptr : workspace.as<Edges>();
    return p;
}

template <class T, class Mask>
void launch_sums(const TokenRewardsInput& in, const TokenRows& rows, const SumPlan& p, float* sums, Stream stream) {
    const int per_warp = int(sizeof(UnitParts) + (p.lanes > 0 ? kSumStaged * sizeof(float) : 0));
    launch(sum_kernel<T, Mask>, p.chunks, kSumThreads, per_warp * kSumWarps, stream, in.rewards.as<const T>(),
           in.mask.as<const Mask>(), rows, p.chunk, p.aligned, p.lanes, sums, p.edges);
    if (!p.edges) return;
    launch(join_kernel, (rows.rows + kSumThreads - 1) / kSumThreads, kSumThreads, 0, stream, rows, p.edges, sums);
}

}  // namespace

int64_t token_reward_sum_workspace(int64_t tokens) {
    return (tokens / kSumChunk + 1) * int64_t(sizeof(Edges));
}

void token_reward_sum(const TokenRewardsInput& input, const View& sums, const View& workspace, Stream stream) {
    check_inputs(input, sums, workspace);
    const TokenRows rows = bind(input);
    if (rows.rows == 0) return;
    const DeviceGuard guard(input.rewards.device);
    if (rows.tokens == 0) return fill_bytes(sums.data, 0, rows.rows * 4, stream);
    const SumPlan p = plan(input, rows, workspace);
    const auto launch_for = [&](auto type) {
        using T = decltype(type);
        const bool float_mask = input.mask && input.mask.dtype == DType::f32;
        float_mask ? launch_sums<T, float>(input, rows, p, sums.as<float>(), stream)
                   : launch_sums<T, uint8_t>(input, rows, p, sums.as<float>(), stream);
    };
    if (input.rewards.dtype == DType::bf16) return launch_for(BFloat16{});
    if (input.rewards.dtype == DType::f16) return launch_for(Half{});
    launch_for(float{});
}

int64_t token_scan_workspace(int64_t tokens) {
    return scan_workspace(tokens);
}

void token_returns(const TokenRewardsInput& input, double gamma, const View& returns, const View& workspace,
                   Stream stream) {
    const TokenRows rows = token_rows(input.rewards, input.cu_seqlens, "token_rewards");
    scan<false>("token_rewards", {input.rewards, {}, input.mask, {}, returns, rows, {float(gamma), 0.0f}}, workspace,
                stream);
}

}  // namespace turnwise::cuda

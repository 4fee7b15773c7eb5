#include "cuda/token_rewards.h"

#include <algorithm>

#include "cuda/token_scan.h"
#include "cuda/token_sum.h"

namespace turnwise::cuda {
namespace {

template <class T, class Mask>
__global__ void __launch_bounds__(kSumThreads, 3) sum_kernel(const T* rewards, const Mask* mask, TokenRows rows,
                                                             int64_t chunk, bool aligned, float* sums, Edges* edges) {
    sum_chunk(rewards, mask, rows, blockIdx.x, chunk, aligned, shared<UnitParts>(), sums, edges);
}

__global__ void __launch_bounds__(kSumThreads) join_kernel(TokenRows rows, const Edges* edges, float* sums) {
    const int64_t row = int64_t(blockIdx.x) * kSumWarps + threadIdx.x / kWarp;
    if (row < rows.rows) join_row(rows, row, edges, sums);
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
    const bool whole = rows.starts == nullptr && rows.width <= kSumChunk;
    const int64_t chunk = whole ? kSumChunk / rows.width * rows.width : kSumChunk;
    const bool aligned = chunk % kSumPack == 0 && is_aligned(in.rewards.data, 16) && is_aligned(in.mask.data, 16);
    Edges* edges = whole ? nullptr : workspace.as<Edges>();
    const int64_t chunks = (rows.tokens + chunk - 1) / chunk;
    if (chunks > 0) {
        launch(sum_kernel<T, Mask>, chunks, kSumThreads, int(sizeof(UnitParts)) * kSumWarps, stream,
               in.rewards.as<const T>(), in.mask.as<const Mask>(), rows, chunk, aligned, sums, edges);
    }
    if (!whole) launch(join_kernel, (rows.rows + kSumWarps - 1) / kSumWarps, kSumThreads, 0, stream, rows, edges, sums);
}

template <class T>
void run(const TokenRewardsInput& in, const TokenRows& rows, float* sums, const View& workspace, Stream stream) {
    if (in.mask.dtype == DType::f32 && in.mask) return run<T, float>(in, rows, sums, workspace, stream);
    run<T, uint8_t>(in, rows, sums, workspace, stream);
}

}  // namespace

int64_t token_reward_sum_workspace(int64_t tokens) {
    return (tokens / kSumChunk + 1) * int64_t(sizeof(Edges));
}

void token_reward_sum(const TokenRewardsInput& input, const View& sums, const View& workspace, Stream stream) {
    check_kernel_mask(input.rewards, input.mask);
    TokenRows rows = token_rows(input.rewards, input.cu_seqlens, "token_rewards");
    if (input.lengths) set_lengths(rows, input);
    require(is_contiguous(input.rewards), "token_rewards: expected a contiguous tensor");
    require_one_device(input.rewards, {&input.mask, &input.lengths, &sums, &workspace});
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

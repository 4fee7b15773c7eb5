// The parameters of the policy loss's kernels, the counts and sums that the first gradient needs, and the host steps
// that policy_loss and grouped_policy_loss share. ops/policy_loss.h defines the result, policy_loss.cu has the kernels.
#pragma once

#include <algorithm>

#include "cuda/row_segments.h"
#include "ops/policy_loss.h"
#include "ops/scalar_math.h"

namespace turnwise::cuda::loss {

constexpr int kThreads = 256;  // per block
constexpr int kWarps = kThreads / kWarp;

// Counts of the batch, all 0 before anything is counted.
struct Counts {
    unsigned ticket;            // blocks of loss_grad_kernel that have finished
    unsigned padding;           // aligns the 8-byte members
    unsigned long long tokens;  // trained tokens
    unsigned long long rows;    // rows with a trained token
};

// Sums over a row's trained tokens, by column of row_partials. Only gmpo needs advantages and only gspo needs KL
// estimates, so the two share a column.
enum RowSum {
    sum_log_ratio,           // gspo: logprob - old_logprob; gmpo: clamped and bounded
    sum_advantage,           // gmpo: A
    sum_mismatch,            // old_logprob - rollout_logprob
    sum_kl = sum_advantage,  // gspo: KL estimate
};
constexpr int kRowSums = sum_mismatch + 1;

// The parameters of all kernels of the policy loss.
struct Params {
    // Inputs with one value per token. Data is null if an input was not given.
    SpannedRows rows;
    AnyStream logprobs, old_logprobs, ref, rollout, entropy;  // as in PolicyLossInput
    AnyStream advantages;                                     // per token; null if row_advantages is given
    AnyStream mask, selected;                                 // trained and selected tokens: 0 or not 0
    // Inputs with one value per row. normalizer: one value, or one per actor.
    RowStream row_advantages, actor_ids, normalizer;
    PolicyLossOptions options;

    // Outputs.
    void* grad;        // one value per token, contiguous
    DType grad_dtype;  // of grad, and of all streams of floats if `fast`
    float* loss;       // one value
    float* metrics;    // [1 + num_actors, metric_columns()]
    // Workspace, see Layout.
    Counts* counts;
    unsigned long long* actor_tokens;  // [actors]: trained tokens
    int* lengths;                      // [rows]: trained tokens
    double* row_partials;              // [rows + warps, kRowSums]: the sums of a row within a span, at index row + span
    double* block_partials;            // [blocks, actors, kColumns]: sums of a block
    double* actor_totals;              // [actors, kColumns]: sums of the batch
    double* warp_tables;               // [warps, actors, kColumns]: sums of a warp; used if shared memory is too small
    int actors;                        // max(num_actors, 1)
    // What the first launch must provide (count_rows, count_actors, sum_rows), and the kind of kernel.
    bool count_rows;     // lengths, and counts->rows
    bool count_actors;   // actor_tokens
    bool sum_rows;       // row_partials
    bool shared_tables;  // the warps' tables of sums are in shared memory
    bool clip_only;      // PPO's clip, with the k3 estimator or none

    // The launch.
    bool fast;         // streams are contiguous, aligned and of grad_dtype, so kernels can use 16-byte packs
    bool count_first;  // a first launch is needed
    int64_t warps;     // number of spans, one per warp of loss_grad_kernel
    int shared_bytes;  // shared memory per block of loss_grad_kernel
};

// The row's actor; -1 for an id out of range.
__device__ __forceinline__ int actor_of(const Params& p, int64_t row) {
    const int64_t id = p.actor_ids.data ? p.actor_ids.integer(row) : 0;
    return id >= 0 && id < p.actors ? int(id) : -1;
}

// The metric for reference log-probabilities uses the k3 estimator if the loss has no KL term.
__device__ __forceinline__ KlKind kl_kind(const PolicyLossOptions& o) {
    return o.kl == KlKind::none ? KlKind::k3 : o.kl;
}

// True if the KL term is multiplied by the row's ratio, whose derivative needs the row's mean estimate.
__device__ __forceinline__ bool kl_by_row(const PolicyLossOptions& o) {
    return o.kl_weighted && o.variant.kind == VariantKind::gspo;
}

// ---- Counts and sums that the first gradient needs -----------------------------------------------------------------
// Adds this lane's share of a segment's row sums to `sums`; returns the lane's trained tokens.
template <class T, bool fast>
__device__ __forceinline__ int64_t sum_segment(const Params& p, const RowSegment& segment, double (&sums)[kRowSums]) {
    constexpr int kPack = 16 / int(sizeof(T));
    const int lane = int(threadIdx.x) % kWarp;
    const PolicyLossOptions& o = p.options;
    const bool ratios = is_by_row(o.variant.kind), bounded = o.variant.kind == VariantKind::gmpo;
    const bool rollouts = o.correction == Correction::sequence, kl = kl_by_row(o);
    const float own = p.row_advantages.data ? p.row_advantages.number(segment.row) : 0.0f;
    int64_t count = 0;
    // Every lane takes 16-byte packs, and loads only the streams that the sums need.
    for (int64_t i = segment.begin / kPack * kPack + lane * kPack; i < segment.end; i += kWarp * kPack) {
        const PackAt<T, fast> at{segment, i};
        const auto mask = at.ask(p.mask);
        typename PackAt<T, fast>::Floats logprob{}, ref{}, rollout{}, advantage{};
        const auto old = at.load(p.old_logprobs);
        if (ratios) logprob = at.load(p.logprobs);
        if (kl) ref = at.load(p.ref);
        if (rollouts) rollout = at.load(p.rollout);
        if (p.advantages.data) advantage = at.load(p.advantages);
        const auto trained = at.truths(p.mask, mask);
        // Add the trained tokens of the pack.
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
            if (!trained[k]) continue;
            count += 1;
            if (rollouts) sums[sum_mismatch] += double(to_float(old[k]) - to_float(rollout[k]));
            if (!ratios) continue;
            float d = to_float(logprob[k]) - to_float(old[k]);
            const float a = p.advantages.data ? to_float(advantage[k]) : own;
            if (bounded) {
                d = clamp_symmetric<ScalarMath>(d, kLogRatioBound);
                d = gmpo_bounded<ScalarMath>(d, a, o.variant);
            }
            sums[sum_log_ratio] += double(d);
            if (kl) {
                sums[sum_kl] += double(kl_term<ScalarMath>(kl_kind(o), to_float(ref[k]) - to_float(logprob[k])).value);
            } else {
                sums[sum_advantage] += double(a);
            }
        }
    }
    return count;
}

// Stores a segment's counts, and its sums if `with_sums`, for what follows. Adds the lane's part of the trained tokens
// to `all`. `place`: the number of the span.
__device__ __forceinline__ void record_segment(const Params& p, const RowSegment& segment, int64_t place,
                                               long long count, const double (&sums)[kRowSums], bool with_sums,
                                               long long& all) {
    const int lane = int(threadIdx.x) % kWarp;
    if (!with_sums && !p.count_rows && !p.count_actors) {
        all += count;  // only the batch's total is needed
        return;
    }
    // The sums of the whole segment go to row_partials, the counts to the totals of row and actor.
    count = warp_sum(count);
    if (with_sums) {
#pragma unroll
        for (int k = 0; k < kRowSums; ++k) {
            const double total = warp_sum(sums[k]);
            if (lane == 0) p.row_partials[(segment.row + place) * kRowSums + k] = total;
        }
    }
    if (lane != 0 || count == 0) return;
    all += count;
    if (p.count_actors) {
        const int actor = actor_of(p, segment.row);
        if (actor >= 0) atomicAdd(p.actor_tokens + actor, (unsigned long long)count);
    }
    if (p.count_rows && atomicAdd(p.lengths + segment.row, int(count)) == 0) atomicAdd(&p.counts->rows, 1ull);
}

// Adds a warp's trained tokens to the batch's count.
__device__ __forceinline__ void record_span(const Params& p, long long all) {
    all = warp_sum(all);
    if (threadIdx.x % kWarp == 0 && all > 0) atomicAdd(&p.counts->tokens, (unsigned long long)all);
}

// ---- Host: check_inputs, bind, plan, launch -------------------------------------------------------------------------
// Offsets into the workspace, in bytes; see Params. The first `zeroed` bytes must be 0 before anything is counted.
struct Layout {
    Layout(int64_t rows, int64_t warps, int64_t actors);
    // Where members of Params start; `zeroed` is the end of the part that must be 0.
    int64_t actor_tokens, lengths, zeroed, row_partials, block_partials, actor_totals, warp_tables;
    int64_t bytes;  // total size
};

// The largest number of warps of any launch on the current device.
int64_t most_warps();

// Throws InvalidInput if a tensor does not fit the others.
void check_inputs(const PolicyLossInput& input, const PolicyLossOptions& options, const PolicyLossOutput& output);

// Tensors and options as kernel parameters.
Params bind(const PolicyLossInput& input, const PolicyLossOptions& options, const PolicyLossOutput& output);

// Chooses the kernel, its grid and what must be counted first, and divides the workspace. Throws InvalidInput if the
// workspace is too small.
void plan(Params& params, const View& workspace);

// Computes loss, gradient and metrics. The counts and row sums that they need must be ready.
void launch_loss_grad(const Params& params, Stream stream);

// True if a stream is contiguous, aligned to 16 bytes and of `dtype`, or not given.
bool fits_fast(const SpannedRows& rows, const AnyStream& stream, DType dtype);

inline int64_t blocks_of(const Params& p) {
    return (p.warps + kWarps - 1) / kWarps;
}

template <class T, bool is_fast>
struct Kind {
    using Type = T;
    static constexpr bool fast = is_fast;
};

// Calls body(Kind) with the type of the streams of floats, and whether kernels can use 16-byte packs.
template <class Body>
void dispatch(bool fast, DType dtype, const Body& body) {
    if (fast && dtype == DType::f32) return body(Kind<float, true>{});
    if (fast && dtype == DType::bf16) return body(Kind<BFloat16, true>{});
    if (fast && dtype == DType::f16) return body(Kind<Half, true>{});
    body(Kind<float, false>{});
}

}  // namespace turnwise::cuda::loss

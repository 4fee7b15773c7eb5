// The parameters of the policy loss's kernels, the counts and sums that precede the first gradient, and the host steps
// that policy_loss and grouped_policy_loss share. ops/policy_loss.h says what is computed; policy_loss.cu how.
#pragma once

#include <algorithm>

#include "cuda/row_segments.h"
#include "ops/policy_loss.h"
#include "ops/scalar_math.h"

namespace turnwise::cuda::loss {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// Counts of the batch; all zero before the first launch.
struct Counts {
    unsigned ticket;            // blocks of loss_grad_kernel that are done
    unsigned padding;           // aligns what follows
    unsigned long long tokens;  // trained tokens
    unsigned long long rows;    // rows with a trained token
};

// Sums over a row's trained tokens, by column of row_partials. Only gmpo needs advantages and only gspo KL estimates:
// they share a column.
enum RowSum {
    sum_log_ratio,           // logprob - old_logprob; gmpo: clamped and bounded
    sum_advantage,           // gmpo: A
    sum_mismatch,            // old_logprob - rollout_logprob
    sum_kl = sum_advantage,  // gspo: KL estimate
};
constexpr int kRowSums = sum_mismatch + 1;

struct Params {
    // Inputs, one value per token. Those with null data were not given.
    SpannedRows rows;
    AnyStream logprobs, old_logprobs, ref, rollout, entropy;
    AnyStream advantages;      // per token; null where row_advantages is given
    AnyStream mask, selected;  // trained and selected tokens: 0 or not 0
    // Inputs, one value per row; normalizer: one per actor, or one.
    RowStream row_advantages, actor_ids, normalizer;
    PolicyLossOptions options;

    // Outputs.
    void* grad;        // one value per token, contiguous
    DType grad_dtype;  // of grad and of the fast streams
    float* loss;       // one value
    float* metrics;    // [1 + num_actors, metric_columns()]
    // Workspace, see Layout.
    Counts* counts;
    unsigned long long* actor_tokens;  // [actors]: trained tokens
    int* lengths;                      // [rows]: trained tokens
    double* row_partials;              // [rows + warps, kRowSums]: a warp's share of a row, at index row + warp
    double* block_partials;            // [blocks, actors, kColumns]: sums of a block
    double* actor_totals;              // [actors, kColumns]: sums of the batch
    double* warp_tables;               // [warps, actors, kColumns], where shared memory is too small for them
    int actors;                        // max(num_actors, 1)
    // Quantities that the first launch must provide.
    bool count_rows;     // lengths, and counts->rows
    bool count_actors;   // actor_tokens
    bool sum_rows;       // row_partials
    bool shared_tables;  // a warp's table lies in shared memory
    bool clip_only;      // PPO's clip, with the k3 estimator or none

    // Read by the host alone.
    bool fast;         // streams are contiguous, aligned and of grad_dtype: 16-byte packs serve
    bool count_first;  // a first launch is needed
    int64_t warps;     // of the whole grid
    int shared_bytes;  // per block
};

// The row's actor; -1 for an id out of range.
__device__ __forceinline__ int actor_of(const Params& p, int64_t row) {
    const int64_t id = p.actor_ids.data ? p.actor_ids.integer(row) : 0;
    return id >= 0 && id < p.actors ? int(id) : -1;
}

// Reference log-probabilities without a KL term still give the metric, by the k3 estimator.
__device__ __forceinline__ KlKind kl_kind(const PolicyLossOptions& o) {
    return o.kl == KlKind::none ? KlKind::k3 : o.kl;
}

// True where the KL term is weighted by the row's ratio, whose derivative needs the row's mean estimate.
__device__ __forceinline__ bool kl_by_row(const PolicyLossOptions& o) {
    return o.kl_weighted && o.variant.kind == VariantKind::gspo;
}

// ---- Counts and sums that precede the first gradient ---------------------------------------------------------------
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
    // Every lane takes 16-byte packs; only the streams that the sums need are read.
    for (int64_t i = segment.begin / kPack * kPack + lane * kPack; i < segment.end; i += kWarp * kPack) {
        const PackAt<T, fast> at{segment, i};
        const auto mask = at.ask(p.mask);
        typename PackAt<T, fast>::Floats logprob{}, ref{}, rollout{}, advantage{};
        const auto old = at.load(p.old_logprobs);
        if (ratios) logprob = at.load(p.logprobs);
        if (kl) ref = at.load(p.ref);
        if (rollouts) rollout = at.load(p.rollout);
        if (p.advantages.data) advantage = at.load(p.advantages);
        const unsigned trained = at.truths(p.mask, mask);
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
            if (!(trained >> k & 1)) continue;
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

// Stores a segment's counts, and its sums if `with_sums`, for the launches that follow. `all` accumulates the lane's
// trained tokens. `place`: the warp's number.
__device__ __forceinline__ void record_segment(const Params& p, const RowSegment& segment, int64_t place,
                                               long long count, const double (&sums)[kRowSums], bool with_sums,
                                               long long& all) {
    const int lane = int(threadIdx.x) % kWarp;
    if (!with_sums && !p.count_rows && !p.count_actors) {
        all += count;  // only the batch's total is needed
        return;
    }
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

__device__ __forceinline__ void record_span(const Params& p, long long all) {
    all = warp_sum(all);
    if (threadIdx.x % kWarp == 0 && all > 0) atomicAdd(&p.counts->tokens, (unsigned long long)all);
}

// ---- Host: check_inputs, bind, plan, launch -------------------------------------------------------------------------
// Offsets into the workspace, in bytes. The first `zeroed` bytes must be 0 before the first launch.
struct Layout {
    Layout(int64_t rows, int64_t warps, int64_t actors);
    int64_t actor_tokens, lengths, zeroed, row_partials, block_partials, actor_totals, warp_tables;
    int64_t bytes;  // of all
};

// The most warps that any launch on the current device has.
int64_t most_warps();

// Throws InvalidInput where a tensor does not fit the others.
void check_inputs(const PolicyLossInput& input, const PolicyLossOptions& options, const PolicyLossOutput& output);

// Tensors and options as kernel parameters.
Params bind(const PolicyLossInput& input, const PolicyLossOptions& options, const PolicyLossOutput& output);

// Chooses the kernel, its grid and what must be counted first, and divides the workspace. Throws InvalidInput where
// that is too small.
void plan(Params& params, const View& workspace);

// Loss, gradient and metrics, once everything that precedes them is counted.
void launch_loss_grad(const Params& params, Stream stream);

bool fits_fast(const SpannedRows& rows, const AnyStream& stream, DType dtype);

inline int64_t blocks_of(const Params& p) {
    return (p.warps + kWarps - 1) / kWarps;
}

template <class T, bool is_fast>
struct Kind {
    using Type = T;
    static constexpr bool fast = is_fast;
};

// Calls body with the type of the streams' floats and whether 16-byte packs serve.
template <class Body>
void dispatch(bool fast, DType dtype, const Body& body) {
    if (fast && dtype == DType::f32) return body(Kind<float, true>{});
    if (fast && dtype == DType::bf16) return body(Kind<BFloat16, true>{});
    if (fast && dtype == DType::f16) return body(Kind<Half, true>{});
    body(Kind<float, false>{});
}

}  // namespace turnwise::cuda::loss

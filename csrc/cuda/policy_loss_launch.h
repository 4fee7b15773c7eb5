// The parameters of the policy loss's kernels, the counts and sums that the first gradient needs, and the host steps
// that policy_loss and grouped_policy_loss share. ops/policy_loss.h defines the result, policy_loss.cu has the kernels.
#pragma once

#include <algorithm>

#include "cuda/exact_sums.h"
#include "cuda/row_segments.h"
#include "ops/policy_loss.h"
#include "ops/scalar_math.h"

namespace turnwise::cuda::loss {

constexpr int kThreads = 256;  // per block
constexpr int kWarps = kThreads / kWarp;

// Counts of the batch, all 0 before anything is counted.
struct Counts {
    unsigned ticket;            // blocks of loss_grad_kernel that have finished
    unsigned actors;            // actors with a trained token
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
    Word* totals;                      // [1 + num_actors, kSumWords, kColumns]: exact sums of the batch, then by actor
    int actors;                        // max(num_actors, 1)
    // The results that the first launch must provide (count_rows, count_actors, sum_rows), and the kind of kernel.
    bool count_rows;    // lengths, and counts->rows
    bool count_actors;  // actor_tokens
    bool sum_rows;      // row_partials
    bool one_weight;    // all rows have the same weight, and there is one actor
    bool clip_only;     // PPO's clip, with the k3 estimator or none
    int table_rows;     // rows of a warp's table of sums in shared memory: the batch, then all actors or none

    // The launch.
    bool fast;         // streams are contiguous, aligned and of grad_dtype, so kernels can use 16-byte packs
    bool count_first;  // a first launch is needed
    int64_t warps;     // number of spans, one per warp of loss_grad_kernel
    int shared_bytes;  // shared memory per block of loss_grad_kernel
};

// True if the actors are too many for the warps' tables. Then all blocks write metrics, after a barrier of the grid.
TW_HD bool is_spread(const Params& p) {
    return p.options.num_actors >= p.table_rows;
}

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
// The number that the row sums read of a trained token; 0 where they need no such stream.
struct RowSumInput {
    float logprob, old, ref, rollout, advantage;
    bool trained;
};

// Adds this lane's share of a segment's row sums to `sums`; returns the lane's trained tokens.
template <class T, bool fast, bool short_rows>
__device__ __forceinline__ int64_t sum_segment(const Params& p, const RowSegment& segment, double (&sums)[kRowSums]) {
    constexpr int kPack = 16 / int(sizeof(T));
    const int lane = int(threadIdx.x) % kWarp;
    const PolicyLossOptions& o = p.options;
    const bool ratios = is_by_row(o.variant.kind), bounded = o.variant.kind == VariantKind::gmpo;
    const bool rollouts = o.correction == Correction::sequence, kl = kl_by_row(o);
    const float own = p.row_advantages.data && !segment.empty() ? p.row_advantages.number(segment.row) : 0.0f;
    int64_t count = 0;
    const auto add = [&](const RowSumInput& in) {
        if (!in.trained) return;
        count += 1;
        if (rollouts) sums[sum_mismatch] += double(in.old - in.rollout);
        if (!ratios) return;
        float d = in.logprob - in.old;
        const float a = p.advantages.data ? in.advantage : own;
        if (bounded) {
            d = clamp_symmetric<ScalarMath>(d, kLogRatioBound);
            d = gmpo_bounded<ScalarMath>(d, a, o.variant);
        }
        sums[sum_log_ratio] += double(d);
        if (kl) {
            sums[sum_kl] += double(kl_term<ScalarMath>(kl_kind(o), in.ref - in.logprob).value);
        } else {
            sums[sum_advantage] += double(a);
        }
    };
    if constexpr (short_rows) {
        const auto value = [&](const AnyStream& stream, int64_t i) { return value_at<T, fast>(stream, segment, i); };
        const auto load = [&](int64_t i) -> RowSumInput {
            return {ratios ? value(p.logprobs, i) : 0,
                    value(p.old_logprobs, i),
                    kl ? value(p.ref, i) : 0,
                    rollouts ? value(p.rollout, i) : 0,
                    p.advantages.data ? value(p.advantages, i) : 0,
                    truth_at<fast>(p.mask, segment, i)};
        };
        each_token<2>(segment, p.rows.lanes, load, add);
    } else {
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
#pragma unroll
            for (int k = 0; k < kPack; ++k) {
                add({to_float(logprob[k]), to_float(old[k]), to_float(ref[k]), to_float(rollout[k]),
                     to_float(advantage[k]), trained[k]});
            }
        }
    }
    return count;
}

// A lane's share of the counts of its warp's span.
struct SpanCounts {
    long long tokens = 0;    // trained tokens
    long long of_actor = 0;  // trained tokens of the actor whose id is the lane's number
    int rows = 0;            // rows of which this warp was the first to find a trained token
};

// Adds trained tokens of an actor, and counts the actor if they are the first.
__device__ __forceinline__ void add_actor_tokens(const Params& p, int actor, long long count) {
    if (atomicAdd(p.actor_tokens + actor, (unsigned long long)count) == 0) atomicAdd(&p.counts->actors, 1u);
}

// Adds the trained tokens of rows to those of their actors. `count`: the row's, in one lane of every row; else 0.
__device__ __forceinline__ void count_by_actor(const Params& p, int64_t row, int count, SpanCounts& counts) {
    const int lane = int(threadIdx.x) % kWarp, actor = count > 0 ? actor_of(p, row) : -1;
    // The actors take turns, each with all of its rows. Only ids that no lane holds go to memory at once.
    for (unsigned left = __ballot_sync(kFullWarp, actor >= 0); left;) {
        const int turn = __shfl_sync(kFullWarp, actor, __ffs(int(left)) - 1);
        const int total = warp_sum(actor == turn ? count : 0);
        if (turn < kWarp) {
            if (lane == turn) counts.of_actor += total;
        } else if (lane == 0) {
            add_actor_tokens(p, turn, total);
        }
        left &= ~__ballot_sync(kFullWarp, actor == turn);
    }
}

// Stores a segment's counts, and its sums if `with_sums`, for what follows, and adds its counts to those of the span.
// `count` and `sums`: this lane's share. `place`: the number of the span.
template <bool short_rows>
__device__ __forceinline__ void record_segment(const Params& p, const RowSegment& segment, int64_t place, int count,
                                               const double (&sums)[kRowSums], bool with_sums, SpanCounts& counts) {
    counts.tokens += count;
    const int lanes = lanes_of<short_rows>(p.rows);
    const bool leads = lane_of_group(lanes) == 0;
    if (with_sums) {
#pragma unroll
        for (int k = 0; k < kRowSums; ++k) {
            const double total = group_sum(sums[k], lanes);
            if (leads && !segment.empty()) p.row_partials[(segment.row + place) * kRowSums + k] = total;
        }
    }
    if (!p.count_rows && !p.count_actors) return;
    count = group_sum(count, lanes);
    if (p.count_actors) count_by_actor(p, segment.row, leads ? count : 0, counts);
    if (!p.count_rows || !leads || count == 0) return;
    if (segment.whole) {
        p.lengths[segment.row] = count;
        counts.rows += 1;
    } else {
        counts.rows += atomicAdd(p.lengths + segment.row, count) == 0;
    }
}

// Adds a span's counts to the batch's.
__device__ __forceinline__ void record_span(const Params& p, const SpanCounts& counts) {
    const int lane = int(threadIdx.x) % kWarp, rows = warp_sum(counts.rows);
    const long long tokens = warp_sum(counts.tokens);
    if (lane == 0 && tokens > 0) atomicAdd(&p.counts->tokens, (unsigned long long)tokens);
    if (lane == 0 && rows > 0) atomicAdd(&p.counts->rows, (unsigned long long)rows);
    if (counts.of_actor > 0) add_actor_tokens(p, lane, counts.of_actor);
}

// ---- Host: check_inputs, bind, plan, launch -------------------------------------------------------------------------
// Offsets into the workspace, in bytes; see Params. Its size depends on the actors and rows, and on the device only by
// row_partials.
struct Layout {
    Layout(int64_t rows, int64_t warps, int64_t num_actors);
    // Where members of Params start. What is before `actor_tokens` must be 0 before loss_grad_kernel, and what is
    // before `zeroed` before anything is counted.
    int64_t totals, actor_tokens, lengths, zeroed, row_partials;
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

// Calls body(std::true_type) if rows are short, else body(std::false_type).
template <class Body>
void dispatch_rows(const SpannedRows& rows, const Body& body) {
    rows.lanes < kWarp ? body(std::true_type{}) : body(std::false_type{});
}

// Calls body(Kind) with the type of the streams of floats, and whether kernels can use 16-byte packs.
template <class Body>
void dispatch(bool fast, DType dtype, const Body& body) {
    if (fast && dtype == DType::f32) return body(Kind<float, true>{});
    if (fast && dtype == DType::bf16) return body(Kind<BFloat16, true>{});
    if (fast && dtype == DType::f16) return body(Kind<Half, true>{});
    body(Kind<float, false>{});
}

}  // namespace turnwise::cuda::loss

// What the kernels of the policy loss share: their parameters, and what is known of rows and the batch before the first
// gradient. ops/policy_loss.h says what is computed; policy_loss.cu how.
#pragma once

#include <algorithm>

#include "cuda/policy_loss.h"
#include "cuda/row_pieces.h"
#include "ops/scalar_math.h"

namespace turnwise::cuda::loss {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// What the first launch counts, all zero before it.
struct Counts {
    unsigned ticket, padding;
    unsigned long long tokens, rows;
};
// Advantages are for gmpo alone, KL estimates for gspo alone: they share a place.
enum RowSum { sum_log_ratio, sum_advantage, sum_mismatch, sum_kl = sum_advantage };
constexpr int kRowSums = sum_mismatch + 1;

struct Params {
    SpannedRows rows;
    AnyStream logprobs, old_logprobs, ref, rollout, entropy, advantages, mask, selected;
    RowStream row_advantages, actor_ids, normalizer;
    PolicyLossOptions options;
    void* grad;
    DType grad_dtype;
    float *loss, *metrics;
    Counts* counts;
    unsigned long long* actor_tokens;
    int* lengths;
    double *records, *partials, *finals, *tables;
    int actors;  // at least one
    bool count_rows, count_actors, sum_rows, shared_tables;
    bool clip_only;

    // For the host.
    bool fast, prepare;
    int64_t warps;
    int shared_bytes;
};

// -1: out of range.
__device__ __forceinline__ int actor_of(const Params& p, int64_t row) {
    const int64_t id = p.actor_ids.data ? p.actor_ids.integer(row) : 0;
    return id >= 0 && id < p.actors ? int(id) : -1;
}

// A reference without a KL term: its metric is still wanted.
__device__ __forceinline__ KlKind kl_kind(const PolicyLossOptions& o) {
    return o.kl == KlKind::none ? KlKind::k3 : o.kl;
}

// Whether the ratio that weighs the KL term is the row's, whose derivative needs the row's mean estimate.
__device__ __forceinline__ bool kl_by_row(const PolicyLossOptions& o) {
    return o.kl_weighted && o.variant.kind == VariantKind::gspo;
}

// ---- Before: what a row and the batch must know ---------------------------------------------------------------------
template <class T, bool fast>
__device__ __forceinline__ int64_t sum_piece(const Params& p, const RowPiece& piece, double (&sums)[kRowSums]) {
    constexpr int kPack = 16 / int(sizeof(T));
    const int lane = int(threadIdx.x) % kWarp;
    const PolicyLossOptions& o = p.options;
    const bool ratios = is_by_row(o.variant.kind), bounded = o.variant.kind == VariantKind::gmpo;
    const bool rollouts = o.correction == Correction::sequence, kl = kl_by_row(o);
    const float own = p.row_advantages.data ? p.row_advantages.number(piece.row) : 0.0f;
    int64_t count = 0;
    for (int64_t i = piece.begin / kPack * kPack + lane * kPack; i < piece.end; i += kWarp * kPack) {
        const PackAt<T, fast> at{piece, i};
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

// A piece's counts, and its sums where wanted, where the launches behind find them; `all`: the lane's own count.
__device__ __forceinline__ void record_piece(const Params& p, const RowPiece& piece, int64_t place, long long count,
                                             const double (&sums)[kRowSums], bool with_sums, long long& all) {
    const int lane = int(threadIdx.x) % kWarp;
    if (!with_sums && !p.count_rows && !p.count_actors) {
        all += count;  // nobody asks whose they are
        return;
    }
    count = warp_sum(count);
    if (with_sums) {
#pragma unroll
        for (int k = 0; k < kRowSums; ++k) {
            const double total = warp_sum(sums[k]);
            if (lane == 0) p.records[(piece.row + place) * kRowSums + k] = total;
        }
    }
    if (lane != 0 || count == 0) return;
    all += count;
    if (p.count_actors) {
        const int actor = actor_of(p, piece.row);
        if (actor >= 0) atomicAdd(p.actor_tokens + actor, (unsigned long long)count);
    }
    if (p.count_rows && atomicAdd(p.lengths + piece.row, int(count)) == 0) atomicAdd(&p.counts->rows, 1ull);
}

__device__ __forceinline__ void record_span(const Params& p, long long all) {
    all = warp_sum(all);
    if (threadIdx.x % kWarp == 0 && all > 0) atomicAdd(&p.counts->tokens, (unsigned long long)all);
}

// ---- Host -----------------------------------------------------------------------------------------------------------
// Bytes of workspace; of them the first `zeroed` must be 0 before the first launch.
struct Layout {
    Layout(int64_t rows, int64_t warps, int64_t actors);
    int64_t actor_tokens, lengths, zeroed, records, partials, finals, tables, bytes;
};

// Most warps that any launch on the current device has.
int64_t most_warps();

// Checks the arguments and makes the parameters; throws InvalidInput.
Params plan(const PolicyLossInput& input, const PolicyLossOptions& options, const PolicyLossOutput& output,
            const View& workspace);

bool fits_fast(const SpannedRows& rows, const AnyStream& stream, DType dtype);

// Loss, gradient and metrics, when all before is known.
void launch_main(const Params& params, Stream stream);

inline int64_t blocks_of(const Params& p) {
    return (p.warps + kWarps - 1) / kWarps;
}

template <class T, bool is_fast>
struct Kind {
    using Type = T;
    static constexpr bool fast = is_fast;
};

// Calls body with the type of the streams' floats and whether packs serve.
template <class Body>
void dispatch(bool fast, DType dtype, const Body& body) {
    if (fast && dtype == DType::f32) return body(Kind<float, true>{});
    if (fast && dtype == DType::bf16) return body(Kind<BFloat16, true>{});
    if (fast && dtype == DType::f16) return body(Kind<Half, true>{});
    body(Kind<float, false>{});
}

}  // namespace turnwise::cuda::loss

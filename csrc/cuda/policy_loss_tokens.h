// The part of each token in the loss, the gradient and the sums of the policy loss.
#pragma once

#include "cuda/policy_loss_launch.h"
#include "cuda/policy_loss_rows.h"

namespace turnwise::cuda::loss {

// Columns of the sums over trained tokens. l: loss, r: ratio, d: log-ratio, w: importance weight.
enum Column {
    tokens,         // 1 per token
    clipped_low,    // 1 if clipped from below
    clipped_high,   // 1 if clipped from above
    clipped_dual,   // 1 if the dual clip applies, or the token is selected
    log_ratio,      // d
    k3,             // r - 1 - d
    loss,           // l times the row's weight
    kl,             // KL estimate against the reference
    mismatch,       // old_logprob - rollout_logprob
    weight,         // w, as it is used: with cap, bounds and rows; without a correction that of the token
    weight_square,  // w^2
    rejected,       // 1 if w is outside its bounds
    entropy,        // entropy, as given
    ratio_max,      // max(r): the only column that is not a sum
};
constexpr int kColumns = ratio_max + 1;
constexpr int kColumnStride = 16;                     // threads per row in write_totals: kColumns rounded up
constexpr int kTotalRows = kThreads / kColumnStride;  // that a block writes at once
static_assert(kColumns <= kColumnStride);

// ---- Tokens ---------------------------------------------------------------------------------------------------------
struct Sums {
    float of[kColumns] = {};  // indexed by Column
    // For a Specialization other than full: clipped_high and clipped_dual together, and clipped_dual alone.
    float above = 0;
    unsigned dual = 0;
};

// The cases for which loss_grad_kernel is compiled. A narrower case needs fewer registers.
enum class Specialization {
    full,                      // every variant and KL estimator
    clip_only,                 // PPO's clip, with the k3 estimator or none
    clip_minimal,              // clip_only without rollout log-probabilities and entropies
    clip_only_weighted_kl,     // clip_only with the KL term times the ratio
    clip_minimal_weighted_kl,  // clip_minimal with the KL term times the ratio
};

TW_HD constexpr bool is_minimal(Specialization s) {
    return s == Specialization::clip_minimal || s == Specialization::clip_minimal_weighted_kl;
}
TW_HD constexpr bool weighs_kl(Specialization s) {
    return s == Specialization::clip_only_weighted_kl || s == Specialization::clip_minimal_weighted_kl;
}

// A warp's table of rows: large enough for a step of short rows, small enough for three blocks on a multiprocessor.
template <class T, Specialization special>
using WindowOf = RowWindow<std::conditional_t<is_minimal(special), ClipRow, Row>,
                           is_minimal(special) && sizeof(T) == 2 ? 128 : 64, kWarp * 16 / int(sizeof(T))>;

// One pack of every stream that the case needs. `load` only starts the loads, so all are in flight at once.
template <class T, Specialization special>
struct TokenPacks {
    static constexpr int kPack = 16 / int(sizeof(T));
    Loaded<T, kPack> logprob, old, ref, rollout, advantage, entropy_of;  // 0 if not given
    MaskPack<kPack> mask, selected;

    template <class At>
    __device__ __forceinline__ void load(const Params& p, const At& at) {
        *this = {};
        logprob = at.load(p.logprobs);
        old = at.load(p.old_logprobs);
        mask = at.ask(p.mask);
        if (p.ref.given) ref = at.load(p.ref);
        if (p.advantages.given) advantage = at.load(p.advantages);
        if (!is_minimal(special) && p.rollout.given) rollout = at.load(p.rollout);
        if (!is_minimal(special) && p.entropy.given) entropy_of = at.load(p.entropy);
        if (special == Specialization::full && p.selected.given) selected = at.ask(p.selected);
    }
    // The tokens that train; and those selected, for the variants that select.
    template <class At>
    __device__ __forceinline__ Truths<kPack> trained(const Params& p, const At& at) const {
        return at.truths(p.mask, mask);
    }
    template <class At>
    __device__ __forceinline__ Truths<kPack> chosen(const Params& p, const At& at) const {
        if (special != Specialization::full || !p.selected.given) return {};
        return at.truths(p.selected, selected);
    }
};

// Loss and derivative of the tokens of a pack, both times the row's weight; 0 for masked tokens.
template <int kPack>
struct PackLoss {
    float loss[kPack], slope[kPack], ratio[kPack];
    bool open[kPack];  // the log-ratio was not clamped
};

// The variant's loss and derivative, and its metrics. A masked token gets log-ratio 0 and weight 0: no branch keeps it,
// or its NaN, from the sums. Its ratio of 1 is never clipped. `per_token`: advantages are given per token. `one_row`:
// all tokens have the same row.
template <bool one_row, bool per_token, Specialization special, class Packs, int kPack, class RowOf>
__device__ __forceinline__ void add_variant(const Params& p, const Packs& in, const Truths<kPack>& trained,
                                            const Truths<kPack>& chosen, const RowOf& row_of, PackLoss<kPack>& out,
                                            Sums& sums) {
    using Math = ScalarMath;
    constexpr bool clip_only = special != Specialization::full;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
        const auto& row = row_of(k);
        const unsigned mask = trained.mask(k);
        const float logprob = to_float(in.logprob[k]), raw = keep(logprob - to_float(in.old[k]), mask);
        const float bounded = clamp_symmetric<Math>(raw, kLogRatioBound), ratio = Math::exp(bounded);
        const bool open = Math::unless_differs(true, bounded, raw);
        TokenLoss<Math> token;
        if constexpr (clip_only) {
            float given = row.scaled, scaled = given;
            ClipRange<Math> range{row.low, row.high, false, true};
            if (per_token) {
                given = to_float(in.advantage[k]), scaled = given * row.weight;
                range = clip_range<Math>(given, p.options.variant);
                range.negative = false, range.positive = true;  // the sign of A waits
            }
            token = clipped_surrogate<Math>(ratio, true, open, keep(scaled, mask), range);
            if (token.clipped_high) {
                sums.above += 1;
                if (!one_row || per_token)
                    sums.dual += __float_as_uint(given) >> 31;  // process_row looks at its one row
            }
        } else {
            const bool on = mask != 0;
            const float advantage = per_token ? to_float(in.advantage[k]) : row.advantage;
            const Token<Math> inputs{
                logprob,       bounded, ratio, on, open, advantage, chosen[k], row.terms.ratio, row.terms.advantage,
                !row.terms.cut};
            token = token_loss<Math>(inputs, p.options.variant);
            token.loss = keep(token.loss * row.weight, mask);
            token.grad = keep(token.grad * row.weight, mask);
            token.clipped_low = on && token.clipped_low;
            token.clipped_high = on && token.clipped_high;
            token.clipped_dual = on && token.clipped_dual;
        }
        if (token.clipped_low) sums.of[clipped_low] += 1;
        if (!clip_only) {
            if (token.clipped_high) sums.of[clipped_high] += 1;
            if (token.clipped_dual) sums.of[clipped_dual] += 1;
        }
        sums.of[log_ratio] += bounded;
        sums.of[k3] += ratio - 1 - bounded;
        sums.of[ratio_max] = fmaxf(sums.of[ratio_max], keep(ratio, mask));
        out.loss[k] = token.loss;
        out.slope[k] = token.grad;
        out.ratio[k] = ratio;
        out.open[k] = open;
    }
}

// Importance sampling: multiplies loss and derivative by old / rollout, per token or per row.
template <class Packs, int kPack, class RowOf>
__device__ __forceinline__ void correct(const Params& p, const Packs& in, const Truths<kPack>& trained,
                                        const RowOf& row_of, PackLoss<kPack>& out, Sums& sums) {
    using Math = ScalarMath;
    const PolicyLossOptions& o = p.options;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
        const auto& row = row_of(k);
        const unsigned mask = trained.mask(k);
        const float difference = keep(to_float(in.old[k]) - to_float(in.rollout[k]), mask);
        const float w = Math::exp(clamp_symmetric<Math>(difference, kLogRatioBound));
        float applied = row.importance;
        bool outside = row.rejected;
        if (o.correction == Correction::token) {
            outside = w < o.reject_below || w > o.reject_above;
            applied = outside ? 0.0f : Math::min(o.cap, w);
        }
        applied = keep(applied, mask);
        out.loss[k] *= applied;
        out.slope[k] *= applied;
        if (outside && mask != 0) sums.of[rejected] += 1;
        const float counted = o.correction == Correction::none ? keep(w, mask) : applied;
        sums.of[mismatch] += difference;
        sums.of[weight] += counted;
        sums.of[weight_square] += counted * counted;
    }
}

// The KL term. Without one in the loss the estimate is only a metric.
template <Specialization special, class Packs, int kPack, class RowOf>
__device__ __forceinline__ void add_kl(const Params& p, const Packs& in, const Truths<kPack>& trained,
                                       const RowOf& row_of, PackLoss<kPack>& out, Sums& sums) {
    using Math = ScalarMath;
    constexpr bool clip_only = special != Specialization::full;
    const PolicyLossOptions& o = p.options;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
        const auto& row = row_of(k);
        const unsigned mask = trained.mask(k);
        const float d = keep(to_float(in.ref[k]) - to_float(in.logprob[k]), mask);
        const float scale = keep(o.kl_coef * row.weight, mask);
        const auto estimate = clip_only ? kl_term<Math, KlKind::k3>(d) : kl_term<Math>(kl_kind(o), d);
        auto term = estimate;
        if (weighs_kl(special) || (!clip_only && o.kl_weighted)) {
            float ratio = out.ratio[k], carried = out.open[k] ? estimate.value : 0.0f;
            if constexpr (!clip_only) {
                if (kl_by_row(o)) {
                    ratio = keep(row.terms.ratio, mask);
                    carried = keep(row.terms.kl, mask);
                }
            }
            term = importance_weighted<Math>(estimate, ratio, carried);
        }
        out.loss[k] = fmaf(scale, term.value, out.loss[k]);
        out.slope[k] = fmaf(-scale, term.slope, out.slope[k]);
        sums.of[kl] += estimate.value;
    }
}

// Adds the tokens of a pack that `trained` names to `sums`, and returns their derivatives. `row_of(k)` is a token's
// row. `weighted`: no row has weight 0, or the caller looks at it.
template <bool one_row, bool weighted, bool per_token, Specialization special, class Packs, int kPack, class RowOf>
__device__ __forceinline__ PackLoss<kPack> add_pack(const Params& p, const Packs& in, const Truths<kPack>& trained,
                                                    const Truths<kPack>& chosen, const RowOf& row_of, Sums& sums) {
    PackLoss<kPack> out;
    add_variant<one_row, per_token, special>(p, in, trained, chosen, row_of, out, sums);
    if constexpr (!is_minimal(special)) {
        if (p.rollout.given) correct(p, in, trained, row_of, out, sums);
    }
    if (p.ref.given) add_kl<special>(p, in, trained, row_of, out, sums);
    sums.of[tokens] += float(trained.number());
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
        // A weight of 0 hides even NaN from the loss.
        sums.of[loss] += weighted || row_of(k).weight != 0 ? out.loss[k] : 0.0f;
        if (!is_minimal(special)) sums.of[entropy] += keep(to_float(in.entropy_of[k]), trained.mask(k));
    }
    return out;
}

}  // namespace turnwise::cuda::loss
